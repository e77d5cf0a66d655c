"""Sound plans cause nothing, however they come about; one changed fact causes what follows from it and no more."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_batch, judge_bind, judge_plan
from kvscope.checks.plan_view import StepView
from kvscope.checks.read import READ_RULES
from kvscope.checks.row import ROW_RULES
from kvscope.checks.rule import Part
from kvscope.checks.write import WRITE_RULES
from kvscope.facts.plans import Plan
from kvscope.facts.requests import Declaration
from kvscope.state.batches import BatchTable
from kvscope.state.bindings import Bindings
from unit.checks.reference import UnclearError, agree, described, reference
from unit.checks.worlds import LAYOUTS, World, blocks_for, copied, first_visible

PARTS: tuple[Part, ...] = ("kv_trace", "kv_guard_config")


class Judge:
    """A worker's side: tables and batches live on from step to step, as they do in a process."""

    def __init__(self, world: World) -> None:
        self.bindings = Bindings(world.topology)
        self.batches = [BatchTable(self.bindings, index) for index in range(len(world.groups))]

    def judge(self, declaration: Declaration, plan: Plan) -> list[Finding]:
        step = StepView(plan, declaration, self.bindings)
        groups = [step.group(batch) for batch in self.batches]
        found = judge_plan(step, groups, PARTS)
        fired = [f for rules in ROW_RULES for f in rules(step)]
        fired += [f for of in groups for rules in (*WRITE_RULES, *READ_RULES) for f in rules(of)]
        assert bool(fired) == bool(found), "the comparison of bytes says otherwise than the rules themselves"
        return found


def run(seed: int, layout: str) -> tuple[World, Judge]:
    world = World(seed, LAYOUTS[layout])
    return world, Judge(world)


def declared_and_planned(world: World, judge: Judge, *, decode_only: bool = False) -> tuple[Declaration, Plan | None]:
    declaration = world.step(decode_only=decode_only)
    judge.bindings.apply(declaration.requests)
    assert judge_bind(declaration, judge.bindings, PARTS) == []
    if not declaration.requests.scheduled:
        return declaration, None
    plan = world.plan(declaration, shuffle=not decode_only)
    assert judge_batch(declaration, plan, PARTS) == []
    return declaration, plan


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 14))
def test_a_sound_engine_causes_no_finding(layout: str, seed: int, steps: int) -> None:
    world, judge = run(seed, layout)
    for _ in range(steps):
        declaration, plan = declared_and_planned(world, judge)
        if plan is not None:
            assert judge.judge(declaration, plan) == []
            assert reference(world, plan) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_steady_decoding_over_block_boundaries_causes_no_finding(layout: str, seed: int) -> None:
    world, judge = run(seed, layout)
    while len(world.live) < 2:
        declared_and_planned(world, judge)
    for _ in range(70):
        declaration, plan = declared_and_planned(world, judge, decode_only=True)
        if plan is None:
            break
        assert judge.judge(declaration, plan) == []


# One changed fact -----------------------------------------------------------------------------------------------------

Change = Callable[[World, Plan, int, random.Random], bool]
"""Changes one fact of a plan in one group; False where this plan has nothing of the kind."""
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


@dataclass
class Spot:
    """A token or a table entry that is about to be changed."""

    world: World
    plan: Plan
    index: int
    rng: random.Random
    own: str
    token: int = 0

    @property
    def size(self) -> int:
        return self.world.groups[self.index].block_size

    @property
    def slots(self) -> list[int]:
        return [int(slot) for slot in self.plan.groups[self.index].slots[: self.plan.num_tokens]]

    def in_block(self, block: int | None) -> int | None:
        """The slot of the token's own offset in another block."""
        return None if block is None else block * self.size + int(self.plan.positions[self.token]) % self.size

    def own_block(self) -> int:
        return self.rng.choice(self.world.live[self.own].tables[self.index])

    def foreign_block(self) -> int | None:
        others = [request for name, request in self.world.live.items() if name != self.own]
        blocks = [block for request in others for block in request.tables[self.index] if block]
        return self.rng.choice(blocks) if blocks else None

    def free_block(self) -> int | None:
        return self.rng.choice(self.world.free) if self.world.free else None


