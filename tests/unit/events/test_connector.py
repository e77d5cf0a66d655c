"""What was planned with a connector, and what it reported, as records and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from kvscope.analysis.pool import pool_operation
from kvscope.events import codec
from kvscope.events.connector import connector_plan_from, connector_result_from, taken_up_from
from kvscope.events.names import RequestNames
from kvscope.events.schema import BoundaryRecord
from kvscope.facts.allocator import RECEIVE, PoolOperation
from kvscope.facts.connector import ConnectorPlan, ConnectorResult, PlannedReceive, TakenUp
from unit.events.samples import counts, ids
from unit.events.wire import through_a_line

names = st.lists(ids, max_size=4)
blocks = st.lists(st.integers(0, 1 << 20), max_size=6)
receives = st.builds(
    PlannedReceive,
    request_id=ids,
    computed_tokens=counts,
    external_tokens=counts,
    waits=st.booleans(),
    blocks=st.lists(blocks, min_size=1, max_size=3).map(tuple),
)
plans = st.builds(ConnectorPlan, receives=st.lists(receives, max_size=3), sends=names)
results = st.builds(
    ConnectorResult,
    finished_sending=names,
    finished_recving=names,
    failed_recving=names,
    invalid_blocks=blocks,
    unknown=names,
)
stands = st.builds(TakenUp, request_id=ids, is_over=st.booleans(), is_marked=st.booleans(), computed_tokens=counts)


def line(kind: str, fact: object) -> BoundaryRecord:
    record = through_a_line(codec.boundary_record(kind, fact))
    assert isinstance(record, BoundaryRecord)
    return record


@given(plans, results, st.lists(stands, max_size=3))
def test_they_come_back_equal(plan: ConnectorPlan, result: ConnectorResult, taken_up: list[TakenUp]) -> None:
    assert connector_plan_from(line("connector_plan", plan)) == plan
    said = line("connector_result", result)
    assert (connector_result_from(said), taken_up_from(said), pool_operation(said)) == (result, None, None)
    became = line("connector_taken_up", taken_up)
    assert (connector_result_from(became), taken_up_from(became), pool_operation(became)) == (None, taken_up, None)
    assert said.kind == became.kind == "connector_result"


def test_a_load_that_has_ended_in_blocks_is_of_the_same_kind_and_something_else() -> None:
    receive = PoolOperation(kind=RECEIVE, block_ids=[3, 4], request_id="r", group_id=0, filled=[16, 8])
    record = through_a_line(codec.operation_record(receive))
    assert record.kind == "connector_result"
    assert pool_operation(record) == receive
    assert (connector_result_from(record), taken_up_from(record), record.finished_recving) == (None, None, UNSET)


def test_without_request_ids_nothing_of_it_can_be_judged_again() -> None:
    omitted = RequestNames("omitted", b"")
    plan = ConnectorPlan(sends=["r"])
    result = ConnectorResult(finished_recving=["r"])
    with pytest.raises(ValueError, match="omitted"):
        connector_plan_from(codec.boundary_record("connector_plan", plan, omitted))
    with pytest.raises(ValueError, match="omitted"):
        connector_result_from(codec.boundary_record("connector_result", result, omitted))
