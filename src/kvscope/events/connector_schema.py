"""Parts of the kv.boundary records about a KV connector."""

from __future__ import annotations

import msgspec

from kvscope.events.envelope import Ranges, RequestId


class ReceiveInfo(msgspec.Struct, kw_only=True):
    """A request that was admitted with ``num_computed_tokens``, the last ``external_tokens`` of which a connector is to
    load, into the table ``blocks[group]``: inside of the step, or (``waits``) while the request waits for it.
    """

    request_id: RequestId
    num_computed_tokens: int
    external_tokens: int
    waits: bool
    blocks: list[Ranges]


class TakenUpInfo(msgspec.Struct, kw_only=True):
    """Where a request with a failed load stands: it ``is_over``, or waits and ``is_marked`` as failed, or goes on with
    ``num_computed_tokens``.
    """

    request_id: RequestId
    is_over: bool
    is_marked: bool
    num_computed_tokens: int
