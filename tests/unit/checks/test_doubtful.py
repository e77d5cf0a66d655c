"""Declarations that are not looked at any closer are those about which no rule would say anything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.budget import examples

from kvscope.checks.judge import judge_bind
from kvscope.checks.rule import Part
from kvscope.facts.requests import BlockIds, Declaration
from kvscope.facts.topology import CHUNKED_LOCAL, SLIDING_WINDOW, Topology
from kvscope.state.bindings import Bindings
from unit.checks.scenes import Scene, declare
from unit.checks.worlds import LAYOUTS, World, group, pool
from unit.events.samples import same

PARTS: tuple[Part, ...] = ("kv_trace", "kv_guard_config")
POOL = 24
TOPOLOGIES = [
    pool(group(0), num_blocks=POOL),
    pool(group(0, SLIDING_WINDOW, 4, 6), num_blocks=POOL),
    pool(group(0, CHUNKED_LOCAL, 4, 8), group(1, block_size=8), num_blocks=POOL),
    pool(group(0, "mamba"), group(1, SLIDING_WINDOW, 4, 9), num_blocks=POOL),
    pool(group(0, "mamba"), num_blocks=POOL),
]
NAMES = ["a", "b", "c"]
BLOCK = st.integers(0, POOL - 1) | st.integers(1, POOL - 1) | st.sampled_from([-1, POOL, POOL + 1, 1 << 31, -(1 << 40)])


@st.composite
def declarations(draw: Any, topology: Topology) -> list[Declaration]:
    """Anything that a scheduler may say about three requests, mostly wrong."""
    said = []
    live: set[str] = set()
    for step in range(1, draw(st.integers(1, 6)) + 1):
        gone = draw(st.sets(st.sampled_from(NAMES), max_size=1)) & live
        live -= gone
        new, known, resumed = [], [], set()
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
            is_new = name not in live and draw(st.integers(0, 5)) > 0
            blocks: BlockIds | None = tuple(draw(st.lists(BLOCK, max_size=4)) for _ in topology.groups)
            most = 8 if is_new else 30
            numbers = (draw(st.integers(0, most)), draw(st.integers(1, 6)))
            if is_new:
                new.append((name, blocks, *numbers))
            else:
                if draw(st.booleans()) and name in live:
                    resumed.add(name)
                elif draw(st.booleans()):
                    blocks = None
                known.append((name, blocks, *numbers))
            live.add(name)
        way = draw(st.sampled_from(["finished", "preempted"]))
        said.append(declare(step, new=new, known=known, resumed=resumed, **{way: gone}))
    return said


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["full", "window", "chunks", "mixed", "no group"])
@settings(max_examples=examples(400), deadline=None)
@given(data=st.data())
def test_what_is_not_doubtful_has_no_finding(topology: Topology, data: st.DataObject) -> None:
    """And nothing is found otherwise by bindings that did not add up the tokens of the steps before."""
    looked, lazy = Bindings(topology), Bindings(topology, doubts=True)
    for declaration in data.draw(declarations(topology)):
        looked.apply(declaration.requests)
        lazy.apply(declaration.requests)
        findings = judge_bind(declaration, looked, PARTS)
        doubtful = lazy.doubtful
        assert doubtful or findings == []
        if doubtful:
            assert same(judge_bind(declaration, lazy, PARTS), findings)
        event(f"doubtful: {doubtful}, found: {bool(findings)}")


@pytest.mark.parametrize("layout", ["full", "mla"])
@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 25), chunk=st.sampled_from([1, 48]))
def test_a_sound_scheduler_is_not_doubted(layout: str, seed: int, steps: int, chunk: int) -> None:
    """Else the rules would run in every step: nothing would be wrong but the price."""
    world = World(seed, LAYOUTS[layout], chunk=chunk)
    bindings = Bindings(world.topology, doubts=True)
    for _ in range(steps):
        declaration = world.step()
        bindings.apply(declaration.requests)
        assert not bindings.doubtful


@pytest.mark.parametrize("block", [64, 1 << 31, 1 << 40, 1 << 70, -1, -(1 << 31) - 1, -(1 << 70)])
def test_a_block_beyond_any_pool_is_found_under_its_own_number_and_at_its_place(block: int) -> None:
    """Wider than what the tables hold; the blocks beside it stay what they are."""
    scene = Scene()
    assert scene.bound(new=[("a", ([1],), 0, 3)]) == []
    (finding,) = scene.bound(known=[("a", ([2, block, 3],), 3, 60)])
    assert (finding.reason, finding.block_id, finding.actual, finding.position) == (
        "bind_block_out_of_range", block, block, 32,
    )  # fmt: skip
    table = scene.bindings.table("a", 0).tolist()
    assert (table[:2], table[3]) == ([1, 2], 3)
    assert not 0 <= table[2] < 64
    assert scene.bound(known=[("a", None, 63, 1)]) == []
