"""kvscope's own time of a step is that of the scheduler's side and of a worker, over the steps of EngineCore."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from kvscope.analysis.cost import is_apart
from kvscope.analysis.reader import Trace
from kvscope.analysis.replay import Replay
from kvscope.analysis.summary import Summary, summarize
from kvscope.boundary.seams import seam_table
from kvscope.testing.trace import TraceBuilder

STEPS = 10
WITH_EVERY_STEP = {
    "scheduler.schedule", "scheduler.update", "worker.execute", "worker.sample", "runner_v1.slots", "runner_v2.attn",
    "runner_v1.zero", "runner_v1.zero_cpu", "runner_v1.copy", "runner_v2.zero", "runner_v2.copy", "runner_v1.verify",
    "runner_v1.rejected", "runner_v2.verify",
    "runner_v1.forward", "runner_v2.metadata", "runner_v2.metadata_hybrid", "runner_v2.metadata_encoder_decoder",
    "runner_v2.micro_batches", "runner_v2.forward", "runner_v1.graph", "runner_v2.graph",
    "runner_v1.output", "runner_v1.pooled", "runner_v2.output", "runner_v2.pooled",
    "pool.alloc", "pool.queue", "pool.touch", "pool.free", "pool.unpin", "pool.cache", "pool.cache_partial",
    "pool.move_hashes", "pool.evict", "pool.copy_on_write", "manager.allocate", "manager.pop", "manager.window",
    "scheduler.preempt", "scheduler.finish", "scheduler.free", "scheduler.finished", "scheduler.drain",
    "scheduler.free_copied", "scheduler.invalid", "scheduler.loaded", "connector.alloc", "connector.plan",
    "connector.finished",
    "monitor.arrival", "monitor.lookup", "monitor.scheduled", "monitor.transfers", "monitor.updated",
}  # fmt: skip


def make(directory: Path, **layout: Any) -> Path:
    builder = TraceBuilder(directory / "run", **layout)
    for _ in range(STEPS):
        builder.step({"r1": 1})
    return builder.close()


def summary_of(path: Path) -> Summary:
    return summarize(Replay(Trace.open(path)).run())


def edit_coverage(run: Path, process: str, change: Callable[[dict[str, Any]], None]) -> None:
    (path,) = run.glob(f"{process}-*.jsonl")
    *lines, last = path.read_text().splitlines()
    record = json.loads(last)
    assert record["event"] == "kv.coverage"
    change(record)
    path.write_text("\n".join([*lines, json.dumps(record)]) + "\n")


def test_workers_count_no_steps_and_their_time_counts_all_the_same(tmp_path: Path) -> None:
    run = make(tmp_path)
    edit_coverage(run, "worker", lambda record: _equal(record["steps"], 0))
    said = summary_of(run)
    assert said.own_ns_per_step == 60_000
    engine, worker = said.processes
    assert engine.own_ns_per_step == {"scheduler.schedule": 20_000}
    assert worker.own_ns_per_step == {"worker.execute": 20_000, "runner_v1.slots": 20_000}


def _equal(value: object, expected: object) -> None:
    assert value == expected


def test_of_several_workers_the_slowest_counts(tmp_path: Path) -> None:
    run = make(tmp_path, ranks=3)
    edit_coverage(run, "worker-1", lambda r: r["hook_time_ns"].update({"worker.execute": STEPS * 70_000}))
    assert summary_of(run).own_ns_per_step == 20_000 + 70_000 + 20_000


def test_in_one_process_everything_stands_in_one_record(tmp_path: Path) -> None:
    said = summary_of(make(tmp_path, in_process=True))
    assert said.own_ns_per_step == 60_000
    assert said.processes[0].own_ns_apart == {"scheduler.create": 5_000_000, "worker.cache": 5_000_000}


def test_what_happens_once_is_no_part_of_a_step_however_often_it_was_called(tmp_path: Path) -> None:
    run = make(tmp_path)
    once = {"frontend.admit": 1, "config.create": 2, "worker.shutdown": 3, "runner_v2.dummy": 4}
    edit_coverage(run, "worker", lambda r: r["hook_time_ns"].update(once))
    edit_coverage(run, "worker", lambda r: r["hook_calls"].update(dict.fromkeys(once, STEPS)))
    said = summary_of(run)
    assert said.own_ns_per_step == 60_000
    assert said.processes[1].own_ns_apart == {"worker.cache": 5_000_000, **once}


@pytest.mark.parametrize("process", ["engine", "worker"])
def test_half_of_the_cost_is_not_called_the_cost(tmp_path: Path, process: str) -> None:
    run = make(tmp_path)
    (path,) = run.glob(f"{process}-*.jsonl")
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines()[:-1]))
    assert summary_of(run).own_ns_per_step is None


def test_every_wrapped_function_is_known_to_run_with_the_steps_or_apart_from_them() -> None:
    names = {seam.name for seam in seam_table(cast("Any", None))}
    assert {name for name in names if not is_apart(name)} == WITH_EVERY_STEP
