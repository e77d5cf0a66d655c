"""A sound engine beside a sound pool causes nothing; a wrong plan is told as without the pool, and more."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.budget import examples

from kvscope.checks.catalog import RULES
from kvscope.checks.finding import Finding
from kvscope.checks.generation import GENERATION_RULES
from kvscope.checks.initialized import INITIALIZED_RULES
from kvscope.checks.judge import judge_bind, judge_content, judge_plan, judge_pool, judge_settled
from kvscope.checks.ownership import OWNERSHIP_RULES
from kvscope.checks.plan_view import StepView
from kvscope.facts.plans import Plan
from kvscope.facts.requests import Declaration
from kvscope.state.batches import BatchTable
from kvscope.state.bindings import Bindings
from kvscope.state.blocks import BlockLedger
from kvscope.state.legality import Legality
from unit.checks.changes import CHANGES
from unit.checks.scenes import PARTS
from unit.checks.worlds import LAYOUTS, NULL, World, copied

OF_THE_POOL = {f.rule.reason for f in (*GENERATION_RULES, *OWNERSHIP_RULES, *INITIALIZED_RULES)}


class Beside:
    """One engine, all of whose sides are judged."""

    def __init__(self, seed: int, layout: str) -> None:
        self.world = World(seed, LAYOUTS[layout])
        topology = self.world.topology
        self.bindings = Bindings(topology, doubts=True)
        self.ledger = BlockLedger(topology.num_blocks, topology.null_block_id)
        self.legality = Legality(topology, self.ledger, self.bindings)
        self.batches = [BatchTable(self.bindings, index) for index in range(len(topology.groups))]

    def step(self, *, decode_only: bool = False) -> tuple[Declaration, Plan | None]:
        """The next step, of which nothing is found before its plan is there."""
        declaration = self.world.step(decode_only=decode_only)
        for operation in self.world.calls:
            assert judge_pool(operation, self.ledger, declaration.trace_id, PARTS) == []
            self.legality.take(operation)
            assert judge_settled(operation, self.ledger, declaration.trace_id, PARTS) == []
        self.bindings.apply(declaration.requests)
        self.legality.advance(declaration)
        assert judge_bind(declaration, self.bindings, PARTS) == []
        assert judge_content(declaration, self.legality, PARTS) == []
        self.legality.end_finished()
        assert not self.legality.doubtful
        plan = self.world.plan(declaration) if declaration.requests.scheduled else None
        return declaration, plan

    def judge(self, declaration: Declaration, plan: Plan, *, with_pool: bool = True) -> list[Finding]:
        sides = (self.ledger, self.legality) if with_pool else (None, None)
        step = StepView(plan, declaration, self.bindings, *sides)
        return judge_plan(step, [step.group(batch) for batch in self.batches], PARTS)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=examples(50), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 25), lag=st.integers(0, 2))
def test_a_sound_engine_beside_a_sound_pool_causes_no_finding(layout: str, seed: int, steps: int, lag: int) -> None:
    """Results come ``lag`` steps late. The rules are run on every plan, asked or not."""
    engine = Beside(seed, layout)
    running: list[Declaration] = []
    for _ in range(steps):
        declaration, plan = engine.step()
        if plan is not None:
            assert engine.judge(declaration, plan) == []
            step = StepView(plan, declaration, engine.bindings, engine.ledger, engine.legality)
            views = [step.group(batch) for batch in engine.batches]
            rules = (*GENERATION_RULES, *OWNERSHIP_RULES, *INITIALIZED_RULES)
            assert [finding for rule in rules for view in views for finding in rule(view)] == []
            running.append(declaration)
        while len(running) > lag:
            engine.legality.confirm(running.pop(0), None)


def said(findings: list[Finding]) -> set[tuple[str, object, object]]:
    return {(reason, f.group_id, f.request_id) for f in findings for reason in (f.reason, *f.also)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CHANGES)
@settings(max_examples=examples(12), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(2, 10))
def test_what_is_wrong_is_said_as_without_the_pool_and_more(name: str, layout: str, seed: int, steps: int) -> None:
    engine = Beside(seed, layout)
    rng = random.Random(seed)
    for _ in range(steps):
        declaration, plan = engine.step()
        if plan is None:
            continue
        changed = copied(plan)
        if not CHANGES[name](engine.world, changed, rng.randrange(len(engine.world.groups)), rng):
            continue
        bare, whole = engine.judge(declaration, changed, with_pool=False), engine.judge(declaration, changed)
        assert {entry for entry in said(whole) if entry[0] not in OF_THE_POOL} == said(bare)
        assert len(whole) == len(bare)
        for finding in whole:
            fitting = [RULES[reason].rank for reason in (finding.reason, *finding.also)]
            assert fitting == sorted(fitting)
            if finding.reason in OF_THE_POOL:
                assert finding.block_id is not None
                assert finding.generation == engine.ledger.generation_of([finding.block_id])[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(3, 14), reads=st.booleans())
def test_a_block_that_was_released_is_told_as_that(layout: str, seed: int, steps: int, reads: bool) -> None:
    engine = Beside(seed, layout)
    rng = random.Random(seed)
    for _ in range(steps):
        declaration, plan = engine.step()
    released = [b for b in engine.world.free if b != NULL and engine.ledger.generation_of([b])[0] > 0]
    if plan is None or not released:
        return
    name = "entry: free" if reads else "slot: free block"
    engine.world.free = released
    if CHANGES[name](engine.world, plan, 0, rng):
        (finding,) = engine.judge(declaration, plan)
        assert finding.reason == ("read_after_release" if reads else "write_after_release")
        history = engine.ledger.history(finding.block_id or 0)
        assert history is not None
        assert finding.other_request_id == (None if history.freed_by == finding.request_id else history.freed_by)
        assert f"freed in step {history.freed_step} ({history.freed_cause})" in str(finding.actual)
