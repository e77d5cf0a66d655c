"""One fact of a plan changed: the ways in which a runner can go wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvscope.facts.plans import Plan
from unit.checks.worlds import World, blocks_for, first_visible

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
        if token >= plan.groups[index].slots.size:
            return False
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
    if padding <= 0:
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
def all_entries_turned_around(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    row = rng.randrange(len(plan.request_ids))
    seen = _seen(world, plan, index, row)
    table = plan.groups[index].tables[row]
    before = table.copy()
    table[seen.start : seen.stop] = before[seen.start : seen.stop][::-1]
    return bool((table != before).any())


@change
def fewer_slots_than_tokens(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    plan.groups[index].slots = plan.groups[index].slots[: rng.randrange(plan.num_tokens)]
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
