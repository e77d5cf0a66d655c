"""Which process imports the modules of ``kv_output.extensions``, and what it does about one that it cannot import."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvscope import plugin
from kvscope.boundary.ledger import Ledger
from kvscope.config import DIR_VARIABLE, DISABLE_VARIABLE
from kvscope.errors import ConfigurationError
from kvscope.plugin import LedgerBook, PluginHub
from kvscope.runtime.extensions import Extensions
from unit.test_plugin import vllm_config

NAME = "kvscope_extension_of_a_test"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PluginHub:
    """Of a process that has imported nothing yet."""
    for name in (DISABLE_VARIABLE, DIR_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setattr(plugin, "EXTENSIONS", Extensions())
    hub = PluginHub(Ledger())
    hub.table = ()
    return hub


def configured(**config: Any) -> Any:
    of = vllm_config(**config)
    of.additional_config["kv_output"] = {"extensions": [NAME]}
    return of


def write(text: str) -> Path:
    path = Path(f"{NAME}.py")
    path.write_text(text)
    return path.with_suffix(".count")


@pytest.mark.parametrize("configure", ["configure_frontend", "configure_engine", "configure_worker"])
def test_every_process_imports_them(hub: PluginHub, configure: str) -> None:
    count = write("import pathlib; pathlib.Path(__file__).with_suffix('.count').open('a').write('x')")
    getattr(hub, configure)(configured())
    assert count.read_text() == "x"
    assert LedgerBook(hub.ledger).hook_numbers()["extensions"][:2] == (1, 0)


def test_an_engine_in_one_process_imports_them_once(hub: PluginHub) -> None:
    count = write("import pathlib; pathlib.Path(__file__).with_suffix('.count').open('a').write('x')")
    of = configured()
    for configure in (hub.configure_frontend, hub.configure_engine, hub.configure_worker):
        configure(of)
    assert count.read_text() == "x"


def test_with_every_part_off_nothing_is_imported(hub: PluginHub) -> None:
    for configure in (hub.configure_frontend, hub.configure_engine, hub.configure_worker):
        configure(configured(on=False))
    assert NAME not in sys.modules
    assert plugin.EXTENSIONS.numbers() is None


def test_the_front_end_refuses_what_it_cannot_import_before_there_is_a_run(hub: PluginHub) -> None:
    of = configured()
    given = of.additional_config
    with pytest.raises(ConfigurationError) as raised:
        hub.configure_frontend(of)
    assert str(raised.value) == (
        f"additional_config.kv_output.extensions[0]: {NAME!r} cannot be imported (ModuleNotFoundError)"
    )
    assert hub._runs == {}
    assert of.additional_config is given


@pytest.mark.parametrize("configure", ["configure_engine", "configure_worker"])
def test_another_process_goes_on_and_counts_it(hub: PluginHub, configure: str) -> None:
    write("raise SystemExit(1)")
    getattr(hub, configure)(configured())
    run = hub.run(os.getpid(), "one")
    assert run._coverage().hook_faults == {"extensions": 1}
