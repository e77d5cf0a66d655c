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
from kvscope.sinks.subscribers import SUBSCRIBERS

EXAMPLE = Path(__file__).parent / "monitor_example.py"


def test_the_public_list_is_what_can_be_seen() -> None:
    visible = {
        name
        for name, value in vars(monitor).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name not in {"annotations", "Callable"}
    }
    assert visible - {"SUBSCRIBERS"} == set(monitor.__all__)
    assert sorted(monitor.__all__) == monitor.__all__


def test_everything_public_is_documented() -> None:
    assert all((getattr(monitor, name).__doc__ or "").strip() for name in monitor.__all__)
    event = monitor.GuardViolationEvent
    assert all(f"{name}:" in (event.__doc__ or "") for name in event.__dataclass_fields__)


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
