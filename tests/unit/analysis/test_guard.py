"""What the guard finds in declarations and plans by its ledger is found again in a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvscope.analysis.pool import rebuild_ledger
from kvscope.analysis.reader import Trace
from kvscope.analysis.replay import Replay
from kvscope.analysis.row_coverage import NO_DECLARATION, PARTIAL
from kvscope.analysis.tally import LIVE, NOT_REPLAYABLE, REPLAY
from kvscope.analysis.verdict import CLEAN, FINDINGS, INCONCLUSIVE, verdict_of
from kvscope.checks.content import CONTENT_RULES
from kvscope.checks.dummy import dummy_table_live
from kvscope.checks.generation import GENERATION_RULES
from kvscope.checks.initialized import INITIALIZED_RULES
from kvscope.checks.lifetime import LIFETIME_RULES
from kvscope.checks.ownership import OWNERSHIP_RULES
from kvscope.facts import allocator as facts
from kvscope.facts.allocator import ALLOC, CACHE, FREE, HOLD, RECEIVE, TOUCH, PoolOperation
from kvscope.facts.plans import Plan
from kvscope.facts.requests import Declaration
from kvscope.testing.trace import TraceBuilder

LAYOUTS = [{"in_process": True}, {"ranks": 2}, {"full": True}]
Scenario = Callable[[TraceBuilder], None]
BOTH = {"r1": 1, "r2": 1}


def does(builder: TraceBuilder, kind: str, block_ids: list[int], request_id: str | None = None, **more: Any) -> None:
    """A call of the pool in the step that is declared next."""
    fields: dict[str, Any] = {"step": builder.step_number + 1, "scheduling": True, "request_id": request_id}
    if request_id is not None and kind != FREE:
        fields |= {"group_id": 0, "first_index": 0}
    builder.pool_does(PoolOperation(kind=kind, block_ids=block_ids, **{**fields, **more}))
    builder.pool = [block for block in builder.pool if kind != ALLOC or block not in block_ids]


def decoding(builder: TraceBuilder) -> None:
    """r1 has blocks 1 to 3, r2 blocks 4 to 6: 41 tokens each, 9 of them in the last one."""
    builder.step({"r1": 40, "r2": 40})
    builder.step(BOTH)


def hit(builder: TraceBuilder, block: int, tokens: int, hashed: int = 16, owner: str = "r1") -> None:
    """r3 will come in with these tokens in a block of somebody else."""
    does(builder, CACHE, [block], owner, hash_counts=[1], hash_tokens=[hashed], cause=facts.CAUSE_ALLOCATE)
    does(builder, TOUCH, [block], "r3", cause=facts.CAUSE_HIT)
    builder.bring("r3", tokens, [block])


def waiting(builder: TraceBuilder) -> None:
    """p waits for a receive in blocks 9 and 10."""
    decoding(builder)
    does(builder, ALLOC, [9, 10], "p", reserved=True, cause=facts.CAUSE_EXTERNAL)


def hit_uninitialized(builder: TraceBuilder) -> None:
    decoding(builder)
    hit(builder, 3, 16)
    builder.step(BOTH | {"r3": 3})
    builder.step(BOTH | {"r3": 1})


def failed(builder: TraceBuilder) -> None:
    """The step that fills block 7 of r4 does not come back, the next one does."""
    decoding(builder)
    builder.step({"r4": 20}, comes_back=False)
    does(builder, CACHE, [7], "r4", hash_counts=[1], hash_tokens=[16], cause=facts.CAUSE_ALLOCATE)
    builder.step(BOTH)


def hit_before_write(builder: TraceBuilder) -> None:
    failed(builder)
    does(builder, TOUCH, [7], "r3", cause=facts.CAUSE_HIT)
    builder.bring("r3", 16, [7])
    builder.step(BOTH | {"r3": 3})


def aborted_block_still_cached(builder: TraceBuilder) -> None:
    failed(builder)
    builder.step(BOTH)


def zero_live_block(builder: TraceBuilder) -> None:
    decoding(builder)
    builder.step(BOTH, damage_declaration=lambda d: setattr(d, "zero_blocks", [1]))


def zero_after_receive(builder: TraceBuilder) -> None:
    waiting(builder)
    builder.step(BOTH)
    builder.step(BOTH, damage_declaration=lambda d: setattr(d, "zero_blocks", [9]))


def finished(request_id: str) -> Callable[[Declaration], None]:
    return lambda d: d.requests.finished.add(request_id)


def leak_after_finish(builder: TraceBuilder) -> None:
    decoding(builder)
    builder.step({"r2": 1}, damage_declaration=finished("r1"))
    builder.step({"r2": 1})


def held(builder: TraceBuilder, cause: str) -> None:
    decoding(builder)
    does(builder, HOLD, [1, 2, 3], "r1", first_index=None, group_id=None, cause=cause)
    builder.step({"r2": 1}, damage_declaration=finished("r1"))


def held_behind_a_step(builder: TraceBuilder) -> None:
    held(builder, facts.CAUSE_DEFERRED)
    for _ in range(19):
        builder.step({"r2": 1})


def held_by_a_connector(builder: TraceBuilder) -> None:
    held(builder, facts.CAUSE_FINISH)
    builder.wait(901)
    builder.step({"r2": 1})
    builder.step({"r2": 1})


def watermark_exceeded(builder: TraceBuilder) -> None:
    decoding(builder)
    builder.blocks["r1"][0] += [50, 51]
    builder.step({"r1": 24}, damage_declaration=lambda d: d.requests.cached_blocks.__setitem__(0, ([50, 51],)))


def released(block: int) -> Scenario:
    def scenario(builder: TraceBuilder) -> None:
        decoding(builder)
        does(builder, FREE, [block], "r1", cause=facts.CAUSE_FINISH, ref_counts=[0])
        builder.step(BOTH)
        builder.step({"r1": 1, "r3": 16})

    return scenario


def waits(change: Callable[[Plan], None]) -> Scenario:
    return lambda builder: (waiting(builder), builder.step(BOTH, damage_plan=change), None)[2]


def slot(value: int) -> Callable[[Plan], None]:
    return lambda plan: plan.groups[0].slots.__setitem__(0, value)


def write_foreign_owner(builder: TraceBuilder) -> None:
    decoding(builder)
    does(builder, HOLD, [4, 5, 6], "r2", first_index=None, group_id=None, cause=facts.CAUSE_FINISH)
    builder.step({"r1": 1}, damage_declaration=finished("r2"), damage_plan=slot(88))


def write_shared_block(builder: TraceBuilder) -> None:
    decoding(builder)
    hit(builder, 3, 8, hashed=8)
    builder.step(BOTH | {"r3": 2})


def write_block_not_declared(builder: TraceBuilder) -> None:
    decoding(builder)
    builder.step(BOTH, damage_plan=slot(488))


def read_uninitialized(builder: TraceBuilder) -> None:
    decoding(builder)
    does(builder, ALLOC, [50], "r3", cause=facts.CAUSE_ALLOCATE)
    builder.bring("r3", 16, [50])
    builder.step(BOTH | {"r3": 2})
    builder.step(BOTH | {"r3": 1})


def write_uninitialized_gap(builder: TraceBuilder) -> None:
    decoding(builder)
    builder.step(BOTH, damage_declaration=lambda d: d.requests.cached_computed.__setitem__(0, 44))


def write_loaded_prefix(builder: TraceBuilder) -> None:
    waiting(builder)
    builder.step(BOTH)
    does(builder, RECEIVE, [9, 10], "p", filled=[16, 16], cause=facts.CAUSE_EXTERNAL)
    builder.bring("p", 20, [9, 10])
    builder.step(BOTH | {"p": 12})


def dummy_over_a_token(builder: TraceBuilder) -> None:
    decoding(builder)
    builder.dummy({0: [-1, 81]})


SCENARIOS: dict[str, tuple[Scenario, ...]] = {
    "hit_uninitialized": (hit_uninitialized,),
    "hit_before_write": (hit_before_write,),
    "aborted_block_still_cached": (aborted_block_still_cached,),
    "zero_live_block": (zero_live_block,),
    "zero_after_receive": (zero_after_receive,),
    "leak_after_finish": (leak_after_finish,),
    "hold_deadline_exceeded": (held_behind_a_step, held_by_a_connector),
    "watermark_exceeded": (watermark_exceeded,),
    "read_after_release": (released(1),),
    "write_after_release": (released(3),),
    "read_reserved_block": (waits(lambda plan: plan.groups[0].tables.__setitem__((0, 1), 10)),),
    "write_reserved_block": (waits(slot(144)),),
    "write_foreign_owner": (write_foreign_owner,),
    "write_shared_block": (write_shared_block,),
    "write_block_not_declared": (write_block_not_declared,),
    "read_uninitialized": (read_uninitialized,),
    "write_uninitialized_gap": (write_uninitialized_gap,),
    "write_loaded_prefix": (write_loaded_prefix,),
    "dummy_table_live": (dummy_over_a_token,),
}
FAMILIES = (CONTENT_RULES, LIFETIME_RULES, GENERATION_RULES, OWNERSHIP_RULES, INITIALIZED_RULES, (dummy_table_live,))


def replayed(run: Path) -> Replay:
    return Replay(Trace.open(run)).run()


def test_every_reason_that_needs_a_ledger_is_replayed_here() -> None:
    assert SCENARIOS.keys() == {function.rule.reason for family in FAMILIES for function in family}
    assert not SCENARIOS.keys() & NOT_REPLAYABLE


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "ranks", "full"])
@pytest.mark.parametrize("reason", SCENARIOS)
def test_replay_finds_what_the_guard_found_live(tmp_path: Path, reason: str, layout: dict[str, Any]) -> None:
    for number, scenario in enumerate(SCENARIOS[reason]):
        builder = TraceBuilder(tmp_path / f"run{number}", observe_pool=True, **layout)
        scenario(builder)
        replay = replayed(builder.close())
        verdict = verdict_of(replay)
        assert reason in {r for entry in verdict.findings for r in (entry.first.reason, *entry.first.also)}
        assert replay.findings.keys[REPLAY] == replay.findings.keys[LIVE]
        assert all(entry.in_replay == entry.in_trace for entry in verdict.findings)
        assert (verdict.word, verdict.agree, verdict.reasons) == (FINDINGS, True, [])


@pytest.mark.parametrize("reason", SCENARIOS)
def test_with_the_guard_off_nothing_of_it_is_replayed(tmp_path: Path, reason: str) -> None:
    builder = TraceBuilder(tmp_path / "run", observe_pool=True, parts=["kv_trace"])
    SCENARIOS[reason][0](builder)
    replay = replayed(builder.close())
    assert replay.findings.keys[REPLAY] == replay.findings.keys[LIVE]
    assert not {key[0] for key in replay.findings.keys[REPLAY]} & SCENARIOS.keys()


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "ranks", "full"])
def test_what_is_legal_is_not_found(tmp_path: Path, layout: dict[str, Any]) -> None:
    """A hit, a receive, blocks that are held for a while, a release behind an empty step, a harmless dummy run."""
    builder = TraceBuilder(tmp_path / "run", observe_pool=True, **layout)
    waiting(builder)
    hit(builder, 1, 16)
    builder.step(BOTH | {"r3": 3})
    does(builder, RECEIVE, [9, 10], "p", filled=[16, 4], cause=facts.CAUSE_EXTERNAL)
    builder.bring("p", 20, [9, 10])
    builder.step(BOTH | {"p": 1})
    does(builder, HOLD, [4, 5, 6], "r2", first_index=None, group_id=None, cause=facts.CAUSE_DEFERRED)
    builder.step({"r1": 1}, damage_declaration=finished("r2"))
    builder.wait(901)
    does(builder, FREE, [6, 5, 4], "r2", cause=facts.CAUSE_DEFERRED, ref_counts=[0] * 3)
    builder.step({"r1": 1, "p": 1})
    builder.step({}, finished=["p"])
    builder.dummy({0: [-1, -1]})
    builder.step({"r1": 1, "r5": 40})
    replay = replayed(builder.close())
    verdict = verdict_of(replay)
    assert (verdict.word, verdict.reasons, verdict.notes, replay.pools_lost) == (CLEAN, [], [], {})
    assert builder.observed is not None
    assert rebuild_ledger(Trace.open(tmp_path / "run")).equals(builder.observed.scheduler.ledger)


def test_a_dummy_run_behind_an_empty_step_is_judged_by_what_the_worker_was_told_with_it(tmp_path: Path) -> None:
    """Of an empty step nothing but its declaration is recorded. With it block 5 was given up."""
    builder = TraceBuilder(tmp_path / "run", observe_pool=True, ranks=2)
    decoding(builder)
    builder.step({}, finished=["r2"])
    builder.dummy({0: [-1, 81]})
    replay = replayed(builder.close())
    assert {key[0] for key in replay.findings.keys[REPLAY]} == {"dummy_slot_enabled"}
    assert replay.findings.keys[REPLAY] == replay.findings.keys[LIVE]
    assert replay.findings.folded()[0].first.other_request_id is None


# A step that was not seen ---------------------------------------------------------------------------------------------


def unseen(path: Path, *, told: bool) -> Path:
    """The step that gave r1 and r2 their fourth blocks has no declaration."""
    builder = TraceBuilder(path / "run", observe_pool=True, in_process=True)
    decoding(builder)
    for _ in range(7):
        builder.step(BOTH)
    missed = builder.step(BOTH)
    assert all(missed.requests.cached_blocks)
    builder.step(BOTH, damage_declaration=lambda d: setattr(d, "after_unseen", told))
    builder.step(BOTH | {"r3": 20})
    for _ in range(3):
        builder.step(BOTH | {"r3": 1})
    run = builder.close()
    (file,) = run.glob("*.jsonl")
    records = [json.loads(line) for line in file.read_bytes().splitlines()]
    kept = [r for r in records if r.get("step") != missed.step or r["event"] == "kv.alloc"]
    lines = [json.dumps({**record, "seq": number}) for number, record in enumerate(kept, start=1)]
    file.write_text("".join(f"{line}\n" for line in lines))
    return run


def test_behind_a_step_that_was_not_seen_no_table_and_no_block_is_trusted(tmp_path: Path) -> None:
    replay = replayed(unseen(tmp_path, told=True))
    verdict = verdict_of(replay)
    assert (verdict.word, verdict.findings) == (INCONCLUSIVE, [])
    assert replay.pools_lost == {0: 11}
    assert replay.coverage.skipped[PARTIAL] == 2 * 5
    assert not replay.coverage.skipped[NO_DECLARATION]
    assert any("block pool are missing" in reason for reason in verdict.reasons)


def test_without_that_word_the_tables_would_look_wrong(tmp_path: Path) -> None:
    assert verdict_of(replayed(unseen(tmp_path, told=False))).word == FINDINGS
