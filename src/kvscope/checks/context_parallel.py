"""C1, C4 and L under context parallelism: which rank stores, computes and counts which token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from ..facts.context_parallel import NO_WRITER, ContextParallel, LocalLengths
from ..facts.plans import PAD_SLOT, Int64
from ..facts.requests import Declaration
from ..facts.topology import Ranks, Topology
from ..state.bindings import Bindings
from ..state.token_shares import local_lengths
from . import rule as r
from .chunks import LocalView
from .finding import Finding
from .plan_view import Bool, GroupView, StepView
from .rule import rule

_COORDINATES = "the rank's own coordinates, by which the runner computes slots"


class ContextView:
    """A plan of a rank that stores or computes a part of every sequence.

    ``local`` is None where the rank computes the whole batch, or its own rows cannot be judged because the host itself
    only estimates where they begin.
    """

    def __init__(self, step: StepView, groups: Sequence[GroupView]) -> None:
        self.step = step
        self.shared = [group for group in groups if group.share is not None]
        context, local = step.plan.context, step.plan.local
        self.local: LocalView | None = None
        if context is not None and local is not None and step.plan.exact:
            self.local = LocalView(step, context, local)

    @property
    def agrees(self) -> bool:
        """Whether no rule about owners and order can fire."""
        return all(group.writes_agree for group in self.shared) and (self.local is None or self.local.agrees)


class CoordinatesView(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinates that a runner works with, beside the configuration of the engine and the rank of the process."""

    step: int
    trace_id: str
    context: ContextParallel
    topology: Topology
    ranks: Ranks


