"""A trace that is followed says at each look what its tables and its pool are then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvscope.analysis.following import Followed, RunFollower
from kvscope.errors import UnreadableTraceError
from kvscope.events.names import RequestNames
from kvscope.facts import allocator as facts
from kvscope.facts.allocator import CACHE, FREE, HOLD, PoolOperation
from kvscope.metrics.readout import Readout
from kvscope.testing.trace import TraceBuilder


def looked_at(builder: TraceBuilder, follower: RunFollower | None = None) -> Followed:
    """A look at a run that goes on, after its processes have written what they have."""
    for stream in {builder.engine, *builder.workers}:
        stream._file.flush()
    return (follower or RunFollower(builder.directory)).look()


def blocks_of(followed: Followed) -> dict[str, int]:
    assert followed.requests is not None
    return {request.request_id: request.blocks for request in followed.requests}


def readout(followed: Followed) -> Readout:
    return Readout(followed.samples, at_s=followed.at_s)


def does(builder: TraceBuilder, kind: str, block_ids: list[int], request_id: str, **more: Any) -> None:
    step = builder.step_number + more.get("scheduling", False)
    builder.pool_does(
        PoolOperation(kind=kind, block_ids=block_ids, **{"step": step, "request_id": request_id, "group_id": 0, **more})
    )


@pytest.mark.parametrize("layout", [{"in_process": True}, {"ranks": 2}], ids=["in-process", "two-workers"])
def test_each_look_has_the_tables_as_they_are_then(tmp_path: Path, layout: dict[str, Any]) -> None:
    builder = TraceBuilder(tmp_path / "run", **layout)
    builder.step({"r1": 40, "r2": 20})
    follower = RunFollower(tmp_path)
    assert follower.run_id == "run"
    first = looked_at(builder, follower)
    assert blocks_of(first) == {"r1": 3, "r2": 2}
    assert [request.tokens for request in first.requests or ()] == [40, 20]
    builder.step({"r1": 9, "r2": 1})
    builder.step({"r1": 1}, finished=["r2"])
    assert blocks_of(looked_at(builder, follower)) == {"r1": 4}
    assert blocks_of(follower.look()) == {"r1": 4}
    builder.close()
    assert blocks_of(follower.look()) == blocks_of(RunFollower(tmp_path / "run").look())


def test_states_of_blocks_are_those_of_the_pool(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run", observe_pool=True)
    builder.step({"r1": 40, "r2": 40})
    does(builder, CACHE, builder.blocks["r1"][0][:2], "r1", hash_counts=[1, 1], hash_tokens=[16, 16], scheduling=True)
    builder.step({"r1": 1, "r2": 1})
    builder.step({"r2": 1}, finished=["r1"])
    builder.close()
    values = readout(RunFollower(tmp_path).look())
    num_blocks = builder.topology.num_blocks
    assert values.by("state", "kv_blocks", engine="0") == {
        "free": num_blocks - 1 - 3 - 2,
        "cached": 2,
        "used": 3,
        "null": 1,
        "held": 0,
    }
    assert values.get("kv_cache_usage_percent", engine="0") == pytest.approx(100 * 3 / (num_blocks - 1))


def test_a_request_whose_blocks_the_pool_has_back_holds_none_although_no_step_has_said_so_yet(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run", observe_pool=True)
    builder.step({"r1": 40, "r2": 20})
    does(builder, FREE, builder.blocks["r1"][0][::-1], "r1", cause=facts.CAUSE_FINISH)
    builder.close()
    assert blocks_of(RunFollower(tmp_path).look()) == {"r2": 2}


def test_holds_have_their_cause_and_their_time(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run", observe_pool=True)
    builder.step({"r1": 40, "r2": 40})
    held = list(builder.blocks["r1"][0])
    does(builder, HOLD, held, "r1", cause=facts.CAUSE_DEFERRED, first_index=0)
    builder.wait(5)
    builder.step({"r2": 1})
    followed = looked_at(builder)
    (hold,) = followed.holds or ()
    assert (hold.cause, hold.blocks, hold.since_before) == ("deferred", 3, False)
    assert hold.for_s == pytest.approx(5, abs=1)
    assert readout(followed).get("kv_blocks", engine="0", state="held", cause="deferred") == 3


def test_without_the_pool_there_are_tables_and_no_states(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run")
    builder.step({"r1": 40})
    builder.close()
    followed = RunFollower(tmp_path).look()
    assert followed.holds is None
    assert followed.no_data["holds"].startswith("the trace does not say what the block pool did")
    assert readout(followed).total("kv_blocks") is None
    assert blocks_of(followed) == {"r1": 3}


def test_coverage_cost_and_findings_are_those_that_were_recorded(tmp_path: Path) -> None:
    def foreign(plan: Any) -> None:
        plan.groups[0].slots[0] = 67

    builder = TraceBuilder(tmp_path / "run", in_process=True)
    builder.step({"r1": 40, "r2": 40})
    builder.step({"r1": 1, "r2": 1}, damage_plan=foreign)
    found = readout(looked_at(builder))
    assert found.by("reason", "guard_violations_total") == {"write_foreign_block": 1}
    assert found.total("guard_rows_audited_total") is None, "before the first kv.coverage nobody knows"
    builder.close()
    followed = RunFollower(tmp_path).look()
    assert readout(followed).total("guard_rows_audited_total") == 4
    assert followed.coverage_share == 1


def test_a_damaged_line_and_a_file_that_is_gone_leave_no_tables(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run", in_process=True)
    builder.step({"r1": 40})
    run = builder.close()
    (path,) = run.glob("all-*.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"kv.bind","schema"', b'"kv.bind","sch', 1))
    assert "lacks records" in RunFollower(run).look().no_data["requests"]
    path.unlink()
    (run / path.name.replace(".0.", ".1.")).write_bytes(whole)
    assert "lacks records" in RunFollower(run).look().no_data["requests"]


def test_a_line_that_is_still_being_written_comes_with_a_later_look(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run", in_process=True)
    builder.step({"r1": 40})
    builder.step({"r1": 40})
    run = builder.close()
    (path,) = run.glob("all-*.jsonl")
    whole = path.read_bytes()
    second = whole.rindex(b'{"event":"kv.bind"')
    path.write_bytes(whole[: second + 30])
    follower = RunFollower(run)
    assert blocks_of(follower.look()) == {"r1": 3}
    path.write_bytes(whole)
    assert blocks_of(follower.look()) == {"r1": 5}


def test_a_trace_without_request_ids_says_so(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run", names=RequestNames("omitted"))
    builder.step({"r1": 40})
    builder.close()
    followed = RunFollower(tmp_path).look()
    assert followed.requests is None
    assert "leaves request ids out" in followed.no_data["requests"]


def test_a_single_file_of_a_worker_declares_nothing(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run")
    builder.step({"r1": 40})
    run = builder.close()
    (path,) = run.glob("worker-*.jsonl")
    assert RunFollower(path).look().no_data["requests"].startswith("this trace declares no step")


def test_a_trace_without_steps_does_not_say_that_no_request_holds_a_block(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run")
    builder.close()
    followed = RunFollower(tmp_path).look()
    assert followed.requests is None
    assert followed.no_data["requests"].startswith("this trace declares no step")


def test_where_there_is_no_trace_it_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableTraceError):
        RunFollower(tmp_path)


def test_reading_is_reported(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run", in_process=True)
    builder.step({"r1": 40})
    run = builder.close()
    told: list[tuple[int, int]] = []
    RunFollower(run).look(lambda done, total: told.append((done, total)))
    size = sum(path.stat().st_size for path in run.glob("*.jsonl"))
    assert told[-1] == (size, size)
    assert told == sorted(told)
