"""Off is untouched, on-then-uninstalled too, and a bad configuration stops the start before the model loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvscope.errors import ConfigurationError
from kvscope.testing import engine

from .traces import Trace

_IDENTITY = """
import json, os, sys, traceback, types
from pathlib import Path
from kvscope.testing.engine import apply_environment
apply_environment(sys.argv[1])
from kvscope.testing import engine
from kvscope.plugin import HUB, register
import vllm.entrypoints.llm
for seam in HUB.table:
    seam.resolve(load=True)

KINDS = (types.FunctionType, classmethod, staticmethod, property)

def functions():
    found = {}
    for name, module in list(sys.modules.items()):
        if name == "vllm" or name.startswith("vllm."):
            for key, value in list(vars(module).items()):
                if isinstance(value, types.FunctionType):
                    found[name, key] = value
                elif isinstance(value, type) and value.__module__ == name:
                    for attribute, member in list(vars(value).items()):
                        if isinstance(member, KINDS):
                            found[name, key, attribute] = member
    return found

def changed():
    after = functions()
    return sorted(".".join(key) for key, value in before.items() if after.get(key) is not value)

before = functions()
assert len(before) > 5000, len(before)
assert not HUB.ledger.installed

# Each engine in a process of its own that begins here: importing vLLM takes longer than all else.
for name, (script, environment) in json.loads(sys.argv[3]).items():
    folder = Path(sys.argv[2], name)
    folder.mkdir()
    child = os.fork()
    if child == 0:
        try:
            os.environ.update(environment)
            exec(script, {**globals(), "folder": folder})
            folder.with_suffix(".json").write_text(json.dumps(changed()))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""

_CONTROL = """
with engine.running() as llm:
    assert len(engine.generate(llm, [[5, 6, 7]], 4)[0]) == 4
"""

_OFF = """
for _ in range(3):
    register()
assert HUB.ledger.installed, "the bootstrap seams are wrapped until a configuration is read"
with engine.running() as llm:
    assert not HUB.ledger.installed
    assert len(engine.generate(llm, [[5, 6, 7]], 4)[0]) == 4
"""

_UNINSTALLED = """
part = {"enabled": True}
with engine.running(additional_config={"kv_trace": part, "kv_output": {"dir": str(folder)}}) as llm:
    assert len(engine.generate(llm, [[5, 6, 7]], 4)[0]) == 4
    during = changed()
for entry in HUB.ledger.installed.values():
    assert entry.seam.target.replace(":", ".") in during, entry.seam.name
assert len(HUB.ledger.installed) >= 13
HUB.ledger.uninstall_all()
"""

_DISABLED = """
nonsense = {"kv_trace": "nonsense", "kv_output": {"dir": str(folder)}}
with engine.running(additional_config=nonsense) as llm:
    assert len(engine.generate(llm, [[5, 6, 7]], 4)[0]) == 4
assert os.listdir(folder) == []
"""

_CASES: dict[str, tuple[str, dict[str, str]]] = {
    # What vLLM itself replaces while an engine starts, with no plugin loaded (its CPU platform patches a few).
    "control": (_CONTROL, {"VLLM_PLUGINS": "", "KVSCOPE_DISABLE": "1"}),
    "off": (_OFF, {}),
    "uninstalled": (_UNINSTALLED, {}),
    "disabled": (_DISABLED, {"KVSCOPE_DISABLE": "1"}),
}


@pytest.fixture(scope="module")
def changed(runner: engine.Runner, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """For each case the functions of vLLM that are other objects than before an engine ran."""
    folder = tmp_path_factory.mktemp("untouched")
    command = [sys.executable, "-c", _IDENTITY, runner, str(folder), json.dumps(_CASES)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in _CASES}
    assert len(found["control"]) < 50
    return found


def test_off_leaves_every_function_of_vllm_as_it_was(changed: dict[str, list[str]]) -> None:
    assert changed["off"] == changed["control"]


def test_uninstalled_leaves_every_function_of_vllm_as_it_was(changed: dict[str, list[str]]) -> None:
    assert changed["uninstalled"] == changed["control"]


def test_the_disabling_variable_wins_over_everything(changed: dict[str, list[str]]) -> None:
    assert changed["disabled"] == changed["control"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "wrong type": ({"kv_trace": {"enabled": "yes"}}, "additional_config.kv_trace.enabled: "),
    "unknown field": (
        {"kv_guard_config": {"enabled": True, "acton": "log"}},
        "additional_config.kv_guard_config.acton",
    ),
    "unknown action": (
        {"kv_guard_config": {"enabled": True, "action": "warn"}},
        "additional_config.kv_guard_config.action: 'warn' is not one of 'log', 'raise', 'isolate'",
    ),
    "no object": ({"kv_monitor": [1, 2]}, "additional_config.kv_monitor: "),
    "nested garbage": ({"kv_output": {"dir": {"a": [None, {"b": "\n\n"}]}}}, "additional_config.kv_output.dir: "),
    "out of range": (
        {"kv_transfer": {"enabled": True, "max_pending": 0}},
        "additional_config.kv_transfer.max_pending: ",
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("case", BAD)
def test_a_bad_configuration_is_refused_before_the_model_loads(
    case: str, runner: engine.Runner, capfd: pytest.CaptureFixture[str]
) -> None:
    config, message = BAD[case]
    with pytest.raises(ConfigurationError) as refused, engine.running(additional_config=config):
        pass
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
    assert "Loading safetensors" not in "".join(capfd.readouterr())


@pytest.mark.once
@pytest.mark.server
def test_a_server_with_a_bad_configuration_ends_with_one_clear_line(runner: engine.Runner, tmp_path: Path) -> None:
    config, message = BAD["unknown action"]
    log = tmp_path / "server.log"
    with pytest.raises(engine.ServerFailedError):
        engine.start_server(log, runner=runner, additional_config=config)
    text = log.read_text(errors="replace")
    assert sum(message in line for line in text.splitlines()) == 1
    assert "Loading safetensors" not in text
    assert "EngineCore pid" not in text


@pytest.mark.once
def test_the_other_engine_of_a_process_is_passed_through(runner: engine.Runner, tmp_path: Path) -> None:
    part = {"enabled": True, "action": "raise"}
    prompts = [[7 + index * 3 % 200 for index in range(50)]]
    config = {"kv_trace": part, "kv_output": {"dir": str(tmp_path)}}
    # One of them must not be stopped while the other runs: they share vLLM's process groups.
    with engine.running(additional_config=config) as on, engine.running() as off:
        before = sorted(path.stat().st_size for path in tmp_path.rglob("*.jsonl"))
        quiet = engine.generate(off, prompts, 8)
        assert sorted(path.stat().st_size for path in tmp_path.rglob("*.jsonl")) == before
        assert engine.generate(on, prompts, 8) == quiet
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1
    assert Trace(tmp_path).rows_audited() == Trace(tmp_path).rows_scheduled() == 8
