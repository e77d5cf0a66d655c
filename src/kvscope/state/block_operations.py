"""Takes over what the pool did: generations, references, hashes, and where blocks stand in tables.

Few blocks are gone through one by one, many at once as rows; a test holds the two to the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from ..facts import allocator as facts
from ..facts.allocator import PoolOperation
from ..facts.plans import Int32
from .block_columns import (
    FREED_BY,
    GENERATION,
    GROUP,
    HASH_TOKENS,
    HASHES,
    INDEX,
    LARGEST,
    NONE,
    OWNERS,
    REFERENCES,
    RESERVED,
    SHIFT,
    WIDTH,
)
from .shares import Holder, Holders, Shares
from .written_prefix import WrittenPrefix

ALLOCATED_ONE_BY_ONE, FREED_ONE_BY_ONE, CACHED_ONE_BY_ONE = 28, 80, 28
"""Up to so many blocks single numbers are faster than arrays."""

_CODES = {cause: code for code, cause in enumerate(facts.CAUSES)}
_MOST_GROUPS = 1 << 15
_NO_SHARES = Shares()
_NO_TABLE = array("i")
# The cells that a handing out changes, counted from RESERVED, which is the first of them.
_REFERENCES, _OWNERS, _GENERATION = REFERENCES - RESERVED, OWNERS - RESERVED, GENERATION - RESERVED
_INDEX, _CELLS = INDEX - RESERVED, WIDTH - RESERVED


class BlockOperations(WrittenPrefix):
    """The pool's operations, replayed."""

    def __init__(self, num_blocks: int, null_block_id: int) -> None:
        super().__init__(num_blocks, null_block_id)
        self._holders = Holders(self._rows)

    def apply(self, operation: PoolOperation, step: int) -> None:
        """Take over one operation of this pool that happened in or after step ``step``.

        Never raises: what makes no sense (an id outside the pool, one reference less than none, the allocation of a
        block in use) is for the caller to see beforehand, and changes only what it can.
        """
        if not NONE <= step <= LARGEST:
            step = max(min(step, LARGEST), NONE)
        block_ids = operation.block_ids
        if operation.kind == facts.RESET:
            self._rows[: self.num_blocks, HASHES : HASH_TOKENS + 1] = 0
        elif not block_ids or operation.kind not in _APPLIERS:
            return
        elif self._has_all(block_ids):
            _APPLIERS[operation.kind](self, operation, step)
        else:
            for offset, block in enumerate(block_ids):
                if self._has(block):
                    _APPLIERS[operation.kind](self, _one_of(operation, offset), step)

    def request_ended(self, request_id: str) -> None:
        """The request is no longer live, or has given up its whole table (a preemption): what it has is held until its
        references are released. The same name may go on to get other blocks.
        """
        holder = self._holders.by_id.get(request_id)
        if holder is None:
            return
        np.subtract.at(self._rows[:, OWNERS], holder.live.blocks(), 1)
        if holder.held.count:
            for block, group, index, count in holder.live.each():
                holder.held.put(group, None if index == NONE else index, [block] * count)
        else:
            holder.held = holder.live
        holder.live = Shares()
        self._holders.settle(holder)

    # Blocks come to a request -----------------------------------------------------------------------------------------

    def _allocate(self, operation: PoolOperation, step: int) -> None:
        request, group, index = self._enter(operation)
        # Of a block that has just been handed out everything is known, from RESERVED on.
        row = array("i", (operation.reserved, 1, request != NONE, 1, 0, 0, 0, 0, NONE, step, request, group, NONE))
        block_ids = operation.block_ids
        if len(block_ids) > ALLOCATED_ONE_BY_ONE and len(set(block_ids)) == len(block_ids):
            self._allocate_at_once(block_ids, row, index)
        else:
            self._allocate_each(block_ids, row, index)
        if operation.hash_counts is not None:
            self._cache(operation, step)

    def _allocate_each(self, block_ids: list[int], row: array[int], index: int | None) -> None:
        cells = self._cells
        index, stride = (NONE, 0) if index is None else (index, 1)
        for block in block_ids:
            start = (block << SHIFT) + RESERVED
            row[_GENERATION] = cells[start + _GENERATION] + 1
            row[_INDEX] = index
            index += stride
            references, owners = cells[start + _REFERENCES], cells[start + _OWNERS]
            cells[start : start + _CELLS] = row
            if references or owners:  # whoever uses it goes on doing so
                cells[start + _REFERENCES] += references
                cells[start + _OWNERS] += owners

    def _allocate_at_once(self, block_ids: list[int], row: array[int], index: int | None) -> None:
        where = np.array(block_ids, np.intp)
        rows = self._rows.take(where, axis=0)
        generations, references, owners = rows[:, GENERATION], rows[:, REFERENCES], rows[:, OWNERS]
        generations += 1
        references += 1
        owners += row[_OWNERS]
        rows[:, RESERVED] = row[0]
        rows[:, HASHES:] = np.frombuffer(row, np.int32)[HASHES - RESERVED :]
        if index is not None:
            rows[:, INDEX] = np.arange(index, index + len(where), dtype=np.int32)
        self._rows[where] = rows

    def _touch(self, operation: PoolOperation, step: int) -> None:
        del step  # a hit hands nothing out
        rows, where = self._rows, np.array(operation.block_ids)
        np.add.at(rows[:, REFERENCES], where, 1)
        if operation.request_id is None:
            return
        _, group, index = self._enter(operation)
        # Whoever comes to a block that nobody has decides where it is looked for.
        first = rows[where, OWNERS] == 0
        indices = np.full(len(where), NONE) if index is None else np.arange(index, index + len(where))
        rows[where[first], GROUP] = group
        rows[where[first], INDEX] = indices[first]
        np.add.at(rows[:, OWNERS], where, 1)

    def _enter(self, operation: PoolOperation) -> tuple[int, int, int | None]:
        """Put the blocks into the request's table. ``(index of the request, group, index of the first block)``."""
        group, first_index = operation.group_id, operation.first_index
        if group is None or not 0 <= group < _MOST_GROUPS:
            group, first_index = NONE, None
        if operation.request_id is None:
            return NONE, group, None
        holder = self._holders.holder(operation.request_id)
        if not holder.live.put(group, first_index, operation.block_ids):
            first_index = None
        return holder.index, group, first_index

    # References go ----------------------------------------------------------------------------------------------------

    def _free(self, operation: PoolOperation, step: int) -> None:
        holders, block_ids = self._holders, operation.block_ids
        holder, request = None, holders.index_of(operation.request_id)
        if operation.request_id is not None:
            holder = holders.by_id.get(operation.request_id)
        elif operation.cause == facts.CAUSE_DEFERRED:
            holder = holders.ended_with(block_ids[0], self._cells[(block_ids[0] << SHIFT) + INDEX])
            request = NONE if holder is None else holder.index
        shares = _NO_SHARES if holder is None else _released_first(holder, operation)
        owned = int(holder is not None and shares is holder.live)
        freed = array("i", (step, _CODES.get(operation.cause, 0), request, 0, 0, 0))
        for group, part in self._by_group(operation):
            if len(part) > FREED_ONE_BY_ONE and len(set(part)) == len(part):
                rest = self._free_at_once(part, group, freed, shares, owned)
            else:
                rest = self._free_each(part, group, freed, shares, owned)
            if len(rest) > 1 and operation.request_id is None and operation.cause != facts.CAUSE_DEFERRED:
                rest = self._of_somebody(rest)
            for block in rest:
                self._release(block, group, holder, operation)
        if holder is not None:
            holders.settle(holder)

    def _by_group(self, operation: PoolOperation) -> Iterable[tuple[int, list[int]]]:
        """The blocks by the group in whose table they are looked for."""
        if operation.group_id is not None:
            return [(operation.group_id, operation.block_ids)]
        if len(operation.block_ids) > FREED_ONE_BY_ONE:
            groups = self._rows[np.array(operation.block_ids, np.intp), GROUP]
            if (groups == groups[0]).all():
                return [(int(groups[0]), operation.block_ids)]
        parts: dict[int, list[int]] = {}
        for block in operation.block_ids:
            parts.setdefault(self._cells[(block << SHIFT) + GROUP], []).append(block)
        return parts.items()

    def _free_each(self, block_ids: list[int], group: int, freed: array[int], shares: Shares, owned: int) -> list[int]:
        """One reference less for each. The blocks whose share is not where their row says come back."""
        cells, table = self._cells, shares.tables.get(group, _NO_TABLE)
        end = len(table)
        rest: list[int] = []
        for block in block_ids:
            at = block << SHIFT
            references, owners, index = cells[at + REFERENCES], cells[at + OWNERS], cells[at + INDEX]
            if 0 <= index < end and table[index] == block:
                table[index] = NONE
                owners -= owned
            else:
                rest.append(block)
            if references == 1:
                cells[at : at + GENERATION] = freed
                if owners:
                    cells[at + OWNERS] = owners
            else:
                cells[at + REFERENCES] = references - 1 if references else 0
                cells[at + OWNERS] = owners
        shares.count -= len(block_ids) - len(rest)
        return rest

    def _free_at_once(
        self, block_ids: list[int], group: int, freed: array[int], shares: Shares, owned: int
    ) -> list[int]:
        """:meth:`_free_each` of blocks that are all different."""
        where = np.array(block_ids, np.intp)
        rows = self._rows.take(where, axis=0)
        references, owners = rows[:, REFERENCES], rows[:, OWNERS]
        last = references == 1
        rows[slice(None) if last.all() else last, : RESERVED + 1] = np.frombuffer(freed, np.int32)[: RESERVED + 1]
        references -= references > 0
        taken = shares.take_all(where, group, rows[:, INDEX])
        if owned:
            owners -= taken
        self._rows[where] = rows
        return [] if taken.all() else where[~taken].tolist()

    def _of_somebody(self, block_ids: list[int]) -> list[int]:
        """Those blocks of which not only a reference of nobody went; :meth:`_release` says it of each."""
        where = np.array(block_ids, np.intp)
        rows = self._rows[where]
        short = rows[:, REFERENCES] < rows[:, OWNERS] + self._holders.all_given_up(where)
        somebodys: list[int] = where[short].tolist()
        return somebodys

    def _release(self, block: int, group: int, holder: Holder | None, operation: PoolOperation) -> None:
        """Find the share that went with a reference.

        A named request can have lost only what it had; if that was nothing, all owners stay, and the block has fewer
        references than owners. Where nobody is named, references of nobody go first, unless the release is a deferred
        one; then those of requests that have ended; and the last reference of the only owner was that owner's.
        """
        at = block << SHIFT
        index = self._cells[at + INDEX]
        candidates = [] if holder is None else [holder]
        if operation.request_id is None:
            references, owners = self._cells[at + REFERENCES], self._cells[at + OWNERS]
            if operation.cause != facts.CAUSE_DEFERRED and references >= owners + self._holders.given_up(block):
                return
            candidates += filter(None, [self._holders.ended_with(block, index)])
            if references == 0 and owners == 1:
                candidates += self._holders.by_id.values()
        for candidate in candidates:
            live_first = _released_first(candidate, operation) is candidate.live
            for shares in (candidate.live, candidate.held) if live_first else (candidate.held, candidate.live):
                if not shares.take(block, group, index):
                    continue
                if shares is candidate.live:
                    self._cells[at + OWNERS] -= 1
                if self._cells[at + REFERENCES] == 0 and self._cells[at + FREED_BY] == NONE:
                    self._cells[at + FREED_BY] = candidate.index
                self._holders.settle(candidate)
                return

    def _hold(self, operation: PoolOperation, step: int) -> None:
        del step  # nothing is freed
        holder = None if operation.request_id is None else self._holders.by_id.get(operation.request_id)
        if holder is None:
            return
        if operation.cause != facts.CAUSE_COPY:
            self.request_ended(holder.request_id)
            return
        for group, part in self._by_group(operation):
            for block in part:
                at = block << SHIFT
                if holder.live.take(block, group, self._cells[at + INDEX]):
                    self._cells[at + OWNERS] -= 1
        self._holders.settle(holder)

    # Hashes -----------------------------------------------------------------------------------------------------------

    def _cache(self, operation: PoolOperation, step: int) -> None:
        del step  # nothing is written
        block_ids, counts, tokens = operation.block_ids, operation.hash_counts, operation.hash_tokens
        if (
            len(block_ids) <= CACHED_ONE_BY_ONE
            and counts is not None
            and tokens is not None
            and len(counts) == len(tokens) == len(block_ids)
        ):
            cells = self._cells
            for block, count, covered in zip(block_ids, counts, tokens, strict=True):
                at = block << SHIFT
                cells[at + HASHES] = min(max(count, 0), LARGEST)
                cells[at + HASH_TOKENS] = min(max(covered, 0), LARGEST)
            return
        rows, where = self._rows, np.array(block_ids)
        if counts is not None and len(counts) == len(where):
            rows[where, HASHES] = _bounded(counts)
        else:
            rows[where, HASHES] = np.maximum(rows[where, HASHES], 1)
        if tokens is not None and len(tokens) == len(where):
            rows[where, HASH_TOKENS] = _bounded(tokens)
        else:
            rows[where, HASH_TOKENS] = np.where(rows[where, HASHES] > 0, NONE, 0)

    def _evict(self, operation: PoolOperation, step: int) -> None:
        del step  # the contents stay
        self._rows[np.array(operation.block_ids), HASHES : HASH_TOKENS + 1] = 0

    def _receive(self, operation: PoolOperation, step: int) -> None:
        filled = operation.filled
        if filled is None or len(filled) != len(operation.block_ids):
            return
        where, tokens = np.array(operation.block_ids, np.intp), np.array(filled, np.int32)
        if operation.request_id is not None:
            # The request's table begins with what it hit, and no load goes there.
            loaded = self._rows[where, RESERVED] > 0
            where, tokens = where[loaded], tokens[loaded]
        self.receive(where, tokens, step)
        self.roll_back(where, tokens)


