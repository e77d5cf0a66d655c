"""Off is untouched, on-then-uninstalled too, and a bad configuration stops the start before the model loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvscope.errors import ConfigurationError
from kvscope.testing import engine

from .traces import Trace

_IDENTITY = """
import json, sys, types
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
"""

_CONTROL = (
    _IDENTITY
    + """
with engine.running() as llm:
    assert len(engine.generate(llm, [[5, 6, 7]], 4)[0]) == 4
print("changed", json.dumps(changed()))
"""
)

_OFF = (
    _IDENTITY
    + """
for _ in range(3):
    register()
assert HUB.ledger.installed, "the bootstrap seams are wrapped until a configuration is read"
with engine.running() as llm:
    assert not HUB.ledger.installed
    assert len(engine.generate(llm, [[5, 6, 7]], 4)[0]) == 4
print("changed", json.dumps(changed()))
"""
)

_UNINSTALLED = (
    _IDENTITY
    + """
part = {"enabled": True}
with engine.running(additional_config={"kv_trace": part, "kv_output": {"dir": sys.argv[2]}}) as llm:
    assert len(engine.generate(llm, [[5, 6, 7]], 4)[0]) == 4
    during = changed()
for entry in HUB.ledger.installed.values():
    assert entry.seam.target.replace(":", ".") in during, entry.seam.name
assert len(HUB.ledger.installed) >= 13
HUB.ledger.uninstall_all()
print("changed", json.dumps(changed()))
"""
)

_DISABLED = (
    _IDENTITY
    + """
import os
nonsense = {"kv_trace": "nonsense", "kv_output": {"dir": sys.argv[2]}}
with engine.running(additional_config=nonsense) as llm:
    assert len(engine.generate(llm, [[5, 6, 7]], 4)[0]) == 4
assert os.listdir(sys.argv[2]) == []
print("changed", json.dumps(changed()))
"""
)


def changed_by(script: str, runner: str, folder: Path, **environment: str) -> list[str]:
    """Functions of vLLM that are not the same objects as before, after the script has run an engine."""
    folder.mkdir(exist_ok=True)
    process = subprocess.run(
        [sys.executable, "-c", script, runner, str(folder)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, **environment},
    )
    assert process.returncode == 0, process.stderr[-2000:]
    line = next(line for line in process.stdout.splitlines() if line.startswith("changed "))
    changed: list[str] = json.loads(line.removeprefix("changed "))
    return changed


@pytest.fixture(scope="module")
def changed_by_vllm(runner: engine.Runner, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What vLLM itself replaces while an engine starts, with no plugin loaded (its CPU platform patches a few)."""
    changed = changed_by(_CONTROL, runner, tmp_path_factory.mktemp("control"), VLLM_PLUGINS="", KVSCOPE_DISABLE="1")
    assert len(changed) < 50
    return changed


def test_off_leaves_every_function_of_vllm_as_it_was(
    runner: engine.Runner, tmp_path: Path, changed_by_vllm: list[str]
) -> None:
    assert changed_by(_OFF, runner, tmp_path) == changed_by_vllm


@pytest.mark.long_v2
def test_uninstalled_leaves_every_function_of_vllm_as_it_was(
    runner: engine.Runner, tmp_path: Path, changed_by_vllm: list[str]
) -> None:
    assert changed_by(_UNINSTALLED, runner, tmp_path) == changed_by_vllm


@pytest.mark.once
def test_the_disabling_variable_wins_over_everything(
    runner: engine.Runner, tmp_path: Path, changed_by_vllm: list[str]
) -> None:
    assert changed_by(_DISABLED, runner, tmp_path, KVSCOPE_DISABLE="1") == changed_by_vllm


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
