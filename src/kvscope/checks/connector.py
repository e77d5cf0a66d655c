"""C3 and C6 on where a KV connector is told to load, L and C5 on what it reports: transfers that are over, loads that
have failed, and blocks that were not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ..facts.connector import RECEIVING, PlannedReceive, TakenUp
from ..facts.topology import Topology
from ..state.blocks import BlockLedger
from ..state.invalid_blocks import Reused
from ..state.transfers import Completion, FailedLoad, Target, targets
from . import past
from . import rule as r
from .content import ContentView
from .finding import Finding
from .past import counted, some_of
from .rule import rule

_TOLD = "the tables with which the connector is told to load"
_REPORTED = "the transfers that the workers report as finished"
_PLANNED = "the transfers that the scheduler has planned"


class ReceiveView(msgspec.Struct, frozen=True, kw_only=True):
    """Loads that are planned. ``ledger`` is None where the blocks of the pool are not followed."""

    step: int
    trace_id: str
    receives: Sequence[PlannedReceive]
    topology: Topology
    ledger: BlockLedger | None = None

    def finding(self, receive: PlannedReceive, target: Target, expected: str, actual: str) -> Finding:
        ledger, block = self.ledger, target.block_id
        return Finding(
            reason="",
            step=self.step,
            trace_id=self.trace_id,
            request_id=receive.request_id,
            other_request_id=None if ledger is None else past.another(ledger, block, receive.request_id),
            group_id=target.group_id,
            position=target.position,
            block_id=block,
            generation=None if ledger is None else past.generation(ledger, block),
            expected=expected,
            actual=actual,
        )


class ConnectorView(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a step: ``completions`` when it arrives, ``failed`` and what was ``taken_up`` of them when it has
    taken effect. ``is_partial``: it is not known of every transfer that it was planned.
    """

    step: int
    trace_id: str
    completions: Sequence[Completion] = ()
    failed: Sequence[FailedLoad] = ()
    taken_up: Mapping[str, TakenUp] = {}
    is_partial: bool = False

    def finding(self, completion: Completion, expected: str, actual: str) -> Finding:
        return Finding(
            reason="",
            step=self.step,
            trace_id=self.trace_id,
            request_id=completion.request_id,
            expected=expected,
            actual=f"finished {_what(completion)}, {actual}",
        )


def _what(completion: Completion) -> str:
    return "receiving" if completion.direction == RECEIVING else "sending"


@rule(
    check="C6",
    severity="error",
    rank=r.NULL,
    title="a connector is told to load into the null block",
    fires="Tokens that a connector is to load, and that attention will see, stand in the null block of the table that "
    "it is given.",
    silent="Null blocks before the attention window, and those outside of what is to be loaded.",
    sources=(_TOLD, "the rule that the null block holds no token"),
    invariant=True,
    proves_not="That the connector loads into it: it may leave null blocks out, and the tokens with them.",
)
def connector_null_block(view: ReceiveView) -> Iterator[Finding]:
    null = view.topology.null_block_id
    for receive in view.receives:
        nulls = [target for target in targets(receive, view.topology) if target.block_id == null]
        if nulls:
            yield view.finding(receive, nulls[0], "a block that holds tokens", f"the null block{_more(nulls)}")


@rule(
    check="C3",
    severity="error",
    rank=r.FOREIGN,
    title="a connector is told to load into a block that is not the request's",
    fires="A block of the table with which a connector is told to load a request's tokens was not given to that "
    "request by the pool, or it has given it back.",
    silent="Blocks that the request shares by a hit; blocks before the attention window; the null block "
    "(connector_null_block).",
    sources=(_TOLD, "the calls of the pool, added up"),
    proves_not="That the load begins: the request may end before.",
)
def connector_block_not_bound(view: ReceiveView) -> Iterator[Finding]:
    ledger, null = view.ledger, view.topology.null_block_id
    if ledger is None:
        return
    for receive in view.receives:
        named = [target for target in targets(receive, view.topology) if target.block_id != null]
        owned = ledger.is_owner(receive.request_id, [target.block_id for target in named]).tolist()
        others = [target for target, is_own in zip(named, owned, strict=True) if not is_own]
        if others:
            actual = past.told(ledger, others[0].block_id) + _more(others)
            yield view.finding(receive, others[0], "a block that the pool has given to the request", actual)


def _more(found: Sequence[Target]) -> str:
    return f"; 1 of {len(found)} such blocks" if len(found) > 1 else ""


