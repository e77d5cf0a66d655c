"""Records made straight of an agreed plan are those of its snapshot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from kvscope.events import codec
from kvscope.events.names import PLAIN, RequestNames
from kvscope.events.plan_schema import ReadRecord, WriteRecord
from kvscope.facts.plans import AgreedPlan
from unit.events import samples

EVERY_MODE = [PLAIN, RequestNames("hashed", b"0123456789abcdef"), RequestNames("omitted")]


def assert_as_of_the_snapshot(plan: AgreedPlan, names: RequestNames) -> tuple[WriteRecord, ReadRecord]:
    made = codec.agreed_records(plan, names)
    expected = codec.write_read_records(plan.snapshot(), names)
    assert samples.same(list(made), list(expected))
    assert list(map(codec.encode, made)) == list(map(codec.encode, expected))
    return made


@given(samples.agreed_plans(), st.sampled_from(EVERY_MODE))
def test_the_records_of_an_agreed_plan_are_those_of_its_snapshot(plans: list[AgreedPlan], names: RequestNames) -> None:
    for plan in plans:
        assert_as_of_the_snapshot(plan, names)


@given(samples.agreed_plans())
def test_an_agreed_plan_comes_back_equal(plans: list[AgreedPlan]) -> None:
    for plan in plans:
        plan.request_ids = [f"r-{row}" for row in range(len(plan.computed))]
        assert samples.same(codec.snapshot_from(*codec.agreed_records(plan)), plan.snapshot())


@pytest.mark.parametrize("beyond", [0, 2])
@pytest.mark.parametrize("skipped", [0, 3])
def test_what_is_zero_throughout_is_left_out_and_one_group_with_more_brings_all(beyond: int, skipped: int) -> None:
    plan = samples.agreed_decode_batch(beyond=beyond, skipped=skipped)
    _, read = assert_as_of_the_snapshot(plan, PLAIN)
    assert read.tail_ignored == ([[0] * 8, [beyond] * 8] if beyond else UNSET)
    assert read.window_skipped == ([[0] * 8, [skipped] * 8] if skipped else UNSET)


def test_what_steps_share_is_made_once() -> None:
    plan = samples.agreed_decode_batch()
    _, first = codec.agreed_records(plan)
    plan.computed = [position + 1 for position in plan.computed]
    _, second = assert_as_of_the_snapshot(plan, PLAIN)
    assert second.digest[0] is first.digest[0]
    assert second.blocks_needed[0] is first.blocks_needed[0]
