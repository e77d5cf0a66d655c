"""Which rules run, and how several reasons for one access become one finding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvscope.checks.catalog import RULES
from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_bind, judge_dummy, judge_handover, judge_missing
from kvscope.checks.rule import Part
from kvscope.facts.plans import DummyRun, Plan
from kvscope.facts.topology import SLIDING_WINDOW, Topology
from unit.checks.scenes import PARTS, Scene, decoding
from unit.checks.worlds import group, pool


def foreign_everything(plan: Plan) -> None:
    """``a`` reads and writes what is ``b``'s, at the wrong position, and a padding slot is on."""
    plan.positions[0] = 41
    plan.groups[0].slots[0] = 89
    plan.groups[0].tables[0, 2] = 5
    plan.groups[0].slots[3] = 900


def found(parts: tuple[Part, ...]) -> list[Finding]:
    scene, declaration = decoding()
    plan = scene.plan(declaration)
    foreign_everything(plan)
    return scene.judge(declaration, plan, parts)


def reasons(findings: list[Finding]) -> dict[str, tuple[str, ...]]:
    return {finding.reason: finding.also for finding in findings}


def test_with_both_parts_the_foreign_block_is_named_and_the_rest_stands_beside_it() -> None:
    assert reasons(found(PARTS)) == {
        "write_foreign_block": ("write_position_mismatch", "write_target_mismatch"),
        "read_foreign_block": ("read_target_mismatch",),
        "write_padding_slot_enabled": (),
    }


def test_with_guard_off_the_ownership_rules_are_off() -> None:
    assert reasons(found(("kv_trace",))) == {
        "write_position_mismatch": ("write_target_mismatch",),
        "read_target_mismatch": (),
        "write_padding_slot_enabled": (),
    }


def test_with_trace_off_only_the_ownership_rules_are_on() -> None:
    assert reasons(found(("kv_guard_config",))) == {"write_foreign_block": (), "read_foreign_block": ()}


def test_with_both_parts_off_nothing_is_found() -> None:
    assert found(()) == []


def test_each_part_finds_only_what_is_its_own() -> None:
    for part in PARTS:
        for finding in found((part,)):
            assert {RULES[reason].part for reason in (finding.reason, *finding.also)} == {part}


@pytest.mark.parametrize("parts", [(), ("kv_guard_config",)])
def test_without_trace_declarations_messages_and_dummy_runs_are_not_judged(parts: tuple[Part, ...]) -> None:
    scene = Scene()
    declaration = scene.say(new=[("a", ([1, 99],), 0, 40)])
    assert judge_bind(declaration, scene.bindings, parts) == []
    message = declaration.requests.copy()
    message.scheduled["a"] = 3
    assert judge_handover(declaration, message, parts) == []
    assert judge_missing(3, message, parts) == []
    run = DummyRun(slots={0: np.array([5], np.int64)}, num_tokens=1)
    assert judge_dummy(run, 1, scene.bindings, parts) == []


def test_a_shifted_position_takes_in_what_follows_from_it_in_every_group() -> None:
    scene, declaration = decoding(pool(group(0), group(1)))
    plan = scene.plan(declaration)
    plan.positions[0] = 42
    for of in plan.groups:
        of.slots[0] += 2
    (finding,) = scene.judge(declaration, plan)
    assert (finding.reason, finding.also) == ("write_position_mismatch", ("write_target_mismatch",))
    assert (finding.group_id, finding.slot, finding.block_id) == (0, 58, 3)


def test_reading_and_writing_of_one_row_are_two_accesses() -> None:
    scene, declaration = decoding()
    plan = scene.plan(declaration)
    plan.groups[0].slots[0] = 57
    plan.groups[0].tables[0, 0] = 50
    assert reasons(scene.judge(declaration, plan)) == {"write_target_mismatch": (), "read_target_mismatch": ()}


def test_the_same_fault_in_two_groups_is_two_findings() -> None:
    scene, declaration = decoding(pool(group(0), group(1)))
    plan = scene.plan(declaration)
    for of in plan.groups:
        of.slots[0] += 1
    findings = scene.judge(declaration, plan)
    assert [(f.reason, f.group_id, f.slot) for f in findings] == [
        ("write_target_mismatch", 0, 57),
        ("write_target_mismatch", 1, 217),
    ]


def test_the_same_fault_of_two_requests_is_two_findings() -> None:
    scene, declaration = decoding()
    plan = scene.plan(declaration)
    plan.groups[0].slots[:2] += 1
    assert [(f.reason, f.request_id) for f in scene.judge(declaration, plan)] == [
        ("write_target_mismatch", "a"),
        ("write_target_mismatch", "b"),
    ]


def test_what_can_crash_stays_marked_beside_any_reason() -> None:
    """The row is reported for its first reason; that one of the others is fatal is not lost."""
    scene, declaration = decoding(pool(group(0), group(1)))
    plan = scene.plan(declaration)
    plan.positions[0] = 42
    plan.groups[0].slots[0] += 2
    plan.groups[1].slots[0] = 1 << 30
    (finding,) = scene.judge(declaration, plan)
    assert finding.reason == "write_outside_cache"
    assert finding.launch_fatal
    assert finding.also == ("write_position_mismatch", "write_target_mismatch")


