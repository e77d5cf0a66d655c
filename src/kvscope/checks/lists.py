"""L on the two lists of blocks that a declaration carries for the worker: those to clear, and those to copy.

A worker clears first, then copies, then computes (vLLM 0.32: ``_update_states`` of runner V1 and ``update_requests`` of
V2). So a block may be cleared and then filled by a copy; that a source is cleared destroys what is copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..facts.requests import Declaration
from ..state.bindings import Bindings
from ..state.blocks import BlockLedger
from ..state.visibility import first_visible_block
from . import past
from . import rule as r
from .bind import BindView
from .finding import Finding
from .past import some_of
from .rule import rule

Place = tuple[str, int, int]
"""Request, group index, logical index."""


def lists_agree(declaration: Declaration, bindings: Bindings, ledger: BlockLedger | None) -> bool:
    """The common case at its lowest price. True means that neither rule can fire.

    Copies are rare enough to be looked at each time.
    """
    zero, topology = declaration.zero_blocks, bindings.topology
    if declaration.copies:
        return False
    if not zero:
        return True
    if min(zero) < 0 or max(zero) >= topology.num_blocks or topology.null_block_id in zero:
        return False
    return ledger is not None or _given(declaration).issuperset(zero)


def _given(declaration: Declaration) -> set[int]:
    """Every block that some request was given in this step."""
    requests = declaration.requests
    tables = [*requests.new_blocks, *(blocks for blocks in requests.cached_blocks if blocks is not None)]
    return {block for groups in tables for blocks in groups for block in blocks}


def _place_before(view: BindView, block: int, *, written: bool) -> Place | None:
    """A place where attention looks that the block had before this step already, in a group that is judged.

    With ``written`` only one that tokens were computed in.
    """
    bindings, given = view.bindings, dict(view.deltas())
    for group_index, group in enumerate(bindings.topology.groups):
        if not group.judged:
            continue
        for request_id in bindings.holders(group_index, block):
            delta = given.get(request_id)
            if request_id in bindings.partial or (delta is not None and block in delta[group_index]):
                continue
            row = bindings.rows_of([request_id])
            first = int(first_visible_block(group, bindings.computed[row])[0])
            index = first + bindings.table(request_id, group_index)[first:].tolist().index(block)
            if not written or index * group.block_size < int(bindings.computed[row][0]):
                return request_id, group_index, index
    return None


def _given_to(view: BindView, block: int) -> Place | None:
    """The place at which the block was given out in this step."""
    for request_id, delta in view.deltas():
        for group_index, blocks in enumerate(delta):
            if block in blocks:
                table = view.bindings.table(request_id, group_index)
                return request_id, group_index, len(table) - len(blocks) + blocks.index(block)
    return None


def _finding(view: BindView, block: int, expected: str, actual: str, place: Place | None = None) -> Finding:
    finding = Finding(
        reason="",
        step=view.declaration.step,
        trace_id=view.declaration.trace_id,
        block_id=block,
        expected=expected,
        actual=actual,
    )
    if place is not None:
        group = view.bindings.topology.groups[place[1]]
        finding.request_id, finding.group_id = place[0], group.group_id
        finding.position = place[2] * group.block_size if group.judged else None
    if view.ledger is not None:
        finding.generation = past.generation(view.ledger, block)
    return finding


def _not_in_pool(view: BindView, block: int) -> str | None:
    """What is wrong with a block that is none of the pool's, or that is nobody's for ever."""
    topology = view.bindings.topology
    if not 0 <= block < topology.num_blocks:
        return f"0 to {topology.num_blocks - 1}"
    return "a block that somebody owns" if block == topology.null_block_id else None


@rule(
    check="L",
    severity="error",
    rank=r.OTHER,
    title="a copy of a block that the scheduler ordered cannot be right",
    fires="Source or destination lies outside the pool or is the null block; a destination is copied to twice, or is "
    "the source of a copy of the same step; or it was not handed out in the step.",
    silent="One source copied to several destinations; a destination that is cleared too, which happens before; one "
    "that was handed out in the step and is in no table, as where a copy keeps a state for the cache.",
    sources=("the scheduler's list of copies", "the tables that it declared and, where the pool is followed, its "
             "ledger"),
    proves_not="That the device copies it; the worker is told to.",
)  # fmt: skip
def bind_copy_conflict(view: BindView) -> Iterator[Finding]:
    copies = view.declaration.copies or ()
    sources, times = {source for source, _ in copies}, Counter(destination for _, destination in copies)
    for block, more in some_of([block for pair in copies for block in pair if _not_in_pool(view, block)]):
        side = "destination" if block in times else "source"
        finding = _finding(view, block, str(_not_in_pool(view, block)), f"{side} of a copy: {block}{more}")
        finding.launch_fatal = not 0 <= block < view.bindings.topology.num_blocks
        yield finding
    for block in [block for block in times if not _not_in_pool(view, block)]:
        before = _place_before(view, block, written=False)
        place = before or _given_to(view, block)
        if times[block] > 1:
            yield _finding(view, block, "one copy to a destination", f"{times[block]}", place)
        if block in sources:
            yield _finding(view, block, "a destination that is no source", "source of a copy of the same step", place)
        if before is not None:
            yield _finding(view, block, "a destination that was handed out in the step", "in use before it", before)
        elif view.ledger is not None and view.ledger.allocated_step_of([block])[0] < view.declaration.step:
            actual = past.told(view.ledger, block)
            yield _finding(view, block, "a destination that was handed out in the step", actual, place)


@rule(
    check="L",
    severity="error",
    rank=r.OTHER + 1,
    title="a block that the scheduler has cleared must not be",
    fires="A block to clear lies outside the pool, is the null block, or is the source of a copy of the same step; or "
    "a request computed tokens in it before the step.",
    silent="One block several times, over groups; the destination of a copy, which comes after; blocks that nobody "
    "has computed in. Where the contents of the pool are followed, what somebody has written or receives is left to "
    "zero_live_block and zero_after_receive.",
    sources=("the scheduler's list of blocks to clear", "its list of copies, and the tables that it declared"),
    proves_not="That the device clears it; the worker is told to.",
)
def bind_zero_conflict(view: BindView) -> Iterator[Finding]:
    zero = list(dict.fromkeys(view.declaration.zero_blocks or ()))
    sources = {source for source, _ in view.declaration.copies or ()}
    for block, more in some_of([block for block in zero if _not_in_pool(view, block)]):
        finding = _finding(view, block, str(_not_in_pool(view, block)), f"to be cleared: {block}{more}")
        finding.launch_fatal = not 0 <= block < view.bindings.topology.num_blocks
        yield finding
    sound = [block for block in zero if not _not_in_pool(view, block)]
    for block, more in some_of([block for block in sound if block in sources]):
        place = _place_before(view, block, written=False) or _given_to(view, block)
        yield _finding(view, block, "a source that keeps its contents", f"cleared before it is copied{more}", place)
    if view.ledger is None:
        live = {block: _place_before(view, block, written=True) for block in sound if block not in sources}
        for block, more in some_of([block for block, place in live.items() if place]):
            yield _finding(view, block, "a block that nobody has computed in", f"to be cleared{more}", live[block])


LIST_RULES = (bind_copy_conflict, bind_zero_conflict)
