"""What operators get, against a brute-force oracle: sound arguments are agreed to, and one wrong entry is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.budget import examples

from kvscope.checks.handed import HandedPlan
from kvscope.facts.operators import OperatorArguments, OperatorRows
from kvscope.facts.plans import Plan
from kvscope.facts.topology import FULL_ATTENTION, MLA, SLIDING_WINDOW, Group
from unit.checks.operator_world import Cut, judged, operators, reference, said
from unit.checks.scenes import decoding
from unit.checks.worlds import LAYOUTS, World, copied, group, pool

KERNELS: dict[str, tuple[tuple[Group, ...], dict[int, int], dict[int, int]]] = {
    "128 of 16": ((group(0, block_size=128),), {0: 8}, {}),
    "128 of 32": ((group(0, block_size=128),), {0: 4}, {}),
    "128 of 64": ((group(0, block_size=128),), {0: 2}, {}),
    "64 of 16, 32, and 128 of 32": (
        (group(0, MLA, 64), group(1, SLIDING_WINDOW, 32, 40), group(2, FULL_ATTENTION, 128)),
        {0: 4, 2: 4},
        {},
    ),
    "packed: others lie between": ((group(0, block_size=64),), {0: 4}, {0: 12}),
    **{name: (groups, {}, {}) for name, groups in LAYOUTS.items()},
}
"""Groups, and by group into how many blocks of its kernel a block is cut, and how far apart blocks then begin."""


def spoil_slot(arguments: OperatorArguments, rng: random.Random) -> None:
    mapping = rng.choice([mapping for of in arguments.groups for mapping in of.slots if mapping.slots.size])
    index = rng.randrange(mapping.slots.size)
    mapping.slots[index] += rng.choice([-1, 1, 16, 5000])


def a_part(arguments: OperatorArguments, rng: random.Random) -> OperatorRows:
    return rng.choice([part for of in arguments.groups for part in of.parts if part.rows])


def spoil_table(arguments: OperatorArguments, rng: random.Random) -> None:
    tables = a_part(arguments, rng).tables
    tables[rng.randrange(tables.shape[0]), rng.randrange(tables.shape[1])] += rng.choice([-1, 1, 7, 100_000])


def spoil_length(arguments: OperatorArguments, rng: random.Random) -> None:
    lengths = a_part(arguments, rng).seq_lens
    assert lengths is not None
    lengths[rng.randrange(lengths.size)] += rng.choice([-1, 1, 40])


def spoil_offset(arguments: OperatorArguments, rng: random.Random) -> None:
    starts = a_part(arguments, rng).query_start
    assert starts is not None
    starts[rng.randrange(starts.size)] += rng.choice([-1, 1])


def exchange_rows(arguments: OperatorArguments, rng: random.Random) -> None:
    part = a_part(arguments, rng)
    one, other = rng.randrange(part.rows), rng.randrange(part.rows)
    part.tables[[one, other]] = part.tables[[other, one]]


SPOIL: dict[str, Callable[[OperatorArguments, random.Random], None]] = {
    function.__name__: function for function in (spoil_slot, spoil_table, spoil_length, spoil_offset, exchange_rows)
}


def cuts_of(plan: Plan, rng: random.Random) -> list[Cut]:
    """Two micro-batches, cut at a token; the row that is cut is in both."""
    total = int(plan.groups[0].slots.size)
    at = rng.randrange(1, plan.num_tokens) if plan.num_tokens > 1 else 0
    if not at:
        return []
    ends = plan.query_start[1:].tolist()
    last = next(row for row, end in enumerate(ends) if end >= at)
    first = last if ends[last] > at else last + 1
    return [(0, last + 1, 0, at), (first, len(ends), at, total)]


@pytest.mark.parametrize("layout", KERNELS)
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 8), cut=st.booleans())
def test_sound_arguments_are_agreed_to(layout: str, seed: int, steps: int, cut: bool) -> None:
    groups, ratio, stride = KERNELS[layout]
    world, rng = World(seed, groups), random.Random(seed)
    handed = HandedPlan(world.topology)
    for _ in range(steps):
        declaration = world.step()
        if not declaration.requests.scheduled:
            continue
        plan = world.plan(declaration)
        cuts = cuts_of(plan, rng) if cut else []
        arguments = operators(plan, ratio=ratio, stride=stride, cuts=cuts)
        handed.keep(plan)
        assert bool(handed.doubtful(arguments)) is bool(cuts)
        assert judged(plan, arguments, world.topology, handed) == []
        assert reference(plan, arguments, world.topology) == set()


@pytest.mark.parametrize("layout", KERNELS)
@pytest.mark.parametrize("name", SPOIL)
@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 8), cut=st.booleans())
def test_one_wrong_entry_is_found_where_the_oracle_sees_it(
    name: str, layout: str, seed: int, steps: int, cut: bool
) -> None:
    groups, ratio, stride = KERNELS[layout]
    world, rng = World(seed, groups), random.Random(seed)
    handed = HandedPlan(world.topology)
    for _ in range(steps):
        declaration = world.step()
        if not declaration.requests.scheduled:
            continue
        plan = world.plan(declaration)
        arguments = operators(plan, ratio=ratio, stride=stride, cuts=cuts_of(plan, rng) if cut else [])
        handed.keep(plan)
        SPOIL[name](arguments, rng)
        found, expected = (
            said(judged(plan, arguments, world.topology, handed)),
            reference(plan, arguments, world.topology),
        )
        # An offset that is wrong hurts two rows and is told once, of the first.
        assert found <= expected
        assert bool(found) == bool(expected)
        if name != "spoil_offset":
            assert found == expected


def test_the_same_memory_is_compared_by_what_is_in_it() -> None:
    """Arguments that are the runner's own buffers, step after step, as on a CPU."""
    world = World(3, (group(0),))
    declaration = world.step()
    while len(declaration.requests.scheduled) < 2:
        declaration = world.step()
    plan = world.plan(declaration)
    arguments = operators(plan)
    (of,) = arguments.groups
    of.parts[0].tables, of.parts[0].seq_lens, of.parts[0].query_start = (
        plan.groups[0].tables, plan.seq_lens, plan.query_start,
    )  # fmt: skip
    of.slots[0].slots = of.slots[1].slots = plan.groups[0].slots
    handed, before = HandedPlan(world.topology), copied(plan)
    arrays = (plan.groups[0].tables, plan.seq_lens, plan.query_start, plan.groups[0].slots)
    for array in arrays:
        for _ in range(2):
            handed.keep(plan)
            assert not handed.doubtful(arguments)
        handed.keep(plan)
        array.flat[0] += 1
        assert handed.doubtful(arguments)
        kept = handed.plan()
        assert np.array_equal(kept.seq_lens, before.seq_lens)
        assert np.array_equal(kept.groups[0].slots, before.groups[0].slots)
        array.flat[0] -= 1


