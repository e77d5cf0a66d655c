"""Blocks that a connector could not load, until somebody has written them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ..facts import allocator as facts
from ..facts.allocator import PoolOperation
from ..facts.requests import StepRequests
from ..facts.topology import Group
from .bindings import Bindings
from .blocks import BlockLedger
from .visibility import relied_on

MOST_BLOCKS = 4096


class Reused(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request relies on ``needed`` tokens of a block that was reported as not loaded in or after step
    ``reported_step``; ``written`` of them were declared written since. ``index`` is None where it was only hit.
    """

    request_id: str | None
    group_index: int
    index: int | None
    block_id: int
    needed: int
    written: int
    reported_step: int


class InvalidBlocks:
    """``blocks`` maps each to the generation in which it was reported, the step, and the tokens that were declared
    written since, from its first one on; ``any`` says at the lowest price whether there is one. ``reused`` is about the
    declaration that was advanced to last: each request that relies on a block is said once.
    """

    def __init__(self, ledger: BlockLedger) -> None:
        self.any = False
        self.blocks: dict[int, tuple[int, int, int]] = {}
        self.reused: list[Reused] = []
        self._ledger = ledger
        self._said: set[tuple[int, str | None]] = set()

    def report(self, block_ids: Sequence[int], step: int) -> None:
        """The result of step ``step`` says that these blocks could not be loaded."""
        for block, generation in zip(block_ids, self._ledger.generation_of(block_ids).tolist(), strict=True):
            if generation and block != self._ledger.null_block_id:
                self.blocks[block] = (generation, step, 0)
        while len(self.blocks) > MOST_BLOCKS:
            self._forget(next(iter(self.blocks)))
        self.any = bool(self.blocks)

    def advance(
        self,
        requests: StepRequests,
        operations: Iterable[PoolOperation],
        bindings: Bindings,
        groups: Sequence[tuple[int, Group]],
    ) -> None:
        """The bindings have the next declaration, and the ledger the operations that led to it.

        What a step writes counts before what it reads: a block that one request computes again is there for the others
        of the same step.
        """
        self.reused = []
        self._forget_handed_out()
        self.any = bool(self.blocks)
        if not self.blocks:
            return
        relying: list[Reused] = []
        for request_id, start in requests.computed().items():
            bound, scheduled = bindings.table_of(request_id), requests.scheduled.get(request_id, 0)
            if bound is None or not scheduled or request_id in bindings.partial:
                continue
            for group_index, group in groups:
                size = group.block_size
                first, relied, needed = relied_on(group, bound.blocks[group_index], start)
                relying += [
                    self._reused(request_id, group_index, first + offset, block, tokens)
                    for offset, (block, tokens) in enumerate(zip(relied.tolist(), needed.tolist(), strict=True))
                    if block in self.blocks
                ]
                written = bound.blocks[group_index][start // size : -(-(start + scheduled) // size)]
                for index, block in enumerate(written, start // size):
                    if block in self.blocks:
                        self._write(block, start - index * size, min(start + scheduled - index * size, size))
        sizes = {index: group.block_size for index, group in groups}
        relying += [
            self._reused(operation.request_id, operation.group_id, None, block, sizes[operation.group_id])
            for operation in operations
            if operation.kind == facts.TOUCH
            and operation.cause == facts.CAUSE_HIT
            and operation.group_id in sizes
            and operation.request_id not in requests.scheduled
            for block in operation.block_ids
            if block in self.blocks
        ]
        relying = [each for each in relying if self.blocks[each.block_id][2] < each.needed]
        self.reused = [each for each in relying if (each.block_id, each.request_id) not in self._said]
        self._said.update((each.block_id, each.request_id) for each in self.reused)
        for block in [b for b, (_, _, tokens) in self.blocks.items() if tokens >= min(sizes.values())]:
            self._forget(block)

    def _reused(self, request_id: str | None, group_index: int, index: int | None, block: int, needed: int) -> Reused:
        _, step, written = self.blocks[block]
        return Reused(
            request_id=request_id,
            group_index=group_index,
            index=index,
            block_id=block,
            needed=needed,
            written=written,
            reported_step=step,
        )

    def _write(self, block: int, first: int, end: int) -> None:
        """Tokens ``first .. end - 1`` of a block are declared written, those before 0 in blocks before it."""
        generation, step, written = self.blocks[block]
        if first <= written:
            self.blocks[block] = (generation, step, max(written, end))

    def _forget_handed_out(self) -> None:
        ids = list(self.blocks)
        for block, generation in zip(ids, self._ledger.generation_of(ids).tolist(), strict=True):
            if self.blocks[block][0] != generation:
                self._forget(block)

    def _forget(self, block: int) -> None:
        del self.blocks[block]
        self._said = {said for said in self._said if said[0] != block}
