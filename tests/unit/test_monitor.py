"""The public extension API is what it says it is."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

from kvscope import monitor
from kvscope.checks.catalog import RULES
from kvscope.checks.finding import Finding
from kvscope.metrics.collectors import COLLECTORS
from kvscope.sinks.subscribers import SUBSCRIBERS

IMPORTED = {
    "annotations",
    "Callable",
    "Protocol",
    "cast",
    "wraps",
    "Kind",
    "CollectorProcess",
    "COLLECTORS",
    "SUBSCRIBERS",
}
EXAMPLE = Path(__file__).parent / "monitor_example.py"


def test_the_public_list_is_what_can_be_seen() -> None:
    visible = {
        name
        for name, value in vars(monitor).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name not in IMPORTED
    }
    assert visible == set(monitor.__all__)
    assert sorted(monitor.__all__) == monitor.__all__


def test_everything_public_is_documented() -> None:
    assert all((getattr(monitor, name).__doc__ or "").strip() for name in monitor.__all__)
    event, context = monitor.GuardViolationEvent, monitor.CollectorContext
    assert all(f"{name}:" in (event.__doc__ or "") for name in event.__dataclass_fields__)
    read = [name for name, value in vars(context).items() if isinstance(value, property)]
    assert all(f"{name}:" in (context.__doc__ or "") for name in read)
    assert len(read) == 4


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("monitor_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_is_told_of_findings() -> None:
    example = load_example()
    found = Finding(reason="write_foreign_block", step=1, trace_id="t", request_id="a", block_id=7)
    SUBSCRIBERS.publish(found, RULES[found.reason])
    ends = time.monotonic() + 10
    while not example.handle.delivered:
        assert time.monotonic() < ends
        time.sleep(0.002)
    assert example.seen == {"write_foreign_block": 1}
    assert example.blocks == {7: ("a",)}
    assert example.health() == "1 told, 0 dropped, 0 faults, active: True"
    example.handle.close()
    for collector in example.collectors:
        collector.close()


def test_the_examples_collectors_say_what_they_mean() -> None:
    example = load_example()
    example.handle.close()
    values = [("used", 6.0), ("held", 2.0)]
    readout = monitor.Readout([("kv_blocks", {"engine": "0", "state": of}, value) for of, value in values], at_s=1.0)
    context = monitor.CollectorContext(engine="0", engine_id="run.0", wall_ns=1, read=lambda: readout)
    assert [collector(context) for collector in example.collectors] == [0.25, 0.0]
    for collector in example.collectors:
        collector.close()
    assert COLLECTORS.of(["exporter", "engine", "worker"]) == []


def test_the_example_holds_under_strict_types() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--config-file", str(root / "pyproject.toml"),
         "--follow-imports", "silent", str(EXAMPLE)],
        capture_output=True, text=True, timeout=240, check=False, cwd=root,
        env={"MYPYPATH": str(root / "src"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_it_imports_no_host_and_starts_no_thread() -> None:
    script = "import sys, threading, kvscope.monitor; print('vllm' in sys.modules, threading.active_count())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "1"]
