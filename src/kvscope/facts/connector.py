"""What the scheduler planned with its KV connector, what the connector says has come of it, and what the scheduler made
of that.

Source (0.32): ``vllm/v1/core/sched/scheduler.py``, ``vllm/distributed/kv_transfer/kv_connector/v1/base.py`` and
``vllm/v1/outputs.py``, ``KVConnectorOutput``.
"""

from __future__ import annotations

import msgspec

from .requests import BlockIds

SENDING = "send"
RECEIVING = "receive"


class PlannedReceive(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request was admitted with tokens that a connector is to load.

    ``computed_tokens`` counts those that were found and those that are to be loaded; the last ``external_tokens`` of
    them are the latter. ``blocks`` is its whole table, one list a group. ``waits``: the load goes on between steps, and
    the request waits for it (``WAITING_FOR_REMOTE_KVS``); else it is done inside of the step that computes the request.
    """

    request_id: str
    computed_tokens: int
    external_tokens: int
    waits: bool
    blocks: BlockIds


class ConnectorPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one ``Scheduler.schedule()`` has given the connector to load, and finished requests whose blocks it keeps
    until they are sent (``Scheduler._connector_finished``).
    """

    receives: list[PlannedReceive] = []
    sends: list[str] = []


class ConnectorResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A ``KVConnectorOutput`` as it arrived in ``Scheduler.update_from_output``, with all workers' words in one.

    ``unknown`` has those of the requests named as finished that the scheduler does not have (``Scheduler.requests``).
    """

    finished_sending: list[str] = []
    finished_recving: list[str] = []
    failed_recving: list[str] = []
    invalid_blocks: list[int] = []
    unknown: list[str] = []


class TakenUp(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a request stands whose load was reported as failed, once the report has taken effect.

    ``is_over``: it has finished, or is not known any more. ``is_marked``: it waits, and is known to have failed
    (``Scheduler.failed_recving_kv_req_ids``). ``computed_tokens``: from there on it is going to be computed.
    """

    request_id: str
    is_over: bool
    is_marked: bool
    computed_tokens: int