class LengthsView(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens of each row a rank is told to have, beside the declared sequences."""

    declaration: Declaration
    context: ContextParallel
    lengths: LocalLengths
    bindings: Bindings

    @property
    def expected(self) -> Int64:
        """``int64 [rows]``: the rank's share of each sequence, or of what it has by the end of the row's chunk."""
        whole = self.lengths.seq_lens
        if whole is None:
            return local_lengths(self.context, self.bindings.seq_lens[self.bindings.rows_of(self.lengths.request_ids)])
        return local_lengths(self.context, whole.astype(np.int64))


def _first_of_each_row(view: StepView, tokens: Bool) -> Iterator[tuple[int, int]]:
    """``(row, token)`` of the first marked token of each row that has one."""
    marked = np.flatnonzero(tokens)
    rows, first = np.unique(view.token_row[marked], return_index=True)
    for row, index in zip(rows.tolist(), first.tolist(), strict=True):
        yield row, int(marked[index])


def _token_finding(view: StepView, row: int, token: int, expected: int | str, actual: int | str) -> Finding:
    return Finding(
        reason="",
        step=view.declaration.step,
        trace_id=view.declaration.trace_id,
        request_id=view.plan.request_ids[row],
        row=row,
        token_index=token,
        position=int(view.plan.positions[token]),
        expected=expected,
        actual=actual,
    )


def _slot_findings(group: GroupView, tokens: Bool) -> Iterator[Finding]:
    for row, token in _first_of_each_row(group.step, tokens):
        slot = int(group.slots[token])
        finding = _token_finding(group.step, row, token, int(group.expected_slots[token]), slot)
        finding.group_id, finding.slot = group.group.group_id, slot
        finding.block_id = int(group.expected_blocks[token] if slot == PAD_SLOT else group.target_blocks[token])
        yield finding


@rule(
    check="C1",
    severity="error",
    rank=r.CP_OWNER,
    title="a context-parallel rank stores a token of another rank, or leaves out its own",
    fires="A token that another rank stores has a slot on this one, or one that this rank stores has none; or a token "
    "of the batch is stored from no place of the gathered keys and values, or from several.",
    silent="Groups whose tokens every rank stores; the copies of a row that several ranks compute, of which one is "
    "stored; padding.",
    sources=(r.PLAN_SLOTS, "the declared positions, dealt out by the rank's own coordinates"),
)
def cp_slot_owner_mismatch(view: ContextView) -> Iterator[Finding]:
    for group in view.shared:
        yield from _slot_findings(group, (group.slots == PAD_SLOT) == group.mine)
    if view.local is not None:
        times = view.local.times_written
        for row, token in _first_of_each_row(view.step, times != 1):
            yield _token_finding(view.step, row, token, "stored once", f"{int(times[token])} times")


@rule(
    check="C4",
    severity="error",
    rank=r.CP_ORDER,
    title="the tokens of a context-parallel rank are not in their order",
    fires="A token of this rank lies in its declared block, but not behind the tokens that this rank stores before it; "
    "or a rank computes other chunks of a prompt than its two, or the gathered keys and values are taken for those of "
    "other tokens than the rank has computed there.",
    silent="Groups whose tokens every rank stores; rows that every rank computes whole; rows of other ranks.",
    sources=("the slots and local rows of the rank", "the declared positions, dealt out by the rank's own coordinates"),
)
def cp_order_mismatch(view: ContextView) -> Iterator[Finding]:
    for group in view.shared:
        inside = group.mine & (group.slots >= 0) & (group.target_blocks == group.expected_blocks)
        yield from _slot_findings(group, inside & (group.slots != group.expected_slots))
    for wrong in view.local.disorder() if view.local is not None else ():
        yield _token_finding(view.step, wrong.row, wrong.token, wrong.expected, wrong.actual)


@rule(
    check="L",
    severity="error",
    rank=r.TARGET,
    title="a context-parallel rank works with coordinates that cannot be its own",
    fires="A rank is not below its size, an interleave does not divide the slots of a block, or size, rank or the "
    "groups that are dealt out are not those of the configuration. Rows of such a rank are not judged.",
    silent="An interleave that the host chose itself; ranks that the configuration does not name.",
    sources=(_COORDINATES, "the configuration of the engine and the rank of the process"),
    proves_not="Which of the two is right.",
)
def cp_rank_invalid(view: CoordinatesView) -> Iterator[Finding]:
    context, topology, ranks = view.context, view.topology, view.ranks
    sharded = tuple(group.group_id for group in topology.groups if group.shards > 1)
    slots = {group.slots_per_block for group in topology.groups if group.group_id in context.sharded}
    for what, expected, actual in (
        ("dcp_size", topology.dcp_size, context.dcp_size),
        ("pcp_size", topology.pcp_size, context.pcp_size),
        ("dcp_rank", ranks.dcp, context.dcp_rank),
        ("pcp_rank", ranks.pcp, context.pcp_rank),
        ("groups dealt out", sharded, tuple(sorted(context.sharded))),
    ):
        if expected is not None and actual != expected:
            yield _coordinate(view, f"{what} {_said(expected)}", f"{what} {_said(actual)}")
            return
    for what, rank, size in (
        ("dcp_rank", context.dcp_rank, context.dcp_size),
        ("pcp_rank", context.pcp_rank, context.pcp_size),
    ):
        if not 0 <= rank < size:
            yield _coordinate(view, f"{what} from 0 to {size - 1}", f"{what} {rank}")
            return
    if context.interleave < 1 or any(count % context.interleave for count in slots):
        divides = f"an interleave that divides {_said(sorted(slots))}"
        yield _coordinate(view, divides, f"interleave {context.interleave}")


def _said(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, (tuple, list)) else str(value)


def _coordinate(view: CoordinatesView, expected: str, actual: str) -> Finding:
    return Finding(reason="", step=view.step, trace_id=view.trace_id, expected=expected, actual=actual)


@rule(
    check="L",
    severity="error",
    rank=r.LENGTH,
    title="a context-parallel rank counts another number of tokens than its share",
    fires="The local length of a row is not this rank's share of the declared sequence.",
    silent="Estimated lengths; rows of padding.",
    sources=("the local lengths handed to attention", "the declared lengths, dealt out by the rank's own coordinates"),
)
def cp_local_length_mismatch(view: LengthsView) -> Iterator[Finding]:
    expected, actual = view.expected, view.lengths.lengths
    told: set[str] = set()
    for row in np.flatnonzero(actual != expected).tolist():
        name = view.lengths.request_ids[row]
        if name not in told:
            told.add(name)
            yield Finding(
                reason="",
                step=view.declaration.step,
                trace_id=view.declaration.trace_id,
                request_id=name,
                row=row,
                expected=int(expected[row]),
                actual=int(actual[row]),
            )


assert NO_WRITER == PAD_SLOT, "what nothing is stored of has no slot, so that gathered slots can be put back in order"

CONTEXT_RULES = (cp_slot_owner_mismatch, cp_order_mismatch)
COORDINATE_RULES = (cp_rank_invalid,)
LENGTH_RULES = (cp_local_length_mismatch,)