@rule(
    check="L",
    severity="error",
    rank=r.OTHER,
    title="a transfer is reported as finished twice",
    fires="A request is reported to have finished sending, or receiving, which was reported before; nothing was "
    "planned for it since.",
    silent="A request that is loaded again, after a preemption or a failure; one that is received and then sent.",
    sources=(_REPORTED, _PLANNED),
    proves_not="Which of the two reports was the true one: until the second the transfer may still have been going on.",
)
def connector_duplicate_completion(view: ConnectorView) -> Iterator[Finding]:
    for completion in view.completions:
        if completion.completed_step is not None:
            yield view.finding(
                completion,
                "one report of each planned transfer",
                f"as was reported with the result of step {completion.completed_step}",
            )


@rule(
    check="L",
    severity="error",
    rank=r.OTHER,
    title="a transfer of a request that does not exist is reported as finished",
    fires="A request is reported to have finished sending or receiving that the scheduler does not have.",
    silent="A request that has ended and is kept until its transfer is over; a second report "
    "(connector_duplicate_completion).",
    sources=(_REPORTED, "the requests that the scheduler has"),
    proves_not="That there never was such a request.",
)
def connector_unknown_request(view: ConnectorView) -> Iterator[Finding]:
    for completion in view.completions:
        if not completion.is_known and completion.completed_step is None:
            yield view.finding(completion, "a request that the scheduler has", "and the scheduler does not have it")


@rule(
    check="L",
    severity="error",
    rank=r.OTHER,
    title="a transfer is reported as finished that was never planned",
    fires="A request is reported to have finished receiving that does not wait for a load, or to have finished sending "
    "whose blocks are not kept for that.",
    silent="A request that was aborted while it waits for its load; one whose blocks are kept until they are sent.",
    sources=(_REPORTED, _PLANNED),
    proves_not="That the connector transferred nothing.",
)
def connector_completion_unplanned(view: ConnectorView) -> Iterator[Finding]:
    for completion in view.completions if not view.is_partial else ():
        if completion.is_known and completion.planned_step is None and completion.completed_step is None:
            yield view.finding(completion, "a transfer that was planned", "and nothing was planned")


@rule(
    check="L",
    severity="error",
    rank=r.OTHER,
    title="a load has failed, and the scheduler goes on as if it had not",
    fires="A load is reported as failed, and when the report has taken effect its request neither is over, nor is set "
    "back to what is valid, nor waits as one that has failed.",
    silent="A request that ends by its failed load; one that is set back; one that was aborted before; loads inside "
    "of a step whose failed block another request of the step has as well.",
    sources=("the loads that the workers report as failed", "what the scheduler makes of their requests"),
    proves_not="That the request reads what is missing; connector_invalid_block_reused says so where blocks are named.",
)
def connector_failed_receive_lost(view: ConnectorView) -> Iterator[Finding]:
    for load in view.failed:
        now = view.taken_up.get(load.request_id)
        if now is None or now.is_over or (now.is_marked if load.waits else now.computed_tokens <= load.most_tokens):
            continue
        yield Finding(
            reason="",
            step=view.step,
            trace_id=view.trace_id,
            request_id=load.request_id,
            group_id=load.group_id,
            block_id=load.block_id,
            position=load.most_tokens,
            expected=f"a request that ends or goes on with at most {counted(load.most_tokens, 'tokens')}",
            actual=f"{counted(now.computed_tokens, 'tokens')} count as computed",
        )


@rule(
    check="C5",
    severity="error",
    rank=r.UNWRITTEN - 2,
    title="a block that could not be loaded is used",
    fires="A connector has reported that it could not load a block, and a request hits it or goes on behind it, while "
    "nobody was declared to write it since.",
    silent="Requests that end, or compute the block again; a block that another request of the same step computes "
    "again; one that was handed out anew.",
    sources=("the blocks that the workers report as not loaded", "what is declared computed, hit and written"),
    proves_not="What the block holds: it may be left over from whoever had it before.",
)
def connector_invalid_block_reused(view: ContentView) -> Iterator[Finding]:
    legality = view.legality
    used: dict[int, Reused] = {}
    for reused in legality.invalid.reused:
        used.setdefault(reused.block_id, reused)
    for block, more in some_of(list(used)):
        reused, size = used[block], legality.block_sizes[used[block].group_index]
        yield Finding(
            reason="",
            step=view.declaration.step,
            trace_id=view.declaration.trace_id,
            request_id=reused.request_id,
            group_id=reused.group_index,
            position=None if reused.index is None else reused.index * size + reused.written,
            block_id=block,
            generation=past.generation(legality.ledger, block),
            expected=f"{counted(reused.needed, 'tokens')} of the block written",
            actual=f"{reused.written} since it was reported as not loaded with the result of step "
            f"{reused.reported_step}; {past.told(legality.ledger, block)}{more}",
        )


RECEIVE_RULES = (connector_null_block, connector_block_not_bound)
COMPLETION_RULES = (connector_duplicate_completion, connector_unknown_request, connector_completion_unplanned)
FAILED_LOAD_RULES = (connector_failed_receive_lost,)
INVALID_RULES = (connector_invalid_block_reused,)