def test_arguments_that_our_code_failed_on_are_looked_at_from_the_start() -> None:
    layout = pool(group(0), group(1))
    scene, declaration = decoding(layout)
    plan = scene.plan(declaration)
    arguments, handed = operators(plan), HandedPlan(layout)
    assert handed.keep(plan)
    part = arguments.groups[0].parts[0]
    tables, part.tables = part.tables, cast("Any", None)
    with pytest.raises(AttributeError):
        handed.doubtful(arguments)
    part.tables = tables
    assert part.seq_lens is not None
    part.seq_lens[0] += 1
    assert handed.doubtful(arguments)


def test_tables_may_grow_wider_while_a_batch_goes_on() -> None:
    world = World(5, (group(0),), chunk=16)
    while not world.live:
        world.step()
    name = next(iter(world.live))
    handed = HandedPlan(world.topology)
    for _ in range(80):
        declaration = world.step(decode_only=True)
        if name not in declaration.requests.scheduled:
            break
        plan = world.plan(declaration, shuffle=False)
        arguments = operators(plan)
        handed.keep(plan)
        assert not handed.doubtful(arguments)
        row = plan.request_ids.index(name)
        last = (int(plan.seq_lens[row]) - 1) // 16
        arguments.groups[0].parts[0].tables[row, last] += 1
        assert handed.doubtful(arguments)
    assert last > 0


def test_a_plan_that_lacks_a_group_is_not_kept() -> None:
    layout = pool(group(0), group(1))
    scene, declaration = decoding(layout)
    plan = scene.plan(declaration)
    handed = HandedPlan(layout)
    assert handed.keep(plan)
    plan.groups.pop(0)
    assert not handed.keep(plan)


def test_a_group_that_is_not_judged_may_be_missing() -> None:
    layout = pool(group(0, "mamba"), group(1))
    scene, declaration = decoding(layout)
    plan = scene.plan(declaration)
    arguments = operators(plan)
    plan.groups.pop(0)
    arguments.groups.pop(0)
    assert judged(plan, arguments, layout) == []
    arguments.groups[0].parts[0].tables[0, 0] = 7
    assert said(judged(plan, arguments, layout)) == {(1, 0)}
