"""Reads what the scheduler plans with its KV connector, and what the connector says has come of it.

One connector is read, the one that the scheduler has: what a MultiConnector leaves to which of its own is its affair.

Source (0.32): ``vllm/v1/core/sched/scheduler.py``, ``vllm/v1/outputs.py`` (``KVConnectorOutput``) and
``vllm/distributed/kv_transfer/kv_connector/v1/base.py``.
"""

from __future__ import annotations

from typing import Any

from ..facts.connector import ConnectorPlan, ConnectorResult, PlannedReceive, TakenUp
from ..facts.requests import BlockIds
from .ledger import Seam
from .wrapping import around

PLANNER = "_kvscope_planner"
"""Attribute by which a scheduler and its connector carry the reader of what is planned."""

_WAITING = "WAITING_FOR_REMOTE_KVS"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


class PlanReader:
    """Gathers what one ``schedule()`` has the connector load; whether a request waits for it is known at its end."""

    def __init__(self, observer: Any, scheduler: Any) -> None:
        self.observer = observer
        self.admitted: list[tuple[Any, int, BlockIds]] = []
        for host in (scheduler, scheduler.connector):
            setattr(host, PLANNER, self)

    def on_native_error(self, boundary: str, error_type: str) -> None:
        self.observer.on_native_error(boundary, error_type)


def connector_seams() -> tuple[Seam, ...]:
    """Installed where there is a connector, each in EngineCore."""
    lost = "what a connector reports has no plan to be held against"
    return (
        Seam(
            "connector.alloc",
            f"{_CONNECTOR}.update_state_after_alloc",
            "connector",
            around(after=after_alloc, carrier=PLANNER),
            fact="which tokens of an admitted request the connector is to load, and into which blocks",
            lost=lost,
            needs=("request", "blocks", "num_external_tokens"),
            interface=True,
        ),
        Seam(
            "connector.plan",
            f"{_SCHEDULER}._build_kv_connector_meta",
            "connector",
            around(after=after_build_meta, carrier=PLANNER),
            fact="the end of a step's plan for the connector",
            lost=lost,
        ),
        Seam(
            "connector.finished",
            f"{_SCHEDULER}._connector_finished",
            "connector",
            around(after=after_connector_finished, carrier=PLANNER),
            fact="finished requests whose blocks the connector keeps until they are sent",
            lost=lost,
            needs=("request",),
        ),
    )


def after_alloc(reader: PlanReader, connector: Any, args: Any, kwargs: Any, result: Any) -> None:
    request, blocks, tokens = _alloc_arguments(*args, **kwargs)
    if tokens > 0:
        reader.admitted.append((request, tokens, blocks.get_block_ids()))


def _alloc_arguments(request: Any, blocks: Any, num_external_tokens: int) -> tuple[Any, Any, int]:
    return request, blocks, num_external_tokens


def after_build_meta(reader: PlanReader, scheduler: Any, args: Any, kwargs: Any, result: Any) -> None:
    if reader.admitted:
        admitted, reader.admitted = reader.admitted, []
        receives = [
            PlannedReceive(
                request_id=request.request_id,
                computed_tokens=request.num_computed_tokens,
                external_tokens=tokens,
                waits=request.status.name == _WAITING,
                blocks=blocks,
            )
            for request, tokens, blocks in admitted
        ]
        reader.observer.on_connector_plan(ConnectorPlan(receives=receives))


def after_connector_finished(reader: PlanReader, scheduler: Any, args: Any, kwargs: Any, result: Any) -> None:
    if result[0]:
        request = args[0] if args else kwargs["request"]
        reader.observer.on_connector_plan(ConnectorPlan(sends=[request.request_id]))


def says_something(transfers: Any) -> bool:
    """Whether a ``KVConnectorOutput`` names a request or a block; most are empty, or have statistics."""
    return bool(
        transfers.finished_recving
        or transfers.finished_sending
        or transfers.invalid_block_ids
        or transfers.failed_recving
    )


def read_connector_result(scheduler: Any, transfers: Any) -> ConnectorResult:
    """The sets of a ``KVConnectorOutput``, each in order."""
    sent, received = sorted(transfers.finished_sending or ()), sorted(transfers.finished_recving or ())
    return ConnectorResult(
        finished_sending=sent,
        finished_recving=received,
        failed_recving=sorted(transfers.failed_recving or ()),
        invalid_blocks=sorted(transfers.invalid_block_ids or ()),
        unknown=[name for name in dict.fromkeys([*received, *sent]) if name not in scheduler.requests],
    )


def read_taken_up(scheduler: Any, request_ids: list[str]) -> list[TakenUp]:
    """Where these requests stand now."""
    marked, taken_up = scheduler.failed_recving_kv_req_ids, []
    for name in request_ids:
        request = scheduler.requests.get(name)
        is_over = request is None or request.is_finished()
        taken_up.append(
            TakenUp(
                request_id=name,
                is_over=is_over,
                is_marked=name in marked,
                computed_tokens=0 if request is None else request.num_computed_tokens,
            )
        )
    return taken_up
