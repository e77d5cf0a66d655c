"""Extensions of the user's own beside a real engine: they are told of findings, and whatever they do stays theirs."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvscope.errors import ConfigurationError
from kvscope.metrics.place import places_in
from kvscope.sinks.subscribers import SUBSCRIBERS
from kvscope.testing import engine
from kvscope.testing.faults import SETTINGS, arm, workload

from .test_healthy import switched_on
from .traces import Trace

EXTENSION = """
import dataclasses, json, os, pathlib, threading
from kvscope.monitor import GuardViolationEvent, register_collector, subscribe_guard_events

HERE = pathlib.Path(__file__).parent


def write(event: GuardViolationEvent) -> None:
    with open(HERE / f"events-{os.getpid()}.jsonl", "a") as file:
        print(json.dumps(dataclasses.asdict(event)), file=file)


def fail(event: GuardViolationEvent) -> None:
    raise ValueError(event.reason)


def hang(event: GuardViolationEvent) -> None:
    threading.Event().wait()


def pid(ctx):
    return os.getpid()


handles = [subscribe_guard_events(callback) for callback in (fail, hang, write)]
for process in ("exporter", "engine", "worker"):
    name = f"vllm_ascend_pid_of_{process}"
    handles.append(register_collector(name=name, metric_type="gauge", process=process)(lambda ctx: pid(ctx)))
with open(HERE / "imported", "a") as file:
    print(os.getpid(), file=file)
"""
FAULT = "slot_foreign_block"
REASON = "write_foreign_block"


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that can be imported here and in child processes; its files stand beside it."""
    name = f"kvscope_told_{os.getpid()}_{time.monotonic_ns()}"  # a process imports a name once
    (tmp_path / f"{name}.py").write_text(EXTENSION)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.glob("events-*.jsonl") for line in path.read_text().splitlines()]


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)


def pids(output: Path) -> dict[str, int]:
    """What the collectors of the extension say on the page of the run's exporter, by process."""
    found = [place for folder in output.iterdir() for place in places_in(folder)]
    if not found:
        return {}
    with urllib.request.urlopen(found[0].metrics_url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    said = [re.fullmatch(r'vllm_ascend_pid_of_(\w+){engine="0"} (\S+)', line) for line in lines]
    return {match[1]: int(float(match[2])) for match in said if match}


@pytest.mark.once
def test_an_extension_is_told_what_is_found_and_changes_nothing(extension: str, tmp_path: Path, cell: Any) -> None:
    config = switched_on(tmp_path / "out", "log", log="off", extensions=[extension])
    with engine.running(additional_config=config, **SETTINGS) as llm:
        healthy = workload(llm)
        with arm(FAULT, after_steps=3, once=False):
            workload(llm)
        violations = Trace(tmp_path / "out").violations
        until(lambda: len(told(tmp_path)) >= len(violations) > 0)
        assert workload(llm) == healthy
    try:
        trace = Trace(tmp_path / "out")
        events = told(tmp_path)
        assert {event["reason"] for event in events} >= {REASON}
        first, written = events[0], trace.violations[0]
        assert first["request_ids"] == [name for name in (written.request_id, written.other_request_id) if name]
        assert (first["reason"], first["block_id"], first["step"], first["group"], first["check"]) == (
            written.reason, written.block_id, written.step, written.group_id, written.check,
        )  # fmt: skip
        assert (tmp_path / "imported").read_text().split() == [str(os.getpid())]
        fails, hangs, writes, *_ = sys.modules[extension].handles
        assert fails.faults > 0
        assert (hangs.delivered, writes.faults, writes.dropped) == (0, 0, 0)
        (coverage,) = trace.last_coverage().values()
        assert coverage.hook_calls["subscribers"] == writes.delivered == len(events)
        assert coverage.hook_faults["subscribers"] == fails.faults
        cell(f"in-process: {len(events)} events told, {fails.faults} faults of a callback that raises")
    finally:
        for handle in sys.modules[extension].handles:
            handle.close()
    assert [known for known in SUBSCRIBERS._known if known.active] == []


@pytest.mark.long
@pytest.mark.once
@pytest.mark.multiprocess
def test_extensions_of_an_engine_in_processes_of_its_own(extension: str, tmp_path: Path, cell: Any) -> None:
    config = switched_on(tmp_path / "out", "log", log="off", extensions=[extension])
    config["kvscope_fault"] = {"name": FAULT, "rank": None, "after_steps": 3, "report": str(tmp_path / "injected.json")}
    config["kv_monitor"] = {"enabled": True, "scrape_interval": 0.2}
    with engine.running(additional_config=config, in_process=False, **SETTINGS) as llm:
        assert all(len(tokens) == 24 for tokens in workload(llm))
        until(lambda: len(told(tmp_path)) > 0)
        until(lambda: set(pids(tmp_path / "out")) == {"exporter", "engine", "worker"})
        found = pids(tmp_path / "out")
        ending = time.monotonic()
    ended = time.monotonic() - ending
    injected = json.loads((tmp_path / "injected.json").read_text())
    events = [event for event in told(tmp_path) if event["reason"] == REASON]
    assert injected["request_id"] in events[0]["request_ids"]
    processes = (tmp_path / "imported").read_text().split()
    assert len(processes) == len(set(processes)) == len(Trace(tmp_path / "out").enabled) >= 2
    assert str(os.getpid()) in processes
    assert found["exporter"] == os.getpid()
    assert str(found["engine"]) in set(processes) - {str(os.getpid())}
    assert str(found["worker"]) in set(processes) - {str(os.getpid())}
    assert ended < 10, "a callback that hangs must not hold up the end of its process"
    cell(f"multi-process: imported in {len(processes)} processes, {len(events)} events, {ended:.1f} s to end")
    for handle in sys.modules[extension].handles:
        handle.close()


@pytest.mark.once
def test_an_extension_that_is_not_there_stops_the_start_before_the_model_loads(tmp_path: Path) -> None:
    config = switched_on(tmp_path / "out", extensions=["json", "kvscope_no_such_module"])
    with pytest.raises(ConfigurationError) as raised:
        engine.start(additional_config=config)
    assert str(raised.value) == (
        "additional_config.kv_output.extensions[1]: 'kvscope_no_such_module' cannot be imported (ModuleNotFoundError)"
    )
    assert not (tmp_path / "out").exists()
