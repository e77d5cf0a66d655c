"""What is kept of a plan: enough to replay every check, and nothing of the host's own buffers."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.budget import examples

from kvscope.checks.plan_view import StepView
from kvscope.facts.digest import column_weights
from kvscope.facts.plans import Plan, PlanSnapshot
from kvscope.runtime.snapshots import take_snapshot
from kvscope.state.batches import BatchTable
from kvscope.state.bindings import Bindings
from unit.checks.scenes import Scene, decoding
from unit.checks.worlds import LAYOUTS, World, blocks_for, copied, first_visible
from unit.events.samples import same


def snapshot_of(scene: Scene, declaration: Any, plan: Plan, *, spell: bool = False) -> PlanSnapshot:
    step = StepView(plan, declaration, scene.bindings)
    return take_snapshot(step, [step.group(batch) for batch in scene.batches], spell_tables=spell)


def damaged(change: Any = None, *, spell: bool = False) -> PlanSnapshot:
    scene, declaration = decoding()
    plan = scene.plan(declaration)
    if change is not None:
        change(plan)
    return snapshot_of(scene, declaration, plan, spell=spell)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 8), spell=st.booleans())
def test_a_snapshot_says_what_the_plan_said(layout: str, seed: int, steps: int, spell: bool) -> None:
    world = World(seed, LAYOUTS[layout])
    bindings = Bindings(world.topology)
    batches = [BatchTable(bindings, index) for index in range(len(world.groups))]
    for _ in range(steps):
        declaration = world.step()
        bindings.apply(declaration.requests)
        if not declaration.requests.scheduled:
            continue
        plan = world.plan(declaration)
        step = StepView(plan, declaration, bindings)
        snapshot = take_snapshot(step, [step.group(batch) for batch in batches], spell_tables=spell)
        requests = [world.live[name] for name in plan.request_ids]
        assert snapshot.request_ids == plan.request_ids
        assert snapshot.query_lens.tolist() == [r.declared - r.computed for r in requests]
        assert snapshot.first_positions.tolist() == [r.computed for r in requests]
        assert snapshot.last_positions.tolist() == [r.declared - 1 for r in requests]
        assert snapshot.computed.tolist() == [r.computed for r in requests]
        assert snapshot.seq_lens.tolist() == [r.declared for r in requests]
        assert snapshot.positions is None
        for index, group in enumerate(snapshot.groups):
            of, handed = world.groups[index], plan.groups[index]
            first = [first_visible(of, r.computed) for r in requests]
            needed = [blocks_for(r.declared, of.block_size) for r in requests]
            assert group.slots.tolist() == handed.slots[: plan.num_tokens].tolist()
            assert group.padding_slots == len(handed.slots) - plan.num_tokens
            assert group.padding_enabled.size == 0
            assert (group.window_skipped.tolist(), group.blocks_needed.tolist()) == (first, needed)
            seen = [r.tables[index][f:n] for r, f, n in zip(requests, first, needed, strict=True)]
            assert {row: entries.tolist() for row, entries in group.tables.items()} == (
                dict(enumerate(seen)) if spell else {}
            )
            weights = column_weights(max(needed)).tolist()
            assert group.digests.tolist() == [
                sum(block * weights[f + i] for i, block in enumerate(entries)) % 2**64
                for f, entries in zip(first, seen, strict=True)
            ]


@pytest.mark.parametrize("spell", [False, True])
def test_nothing_of_the_hosts_buffers_is_kept(spell: bool) -> None:
    scene, declaration = decoding()
    plan = scene.plan(declaration)
    plan.groups[0].slots[3] = 7
    plan.groups[0].tables[0, 0] = 50
    snapshot = snapshot_of(scene, declaration, plan, spell=spell)
    again = snapshot_of(scene, declaration, copied(plan), spell=spell)
    for array in (plan.query_start, plan.positions, plan.seq_lens):
        array[:] = 77
    for group in plan.groups:
        for array in (group.tables, group.table_blocks, group.slots):
            array[:] = 77
    plan.request_ids.clear()
    assert same(snapshot, again)


def test_a_table_that_differs_is_spelled_out_and_has_its_own_digest() -> None:
    sound, other = damaged(), damaged(lambda plan: plan.groups[0].tables.__setitem__((1, 2), 50))
    assert {row: entries.tolist() for row, entries in other.groups[0].tables.items()} == {1: [4, 5, 50]}
    assert (sound.groups[0].digests == other.groups[0].digests).tolist() == [True, False]


def test_enabled_padding_is_kept() -> None:
    group = damaged(lambda plan: plan.groups[0].slots.__setitem__(3, 7)).groups[0]
    assert (group.padding_slots, group.padding_enabled.tolist()) == (3, [7])


def test_positions_that_are_no_run_are_kept_one_by_one() -> None:
    snapshot = damaged(lambda plan: plan.positions.__setitem__(0, 3))
    assert snapshot.positions is not None
    assert snapshot.positions.tolist() == [3, 40]


def test_estimated_positions_are_kept_one_by_one() -> None:
    def estimated(plan: Plan) -> None:
        plan.exact = False

    snapshot = damaged(estimated)
    assert snapshot.positions is not None
    assert not snapshot.exact


@pytest.mark.parametrize("starts", [[0, 1, 1], [0, 2, 2], [0, 0, 2], [0, 9, 2], [1, 1, 2], [0, 1, 9]])
def test_offsets_that_do_not_cover_the_batch_are_kept_as_they_were(starts: list[int]) -> None:
    snapshot = damaged(lambda plan: plan.query_start.__setitem__(slice(None), starts))
    assert snapshot.query_lens.tolist() == np.diff(starts).tolist()
    assert msgspec.structs.asdict(snapshot)["num_tokens"] == 2


def test_a_short_table_keeps_its_length() -> None:
    snapshot = damaged(lambda plan: plan.groups[0].table_blocks.__setitem__(0, 1))
    assert snapshot.groups[0].table_blocks.tolist() == [1, 3]
    assert {row: entries.tolist() for row, entries in snapshot.groups[0].tables.items()} == {}
