"""Modules of the user's own: imported once a process, and never the end of vLLM once it is past its front end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvscope.errors import ConfigurationError
from kvscope.runtime import extensions
from kvscope.runtime.extensions import Extensions

Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Make a module that can be imported until the test is over."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def module(name: str, text: str) -> str:
        name = f"kvscope_extension_{name}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return module


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []

    def say(_level: int, text: str, *values: object, error: BaseException | None = None) -> None:
        if error is None:
            lines.append(text % values)

    monkeypatch.setattr(extensions, "say", say)
    return lines


COUNTS = "import os, pathlib; p = pathlib.Path(__file__).with_suffix('.count'); p.open('a').write('x')"


def test_a_module_is_imported_once_a_process(write: Write, tmp_path: Path) -> None:
    name = write("once", COUNTS)
    loaded = Extensions()
    loaded.load([name], refuse=True)
    loaded.load([name, name], refuse=False)
    assert (tmp_path / f"{name}.count").read_text() == "x"
    numbers = loaded.numbers()
    assert numbers is not None
    assert numbers[:2] == (1, 0)
    assert numbers[2] > 0


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("import kvscope_that_is_not_there", "ModuleNotFoundError"),
        ("def (", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_one_that_cannot_be_imported_stops_the_front_end_alone(
    write: Write, errors: list[str], text: str, kind: str
) -> None:
    name = write("bad", text)
    with pytest.raises(ConfigurationError) as raised:
        Extensions().load(["json", name], refuse=True)
    assert str(raised.value) == f"additional_config.kv_output.extensions[1]: {name!r} cannot be imported ({kind})"
    assert errors == []

    engine = Extensions()
    for _ in range(2):
        engine.load(["json", name], refuse=False)
    assert errors == [f"kvscope: extension {name} cannot be imported ({kind}); it is left out"]
    numbers = engine.numbers()
    assert numbers is not None
    assert numbers[:2] == (2, 1)


def test_one_that_is_not_there_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigurationError, match=r"extensions\[0\]: 'kvscope_no.such' cannot be imported \(ModuleNo"):
        Extensions().load(["kvscope_no.such"], refuse=True)


def test_mended_it_is_imported_by_the_next_engine_of_the_process(write: Write, tmp_path: Path) -> None:
    loaded = Extensions()
    name = write("mended", "1 / 0")
    with pytest.raises(ConfigurationError):
        loaded.load([name], refuse=True)
    write("mended", COUNTS + "  # mended")
    loaded.load([name], refuse=True)
    assert (tmp_path / f"{name}.count").read_text() == "x"


def test_without_extensions_there_is_nothing_to_say() -> None:
    loaded = Extensions()
    loaded.load([], refuse=True)
    assert loaded.numbers() is None


FORKING = """
import os, sys
from kvscope.runtime.extensions import EXTENSIONS

EXTENSIONS.load(["kvscope_forked"], refuse=True)
child = os.fork()
if not child:
    EXTENSIONS.load(["kvscope_forked"], refuse=False)
    EXTENSIONS.load(["kvscope_forked"], refuse=False)
    os._exit(0)
os.waitpid(child, 0)
EXTENSIONS.load(["kvscope_forked"], refuse=True)
"""


def test_a_forked_process_imports_anew_what_it_has_inherited(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "kvscope_forked.py").write_text(
        "import json, os\n"
        "from kvscope.monitor import subscribe_guard_events\n"
        "from kvscope.sinks.subscribers import SUBSCRIBERS\n"
        "subscribe_guard_events(print)\n"
        f"with open({str(out)!r}, 'a') as file:\n"
        "    print(json.dumps([os.getpid(), len(SUBSCRIBERS._known)]), file=file)\n"
    )
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run([sys.executable, "-c", FORKING], timeout=60, check=True, env=variables)
    (parent, parents), (child, childs) = (json.loads(line) for line in out.read_text().splitlines())
    assert parent != child
    assert (parents, childs) == (1, 1)