def test_two_declared_faults_of_one_request_are_one_finding_a_group() -> None:
    findings = Scene(pool(group(0), group(1))).bound(new=[("a", ([1, 99], [1, 1, 2]), 0, 40)])
    assert [(f.reason, f.also, f.group_id, f.launch_fatal) for f in findings] == [
        ("bind_block_out_of_range", ("bind_block_shortfall",), 0, True),
        ("bind_duplicate_block", (), 1, False),
    ]


def test_a_finding_belongs_to_the_step_that_it_is_about() -> None:
    scene, declaration = decoding()
    plan = scene.plan(declaration)
    foreign_everything(plan)
    plan.seq_lens[1] = 60
    plan.groups[0].table_blocks[1] = 1
    found_here = scene.judge(declaration, plan)
    assert {(f.step, f.trace_id) for f in found_here} == {(2, "t2")}
    run = DummyRun(slots={0: np.array([5], np.int64)}, num_tokens=1)
    assert [(f.step, f.trace_id) for f in judge_dummy(run, 9, scene.bindings, PARTS)] == [(9, "")]
    assert [f.step for f in judge_missing(4, declaration.requests, PARTS)] == [4]


# What is kept from step to step ---------------------------------------------------------------------------------------


def steady(scene: Scene, computed: int) -> None:
    declaration = scene.say(known=[("a", None, computed, 1), ("b", None, computed, 1)])
    assert scene.judge(declaration, scene.plan(declaration)) == []


Change = Callable[[Plan], object]

CHANGES: dict[str, tuple[Change, str]] = {
    "the next slot": (lambda plan: plan.groups[0].slots.__iadd__([0, 1, 0, 0, 0]), "write_target_mismatch"),
    "a foreign slot": (lambda plan: plan.groups[0].slots.__setitem__(1, 40), "write_foreign_block"),
    "padding": (lambda plan: plan.groups[0].slots.__setitem__(3, 7), "write_padding_slot_enabled"),
    "an entry": (lambda plan: plan.groups[0].tables.__setitem__((1, 2), 50), "read_target_mismatch"),
    "the null block": (lambda plan: plan.groups[0].tables.__setitem__((1, 2), 0), "read_null_block"),
    "a short row": (lambda plan: plan.groups[0].table_blocks.__setitem__(1, 2), "read_table_short"),
    "a position": (lambda plan: plan.positions.__setitem__(1, 3), "write_position_mismatch"),
    "too long": (lambda plan: plan.seq_lens.__setitem__(1, 49), "read_length_exceeds_declared"),
    "too short": (lambda plan: plan.seq_lens.__setitem__(1, 20), "write_length_mismatch"),
    "an offset": (lambda plan: plan.query_start.__setitem__(1, 2), "write_length_mismatch"),
}


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("topology", [pool(group(0)), pool(group(0, SLIDING_WINDOW, 16, 20))], ids=["full", "window"])
@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_identical_steps_before_a_change_do_not_hide_it(
    steps: int, topology: Topology, change: Change, expected: str
) -> None:
    scene, _ = decoding(topology)
    for computed in range(41, 41 + steps):
        steady(scene, computed)
    declaration = scene.say(known=[("a", None, 41 + steps, 1), ("b", None, 41 + steps, 1)])
    plan = scene.plan(declaration)
    change(plan)
    assert expected in [reason for f in scene.judge(declaration, plan) for reason in (f.reason, *f.also)]
    steady(scene, 42 + steps)


def test_a_declaration_that_changes_is_what_plans_are_held_against_from_then_on() -> None:
    """The plan that was right a step ago is wrong once a request has been bound anew."""
    scene, declaration = decoding()
    plan = scene.plan(declaration)
    assert scene.judge(declaration, plan) == []
    again = scene.say(known=[("a", ([7, 8, 9],), 40, 1), ("b", None, 40, 1)], resumed=["a"])
    assert reasons(scene.judge(again, plan)) == {"write_target_mismatch": (), "read_target_mismatch": ()}
    assert scene.judge(again, scene.plan(again)) == []


def test_a_row_that_passes_to_another_request_brings_its_own_table() -> None:
    scene, _ = decoding()
    declaration = scene.say(finished=["a"], known=[("b", None, 41, 1)], new=[("c", ([1, 2, 9],), 32, 1)])
    assert scene.judge(declaration, scene.plan(declaration)) == []
    back = scene.say(known=[("b", None, 42, 1), ("c", None, 33, 1)])
    plan = scene.plan(back)
    assert scene.judge(back, plan) == []
    plan.groups[0].tables[1, 2] = 3  # of a, which is gone
    assert reasons(scene.judge(back, plan)) == {"read_target_mismatch": ()}


def test_a_block_beyond_the_first_columns_is_seen() -> None:
    scene = Scene(pool(group(0), num_blocks=4000))
    blocks = list(range(1, 201))
    declaration = scene.say(new=[("a", (blocks,), 3190, 10), ("b", ([300],), 0, 3)])
    plan = scene.plan(declaration)
    assert scene.judge(declaration, plan) == []
    plan.groups[0].tables[0, 150] = 3000
    (finding,) = scene.judge(declaration, plan)
    assert (finding.reason, finding.position, finding.expected) == ("read_target_mismatch", 2400, 151)
