"""The ledger that a trace gives back is the one that its engine had, and a gap leaves none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.budget import examples

from kvscope.analysis.pool import MOST_WAITING, ScheduledPool, rebuild_ledger
from kvscope.analysis.reader import Trace
from kvscope.analysis.replay import Replay
from kvscope.analysis.tally import LIVE, NOT_REPLAYABLE, REPLAY
from kvscope.analysis.verdict import CLEAN, FINDINGS, INCONCLUSIVE, verdict_of
from kvscope.checks.audit import BOOKS_RULES
from kvscope.checks.pool import POOL_RULES
from kvscope.events.codec import bind_record
from kvscope.events.names import RequestNames
from kvscope.facts import allocator as facts
from kvscope.facts.allocator import ALLOC, CACHE, EVICT, FREE, HOLD, RECEIVE, RESET, TOUCH, PoolOperation
from kvscope.facts.topology import FULL_ATTENTION, SLIDING_WINDOW, Group, Topology
from kvscope.state.bindings import Bindings
from kvscope.state.blocks import BlockLedger
from kvscope.testing.pool import BuiltPool
from kvscope.testing.trace import TOPOLOGY, TraceBuilder
from unit.events.samples import decode_batch

TWO_GROUPS = Topology(
    num_blocks=96,
    null_block_id=0,
    groups=(
        Group(group_id=0, kind=FULL_ATTENTION, block_size=16, kernel_block_size=16, layers=1),
        Group(group_id=1, kind=SLIDING_WINDOW, block_size=8, kernel_block_size=8, layers=1, visible_tokens=24),
    ),
)


def observed(builder: TraceBuilder) -> BuiltPool:
    assert builder.observed is not None
    return builder.observed


def replayed(run: Path) -> Replay:
    return Replay(Trace.open(run)).run()


def sides(replay: Replay) -> tuple[BlockLedger | None, list[BlockLedger | None]]:
    """What the replay has of EngineCore and of each worker."""
    (engine,) = {id(engine): engine for engine in replay._by_log.values()}.values()
    return engine.pool.ledger, [rank.pool.ledger for rank in engine.ranks.values()]


def does(builder: TraceBuilder, kind: str, block_ids: list[int], request_id: str | None = None, **more: Any) -> None:
    step = builder.step_number + more.get("scheduling", False)
    fields = {"step": step, "request_id": request_id, "group_id": None if request_id is None else 0}
    builder.pool_does(PoolOperation(kind=kind, block_ids=block_ids, **{**fields, **more}))


def everything(builder: TraceBuilder) -> None:
    """A life with all kinds of operations: hits, hashes, a copy, a receive, a hold, preemption, eviction, reset."""
    builder.step({"r1": 40, "r2": 40})
    first = builder.blocks["r1"][0][:2]
    does(
        builder,
        CACHE,
        first,
        "r1",
        hash_counts=[1, 1],
        hash_tokens=[16, 16],
        cause=facts.CAUSE_ALLOCATE,
        scheduling=True,
    )
    does(builder, TOUCH, first, "r3", first_index=0, cause=facts.CAUSE_HIT, scheduling=True)
    builder.step({"r1": 1, "r2": 1})
    does(builder, ALLOC, [60, 61], "r4", first_index=0, reserved=True, cause=facts.CAUSE_EXTERNAL, scheduling=True)
    builder.step({"r1": 1, "r2": 1})
    does(builder, RECEIVE, [60, 61], "r4", filled=[16, 3], cause=facts.CAUSE_EXTERNAL)
    does(builder, TOUCH, [60], cause=facts.CAUSE_PIN)
    does(builder, HOLD, [60, 61], "r4", cause=facts.CAUSE_DEFERRED)
    builder.step({"r1": 1}, preempted=["r2"])
    does(builder, FREE, [61, 60], "r4", cause=facts.CAUSE_DEFERRED)
    does(builder, FREE, [60], cause=facts.CAUSE_UNPIN)
    does(builder, EVICT, [first[1]], cause=facts.CAUSE_LOAD_FAILED)
    builder.step({"r1": 1, "r2": 42})
    does(builder, FREE, first[::-1], "r3", cause=facts.CAUSE_ABORT, ref_counts=[1, 1])
    builder.step({"r5": 3}, finished=["r1"], preempted=["r2"])
    builder.step({}, finished=["r2", "r5"])
    does(builder, RESET, [], cause=facts.CAUSE_RESET)
    for _ in range(20):
        builder.step({"r8": 1, "r9": 1})


# The ledger comes back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [TOPOLOGY, TWO_GROUPS], ids=["one group", "two"])
@pytest.mark.parametrize("layout", [{"in_process": True}, {"ranks": 2}, {"full": True}], ids=["one", "ranks", "full"])
def test_the_ledger_comes_back_in_all_processes(tmp_path: Path, topology: Topology, layout: dict[str, Any]) -> None:
    builder = TraceBuilder(tmp_path / "run", topology=topology, observe_pool=True, **layout)
    everything(builder)
    run = builder.close()
    live = observed(builder)
    assert rebuild_ledger(Trace.open(run)).equals(live.scheduler.ledger)
    replay = replayed(run)
    scheduler, workers = sides(replay)
    assert scheduler is not None
    assert scheduler.equals(live.scheduler.ledger)
    for worker, told in zip(workers, live.workers, strict=True):
        assert worker is not None
        assert worker.equals(told.ledger)
        assert worker.pending() != scheduler.pending()  # a worker is told of no result
    assert (verdict_of(replay).word, replay.pools_lost) == (CLEAN, {})


NAMES = [f"r{number}" for number in range(64)]
"""More than can end in the longest traffic."""


@st.composite
def traffic(draw: st.DrawFn) -> list[tuple[dict[str, int], list[str], list[str]]]:
    """Steps: what is scheduled, who has finished, who was preempted."""
    steps: list[tuple[dict[str, int], list[str], list[str]]] = []
    live: set[str] = set()
    gone: set[str] = set()
    for _ in range(draw(st.integers(1, 12))):
        finished = sorted(name for name in live if draw(st.integers(0, 7)) == 0)
        preempted = sorted(name for name in live.difference(finished) if draw(st.integers(0, 7)) == 0)
        live.difference_update(finished, preempted)
        gone.update(finished)
        names = st.sampled_from([name for name in NAMES if name not in gone and name not in preempted])
        scheduled = draw(st.dictionaries(names, st.sampled_from([1, 1, 5, 16, 37]), min_size=1, max_size=3))
        live.update(scheduled)
        steps.append((scheduled, finished, preempted))
    return steps


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=traffic(), data=st.data())
def test_whatever_the_traffic_was_the_ledger_comes_back(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[dict[str, int], list[str], list[str]]],
    data: st.DataObject,
) -> None:  # fmt: skip
    builder = TraceBuilder(tmp_path_factory.mktemp("run"), topology=TWO_GROUPS, in_process=True, observe_pool=True)
    for scheduled, finished, preempted in steps:
        if len(builder.pool) > 40:
            builder.step(scheduled, finished=finished, preempted=preempted)
        for kind in data.draw(st.lists(st.sampled_from([TOUCH, CACHE, EVICT, FREE, HOLD]), max_size=2)):
            owner = data.draw(st.none() | st.sampled_from(sorted(builder.blocks) or ["z"]))
            does(builder, kind, data.draw(st.lists(st.integers(0, 97), max_size=3)), owner)
    run = builder.close()
    live = observed(builder).scheduler.ledger
    if steps and live.snapshot().block_ids.size:
        assert rebuild_ledger(Trace.open(run)).equals(live)


def test_hashed_names_are_those_of_the_records(tmp_path: Path) -> None:
    names = RequestNames("hashed", b"0123456789abcdef")
    builder = TraceBuilder(tmp_path / "run", observe_pool=True, names=names)
    everything(builder)
    back = rebuild_ledger(Trace.open(builder.close())).snapshot()
    live = observed(builder).scheduler.ledger.snapshot()
    assert back.allocated_for == [name and names(name) for name in live.allocated_for]


# What surrounds a finding ---------------------------------------------------------------------------------------------


def test_a_finding_comes_with_what_the_pool_did_with_its_block(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run", observe_pool=True)
    builder.step({"r1": 40, "r2": 40})
    builder.pool = []
    builder.step({"r2": 1}, finished=["r1"])
    builder.step({"r2": 1, "r3": 40})
    builder.step({"r2": 1, "r3": 1}, damage_plan=lambda plan: plan.groups[0].slots.__setitem__(0, 16))
    (folded,) = replayed(builder.close()).findings.folded()
    assert folded.first.block_id == 1
    assert folded.scene is not None
    history = folded.scene.history
    assert history is not None
    assert (history.generation, history.allocated_for, history.allocated_step) == (2, "r3", 3)
    assert (history.freed_by, history.freed_step, history.freed_cause) == ("r1", 1, facts.CAUSE_FINISH)
    assert (history.last_written_step, history.freed_generation) == (3, 1)
    assert history.owners[0].request_id == "r3"
    assert folded.scene.tenures[0].request_id == "r3"


def test_a_worker_is_judged_by_what_it_knew_at_its_step(tmp_path: Path) -> None:
    """EngineCore's file is ahead: it is read first within a step, and with asynchronous scheduling by more than one."""
    builder = TraceBuilder(tmp_path / "run", observe_pool=True)
    builder.step({"r1": 40, "r2": 40})
    builder.step({"r1": 1, "r2": 1}, damage_plan=lambda plan: plan.groups[0].slots.__setitem__(0, 67))
    builder.step({"r1": 1}, finished=["r2"])
    (folded,) = replayed(builder.close()).findings.folded()
    assert folded.scene is not None
    assert folded.scene.history is not None
    assert (folded.first.block_id, folded.scene.history.status) == (4, "active")


