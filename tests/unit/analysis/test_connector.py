"""What a trace says about transfers is judged again as it was, and not at all where something may be missing."""

from __future__ import annotations

import json
from pathlib import Path

from kvscope.analysis.reader import Trace
from kvscope.analysis.replay import Replay
from kvscope.analysis.tally import REPLAY
from kvscope.events.codec import boundary_record
from kvscope.facts.allocator import CAUSE_HIT, TOUCH, PoolOperation
from kvscope.facts.connector import ConnectorPlan, ConnectorResult, PlannedReceive, TakenUp
from kvscope.testing.trace import TraceBuilder


def tell(builder: TraceBuilder, kind: str, fact: object) -> None:
    """It happens with the last step."""
    builder.engine.write(boundary_record(kind, fact, builder.names), "connector", kind, step=builder.step_number)


def receive(name: str, blocks: list[int]) -> ConnectorPlan:
    return ConnectorPlan(
        receives=[PlannedReceive(request_id=name, computed_tokens=32, external_tokens=32, waits=True, blocks=(blocks,))]
    )


def made(folder: Path) -> Path:
    """Requests with a transfer each, none of which has a block; what else is wrong with them their findings say."""
    builder = TraceBuilder(folder / "run", observe_pool=True)
    builder.step({"a": 40})
    for number, name in enumerate(["r", "failed", "twice"]):
        tell(builder, "connector_plan", receive(name, [50 + 2 * number, 51 + 2 * number]))
    builder.step({"a": 1})
    done = ConnectorResult(finished_recving=["r", "failed", "twice"], failed_recving=["failed"])
    tell(builder, "connector_result", done)
    stands = TakenUp(request_id="failed", is_over=False, is_marked=False, computed_tokens=32)
    tell(builder, "connector_taken_up", [stands])
    builder.step({"a": 1})
    strange = ConnectorResult(finished_recving=["twice", "a"], finished_sending=["nobody"], unknown=["nobody"])
    tell(builder, "connector_result", strange)
    block = builder.blocks["a"][0][0]
    tell(builder, "connector_result", ConnectorResult(invalid_blocks=[block]))
    tell(builder, "connector_plan", receive("null", [0, block]))
    builder.pool_does(
        PoolOperation(
            kind=TOUCH,
            block_ids=[block],
            request_id="x",
            group_id=0,
            first_index=0,
            cause=CAUSE_HIT,
            step=builder.step_number + 1,
            scheduling=True,
        )
    )
    builder.step({"a": 1})
    return builder.close()


def replayed(run: Path) -> list[tuple[str, str | None, int]]:
    """Reason, request and first step of what a replay finds about transfers."""
    replay = Replay(Trace.open(run)).run()
    steps = {(entry.first.reason, entry.first.group_id): entry.first_step for entry in replay.findings.folded()}
    found = [(reason, request, steps[reason, group]) for reason, group, request in replay.findings.keys[REPLAY]]
    return sorted(each for each in found if each[0].startswith("connector_"))


def test_everything_that_a_live_process_finds_is_found_again(tmp_path: Path) -> None:
    assert replayed(made(tmp_path)) == [
        ("connector_block_not_bound", "failed", 1),
        ("connector_block_not_bound", "null", 1),
        ("connector_block_not_bound", "r", 1),
        ("connector_block_not_bound", "twice", 1),
        ("connector_completion_unplanned", "a", 3),
        ("connector_duplicate_completion", "twice", 3),
        ("connector_failed_receive_lost", "failed", 2),
        ("connector_invalid_block_reused", "a", 4),
        ("connector_null_block", "null", 3),
        ("connector_unknown_request", "nobody", 3),
    ]


def test_with_a_gap_nothing_follows_from_a_plan_that_is_not_there(tmp_path: Path) -> None:
    run = made(tmp_path)
    (path,) = run.glob("engine-*.jsonl")
    lines = path.read_text().splitlines()
    kept = [line for line in lines if json.loads(line).get("kind") != "connector_plan"]
    assert len(kept) == len(lines) - 4
    path.write_text("\n".join(kept) + "\n")
    reasons = {reason for reason, _, _ in replayed(run)}
    assert reasons == {"connector_unknown_request"}