def _slot(value: Callable[[Spot], int | None]) -> Change:
    def apply(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
        token, starts = rng.randrange(plan.num_tokens), plan.query_start.tolist()
        own = next(name for row, name in enumerate(plan.request_ids) if starts[row] <= token < starts[row + 1])
        slot = value(Spot(world, plan, index, rng, own, token))
        if slot is None or slot == plan.groups[index].slots[token]:
            return False
        plan.groups[index].slots[token] = slot
        return True

    return apply


CHANGES["slot: next"] = _slot(lambda spot: spot.slots[spot.token] + 1)
CHANGES["slot: null block"] = _slot(lambda spot: spot.in_block(0))
CHANGES["slot: one past the cache"] = _slot(lambda spot: spot.world.num_blocks * spot.size)
CHANGES["slot: far outside"] = _slot(lambda _: 1 << 40)
CHANGES["slot: negative"] = _slot(lambda spot: -spot.rng.randint(2, 40))
CHANGES["slot: off"] = _slot(lambda _: -1)
CHANGES["slot: of another token"] = _slot(lambda spot: spot.rng.choice(spot.slots))
CHANGES["slot: anywhere in the pool"] = _slot(lambda spot: spot.rng.randrange(spot.world.num_blocks * spot.size))
CHANGES["slot: free block"] = _slot(lambda spot: spot.in_block(spot.free_block()))
CHANGES["slot: foreign block"] = _slot(lambda spot: spot.in_block(spot.foreign_block()))
CHANGES["slot: other block of its own"] = _slot(lambda spot: spot.in_block(spot.own_block()))


@change
def padding_slot_enabled(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    padding = len(plan.groups[index].slots) - plan.num_tokens
    if not padding:
        return False
    value = rng.choice([rng.randrange(world.num_blocks * world.groups[index].block_size), 1 << 33, -2])
    plan.groups[index].slots[plan.num_tokens + rng.randrange(padding)] = value
    return True


def _seen(world: World, plan: Plan, index: int, row: int) -> range:
    """Logical blocks of a row that attention looks at."""
    request, of = world.live[plan.request_ids[row]], world.groups[index]
    return range(first_visible(of, request.computed), blocks_for(request.declared, of.block_size))


def _entry(value: Callable[[Spot], int | None]) -> Change:
    def apply(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
        row = rng.randrange(len(plan.request_ids))
        logical = rng.choice(_seen(world, plan, index, row))
        block = value(Spot(world, plan, index, rng, plan.request_ids[row]))
        if block is None or block == plan.groups[index].tables[row, logical]:
            return False
        plan.groups[index].tables[row, logical] = block
        return True

    return apply


CHANGES["entry: null block"] = _entry(lambda _: 0)
CHANGES["entry: one past the pool"] = _entry(lambda spot: spot.world.num_blocks)
CHANGES["entry: negative"] = _entry(lambda spot: -spot.rng.randint(1, 9))
CHANGES["entry: foreign"] = _entry(Spot.foreign_block)
CHANGES["entry: free"] = _entry(Spot.free_block)
CHANGES["entry: another of its own"] = _entry(Spot.own_block)


@change
def two_entries_exchanged(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    row = rng.randrange(len(plan.request_ids))
    seen = _seen(world, plan, index, row)
    if len(seen) < 2:
        return False
    one, other = rng.sample(seen, 2)
    table = plan.groups[index].tables[row]
    table[one], table[other] = int(table[other]), int(table[one])
    return True


@change
def two_rows_exchanged(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    if len(plan.request_ids) < 2:
        return False
    one, other = rng.sample(range(len(plan.request_ids)), 2)
    plan.groups[index].tables[[one, other]] = plan.groups[index].tables[[other, one]]
    return True


@change
def table_too_short(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    row = rng.randrange(len(plan.request_ids))
    needed = blocks_for(world.live[plan.request_ids[row]].declared, world.groups[index].block_size)
    plan.groups[index].table_blocks[row] = rng.randint(-1, needed - 1)
    return True


@change
def position_moved(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    plan.positions[rng.randrange(plan.num_tokens)] += rng.choice([-17, -1, 1, 16])
    return True


@change
def length_changed(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    plan.seq_lens[rng.randrange(len(plan.request_ids))] += rng.choice([-16, -1, 1, 40])
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CHANGES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 10), steady=st.booleans())
def test_one_changed_fact_causes_exactly_what_follows_from_it(
    name: str, layout: str, seed: int, steps: int, steady: bool
) -> None:
    """At every step: sound, changed, sound again, all through the same kept tables."""
    world, judge = run(seed, layout)
    rng = random.Random(seed)
    for _ in range(steps):
        declaration, plan = declared_and_planned(world, judge, decode_only=steady and len(world.live) > 1)
        if plan is None:
            continue
        assert judge.judge(declaration, plan) == []
        changed = copied(plan)
        if CHANGES[name](world, changed, rng.randrange(len(world.groups)), rng):
            found = described(judge.judge(declaration, changed))
            with contextlib.suppress(UnclearError):
                assert agree(found, reference(world, changed))
        assert judge.judge(declaration, plan) == []


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), layout=st.sampled_from(sorted(LAYOUTS)), steps=st.integers(1, 8))
def test_every_row_that_has_a_wrong_fact_has_a_finding(seed: int, layout: str, steps: int) -> None:
    """Several changes at once may hide in one another's finding, but never out of the row's sight."""
    world, judge = run(seed, layout)
    rng = random.Random(seed)
    for _ in range(steps):
        declaration, plan = declared_and_planned(world, judge)
    if plan is None:
        return
    for name in rng.choices(sorted(CHANGES), k=rng.randint(2, 6)):
        CHANGES[name](world, plan, rng.randrange(len(world.groups)), rng)
    found = described(judge.judge(declaration, plan))
    try:
        expected = reference(world, plan)
    except UnclearError:
        reject()
    fields = ("reason", "also", "request_id", "row", "group_id", "launch_fatal")
    assert sorted(str([f[n] for n in fields]) for f in found) == sorted(str([f[n] for n in fields]) for f in expected)