def test_without_records_of_the_pool_there_is_no_history_and_nothing_is_missed(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run")
    builder.step({"r1": 40, "r2": 40})
    builder.step({"r1": 1, "r2": 1}, damage_plan=lambda plan: plan.groups[0].slots.__setitem__(0, 67))
    run = builder.close()
    replay = replayed(run)
    (folded,) = replay.findings.folded()
    assert folded.scene is not None
    assert folded.scene.history is None
    assert replay.pools_lost == {}
    assert [note for note in verdict_of(replay).notes if "block pool" in note]
    with pytest.raises(ValueError, match="lacks records of its pool"):
        rebuild_ledger(Trace.open(run))


# What is wrong with a call of the pool --------------------------------------------------------------------------------


def both(builder: TraceBuilder, *, comes_back: bool = True) -> None:
    """r1 has blocks 1 to 3, r2 blocks 4 to 6."""
    builder.step({"r1": 40, "r2": 40})
    builder.step({"r1": 1, "r2": 1}, comes_back=comes_back)


def call(kind: str, block_ids: list[int], request_id: str | None = None, **more: Any) -> Callable[[TraceBuilder], None]:
    def scenario(builder: TraceBuilder) -> None:
        both(builder)
        does(builder, kind, block_ids, request_id, **more)
        builder.step({"r1": 1, "r2": 1})

    return scenario


def released_twice(builder: TraceBuilder) -> None:
    both(builder)
    builder.step({"r2": 1}, finished=["r1"])
    does(builder, FREE, [2], "r1", cause=facts.CAUSE_FINISH, ref_counts=[0])
    builder.step({"r2": 1})


def reserved_too_early(builder: TraceBuilder) -> None:
    both(builder, comes_back=False)
    builder.step({"r2": 1}, finished=["r1"], comes_back=False)
    does(builder, ALLOC, [2], "r9", first_index=0, reserved=True, cause=facts.CAUSE_EXTERNAL, scheduling=True)
    builder.pool.remove(2)
    builder.step({"r2": 1})


def released_for_somebody_else(builder: TraceBuilder) -> None:
    both(builder)
    does(builder, TOUCH, [1], "r2", first_index=3, cause=facts.CAUSE_HIT, ref_counts=[2])
    does(builder, FREE, [1], "r9", cause=facts.CAUSE_FINISH, ref_counts=[1])
    builder.step({"r1": 1, "r2": 1})


CALLS: dict[str, Callable[[TraceBuilder], None]] = {
    "alloc_null_block": call(ALLOC, [0], "r9", first_index=0, scheduling=True),
    "alloc_live_block": call(ALLOC, [1], "r9", first_index=0, scheduling=True),
    "free_inflight_step": reserved_too_early,
    "free_unallocated": call(FREE, [50], ref_counts=[0]),
    "double_free": released_twice,
    "ref_underflow": call(FREE, [1], "r1", ref_counts=[-1]),
    "evict_referenced": call(EVICT, [4]),
    "alias_owner_mismatch": released_for_somebody_else,
    "ledger_pool_mismatch": call(CACHE, [1], "r1", ref_counts=[5]),
}
FOUND_BY_AN_AUDIT = {"free_list_damaged"}


def test_every_reason_about_a_call_is_replayed_here() -> None:
    rules = {function.rule.reason for family in (POOL_RULES, BOOKS_RULES) for function in family}
    assert CALLS.keys() | FOUND_BY_AN_AUDIT == rules
    assert FOUND_BY_AN_AUDIT <= NOT_REPLAYABLE


@pytest.mark.parametrize("layout", [{"in_process": True}, {"ranks": 2}], ids=["one", "ranks"])
@pytest.mark.parametrize("reason", CALLS)
def test_replay_finds_in_the_pool_what_was_found_live(tmp_path: Path, reason: str, layout: dict[str, Any]) -> None:
    builder = TraceBuilder(tmp_path / "run", observe_pool=True, **layout)
    CALLS[reason](builder)
    replay = replayed(builder.close())
    reasons = {r for entry in replay.findings.folded() for r in (entry.first.reason, *entry.first.also)}
    assert reason in reasons
    assert replay.findings.keys[REPLAY] == replay.findings.keys[LIVE]
    verdict = verdict_of(replay)
    assert (verdict.word, verdict.agree) == (FINDINGS, True)


def test_what_surrounds_a_wrong_call_is_what_it_found_and_not_what_it_left(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run", observe_pool=True)
    CALLS["alloc_live_block"](builder)
    history = next(
        folded.scene.history
        for folded in replayed(builder.close()).findings.folded()
        if folded.first.reason == "alloc_live_block" and folded.scene is not None
    )
    assert history is not None
    assert (history.generation, history.allocated_for, history.references) == (1, "r1", 1)


def test_a_finding_behind_the_last_declaration_counts_if_nothing_is_missing(tmp_path: Path) -> None:
    """Action raise stops an engine right there."""
    builder = TraceBuilder(tmp_path / "run", observe_pool=True)
    both(builder)
    does(builder, FREE, [50], ref_counts=[0])
    (folded,) = replayed(builder.close()).findings.folded()
    assert (folded.first.reason, folded.in_replay, folded.in_trace) == ("free_unallocated", 1, 1)
    assert folded.scene is not None
    assert folded.scene.history is not None
    assert folded.scene.history.generation == 0


# Gaps -----------------------------------------------------------------------------------------------------------------


def sound(path: Path) -> Path:
    builder = TraceBuilder(path / "run", observe_pool=True, in_process=True)
    everything(builder)
    return builder.close()


def edit(run: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], *, renumber: bool) -> None:
    (path,) = run.glob("all-*.jsonl")
    records = change([json.loads(line) for line in path.read_bytes().splitlines()])
    if renumber:
        records = [{**record, "seq": number} for number, record in enumerate(records, start=1)]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def without(event: str, at: int = 0) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    def change(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        gone = [r for r in records if event in {r["event"], r.get("kind")}][at]
        return [r for r in records if r is not gone]

    return change


@pytest.mark.parametrize("renumber", [False, True], ids=["lost", "dropped"])
@pytest.mark.parametrize("event", ["kv.alloc", "kv.touch", "kv.free", "kv.evict", "kv.cache", "kv.reset",
                                   "connector_result"])  # fmt: skip
def test_one_missing_operation_leaves_no_ledger_and_no_clean_verdict(
    tmp_path: Path, event: str, renumber: bool
) -> None:
    run = sound(tmp_path)
    edit(run, without(event), renumber=renumber)
    replay = replayed(run)
    assert sides(replay) == (None, [None])
    verdict = verdict_of(replay)
    assert (verdict.word, verdict.findings) == (INCONCLUSIVE, [])
    assert any("the engine's block pool are missing" in reason for reason in verdict.reasons)
    with pytest.raises(ValueError, match="lacks records"):
        rebuild_ledger(Trace.open(run))


def test_a_missing_result_leaves_no_ledger(tmp_path: Path) -> None:
    """The step would look like one that failed."""
    run = sound(tmp_path)
    edit(run, without("update_input", at=2), renumber=False)
    assert sides(replayed(run)) == (None, [None])


def test_a_result_that_was_dropped_from_the_queue_leaves_no_ledger(tmp_path: Path) -> None:
    run = sound(tmp_path)

    def drop(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        kept = without("update_input", at=2)(records)
        kept[-1]["records_dropped"] = {"queue_records": 1}
        return kept

    edit(run, drop, renumber=True)
    assert sides(replayed(run))[0] is None


def test_a_generation_that_is_not_ours_says_that_something_is_missing(tmp_path: Path) -> None:
    run = sound(tmp_path)

    def other(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        [r for r in records if r["event"] == "kv.alloc"][-1]["generation"] = 7
        return records

    edit(run, other, renumber=False)
    assert sides(replayed(run))[0] is None


def test_a_trace_whose_start_is_gone_has_no_ledger(tmp_path: Path) -> None:
    run = sound(tmp_path)
    edit(run, lambda records: [records[0], *records[8:]], renumber=False)
    replay = replayed(run)
    assert sides(replay) == (None, [None])
    assert replay.pools_lost


def test_a_trace_without_request_ids_says_that_and_not_that_the_pool_is_missing(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run", observe_pool=True, names=RequestNames("omitted"))
    everything(builder)
    replay = replayed(builder.close())
    assert replay.ids_omitted
    assert not any("pool" in reason for reason in verdict_of(replay).reasons)


def test_a_trace_cut_anywhere_is_read(tmp_path: Path) -> None:
    run = sound(tmp_path)
    (path,) = run.glob("all-*.jsonl")
    whole = path.read_bytes()
    start = len(whole.splitlines(keepends=True)[0])
    for end in range(start, len(whole), len(whole) // 23):
        path.write_bytes(whole[:end])
        verdict = verdict_of(replayed(run))
        assert (verdict.word, verdict.findings) == (INCONCLUSIVE, [])


def test_what_waits_for_a_declaration_is_bounded() -> None:
    bindings = Bindings(TOPOLOGY)
    pool = ScheduledPool(TOPOLOGY, bindings)
    operation = PoolOperation(kind=TOUCH, block_ids=[1])
    for _ in range(MOST_WAITING + 5):
        pool.hear(operation, 0)
    declaration, _ = decode_batch()
    record = bind_record(declaration)
    record.operations_before, record.num_operations = 0, MOST_WAITING + 5
    pool.hand_over(declaration, record)
    assert pool.ledger is not None
    assert (len(declaration.operations), declaration.operations_before) == (MOST_WAITING, 5)
