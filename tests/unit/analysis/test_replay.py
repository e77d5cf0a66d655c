"""What the live rules found is what the replay finds, reason by reason; and a damaged trace is never called clean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvscope.analysis.reader import Trace
from kvscope.analysis.replay import Replay
from kvscope.analysis.row_coverage import GROUP_MISSING, NO_DECLARATION, NO_TABLE, PARTIAL
from kvscope.analysis.tally import LIVE, REPLAY
from kvscope.analysis.verdict import CLEAN, FINDINGS, INCONCLUSIVE, Verdict, verdict_of
from kvscope.checks.audit import BOOKS_RULES
from kvscope.checks.catalog import RULES
from kvscope.checks.connector import COMPLETION_RULES, FAILED_LOAD_RULES, INVALID_RULES, RECEIVE_RULES
from kvscope.checks.content import CONTENT_RULES
from kvscope.checks.context_parallel import CONTEXT_RULES, COORDINATE_RULES, LENGTH_RULES
from kvscope.checks.dummy import dummy_table_live
from kvscope.checks.generation import GENERATION_RULES
from kvscope.checks.initialized import INITIALIZED_RULES
from kvscope.checks.lifetime import LIFETIME_RULES
from kvscope.checks.ownership import OWNERSHIP_RULES
from kvscope.checks.pool import POOL_RULES
from kvscope.events.codec import work_record
from kvscope.events.names import RequestNames
from kvscope.facts.plans import Plan
from kvscope.facts.requests import BlockWork, Declaration, Drafts, StepRequests, StepResult, Verification
from kvscope.facts.topology import FULL_ATTENTION, SLIDING_WINDOW, Group, Topology
from kvscope.testing.trace import TraceBuilder

HYBRID = Topology(
    num_blocks=96,
    null_block_id=0,
    groups=(
        Group(group_id=0, kind=FULL_ATTENTION, block_size=16, kernel_block_size=16, layers=1),
        Group(group_id=1, kind=SLIDING_WINDOW, block_size=16, kernel_block_size=16, layers=1, visible_tokens=20),
        Group(group_id=2, kind="mamba", block_size=16, kernel_block_size=None, layers=1),
    ),
)


def judged(path: Path, min_coverage: float = 0.99) -> tuple[Replay, Verdict]:
    replay = Replay(Trace.open(path)).run()
    return replay, verdict_of(replay, min_coverage)


def warm(builder: TraceBuilder) -> None:
    """r1 has blocks 1 to 3, r2 blocks 4 to 6; both are decoding."""
    builder.step({"r1": 40, "r2": 40})
    builder.step({"r1": 1, "r2": 1})


def plan(change: Callable[[Plan], None]) -> Callable[[TraceBuilder], None]:
    def scenario(builder: TraceBuilder) -> None:
        warm(builder)
        builder.step({"r1": 1, "r2": 1}, damage_plan=change)
        builder.step({"r1": 1, "r2": 1})

    return scenario


def received(change: Callable[[StepRequests], None]) -> Callable[[TraceBuilder], None]:
    return lambda builder: (builder.step({"r1": 40, "r2": 40}, damage_received=change), None)[1]


def declared(change: Callable[[Declaration], None]) -> Callable[[TraceBuilder], None]:
    return lambda builder: (builder.step({"r1": 40, "r2": 40}, damage_declaration=change), None)[1]


def returned(**fields: object) -> Callable[[TraceBuilder], None]:
    def damaged(result: StepResult) -> StepResult:
        return msgspec.structs.replace(result, **fields)

    return lambda builder: (warm(builder), builder.step({"r1": 1, "r2": 1}, damage_result=damaged), None)[2]


def warmed(step: dict[str, Any], before: dict[str, Any] | None = None) -> Callable[[TraceBuilder], None]:
    """``r1`` goes on alone after ``before``, then with ``step``."""

    def scenario(builder: TraceBuilder) -> None:
        warm(builder)
        builder.step({"r1": 1}, **(before or {}))
        builder.step({"r1": 1}, **step)

    return scenario


def listed(request_id: str) -> Callable[[Declaration], None]:
    """It has no tokens in what the scheduler sends, or its plan would have to be made up as well."""

    def change(declaration: Declaration) -> None:
        requests = declaration.requests
        requests.cached_ids.append(request_id)
        requests.cached_blocks.append(None)
        requests.cached_computed.append(41)
        declaration.cached_output_tokens.append(1)

    return change


def back(declaration: Declaration) -> None:
    declaration.requests.cached_computed[0] -= 1


def slot(value: int, token: int = 0) -> Callable[[Plan], None]:
    return lambda p: p.groups[0].slots.__setitem__(token, value)


def entry(value: int) -> Callable[[Plan], None]:
    return lambda p: p.groups[0].tables.__setitem__((0, 0), value)


def second_row_for_first(p: Plan) -> None:
    p.groups[0].tables[0] = p.groups[0].tables[1]


def prefill_collision(builder: TraceBuilder) -> None:
    builder.step({"r1": 40, "r2": 40}, damage_plan=lambda p: p.groups[0].slots.__setitem__(0, p.groups[0].slots[1]))


def counted(change: Callable[[Verification], None]) -> Callable[[TraceBuilder], None]:
    """r1 and r2 are given three drafts each, and all are accepted but for the change."""

    def scenario(builder: TraceBuilder) -> None:
        warm(builder)
        builder.step({"r1": 4, "r2": 4}, drafts={"r1": 3, "r2": 3}, damage_counted=change)
        builder.step({"r1": 4, "r2": 4}, drafts={"r1": 3, "r2": 3})
        builder.step({"r1": 1, "r2": 1})

    return scenario


def advanced(builder: TraceBuilder) -> None:
    """What r1 has of its drafts is declared two tokens too few, and computed from there."""
    warm(builder)
    builder.step({"r1": 4, "r2": 4}, drafts={"r1": 3, "r2": 3})
    builder.step({"r1": 1, "r2": 1}, damage_declaration=lambda d: d.requests.cached_computed.__setitem__(0, 43))


SCENARIOS: dict[str, Callable[[TraceBuilder], None]] = {
    "bind_block_out_of_range": declared(lambda d: d.requests.new_blocks[0][0].__setitem__(0, 999)),
    "bind_null_block_declared": declared(lambda d: d.requests.new_blocks[0][0].__setitem__(1, 0)),
    "bind_duplicate_block": declared(lambda d: d.requests.new_blocks[0][0].__setitem__(1, 1)),
    "bind_block_shortfall": declared(lambda d: d.requests.new_blocks[0][0].pop() and None),
    "bind_copy_conflict": declared(lambda d: setattr(d, "copies", [(1, 4), (2, 4)])),
    "bind_zero_conflict": declared(lambda d: setattr(d, "zero_blocks", [1, 0])),
    "spec_row_count_mismatch": counted(lambda v: v.drafted.__setitem__(0, 2)),
    "spec_accepted_out_of_range": counted(lambda v: v.accepted.__setitem__(1, 4)),
    "spec_rejected_out_of_range": counted(lambda v: v.rejected.__setitem__(0, 4)),
    "spec_advance_mismatch": advanced,
    "handover_request_mismatch": received(lambda r: r.scheduled.__setitem__("r1", 39)),
    "handover_delta_mismatch": received(lambda r: r.new_blocks[0][0].__setitem__(0, 9)),
    "handover_spec_mismatch": warmed({"received_drafts": Drafts(spec_tokens={"r1": 2}, invalid_spec_tokens={})}),
    "handover_out_of_order": warmed({"received_after": 1}),
    "bind_group_count_mismatch": declared(lambda d: d.requests.new_blocks.__setitem__(0, ([1, 2, 3], []))),
    "bind_token_total_mismatch": declared(lambda d: setattr(d, "total_num_scheduled_tokens", 81)),
    "bind_unknown_request": warmed({"damage_declaration": listed("nobody")}),
    "bind_finished_scheduled": warmed({"damage_declaration": listed("r2")}, before={"finished": ["r2"]}),
    "bind_preempted_scheduled": warmed({"damage_declaration": listed("r2")}, before={"preempted": ["r2"]}),
    "bind_computed_regressed": warmed({"damage_declaration": back}),
    "write_position_mismatch": plan(lambda p: p.positions.__setitem__(0, 7)),
    "read_length_exceeds_declared": plan(lambda p: p.seq_lens.__setitem__(0, 60)),
    "write_length_mismatch": plan(lambda p: p.seq_lens.__setitem__(0, 30)),
    "write_outside_cache": plan(slot(64 * 16)),
    "write_query_offsets_invalid": plan(lambda p: p.query_start.__setitem__(2, 1)),
    "write_group_missing": plan(lambda p: p.groups.clear()),
    "write_slot_negative": plan(slot(-1)),
    "write_slot_count_mismatch": plan(lambda p: setattr(p.groups[0], "slots", p.groups[0].slots[:1])),
    "logical_order_mismatch": plan(lambda p: p.groups[0].tables.__setitem__((0, slice(0, 3)), [2, 3, 1])),
    "read_duplicate_block": plan(lambda p: p.groups[0].tables.__setitem__((0, 2), 1)),
    "null_block_write": plan(slot(3)),
    "write_foreign_block": plan(slot(67)),
    "write_slot_collision": prefill_collision,
    "write_target_mismatch": plan(slot(50 * 16)),
    "write_padding_slot_enabled": plan(slot(50 * 16, token=-1)),
    "read_outside_cache": plan(entry(64)),
    "read_null_block": plan(entry(0)),
    "read_row_request_mismatch": plan(second_row_for_first),
    "read_foreign_block": plan(entry(4)),
    "read_target_mismatch": plan(entry(50)),
    "read_table_short": plan(lambda p: p.groups[0].table_blocks.__setitem__(0, 1)),
    "dummy_persistent_slot_enabled": lambda b: (warm(b), b.dummy({0: [-1, -1]}, behind=(17,)), None)[2],
    "dummy_slot_enabled": lambda builder: (warm(builder), builder.dummy({0: [-1, 17]}), None)[2],
    "result_trace_mismatch": returned(trace_id="run-2"),
    "result_request_mapping": returned(rows={"r1": 1, "r2": 0}),
    "result_row_count": returned(lengths={"sampled_token_ids": 3}),
}
NOT_IN_A_TRACE = {"handover_missing", "operator_argument_mismatch"}
FAMILIES = (
    POOL_RULES,
    BOOKS_RULES,
    CONTENT_RULES,
    LIFETIME_RULES,
    GENERATION_RULES,
    OWNERSHIP_RULES,
    INITIALIZED_RULES,
    (dummy_table_live,),
)
OF_THE_POOL = {function.rule.reason for family in FAMILIES for function in family}
"""What needs a ledger of the pool beside declarations and plans."""
OF_SEVERAL_RANKS = {f.rule.reason for family in (CONTEXT_RULES, COORDINATE_RULES, LENGTH_RULES) for f in family}
"""What needs ranks that share out a sequence (``test_context``)."""


CONNECTOR_FAMILIES = (RECEIVE_RULES, COMPLETION_RULES, FAILED_LOAD_RULES, INVALID_RULES)
OF_A_CONNECTOR = {function.rule.reason for family in CONNECTOR_FAMILIES for function in family}
"""What needs records of its own: ``test_connector``."""


def test_every_reason_of_the_catalog_is_replayed_here() -> None:
    beside = NOT_IN_A_TRACE | OF_THE_POOL | OF_A_CONNECTOR | OF_SEVERAL_RANKS
    assert SCENARIOS.keys() | beside == RULES.keys()


@pytest.mark.parametrize(("kind", "work"), [
    ("zero", BlockWork(declared=[1, 2], cleared=[1])), ("zero", BlockWork(declared=[1, 2], cleared=[])),
    ("copy", BlockWork(declared=[(1, 2)], copied=[(1, 3)])),
])  # fmt: skip
def test_what_a_worker_clears_and_copies_is_held_against_its_declaration(
    tmp_path: Path, kind: str, work: BlockWork
) -> None:
    builder = TraceBuilder(tmp_path / "run")
    lists = {"zero": "zero_blocks", "copy": "copies"}
    step = builder.step({"r1": 40, "r2": 40}, damage_declaration=lambda d: setattr(d, lists[kind], work.declared))
    for made in (msgspec.structs.replace(work, cleared=work.cleared and [2, 1], copied=work.copied and [(1, 2)]), work):
        builder.workers[0].write(work_record(kind, made), "worker", kind, step=step.step)
    replay, _ = judged(builder.close())
    keys = replay.findings.keys[REPLAY]
    assert [key[0] for key in keys if key[0].startswith("handover")] == ["handover_delta_mismatch"]


@pytest.mark.parametrize("layout", [{"in_process": True}, {"ranks": 2}, {"full": True}], ids=["one", "ranks", "full"])
@pytest.mark.parametrize("reason", SCENARIOS)
def test_replay_finds_what_was_found_live(tmp_path: Path, reason: str, layout: dict[str, int]) -> None:
    builder = TraceBuilder(tmp_path / "run", **layout)
    SCENARIOS[reason](builder)
    replay, verdict = judged(builder.close())
    found = {key[0] for key in replay.findings.keys[REPLAY]}
    assert reason in found
    assert replay.findings.keys[REPLAY] == replay.findings.keys[LIVE]
    assert (verdict.word, verdict.exit_code, verdict.agree) == (FINDINGS, 1, True)
    assert replay.coverage.skipped.keys() == ({GROUP_MISSING} if reason == "write_group_missing" else set())
    assert replay.coverage.audited + replay.coverage.skipped.total() == replay.coverage.scheduled > 0


@pytest.mark.parametrize("topology", [None, HYBRID], ids=["full", "hybrid"])
def test_a_sound_run_is_clean_through_preemption_resumption_and_reuse(
    tmp_path: Path, topology: Topology | None
) -> None:
    builder = TraceBuilder(tmp_path / "run", ranks=2, **({"topology": topology} if topology else {}))
    warm(builder)
    builder.step({"r1": 1}, preempted=["r2"])
    builder.step({"r1": 1, "r3": 50})
    builder.step({"r3": 1, "r2": 42}, finished=["r1"])
    for _ in range(40):
        builder.step({"r3": 1, "r2": 1})
    builder.dummy({0: [-1, -1]})
    replay, verdict = judged(builder.close())
    assert (verdict.word, verdict.reasons) == (CLEAN, [])
    assert replay.coverage.share == 1.0
    if topology:
        assert replay.coverage.other_rows == {"group 2 (mamba)": replay.coverage.scheduled // 2}


def test_a_run_of_which_no_group_can_be_judged_says_so(tmp_path: Path) -> None:
    """All layers are Mamba, say: its rows are no hole in the coverage, and still there is nothing to call clean."""
    topology = Topology(num_blocks=96, null_block_id=0, groups=(HYBRID.groups[2],))
    builder = TraceBuilder(tmp_path / "run", topology=topology)
    builder.step({"r1": 40})
    _, verdict = judged(builder.close())
    assert verdict.word == INCONCLUSIVE
    assert verdict.reasons == ["coverage 0.0 % is below 0.99 (there is nothing to judge but group 2 (mamba))"]


def test_the_finding_carries_where_it_was(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run")
    SCENARIOS["write_foreign_block"](builder)
    replay, _ = judged(builder.close())
    (folded,) = replay.findings.folded()
    scene = folded.scene
    assert scene is not None
    assert (folded.first.request_id, folded.first.other_request_id, folded.first.block_id) == ("r1", "r2", 4)
    assert (scene.holders, scene.declared_block, scene.logical_block) == (["r2"], 3, 2)
    assert [(t.request_id, t.since_step, t.index) for t in scene.tenures] == [("r2", 1, 0)]
    assert [n.whose for n in scene.strip] == ["null", *["own"] * 3, *["other"] * 3, *["nobody"] * 9]
    assert [n.block_id for n in scene.strip] == list(range(16))


def test_a_block_says_who_had_it_before(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run")
    warm(builder)
    builder.pool = []
    builder.step({"r2": 1}, finished=["r1"])
    builder.step({"r2": 1, "r3": 40})
    builder.step({"r2": 1, "r3": 1}, damage_plan=slot(16))
    replay, _ = judged(builder.close())
    (folded,) = replay.findings.folded()
    assert folded.scene is not None
    latest, earlier = folded.scene.tenures
    assert (latest.request_id, latest.since_step, latest.until_step) == ("r3", 4, None)
    assert (earlier.request_id, earlier.since_step, earlier.until_step, earlier.cause) == ("r1", 1, 3, "finished")


# A trace that was damaged afterwards ----------------------------------------------------------------------------------


def sound(path: Path, **layout: bool) -> Path:
    builder = TraceBuilder(path / "run", **layout)
    warm(builder)
    for _ in range(18):
        builder.step({"r1": 1, "r2": 1})
    return builder.close()


def edit(run: Path, process: str, change: Callable[[list[str]], list[str]]) -> None:
    (path,) = run.glob(f"{process}-*.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("".join(f"{line}\n" for line in change(lines)), encoding="utf-8")


def test_an_untouched_trace_is_clean(tmp_path: Path) -> None:
    assert judged(sound(tmp_path))[1].word == CLEAN


def test_a_changed_digest_leaves_the_row_unknown(tmp_path: Path) -> None:
    run = sound(tmp_path)
    edit(run, "worker", lambda lines: [_other_digest(line) if '"step":5' in line else line for line in lines])
    replay, verdict = judged(run, min_coverage=0.5)
    assert verdict.word == INCONCLUSIVE
    assert replay.coverage.skipped == {NO_TABLE: 1}
    assert any(NO_TABLE in reason for reason in verdict.reasons)


def _other_digest(line: str) -> str:
    before, found, after = line.partition('"digest":[["')
    return f"{before}{found}{'0' if after[0] != '0' else '1'}{after[1:]}" if found else line


def test_a_changed_slot_is_found(tmp_path: Path) -> None:
    run = sound(tmp_path)
    edit(run, "worker", lambda lines: [line.replace('"slots":[[59,', '"slots":[[60,') for line in lines])
    replay, verdict = judged(run)
    assert verdict.word == FINDINGS
    assert verdict.only_replay == [("write_target_mismatch", 0, "r1")]
    assert not replay.findings.keys[LIVE]


def test_a_deleted_declaration_is_inconclusive_and_causes_no_finding(tmp_path: Path) -> None:
    run = sound(tmp_path)
    edit(run, "engine", lambda lines: [line for line in lines if '"trace_id":"run-5"' not in line])
    replay, verdict = judged(run)
    assert verdict.word == INCONCLUSIVE
    assert not verdict.findings
    assert (replay.undeclared_steps, replay.coverage.skipped[NO_DECLARATION]) == (1, 2)
    assert replay.coverage.skipped[PARTIAL] > 0


def test_a_declaration_dropped_from_the_queue_causes_no_finding(tmp_path: Path) -> None:
    """A dropped record leaves no gap in seq. Here it gave r1 a block, without which its later slots look wrong."""
    run = sound(tmp_path, in_process=True)

    def drop(lines: list[str]) -> list[str]:
        kept = [line for line in lines if not ("kv.bind" in line and '"trace_id":"run-a"' in line)]
        assert len(kept) == len(lines) - 1
        numbered = [_numbered(line, number) for number, line in enumerate(kept, start=1)]
        return [line.replace('"records_dropped":{}', '"records_dropped":{"queue_records":1}') for line in numbered]

    edit(run, "all", drop)
    _, verdict = judged(run)
    assert (verdict.word, verdict.findings) == (INCONCLUSIVE, [])
    assert "all-0-100: 1 record dropped (queue_records)" in verdict.reasons


def _numbered(line: str, number: int) -> str:
    before, _, after = line.partition('"seq":')
    return f'{before}"seq":{number}{after[after.index(",") :]}'


def test_a_deleted_finding_is_found_again(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run")
    SCENARIOS["write_foreign_block"](builder)
    run = builder.close()
    edit(run, "worker", lambda lines: [line for line in lines if "kv.violation" not in line])
    _, verdict = judged(run)
    assert (verdict.word, verdict.only_replay) == (FINDINGS, [("write_foreign_block", 0, "r1")])
    assert "worker-0-200: 1 record missing in between" in verdict.reasons


def test_a_killed_worker_leaves_rows_that_are_counted_and_not_guessed(tmp_path: Path) -> None:
    run = sound(tmp_path, ranks=2)
    edit(run, "worker-1", lambda lines: [line for line in lines if '"step":1' not in line or '"step":1,' in line][:20])
    replay, verdict = judged(run)
    assert (verdict.word, verdict.findings) == (INCONCLUSIVE, [])
    assert replay.coverage.scheduled == 80
    assert 40 < replay.coverage.audited < 80
    assert any("the end is missing" in reason for reason in verdict.reasons)


@pytest.mark.parametrize("missing", ["engine", "worker-0", "worker"])
def test_a_process_without_a_file_is_named(tmp_path: Path, missing: str) -> None:
    run = sound(tmp_path, ranks=2)
    for path in run.glob(f"{missing}-*"):
        path.unlink()
    replay, verdict = judged(run)
    assert (verdict.word, verdict.findings) == (INCONCLUSIVE, [])
    expected = {"engine": "scheduler", "worker-0": "worker rank 0", "worker": "no file of the engine's workers"}
    assert any(expected[missing] in reason for reason in verdict.reasons)
    assert replay.coverage.share < 0.99


def test_requests_from_before_the_trace_are_not_judged(tmp_path: Path) -> None:
    run = sound(tmp_path, in_process=True)
    edit(run, "all", lambda lines: [lines[0], *(line for line in lines[1:] if '"trace_id":"run-1"' not in line)])
    replay, verdict = judged(run)
    assert (verdict.word, verdict.findings) == (INCONCLUSIVE, [])
    assert replay.coverage.audited == 0


def test_a_trace_of_findings_alone_is_inconclusive(tmp_path: Path) -> None:
    configuration = {"kv_output": {"records": "findings"}}
    run = TraceBuilder(tmp_path / "run", configuration=configuration).close()
    _, verdict = judged(run)
    assert verdict.word == INCONCLUSIVE
    assert any('records = "findings"' in reason for reason in verdict.reasons)


def test_more_is_judged_than_asked_for(tmp_path: Path) -> None:
    """With the guard off its rules are silent, live and here, and the verdict says so."""
    builder = TraceBuilder(tmp_path / "run", parts=["kv_trace"])
    SCENARIOS["write_foreign_block"](builder)
    replay, verdict = judged(builder.close())
    assert {key[0] for key in replay.findings.keys[REPLAY]} == {"write_target_mismatch"}
    assert verdict.agree
    assert "kv_guard_config was off: its rules were not judged" in verdict.notes


@pytest.mark.parametrize(
    ("said", "judged_by_guard"),
    [("on", True), ("on; action isolate is inactive: not in this version, findings are logged", True), ("off", False),
     ("inactive: not in this version", False), ("only half", False)],
)  # fmt: skip
def test_a_part_that_is_on_with_a_restriction_is_on(tmp_path: Path, said: str, judged_by_guard: bool) -> None:
    builder = TraceBuilder(tmp_path / "run")
    SCENARIOS["write_foreign_block"](builder)
    run = builder.close()
    for process in ("engine", "worker"):
        edit(run, process, lambda lines: [line.replace('"kv_guard_config":"on"', f'"kv_guard_config":"{said}"')
                                          for line in lines])  # fmt: skip
    replay, verdict = judged(run)
    assert ("write_foreign_block" in {key[0] for key in replay.findings.keys[REPLAY]}) is judged_by_guard
    assert ("kv_guard_config was off: its rules were not judged" in verdict.notes) is not judged_by_guard


def test_an_estimated_length_is_no_finding(tmp_path: Path) -> None:
    def estimate(p: Plan) -> None:
        p.exact = False
        p.seq_lens[0] += 3

    builder = TraceBuilder(tmp_path / "run")
    plan(estimate)(builder)
    replay, verdict = judged(builder.close())
    assert verdict.word == CLEAN
    assert replay.coverage.share == 1.0


def test_numbers_that_no_host_has_are_damage_and_no_crash(tmp_path: Path) -> None:
    run = sound(tmp_path)
    edit(
        run,
        "worker",
        lambda lines: [line.replace('"blocks_needed":[[3,', '"blocks_needed":[[3000000000,') for line in lines],
    )
    replay, verdict = judged(run)
    assert verdict.word == INCONCLUSIVE
    assert replay.damaged_records > 0
    assert np.isfinite(replay.coverage.share)


@pytest.mark.parametrize(
    ("process", "before", "after"),
    [
        ("engine", '"block_delta":[[[1,3]]]', '"block_delta":[[[1,3000000000000]]]'),
        ("worker", '"query_len":[1,', '"query_len":[4294967297,'),
        ("worker", '"slots":[[[[16,', '"slots":[[[[-9000000000000,'),
        ("worker", '"padding_slots":[3]', '"padding_slots":[3000000000]'),
        ("worker", '"blocks_needed":[[3,', '"blocks_needed":[[4,'),
        ("worker", '"blocks_needed":[[3,', '"blocks_needed":[[18446744073709551616,'),
        ("worker", '"blocks_needed":[[', '"blocks_needed":[[3,3],['),
        ("worker", '"event":"kv.read","schema":"kvscope.trace/1","trace_id":"run-5"', '"event":"kv.read"'),
        ("worker", '"trace_id":"run-5"', '"trace_id":"run-6"'),
        ("worker", '"schema":"kvscope.trace/1","trace_id":"run-5"', '"schema":"kvscope.trace/2","trace_id":"run-5"'),
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_true_is_never_part_of_a_clean_verdict(
    tmp_path: Path, process: str, before: str, after: str
) -> None:
    run = sound(tmp_path)
    changed: list[int] = []

    def change(lines: list[str]) -> list[str]:
        changed.append(sum(before in line for line in lines))
        return [line.replace(before, after) for line in lines]

    edit(run, process, change)
    assert changed[0]
    _, verdict = judged(run, min_coverage=0.0)
    assert (verdict.word, verdict.findings) == (INCONCLUSIVE, [])


def test_a_kv_read_of_other_requests_is_not_taken_for_the_one_of_the_kv_write(tmp_path: Path) -> None:
    run = sound(tmp_path)
    edit(run, "worker", lambda lines: [line.replace('"requests":["r1","r2"]', '"requests":["r2","r1"]')
                                       if '"kv.read"' in line else line for line in lines])  # fmt: skip
    assert judged(run, min_coverage=0.0)[1].word == INCONCLUSIVE


@pytest.mark.parametrize(
    ("names", "word"),
    [(RequestNames("hashed", b"0123456789abcdef"), FINDINGS), (RequestNames("omitted"), FINDINGS)],
    ids=["hashed", "omitted"],
)
def test_without_plain_request_ids(tmp_path: Path, names: RequestNames, word: str) -> None:
    builder = TraceBuilder(tmp_path / "run", names=names)
    SCENARIOS["write_foreign_block"](builder)
    replay, verdict = judged(builder.close())
    assert verdict.word == word
    assert replay.damaged_records == 0
    if names.mode == "hashed":
        assert verdict.agree
        assert replay.findings.folded()[0].first.request_id == names("r1")
    else:
        assert any('request_ids = "omitted"' in reason for reason in verdict.reasons)
        assert not any("contradict" in reason for reason in verdict.reasons)


def test_a_sound_run_without_request_ids_is_inconclusive_and_says_why(tmp_path: Path) -> None:
    builder = TraceBuilder(tmp_path / "run", names=RequestNames("omitted"))
    warm(builder)
    _, verdict = judged(builder.close())
    assert verdict.word == INCONCLUSIVE
    assert verdict.reasons == [
        'written with request_ids = "omitted": requests cannot be told apart',
        "coverage 0.0 % is below 0.99 (4 declaration missing)",
    ]
