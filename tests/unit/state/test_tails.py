"""What unread table entries lead to is counted, a few rows at a time, and never more of it than was asked for."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvscope.facts.plans import Plan
from kvscope.facts.topology import SLIDING_WINDOW, Topology
from kvscope.state.tails import SAMPLE_INTERVAL_PLANS, SAMPLED_ENTRIES, SAMPLED_ROWS, TailCensus
from unit.checks.scenes import ONE_GROUP, Scene, decoding
from unit.checks.worlds import group, pool


def counted(plan: Plan, scene: Scene, times: int = 1) -> dict[str, int]:
    census, counts = TailCensus(), Counter[str]()
    for _ in range(times):
        census.take(plan, scene.bindings, counts)
    return dict(counts)


def tail(*entries: int, topology: Topology = ONE_GROUP, window: tuple[int, ...] = ()) -> dict[str, int]:
    """``a`` and ``b`` of :func:`decoding` read blocks 3 and 6 last; ``a`` has these entries behind, ``b`` null ones.

    ``window`` are the first entries of ``a``.
    """
    scene, declaration = decoding(topology)
    plan = scene.plan(declaration)
    of = plan.groups[0]
    read, of.tables = of.tables[:, :3], np.zeros((2, 3 + len(entries)), np.int32)
    of.tables[:, :3], of.tables[0, 3:] = read, entries
    of.tables[0, : len(window)] = window
    return counted(plan, scene)


def test_an_entry_is_counted_by_what_it_leads_to() -> None:
    assert tail(0) == {"null": 2}
    assert tail(2) == {"own": 1, "null": 1}
    assert tail(5) == {"foreign": 1, "null": 1}
    assert tail(50) == {"nobody": 1, "null": 1}
    assert tail(64) == {"outside": 1, "null": 1}
    assert tail(-1) == {"outside": 1, "null": 1}
    assert tail() == {}


def test_what_attention_reads_is_not_counted() -> None:
    assert tail(5, 50, 2) == {"foreign": 1, "nobody": 1, "own": 1, "null": 3}


def test_what_a_window_has_left_behind_is_counted() -> None:
    """Of 41 tokens a window of 8 leaves the third block; the first two entries of ``b`` are its own."""
    topology = pool(group(0, SLIDING_WINDOW, 16, 8))
    assert tail(window=(0, 6), topology=topology) == {"null": 1, "foreign": 1, "own": 2}


def test_states_and_missing_groups_are_not_counted() -> None:
    scene, declaration = decoding(pool(group(0), group(1, "mamba")))
    plan = scene.plan(declaration)
    assert counted(plan, scene) == {"null": 2}
    plan.groups.clear()
    assert counted(plan, scene) == {}


def test_of_a_large_batch_every_row_has_its_turn() -> None:
    scene = Scene(pool(group(0), num_blocks=400))
    names = [f"r{number}" for number in range(2 * SAMPLED_ROWS)]
    declaration = scene.say(new=[(name, ([number + 1],), 0, 3) for number, name in enumerate(names)])
    plan = scene.plan(declaration)
    plan.groups[0].tables = plan.groups[0].tables[:, :1].repeat(2 + SAMPLED_ENTRIES, axis=1)
    assert counted(plan, scene) == {"own": SAMPLED_ROWS * SAMPLED_ENTRIES}
    plan.groups[0].tables[SAMPLED_ROWS:, 1:] = 300
    assert counted(plan, scene, 2) == {"own": SAMPLED_ROWS * SAMPLED_ENTRIES, "nobody": SAMPLED_ROWS * SAMPLED_ENTRIES}


def test_an_empty_batch_and_unknown_requests_are_passed_over() -> None:
    scene, declaration = decoding()
    plan = scene.plan(declaration)
    plan.request_ids = ["nobody", "b"]
    assert counted(plan, scene) == {"null": 1}
    plan.request_ids = []
    assert counted(plan, scene) == {}


def test_one_plan_in_many_is_due_and_the_first_one_is() -> None:
    scene, declaration = decoding()
    census, plan, due = TailCensus(), scene.plan(declaration), []
    for number in range(3 * SAMPLE_INTERVAL_PLANS):
        census.plans_left -= 1
        if not census.plans_left:
            due.append(number)
            census.take(plan, scene.bindings, Counter())
    assert due == [0, SAMPLE_INTERVAL_PLANS, 2 * SAMPLE_INTERVAL_PLANS]
