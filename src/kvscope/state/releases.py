"""Who goes on with blocks that were released: the releases of one interval between two declarations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from ..facts import allocator as facts
from ..facts.allocator import PoolOperation
from ..facts.requests import StepRequests
from ..facts.topology import Group
from .bindings import Bindings
from .blocks import BlockLedger
from .progress import Progress
from .visibility import first_visible_block

_NOT_A_REQUESTS = frozenset({facts.CAUSE_DEFERRED, facts.CAUSE_COPY, facts.CAUSE_PIN, facts.CAUSE_UNPIN})


class Releases:
    """Reads bindings, ledger and progress of one :class:`~kvscope.state.legality.Legality`."""

    def __init__(
        self, groups: Sequence[tuple[int, Group]], ledger: BlockLedger, bindings: Bindings, progress: Progress
    ) -> None:
        self._groups = groups
        self._ledger = ledger
        self._bindings = bindings
        self._progress = progress
        self._takes_away = False
        self._borrowed: dict[str, set[int]] = {}

    def borrow(self, request_id: str, block_ids: Collection[int]) -> None:
        """The request uses blocks of which it has no share: what releases their last reference takes them from it."""
        self._borrowed.setdefault(request_id, set()).update(block_ids)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These are over, or come in anew."""
        if self._borrowed:
            for request_id in request_ids:
                self._borrowed.pop(request_id, None)

    def apply(self, operation: PoolOperation) -> None:
        """Apply an operation to the ledger, and see whether a release in nobody's name takes a block from somebody."""
        ledger, blocks = self._ledger, operation.block_ids
        if operation.kind != facts.FREE or operation.request_id is not None or operation.cause in _NOT_A_REQUESTS:
            ledger.apply(operation, operation.step)
            return
        before = ledger.places_of(blocks)
        ledger.apply(operation, operation.step)
        after = ledger.places_of(blocks)
        self._takes_away |= bool(((after < before) | (after > ledger.references_of(blocks))).any())

    def still_used(
        self, interval: Sequence[PoolOperation], requests: StepRequests, fresh: Collection[str]
    ) -> Iterator[tuple[str, dict[int, int]]]:
        """Requests that go on, with the blocks that they will look at though they were released, and the generation in
        which that happened. ``fresh`` have come with this declaration.
        """
        takes_away, self._takes_away = self._takes_away, False
        for position, operation in enumerate(interval):
            if operation.kind != facts.FREE:
                continue
            yield from self._borrowers(interval, position, fresh)
            if operation.request_id is not None:
                users: Iterable[str] = (operation.request_id,)
            elif takes_away and operation.cause not in _NOT_A_REQUESTS:
                users = list(self._bindings.live)
            else:
                continue
            for request_id in users:
                if request_id in self._bindings and request_id not in fresh:
                    used = self._of(request_id, operation, requests)
                    if used:
                        yield request_id, dict(self._generations_at(interval, position, used))

    def _borrowers(
        self, interval: Sequence[PoolOperation], position: int, fresh: Collection[str]
    ) -> Iterator[tuple[str, dict[int, int]]]:
        """Those who go on with somebody else's blocks, when the last reference to these has been released."""
        if not self._borrowed:
            return
        operation = interval[position]
        left = operation.ref_counts
        if left is None:
            left = self._ledger.references_of(operation.block_ids).tolist()
        released = {block for block, count in zip(operation.block_ids, left, strict=False) if count <= 0}
        for request_id, borrowed in self._borrowed.items():
            lost = released & borrowed
            if lost and request_id in self._bindings and request_id not in fresh:
                yield request_id, dict(self._generations_at(interval, position, lost))

    def _of(self, request_id: str, operation: PoolOperation, requests: StepRequests) -> set[int]:
        """Which of the released blocks stand in the request's tables where attention still looks."""
        bound = self._bindings.table_of(request_id)
        if bound is None:
            return set()
        used: set[int] = set()
        released = set(operation.block_ids)
        # Who is not in the step may have lost what left its window on the way there (KVCacheManager.allocate_slots
        # releases it before it finds that there are too few blocks).
        computed = requests.computed().get(request_id)
        if computed is None:
            computed = self._progress.end_of(request_id) or 0
        for group_index, group in self._groups:
            visible = int(first_visible_block(group, np.array([computed], np.int64))[0])
            used |= released.intersection(bound.blocks[group_index][visible:])
        # It may have been given the block again, at another index or by a hit.
        return {block for block in used if not self._ledger.owns(request_id, block)}

    def _generations_at(
        self, interval: Sequence[PoolOperation], position: int, block_ids: set[int]
    ) -> Iterator[tuple[int, int]]:
        """The generation that each block had at an operation of this interval."""
        later = [o.block_ids for o in interval[position + 1 :] if o.kind == facts.ALLOC]
        for block in block_ids:
            again = sum(ids.count(block) for ids in later)
            yield block, int(self._ledger.generation_of([block])[0]) - again
