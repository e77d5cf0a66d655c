"""The rows of a plan that something is known about."""

from __future__ import annotations

from kvscope.facts.plans import Plan
from kvscope.facts.requests import Declaration
from kvscope.runtime.selection import judged_rows
from unit.checks.scenes import Scene
from unit.checks.worlds import copied


def prefilled() -> tuple[Scene, Declaration, Plan]:
    scene = Scene()
    declaration = scene.say(
        new=[("a", ([1, 2],), 0, 20), ("b", ([3],), 0, 5)], known=[("old", ([4, 5],), 0, 18), ("c", ([6],), 0, 2)]
    )
    scene.bindings.partial.discard("c")
    return scene, declaration, scene.plan(declaration)


def test_a_plan_whose_rows_are_all_known_is_left_as_it_is() -> None:
    scene, declaration, plan = prefilled()
    scene.bindings.partial.clear()
    assert judged_rows(plan, declaration, scene.bindings) is plan


def test_a_partial_request_outside_the_batch_does_not_matter() -> None:
    scene, declaration, plan = prefilled()
    scene.bindings.partial.clear()
    scene.bindings.partial.add("waiting")
    assert judged_rows(plan, declaration, scene.bindings) is plan


def test_a_row_whose_table_is_not_known_from_its_start_is_left_out() -> None:
    scene, declaration, plan = prefilled()
    before = copied(plan)
    part = judged_rows(plan, declaration, scene.bindings)
    assert part.request_ids == ["a", "b", "c"]
    assert part.query_start.tolist() == [0, 20, 25, 27]
    assert part.positions.tolist() == [*range(20), *range(5), *range(2)]
    assert part.seq_lens.tolist() == [20, 5, 2]
    assert part.num_tokens == 27
    (group,) = part.groups
    kept = [*range(25), 43, 44]
    assert group.slots.tolist() == [*before.groups[0].slots[kept].tolist(), -1, -1, -1]
    assert group.tables.tolist() == before.groups[0].tables[[0, 1, 3]].tolist()
    assert group.table_blocks.tolist() == [2, 1, 1]
    assert scene.judge(declaration, part)[1:] == []  # the batch lacks a request; nothing else is wrong


def test_a_row_that_was_not_declared_is_left_out() -> None:
    scene, declaration, plan = prefilled()
    scene.bindings.partial.clear()
    plan.request_ids[1] = "stranger"
    part = judged_rows(plan, declaration, scene.bindings)
    assert part.request_ids == ["a", "old", "c"]
    assert part.num_tokens == 40


def test_a_plan_of_which_nothing_is_known_has_no_rows() -> None:
    scene, declaration, plan = prefilled()
    scene.bindings.partial.update(["a", "b", "c", "old"])
    part = judged_rows(plan, declaration, scene.bindings)
    assert (part.request_ids, part.num_tokens, part.query_start.tolist()) == ([], 0, [0])


def test_what_the_host_estimates_stays_an_estimate() -> None:
    scene, declaration, plan = prefilled()
    plan.exact, plan.graph_mode = False, "FULL"
    part = judged_rows(plan, declaration, scene.bindings)
    assert (part.exact, part.graph_mode) == (False, "FULL")
