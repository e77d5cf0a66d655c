"""The shortcut for decoding batches says yes exactly where all rules are silent, and keeps what a snapshot would."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.budget import examples

from kvscope.checks.agreement import Agreement
from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_batch, judge_plan
from kvscope.checks.plan_view import StepView
from kvscope.checks.rule import Part
from kvscope.facts.plans import AgreedPlan, GroupPlan, Plan, PlanSnapshot
from kvscope.facts.requests import Declaration, StepRequests
from kvscope.facts.topology import SLIDING_WINDOW, Topology
from kvscope.runtime.selection import judged_rows
from kvscope.runtime.snapshots import take_snapshot
from kvscope.state.batches import BatchTable
from kvscope.state.bindings import Bindings
from kvscope.state.followers import Follower
from unit.checks.changes import CHANGES, Change
from unit.checks.scenes import ONE_GROUP, Scene, decoding
from unit.checks.worlds import LAYOUTS, World, copied, group, pool
from unit.events.samples import same

PARTS: tuple[Part, ...] = ("kv_trace", "kv_guard_config")


def tables_of(bindings: Bindings) -> list[BatchTable]:
    return [BatchTable(bindings, index) for index, of in enumerate(bindings.topology.groups) if of.judged]


def followers_of(bindings: Bindings) -> list[Follower]:
    return [Follower(bindings, index) for index, of in enumerate(bindings.topology.groups) if of.judged]


def in_full(
    bindings: Bindings, tables: list[BatchTable], declaration: Declaration, plan: Plan
) -> tuple[list[Finding], PlanSnapshot | None]:
    """The way without the shortcut, as a worker goes it: every rule, and the snapshot."""
    findings = judge_batch(declaration, plan, PARTS)
    judged = judged_rows(plan, declaration, bindings)
    if not judged.request_ids:
        return findings, None
    step = StepView(judged, declaration, bindings)
    groups = step.groups(tables)
    findings += judge_plan(step, groups, PARTS)
    return findings, take_snapshot(step, groups, spell_tables=False)


class Both:
    """A worker whose tables are kept from step to step, and one that looks at every plan as if it were its first."""

    def __init__(self, topology: Topology) -> None:
        self.kept = Bindings(topology)
        self.tables = tables_of(self.kept)
        self.agreement = Agreement(self.kept, followers_of(self.kept))
        self.anew = Bindings(topology)
        self.queued: list[tuple[AgreedPlan, PlanSnapshot]] = []

    def take_over(self, declaration: Declaration) -> None:
        self.kept.apply(declaration.requests)
        self.anew.apply(declaration.requests)
        assert self.anew.computed.shape == self.anew.seq_lens.shape  # looked at in every step

    def judge(self, declaration: Declaration, plan: Plan) -> AgreedPlan | None:
        """What the shortcut says; checked against the way in full, which the kept tables go too where it says no."""
        findings, expected = in_full(self.anew, tables_of(self.anew), declaration, plan)
        agreed = self.agreement.of(plan, declaration)
        if agreed is None:
            kept_findings, kept_snapshot = in_full(self.kept, self.tables, declaration, plan)
            assert same(kept_findings, findings)
            assert kept_snapshot is None or same(kept_snapshot, expected)
        else:
            assert findings == []
            assert expected is not None
            self.queued.append((agreed, expected))
            if len(self.queued) % 2:  # the rest is spelled out at the end, when the tables have gone on
                assert same(agreed.snapshot(), expected)
        if plan.exact and plan.request_ids:
            assert (agreed is not None) is (findings == [])
        return agreed

    def end(self) -> None:
        """What was queued early still says what it said."""
        for agreed, expected in self.queued:
            assert same(agreed.snapshot(), expected)


def is_decoding(declaration: Declaration) -> bool:
    return set(declaration.requests.scheduled.values()) == {1}


# Further ways in which a plan can differ, and some that mean nothing --------------------------------------------------


def anywhere_in_a_table(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    """Also where nothing looks: then nothing may be said."""
    tables = plan.groups[index].tables
    tables[rng.randrange(tables.shape[0]), rng.randrange(tables.shape[1])] = rng.randint(-2, world.num_blocks + 2)
    return True


def another_block_count(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    counts = plan.groups[index].table_blocks
    counts[rng.randrange(len(counts))] += rng.choice([-1, 1, 7])
    return True


def narrower_or_wider_tables(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    of = plan.groups[index]
    by = rng.choice([-2, -1, 1, 30])
    if of.tables.shape[1] + by < 1:
        return False
    of.tables = of.tables[:, :by] if by < 0 else np.pad(of.tables, ((0, 0), (0, by)), constant_values=9)
    return True


def more_padding(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    of = plan.groups[index]
    of.slots = np.concatenate((of.slots, np.full(rng.randint(1, 9), -1)))
    return True


def a_query_start(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    plan.query_start[rng.randrange(len(plan.query_start))] += rng.choice([-1, 1])
    return True


def names_exchanged(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    """As if the runner had mixed up which row is whose."""
    if len(plan.request_ids) < 2:
        return False
    one, other = rng.sample(range(len(plan.request_ids)), 2)
    plan.request_ids[one], plan.request_ids[other] = plan.request_ids[other], plan.request_ids[one]
    return True


def a_name_twice(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    if len(plan.request_ids) < 2:
        return False
    one, other = rng.sample(range(len(plan.request_ids)), 2)
    plan.request_ids[one] = plan.request_ids[other]
    return True


def a_row_twice(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    """One request's row stands where another's should: it agrees with itself in everything."""
    if len(plan.request_ids) < 2 or plan.num_tokens != len(plan.request_ids):
        return False
    one, other = rng.sample(range(len(plan.request_ids)), 2)
    plan.request_ids[one] = plan.request_ids[other]
    for array in (plan.positions, plan.seq_lens, *(a for of in plan.groups for a in (of.tables, of.table_blocks))):
        array[one] = array[other]
    for of in plan.groups:
        of.slots[one] = of.slots[other]
    return True


def a_name_that_nobody_has(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    plan.request_ids[rng.randrange(len(plan.request_ids))] = "nobody"
    return True


def a_row_left_out(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    rows = len(plan.request_ids)
    if rows < 2 or plan.num_tokens != rows:
        return False
    gone = rng.randrange(rows)
    del plan.request_ids[gone]
    plan.query_start = plan.query_start[:-1]
    plan.positions, plan.seq_lens = np.delete(plan.positions, gone), np.delete(plan.seq_lens, gone)
    plan.num_tokens -= 1
    for of in plan.groups:
        of.tables, of.table_blocks = np.delete(of.tables, gone, axis=0), np.delete(of.table_blocks, gone)
        of.slots = np.delete(of.slots, gone)
    return True


def a_group_left_out(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    del plan.groups[index]
    return True


def estimated(world: World, plan: Plan, index: int, rng: random.Random) -> bool:
    plan.exact = False
    return True


FURTHER: tuple[Change, ...] = (
    anywhere_in_a_table,
    another_block_count,
    narrower_or_wider_tables,
    more_padding,
    a_query_start,
    names_exchanged,
    a_name_twice,
    a_row_twice,
    a_name_that_nobody_has,
    a_row_left_out,
    a_group_left_out,
    estimated,
)
ALL: dict[str, Change] = {**CHANGES, **{change.__name__: change for change in FURTHER}}

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["steady", "steady", "steady", "others come and go"]),
        st.sampled_from(["kept", "kept", "shuffled", "by name"]),
        st.none() | st.none() | st.sampled_from(sorted(ALL)),
        st.booleans(),
    ),
    min_size=1,
    max_size=24,
)


def in_order(world: World, declaration: Declaration, order: str) -> Plan:
    """V1 keeps its rows, V2 sorts them anew in every step."""
    if order == "by name":
        declaration = msgspec.structs.replace(declaration, requests=declaration.requests.copy())
        scheduled = declaration.requests.scheduled
        declaration.requests.scheduled = {name: scheduled[name] for name in sorted(scheduled)}
    return world.plan(declaration, shuffle=order == "shuffled")


def with_live_requests(seed: int, layout: str, chunk: int) -> tuple[World, Both]:
    world = World(seed, LAYOUTS[layout], chunk=chunk)
    both = Both(world.topology)
    while len(world.live) < 3:
        both.take_over(world.step())
    return world, both


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=examples(120), deadline=None)
@given(seed=st.integers(0, 2**32), steps=STEPS, chunk=st.sampled_from([1, 1, 3, 48]))
def test_the_shortcut_agrees_exactly_where_all_rules_are_silent(
    layout: str, seed: int, steps: list[tuple[str, str, str | None, bool]], chunk: int
) -> None:
    """Over steps in which requests leave, join and come back, in any order of rows; with and without one change."""
    world, both = with_live_requests(seed, layout, chunk)
    rng = random.Random(seed)
    for kind, order, name, sound_too in steps:
        declaration = world.step(decode_only=kind == "steady")
        both.take_over(declaration)
        if not declaration.requests.scheduled:
            continue
        plan = in_order(world, declaration, order)
        if name is not None:
            changed = copied(plan)
            if ALL[name](world, changed, rng.randrange(len(world.groups)), rng):
                event(f"{name}: {'silent' if both.judge(declaration, changed) else 'not agreed'}")
        if name is None or sound_too:
            assert both.judge(declaration, plan) is not None
    both.end()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", sorted(ALL))
@settings(max_examples=examples(12), deadline=None)
@given(seed=st.integers(0, 2**32), before=st.integers(0, 40))
def test_one_change_after_long_steady_decoding_is_not_agreed_to(name: str, layout: str, seed: int, before: int) -> None:
    """Every step agreed, through new blocks and appended ones; then the change; then agreement again."""
    world, both = with_live_requests(seed, layout, 48)
    rng = random.Random(seed)
    for number in range(before + 4):
        declaration = world.step(decode_only=True)
        both.take_over(declaration)
        if not declaration.requests.scheduled:
            return
        plan = world.plan(declaration, shuffle=False)
        if number == before:
            changed = copied(plan)
            ALL[name](world, changed, rng.randrange(len(world.groups)), rng)
            both.judge(declaration, changed)
        else:
            assert both.judge(declaration, plan) is not None
    both.end()


# Small scenes ---------------------------------------------------------------------------------------------------------


def agreed_in(scene: Scene, declaration: Declaration, plan: Plan) -> AgreedPlan | None:
    return scene.agreement.of(plan, declaration)


def test_what_did_not_change_is_shared_and_what_is_queued_does_not_change() -> None:
    scene, declaration = decoding()
    agreed = agreed_in(scene, declaration, scene.plan(declaration))
    assert agreed is not None
    before = copy.deepcopy(agreed.snapshot())
    kept = [agreed]
    for computed in range(41, 41 + 60):
        blocks = {48: ([7],), 64: ([8],), 70: ([20, 21, 22],)}.get(computed)
        others = {48: ([9],), 64: ([10],), 80: ([11, 12],)}.get(computed)
        declaration = scene.say(known=[("a", blocks, computed, 1), ("b", others, computed, 1)])
        now = agreed_in(scene, declaration, scene.plan(declaration))
        assert now is not None
        kept.append(now)
    assert same(agreed.snapshot(), before)
    assert len({id(of.groups[0]) for of in kept}) == 6, "one for each crossing, one for the appended blocks"
    assert kept[1].groups[0] is kept[7].groups[0]
    digests = kept[1].snapshot().groups[0].digests
    assert kept[7].snapshot().groups[0].digests is digests
    scene.say(finished=["a", "b"], new=[("c", ([30],), 0, 3)])
    assert same(agreed.snapshot(), before)


@pytest.mark.parametrize("fault", [0, 64, -1])
def test_a_row_that_grows_into_a_block_that_nothing_may_touch_is_not_agreed_to(fault: int) -> None:
    """The declaration and the plan say the same, and both are wrong."""
    scene, declaration = decoding()
    assert agreed_in(scene, declaration, scene.plan(declaration)) is not None
    for computed in range(41, 50):
        blocks = ([fault],) if computed == 48 else None
        declaration = scene.say(known=[("a", blocks, computed, 1), ("b", ([9],) if blocks else None, computed, 1)])
        plan = scene.plan(declaration)
        agreed = agreed_in(scene, declaration, plan)
        assert (agreed is not None) is (computed < 48)
        assert (scene.judge(declaration, plan) == []) is (computed < 48)


def test_a_declaration_that_falls_short_is_agreed_to_only_once_its_block_is_there() -> None:
    scene, declaration = decoding()
    assert agreed_in(scene, declaration, scene.plan(declaration)) is not None
    for computed in range(41, 56):
        blocks = {52: ([9],)}.get(computed)
        declaration = scene.say(known=[("a", blocks, computed, 1)])
        plan = scene.plan(declaration)
        agreed = agreed_in(scene, declaration, plan)
        silent = scene.judge(declaration, plan) == []
        assert silent is (computed < 48 or computed >= 52)
        if not silent:
            assert agreed is None
        if silent and computed != 52:  # in that very step the rules look, and find nothing
            assert agreed is not None


def test_a_block_that_is_left_over_in_the_row_from_an_earlier_request_is_nobodys() -> None:
    scene = Scene()
    scene.say(new=[("earlier", ([50, 51, 52, 53],), 0, 60)])
    scene.say(finished=["earlier"], new=[("a", ([1, 2, 3],), 0, 40)])
    for computed in range(40, 50):
        declaration = scene.say(known=[("a", None, computed, 1)])
        plan = scene.plan(declaration)
        if computed >= 48:  # a runner whose row was not cleared either
            plan.groups[0].tables[0, 3] = 53
            plan.groups[0].table_blocks[0] = 4
            plan.groups[0].slots[0] = 53 * 16 + computed - 48
        assert (agreed_in(scene, declaration, plan) is not None) is (computed < 48)


def test_a_row_that_goes_back_behind_a_block_it_had_grown_into_does_not_look_there_any_more() -> None:
    """As with rejected drafts. Its blocks were there all along, so that no declaration changes any table."""
    scene, _ = decoding()
    scene.say(known=[("a", ([7],), 41, 1), ("b", ([8],), 41, 1)])
    for computed in (46, 47, 48, 47, 48, 46):
        declaration = scene.say(known=[("a", None, computed, 1), ("b", None, computed, 1)])
        plan = scene.plan(declaration)
        if computed < 48:
            plan.groups[0].tables[:, 3] = 63
            plan.groups[0].table_blocks[:] = 3
        assert agreed_in(scene, declaration, plan) is not None


def test_two_rows_that_grow_into_one_block_are_not_agreed_to() -> None:
    scene, declaration = decoding()
    assert agreed_in(scene, declaration, scene.plan(declaration)) is not None
    for computed in range(41, 50):
        blocks = ([9],) if computed == 48 else None
        declaration = scene.say(known=[("a", blocks, computed, 1), ("b", blocks, computed, 1)])
        plan = scene.plan(declaration)
        assert (agreed_in(scene, declaration, plan) is not None) is (computed < 48)
        assert (scene.judge(declaration, plan) == []) is (computed < 48)


def test_a_request_that_goes_back_or_is_bound_anew_is_gathered_anew() -> None:
    scene, declaration = decoding(pool(group(0), group(1, SLIDING_WINDOW, 16, 20)))
    for known in (
        [("a", ([7], [17]), 48, 1), ("b", ([8], [18]), 48, 1)],
        [("a", None, 33, 1), ("b", None, 49, 1)],  # tokens were rejected
        [("a", None, 20, 1), ("b", None, 50, 1)],
        [("a", None, 60, 1), ("b", None, 51, 1)],
    ):
        declaration = scene.say(known=known)
        plan = scene.plan(declaration)
        assert scene.judge(declaration, plan) == []
        assert agreed_in(scene, declaration, plan) is not None
    old = scene.plan(declaration)
    declaration = scene.say(known=[("a", ([30, 31, 32, 33], [40, 41, 42, 43]), 60, 1), known[1]], resumed=["a"])
    assert agreed_in(scene, declaration, old) is None
    assert agreed_in(scene, declaration, scene.plan(declaration)) is not None


def test_after_a_plan_that_our_code_failed_on_the_next_is_looked_at_from_the_start() -> None:
    """The runner hands over once more what it should have handed over in the step that nobody saw to its end."""
    scene, declaration = decoding()
    assert agreed_in(scene, declaration, scene.plan(declaration)) is not None
    declaration = scene.say(known=[("a", None, 41, 1), ("b", None, 41, 1)])
    old, broken = scene.plan(declaration), scene.plan(declaration)
    broken.groups[0] = cast("GroupPlan", None)
    with pytest.raises(AttributeError):
        agreed_in(scene, declaration, broken)
    declaration = scene.say(known=[("a", None, 42, 1), ("b", None, 42, 1)])
    assert scene.bindings.is_steady
    assert agreed_in(scene, declaration, old) is None
    assert agreed_in(scene, declaration, scene.plan(declaration)) is not None


Said = Callable[[StepRequests], Any]


@pytest.mark.parametrize(
    "said",
    [
        lambda requests: requests.scheduled.update(a=2, b=0),
        lambda requests: requests.scheduled.update(b=2),
        lambda requests: requests.scheduled.update(ghost=1),
        lambda requests: (requests.scheduled.pop("b"), requests.scheduled.update(ghost=1)),
        lambda requests: (requests.scheduled.pop("b"), requests.scheduled.update(a=2)),
    ],
    ids=["same sum", "total is another", "one too many", "another one", "one listed only"],
)
def test_a_declaration_that_contradicts_itself_is_left_to_the_rules(said: Said) -> None:
    """The total and the list of requests agree with the plan; the counts of tokens, from which they come, do not."""
    scene, _ = decoding()
    declaration = scene.say(known=[("a", None, 41, 1), ("b", None, 41, 1)])
    plan = scene.plan(declaration)
    said(declaration.requests)
    assert scene.judge(declaration, plan) != []
    assert agreed_in(scene, declaration, plan) is None


def test_a_batch_with_a_request_whose_table_is_unknown_is_left_to_the_rules() -> None:
    scene, _ = decoding()
    scene.say(known=[("old", ([30],), 60, 1)])
    declaration = scene.say(known=[("a", None, 41, 1), ("b", None, 41, 1)])
    assert agreed_in(scene, declaration, scene.plan(declaration)) is None
    declaration = scene.say(known=[("a", None, 42, 1), ("b", None, 42, 1)], finished=["old"])
    assert agreed_in(scene, declaration, scene.plan(declaration)) is not None


def test_without_a_group_that_is_judged_a_batch_with_one_request_twice_is_left_to_the_rules() -> None:
    scene, declaration = decoding(pool(group(0, "mamba")))
    plan = scene.plan(declaration)
    plan.request_ids[1] = "a"
    assert scene.judge(declaration, plan) != []
    assert agreed_in(scene, declaration, plan) is None


def test_a_prompt_that_begins_in_the_middle_of_a_block_is_agreed_to_and_followed_from_there_on() -> None:
    scene = Scene(ONE_GROUP)
    for computed, tokens, blocks in ((0, 20, [1, 2]), (20, 29, [3, 4]), (49, 1, []), (50, 14, []), (64, 1, [5])):
        said = {"known" if computed else "new": [("a", (blocks,) if blocks else None, computed, tokens)]}
        declaration = scene.say(**said)
        agreed = agreed_in(scene, declaration, scene.plan(declaration))
        assert agreed is not None
        assert agreed.query_lens == (None if tokens == 1 else [tokens])


@pytest.mark.parametrize("counts", [(0, 2), (-1, 3)])
def test_a_declaration_of_less_than_one_token_is_left_to_the_rules(counts: tuple[int, int]) -> None:
    scene, _ = decoding()
    declaration = scene.say(known=[("a", None, 41, counts[0]), ("b", None, 41, counts[1])])
    plan = scene.plan(scene.say(known=[("a", None, 41, 1), ("b", None, 41, 1)]))
    assert agreed_in(scene, declaration, plan) is None