_APPLIERS = {
    facts.ALLOC: BlockOperations._allocate,
    facts.TOUCH: BlockOperations._touch,
    facts.FREE: BlockOperations._free,
    facts.HOLD: BlockOperations._hold,
    facts.CACHE: BlockOperations._cache,
    facts.EVICT: BlockOperations._evict,
    facts.RECEIVE: BlockOperations._receive,
}


def _released_first(holder: Holder, operation: PoolOperation) -> Shares:
    """What a released reference belongs to, if it can be both: the table, unless it was given up before."""
    given_up = operation.cause == facts.CAUSE_DEFERRED or operation.request_id is None
    return holder.held if (given_up and holder.held.count) or not holder.live.count else holder.live


def _one_of(operation: PoolOperation, offset: int) -> PoolOperation:
    """The operation on one of its blocks alone."""

    def item(values: list[int] | None) -> list[int] | None:
        return None if values is None or len(values) <= offset else [values[offset]]

    first_index = operation.first_index
    return msgspec.structs.replace(
        operation,
        block_ids=[operation.block_ids[offset]],
        first_index=None if first_index is None else first_index + offset,
        hash_counts=item(operation.hash_counts),
        hash_tokens=item(operation.hash_tokens),
        filled=item(operation.filled),
    )


def _bounded(values: Sequence[int]) -> Int32:
    return np.array([min(max(value, 0), LARGEST) for value in values], np.int32)
