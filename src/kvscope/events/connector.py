"""kv.boundary of kinds ``connector_plan`` and ``connector_result``: facts.connector to records and back.

A load outside of any step that has ended in some blocks is a ``connector_result`` as well; ``events.pool`` has that.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UnsetType

from kvscope.events.connector_schema import ReceiveInfo, TakenUpInfo
from kvscope.events.envelope import Runs, given
from kvscope.events.names import PLAIN, RequestNames, known
from kvscope.events.pool import CONNECTOR_RESULT
from kvscope.events.ranges import from_ranges, from_run, to_ranges, to_run
from kvscope.events.schema import BoundaryRecord
from kvscope.facts.connector import ConnectorPlan, ConnectorResult, PlannedReceive, TakenUp

CONNECTOR_PLAN = "connector_plan"


def connector_plan_record(plan: ConnectorPlan, names: RequestNames = PLAIN) -> BoundaryRecord:
    receives = [
        ReceiveInfo(
            request_id=names(receive.request_id),
            num_computed_tokens=receive.computed_tokens,
            external_tokens=receive.external_tokens,
            waits=receive.waits,
            blocks=[to_ranges(group) for group in receive.blocks],
        )
        for receive in plan.receives
    ]
    return BoundaryRecord(kind=CONNECTOR_PLAN, receives=receives, sends=names.of(plan.sends))


def connector_plan_from(record: BoundaryRecord) -> ConnectorPlan:
    """
    Raises:
        ValueError: the trace was written without request ids.
    """
    receives = [
        PlannedReceive(
            request_id=known(info.request_id),
            computed_tokens=info.num_computed_tokens,
            external_tokens=info.external_tokens,
            waits=info.waits,
            blocks=tuple(from_ranges(group) for group in info.blocks),
        )
        for info in given(record.receives, [])
    ]
    return ConnectorPlan(receives=receives, sends=[known(name) for name in given(record.sends, [])])


def connector_result_record(result: ConnectorResult, names: RequestNames = PLAIN) -> BoundaryRecord:
    return BoundaryRecord(
        kind=CONNECTOR_RESULT,
        finished_sending=names.of(result.finished_sending),
        finished_recving=names.of(result.finished_recving),
        failed_recving=names.of(result.failed_recving),
        invalid_blocks=to_run(result.invalid_blocks),
        unknown_requests=names.of(result.unknown),
    )


def connector_result_from(record: BoundaryRecord) -> ConnectorResult | None:
    """None if the record says something else of what came through the connector.

    Raises:
        ValueError: the trace was written without request ids.
    """
    if isinstance(record.finished_recving, UnsetType):
        return None
    invalid: Runs = [] if isinstance(record.invalid_blocks, UnsetType) else record.invalid_blocks
    return ConnectorResult(
        finished_sending=[known(name) for name in given(record.finished_sending, [])],
        finished_recving=[known(name) for name in record.finished_recving],
        failed_recving=[known(name) for name in given(record.failed_recving, [])],
        invalid_blocks=from_run(invalid),
        unknown=[known(name) for name in given(record.unknown_requests, [])],
    )


def taken_up_record(taken_up: Sequence[TakenUp], names: RequestNames = PLAIN) -> BoundaryRecord:
    return BoundaryRecord(
        kind=CONNECTOR_RESULT,
        taken_up=[
            TakenUpInfo(
                request_id=names(request.request_id),
                is_over=request.is_over,
                is_marked=request.is_marked,
                num_computed_tokens=request.computed_tokens,
            )
            for request in taken_up
        ],
    )


def taken_up_from(record: BoundaryRecord) -> list[TakenUp] | None:
    """None if the record says something else of what came through the connector.

    Raises:
        ValueError: the trace was written without request ids.
    """
    if isinstance(record.taken_up, UnsetType):
        return None
    return [
        TakenUp(
            request_id=known(info.request_id),
            is_over=info.is_over,
            is_marked=info.is_marked,
            computed_tokens=info.num_computed_tokens,
        )
        for info in record.taken_up
    ]
