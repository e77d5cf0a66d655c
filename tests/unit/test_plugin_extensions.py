"""Which process imports the modules of ``kv_output.extensions``, and what it does about one that it cannot import."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope import plugin
from kvscope.boundary.ledger import OBSERVER, Ledger
from kvscope.config import DIR_VARIABLE, DISABLE_VARIABLE
from kvscope.errors import ConfigurationError
from kvscope.metrics.collectors import Collectors
from kvscope.metrics.reader import read_process
from kvscope.plugin import LedgerBook, PluginHub
from kvscope.runtime.extensions import Extensions
from unit.metrics.support import until
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


COLLECTOR = """
from kvscope.monitor import register_collector
mine = register_collector(name="{name}", metric_type="gauge", process="{process}")(lambda ctx: 1.0)
"""


@pytest.fixture
def collectors(monkeypatch: pytest.MonkeyPatch) -> Collectors:
    """Of a process in which nothing is registered yet."""
    made = Collectors()
    for module in (
        "kvscope.monitor",
        "kvscope.plugin",
        "kvscope.runtime.extensions",
        "kvscope.runtime.collectors_called",
    ):
        monkeypatch.setattr(f"{module}.COLLECTORS", made)
    return made


def monitored(prefix: str) -> Any:
    of = configured()
    of.additional_config |= {"kv_monitor": {"enabled": True, "prefix": prefix}}
    del of.additional_config["kv_trace"]
    return of


def test_an_extension_registers_with_the_prefix_of_the_run(hub: PluginHub, collectors: Collectors) -> None:
    write(COLLECTOR.format(name="p_mine", process="engine"))
    hub.configure_frontend(monitored("p_"))
    assert [each.name for each in collectors.of(["engine"])] == ["p_mine"]
    sys.modules[NAME].mine.close()
    assert collectors.of(["engine"]) == []


def test_why_a_collector_is_refused_stands_in_the_error_that_stops_the_start(
    hub: PluginHub, collectors: Collectors
) -> None:
    write(COLLECTOR.format(name="vllm_ascend_mine", process="engine"))
    with pytest.raises(ConfigurationError) as raised:
        hub.configure_frontend(monitored("p_"))
    assert str(raised.value) == (
        f"additional_config.kv_output.extensions[0]: {NAME!r} cannot be imported (name: 'vllm_ascend_mine' does not "
        "begin with 'p_', as kv_monitor.prefix has it)"
    )


@pytest.mark.parametrize(("process", "has_file"), [("worker", True), ("engine", False)])
def test_a_worker_of_kv_monitor_alone_publishes_if_a_collector_is_for_it(
    process: str, has_file: bool, hub: PluginHub, collectors: Collectors, tmp_path: Path
) -> None:
    write(COLLECTOR.format(name="p_mine", process=process))
    of = monitored("p_")
    hub.configure_worker(of)
    worker = SimpleNamespace(vllm_config=of, rank=1)
    hub.attach_worker(worker)
    assert not hasattr(worker, OBSERVER)
    assert [path.name for path in tmp_path.rglob("*.metrics")] == [f"worker-1-{os.getpid()}.metrics"] * has_file
    if has_file:
        monitor = hub.run(os.getpid(), "one").monitor
        assert monitor is not None
        assert until(lambda: [value.name for value in read_process(monitor.store.path).custom] == ["p_mine"])
        assert LedgerBook(hub.ledger).hook_numbers()["collectors"][1:] == (0, 0)
        monitor.close()
