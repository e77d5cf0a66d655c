"""Sound plans cause nothing, however they come about; one changed fact causes what follows from it and no more."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from tests.budget import examples

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
from unit.checks.changes import CHANGES
from unit.checks.reference import UnclearError, agree, described, reference
from unit.checks.worlds import LAYOUTS, World, copied

PARTS: tuple[Part, ...] = ("kv_trace", "kv_guard_config")


class Judge:
    """A worker's side: tables and batches live on from step to step, as they do in a process."""

    def __init__(self, world: World) -> None:
        self.bindings = Bindings(world.topology)
        self.batches = [BatchTable(self.bindings, index) for index in range(len(world.groups))]

    def judge(self, declaration: Declaration, plan: Plan) -> list[Finding]:
        step = StepView(plan, declaration, self.bindings)
        groups = step.groups(self.batches)
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
@settings(max_examples=examples(120), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 14))
def test_a_sound_engine_causes_no_finding(layout: str, seed: int, steps: int) -> None:
    world, judge = run(seed, layout)
    for _ in range(steps):
        declaration, plan = declared_and_planned(world, judge)
        if plan is not None:
            assert judge.judge(declaration, plan) == []
            assert reference(world, plan) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=examples(20), deadline=None)
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CHANGES)
@settings(max_examples=examples(25), deadline=None)
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


@settings(max_examples=examples(150), deadline=None)
@example(seed=29146, layout="full", steps=5)  # three tokens in one slot
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
