"""Ranks that share out a sequence, against an oracle that deals out token by token: sound ones cause nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.budget import examples

from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_plan
from kvscope.checks.plan_view import StepView
from kvscope.facts.context_parallel import ContextParallel
from kvscope.facts.plans import PAD_SLOT, Plan
from kvscope.facts.requests import Declaration
from kvscope.facts.topology import MLA, Group
from kvscope.state.batches import BatchTable
from kvscope.state.bindings import Bindings
from kvscope.state.token_shares import block_offset, local_lengths, local_offsets, owned
from unit.checks.dealing import dcp_pool, deal, on_rank, partitioned, sharded, share_of
from unit.checks.scenes import PARTS
from unit.checks.worlds import World, copied, group

LAYOUTS = [(1, 16), (4, 16), (16, 16), (8, 32), (1, 32)]
"""Interleave and slots of a block."""


def contexts(size: int, interleave: int, *of: int) -> list[ContextParallel]:
    return [ContextParallel(dcp_size=size, dcp_rank=r, interleave=interleave, sharded=of) for r in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(("interleave", "slots"), LAYOUTS)
def test_the_formulas_are_those_of_a_deal(size: int, interleave: int, slots: int) -> None:
    block_size = slots * size
    dealt = deal(block_size, size, interleave)
    positions = np.arange(3 * block_size)
    for context in contexts(size, interleave, 0):
        mine = [dealt[position % block_size][0] == context.dcp_rank for position in positions.tolist()]
        assert owned(context, positions).tolist() == mine
        lengths = [share_of(length, block_size, context) for length in positions.tolist()]
        assert local_lengths(context, positions).tolist() == lengths
        for offset, (rank, before) in enumerate(dealt):
            if rank == context.dcp_rank:
                assert local_offsets(context, np.array([offset])).tolist() == [before]
                assert block_offset(context, before) == offset


class Ranks:
    """The workers of one engine, each with tables that live on."""

    def __init__(self, world: World, contexts_: list[ContextParallel]) -> None:
        self.contexts = contexts_
        self.bindings = [Bindings(world.topology) for _ in contexts_]
        self.batches = [[BatchTable(b, i) for i in range(len(world.groups))] for b in self.bindings]

    def bind(self, declaration: Declaration) -> None:
        for bindings in self.bindings:
            bindings.apply(declaration.requests)

    def judge(self, rank: int, declaration: Declaration, plan: Plan) -> list[Finding]:
        step = StepView(plan, declaration, self.bindings[rank])
        return judge_plan(step, [step.group(batch) for batch in self.batches[rank]], PARTS)


GROUPS: dict[str, tuple[Group, ...]] = {
    "one": (sharded(0),),
    "mla": (sharded(0, 32, 2, MLA),),
    "with a replica": (sharded(0), group(1)),
    "four": (sharded(0, 16, 4),),
}


def dealt_world(seed: int, layout: str, interleave: int) -> tuple[World, Ranks]:
    groups = GROUPS[layout]
    size = groups[0].shards
    world = World(seed, groups, num_blocks=400)
    world.topology = dcp_pool(*groups, size=size, num_blocks=400)
    dealt_out = [of.group_id for of in groups if of.shards > 1]
    return world, Ranks(world, contexts(size, interleave, *dealt_out))


def tables_of(world: World) -> dict[str, list[list[int]]]:
    return {name: request.tables for name, request in world.live.items()}


@pytest.mark.parametrize("layout", GROUPS)
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 2**32), interleave=st.sampled_from([1, 2, 8, 16]), steps=st.integers(1, 8))
def test_a_sound_engine_of_several_ranks_causes_no_finding(layout: str, seed: int, interleave: int, steps: int) -> None:
    world, ranks = dealt_world(seed, layout, interleave)
    for _ in range(steps):
        declaration = world.step()
        ranks.bind(declaration)
        if not declaration.requests.scheduled:
            continue
        whole = world.plan(declaration)
        stored = np.zeros(whole.num_tokens, np.int64)
        for rank, context in enumerate(ranks.contexts):
            plan = on_rank(whole, world.topology, tables_of(world), context)
            assert ranks.judge(rank, declaration, plan) == []
            stored += plan.groups[0].slots[: whole.num_tokens] != PAD_SLOT
        assert (stored == 1).all()


@pytest.mark.parametrize("layout", GROUPS)
@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32), interleave=st.sampled_from([1, 2, 8, 16]))
def test_one_wrong_slot_of_a_rank_is_found_for_what_it_is(layout: str, seed: int, interleave: int) -> None:
    world, ranks = dealt_world(seed, layout, interleave)
    rng = random.Random(seed)
    declaration = world.step()
    while not declaration.requests.scheduled:
        ranks.bind(declaration)
        declaration = world.step()
    ranks.bind(declaration)
    whole, rank = world.plan(declaration), rng.randrange(len(ranks.contexts))
    sound = on_rank(whole, world.topology, tables_of(world), ranks.contexts[rank])
    plan = copied(sound)
    plan.context = sound.context
    slots, token = plan.groups[0].slots, rng.randrange(whole.num_tokens)
    per_block = world.groups[0].block_size // world.groups[0].shards
    row = int(np.searchsorted(plan.query_start, token, side="right")) - 1
    table = world.live[plan.request_ids[row]].tables[0]
    block = table[int(plan.positions[token]) // world.groups[0].block_size]
    used = set(slots.tolist())
    free = [slot for slot in range(block * per_block, (block + 1) * per_block) if slot not in used]
    is_mine = slots[token] != PAD_SLOT
    if is_mine and rng.random() < 0.5:
        reason, slots[token] = "cp_slot_owner_mismatch", PAD_SLOT
    elif free:
        reason, slots[token] = "cp_order_mismatch" if is_mine else "cp_slot_owner_mismatch", rng.choice(free)
    else:
        return
    (finding,) = ranks.judge(rank, declaration, plan)
    assert (finding.reason, finding.group_id, finding.token_index) == (reason, 0, token)
    assert finding.position == int(plan.positions[token])
    assert ranks.judge(rank, declaration, sound) == []


@pytest.mark.parametrize("size", [2, 3, 4])
@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32), dcp=st.booleans(), steps=st.integers(1, 5))
def test_sound_ranks_that_cut_prompts_cause_no_finding(size: int, seed: int, dcp: bool, steps: int) -> None:
    """With ``dcp`` the gathered keys are stored by shares, too, over the same ranks."""
    groups = (sharded(0, 16, size),) if dcp else (group(0),)
    world = World(seed, groups, num_blocks=400)
    world.topology = dcp_pool(*groups, size=size if dcp else 1, pcp_size=size, num_blocks=400)
    at = [
        ContextParallel(
            pcp_size=size,
            pcp_rank=rank,
            dcp_size=size if dcp else 1,
            dcp_rank=rank if dcp else 0,
            interleave=4 if dcp else 1,
            sharded=(0,) if dcp else (),
        )
        for rank in range(size)
    ]
    ranks, rng = Ranks(world, at), random.Random(seed)
    for _ in range(steps):
        declaration = world.step()
        ranks.bind(declaration)
        if not declaration.requests.scheduled:
            continue
        whole = world.plan(declaration)
        decoding = {name for name, count in declaration.requests.scheduled.items() if count == 1 or rng.random() < 0.3}
        for rank, context in enumerate(at):
            plan = on_rank(whole, world.topology, tables_of(world), context)
            plan = partitioned(plan, context, decoding)
            assert ranks.judge(rank, declaration, plan) == []
            if plan.num_tokens > 1:
                assert plan.local is not None
                count = len(plan.local.writers)
                place = rng.randrange(count)
                plan.local.writers[place] = (int(plan.local.writers[place]) + 1) % plan.num_tokens
                assert ranks.judge(rank, declaration, plan) != []
