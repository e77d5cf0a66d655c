"""`kvscope demo` as it is: real server, real fault, and nothing left behind when it is interrupted."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvscope.testing import engine

COMMAND = [sys.executable, "-c", "import sys; from kvscope.cli import main; sys.exit(main())", "demo"]


@pytest.mark.once
@pytest.mark.server
def test_the_demo_shows_a_clean_server_and_a_found_fault(runner: engine.Runner, tmp_path: Path) -> None:
    arguments = [*COMMAND, "--runner", runner, "--dir", str(tmp_path / "demo"), "--json"]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=280)
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["passed"] is True
    assert document["traffic"]["completed"] == document["traffic"]["sent"]
    assert document["server_exit_code"] == 0
    assert document["healthy"]["verdict"] == "clean"
    assert document["healthy"]["coverage"].startswith("coverage: ")
    # Eight requests compete for blocks. How many a step has depends on how fast this machine sends the next.
    assert document["traffic"]["preemptions"] > 0
    assert document["healthy"]["rows_audited"] > document["healthy"]["steps"]
    _check_cost(document["cost"])
    assert document["fault"]["found"] == ["write_foreign_block"]
    assert {"kv_monitor", "kv_transfer"} <= set(document["parts"])


def _check_cost(cost: dict[str, Any]) -> None:
    """Scheduler and worker stand in the number together, and it is that of full steps. How large it is, is not ours to
    say: the machine is shared.
    """
    assert cost["verdict"] == "clean"
    assert cost["steps"] > 250
    assert cost["rows_audited"] > 7 * cost["steps"]
    assert {"scheduler.schedule", "worker.execute", "runner_v1.slots"} <= set(cost["own_ns_by_hook"])
    assert 0 <= cost["own_ns_per_step"] - sum(cost["own_ns_by_hook"].values()) <= len(cost["own_ns_by_hook"])


@pytest.mark.long
@pytest.mark.once
@pytest.mark.server
def test_a_demo_that_is_told_to_end_leaves_no_process(runner: engine.Runner, tmp_path: Path) -> None:
    arguments = [*COMMAND, "--runner", runner, "--dir", str(tmp_path / "demo")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        assert next(line for line in demo.stdout if line.startswith("ready"))
        children = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signal.SIGTERM)
        _, err = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert err.startswith("kvscope: demo interrupted")
    assert len(children) >= 3
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
