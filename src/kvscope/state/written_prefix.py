"""How many tokens of each block have been written since it was handed out: by submitted steps, and by completed ones.

A block is written from its first token on, so one number says it. With asynchronous scheduling two steps are on their
way: what a step will write is declared when it is submitted and confirmed when its result is there. In between its
blocks may have been freed and handed out again; then the step says nothing about the new generation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ..facts.plans import Int32
from .block_columns import (
    CONFIRMED,
    DECLARED,
    GENERATION,
    HASHES,
    LARGEST,
    REFERENCES,
    RESERVED,
    SHIFT,
    WRITTEN_STEP,
    BlockColumns,
    Ids,
    Where,
)

Filled = Sequence[int] | npt.NDArray[np.integer] | int
"""Tokens of each block, from its first one on ``[n]``, or the same number for all: 0 .. block size."""

DECLARED_ONE_BY_ONE = 40
"""Up to so many blocks single numbers are faster than arrays."""
_MOST_PENDING_STEPS = 64

Pending = tuple[list[int], list[int], list[int]] | tuple[Where, Int32, Int32]
"""Blocks that a step writes, as ``(block ids, generations, tokens filled)``, ``[n]`` each."""


class WrittenPrefix(BlockColumns):
    """The written part of every block of one pool. ``pending_steps`` are the steps that were declared to write and not
    confirmed, in their order.
    """

    def __init__(self, num_blocks: int, null_block_id: int) -> None:
        super().__init__(num_blocks, null_block_id)
        self._pending: dict[int, list[Pending]] = {}
        self.pending_steps: Collection[int] = self._pending.keys()

    def declare_written(self, block_ids: Ids, filled: Sequence[int] | npt.NDArray[np.integer], step: int) -> None:
        """Step ``step`` was submitted and writes into these blocks ``[n]``; ``filled`` ``[n]`` tokens of each are then
        written. A block that has more keeps it: writing a token again takes nothing away.

        At most 64 steps wait for :meth:`confirm`; the oldest beyond that stay unconfirmed.
        """
        step = min(step, LARGEST)
        if len(block_ids) > DECLARED_ONE_BY_ONE:
            pending = self._declare_at_once(block_ids, filled, step)
        else:
            pending = self._declare_each(block_ids, filled, step)
        waiting = self._pending.get(step)
        if waiting is None:
            waiting = self._pending[step] = []
            if len(self._pending) > _MOST_PENDING_STEPS:
                del self._pending[next(iter(self._pending))]
        waiting.append(pending)

    def confirm(self, step: int) -> None:
        """The result of step ``step`` is there: what it declared is written, except in blocks that were handed out
        again meanwhile, and except what was rolled back.
        """
        cells, rows = self._cells, self._rows
        for blocks, generations, filled in self._pending.pop(min(step, LARGEST), ()):
            if isinstance(blocks, np.ndarray):
                same = rows[blocks, GENERATION] == generations
                where, tokens = blocks[same], np.asarray(filled)[same]
                self._raise(where, CONFIRMED, np.minimum(tokens, rows[where, DECLARED]))
                continue
            for block, generation, count in zip(blocks, generations, filled, strict=True):
                at = block << SHIFT
                if cells[at + GENERATION] == generation:
                    cells[at + CONFIRMED] = max(cells[at + CONFIRMED], min(count, cells[at + DECLARED]))

    def abandon(self, step: int) -> None:
        """Step ``step`` failed or was given up: what it alone declared is not going to be written."""
        lost = list(_each(self._pending.pop(min(step, LARGEST), [])))
        others: dict[tuple[int, int], int] = {}
        for waiting in self._pending.values():
            for block, generation, tokens in _each(waiting):
                others[block, generation] = max(tokens, others.get((block, generation), 0))
        cells = self._cells
        for block, generation, _ in lost:
            at = block << SHIFT
            if cells[at + GENERATION] == generation:
                still = max(cells[at + CONFIRMED], others.get((block, generation), 0))
                cells[at + DECLARED] = min(cells[at + DECLARED], still)

    def confirm_written(self, block_ids: Ids, filled: Filled, step: int) -> None:
        """Step ``step`` has written ``filled`` tokens of these blocks ``[n]``, whether or not they were declared."""
        where, tokens = self._tokens(block_ids, filled)
        self._raise(where, DECLARED, tokens)
        self._raise(where, CONFIRMED, tokens)
        self._raise(where, WRITTEN_STEP, min(step, LARGEST))

    def confirm_block(self, block_id: int, tokens: int, step: int) -> None:
        """:meth:`confirm_written` of one block."""
        if 0 <= block_id < self.num_blocks and block_id != self.null_block_id:
            cells, at = self._cells, block_id << SHIFT
            cells[at + DECLARED] = max(cells[at + DECLARED], tokens)
            cells[at + CONFIRMED] = max(cells[at + CONFIRMED], tokens)
            cells[at + WRITTEN_STEP] = max(cells[at + WRITTEN_STEP], min(step, LARGEST))

    def roll_back(self, block_ids: Ids, filled: Filled, confirmed: Filled | None = None) -> None:
        """Of these blocks ``[n]`` only ``filled`` tokens are written once all submitted steps have run, and
        ``confirmed`` now (None: the same), because drafts were rejected or a step did not do what it declared.

        With a later step on its way the two differ: two drafts rejected, and one token of the next step behind what
        was accepted, are ``filled = accepted + 1, confirmed = accepted``. After the :meth:`confirm` of the step.
        """
        where, tokens = self._tokens(block_ids, filled)
        np.minimum.at(self._rows[:, DECLARED], where, tokens)
        if confirmed is not None:
            where, tokens = self._tokens(block_ids, confirmed)
        np.minimum.at(self._rows[:, CONFIRMED], where, tokens)

    def assume_written(self) -> None:
        """Every block that somebody has or could hit counts as written to its end, because nobody knows better."""
        used = (self._rows[:, REFERENCES] > 0) | (self._rows[:, HASHES] > 0)
        self._rows[used, DECLARED] = self._rows[used, CONFIRMED] = LARGEST

    def receive(self, block_ids: Ids, filled: Filled, step: int) -> None:
        """A receive into these blocks ``[n]`` has completed after step ``step`` and filled so many tokens of each. It
        reserves them no longer.
        """
        self.confirm_written(block_ids, filled, step)
        self._rows[self._tokens(block_ids, 0)[0], RESERVED] = 0

    def cut(self, block_ids: Ids, filled: Filled) -> None:
        """A receive into these blocks ``[n]`` has ended and is valid for ``filled`` tokens of each at most. It reserves
        them no longer.
        """
        self.roll_back(block_ids, filled)
        self._rows[self._tokens(block_ids, 0)[0], RESERVED] = 0

    def pending(self) -> dict[int, list[tuple[int, int, int]]]:
        """Steps that were declared and not confirmed, with ``(block, generation, tokens filled)`` in order."""
        return {step: list(_each(waiting)) for step, waiting in self._pending.items()}

    def _declare_each(self, block_ids: Ids, filled: Sequence[int] | npt.NDArray[np.integer], step: int) -> Pending:
        cells, end, null = self._cells, self.num_blocks, self.null_block_id
        blocks: list[int] = []
        generations: list[int] = []
        written: list[int] = []
        if isinstance(block_ids, np.ndarray) or isinstance(filled, np.ndarray):
            block_ids, filled = _listed(block_ids), _listed(filled)
        for block, tokens in zip(block_ids, filled, strict=True):
            if 0 <= block < end and block != null:
                at = block << SHIFT
                blocks.append(block)
                generations.append(cells[at + GENERATION])
                written.append(tokens)
                cells[at + DECLARED] = max(cells[at + DECLARED], tokens)
                cells[at + WRITTEN_STEP] = step
        return blocks, generations, written

    def _declare_at_once(self, block_ids: Ids, filled: Filled, step: int) -> Pending:
        where, tokens = self._tokens(block_ids, filled)
        self._raise(where, DECLARED, tokens)
        self._rows[where, WRITTEN_STEP] = step
        return where, self._rows[where, GENERATION], tokens

    def _tokens(self, block_ids: Ids, filled: Filled) -> tuple[Where, Int32]:
        """Rows and numbers of those blocks that are counted: neither the null block nor outside of the pool."""
        where = self._where(block_ids)
        tokens = np.broadcast_to(np.asarray(filled, np.int32), where.shape)
        counted = (where < self.num_blocks) & (where != self.null_block_id)
        return where[counted], tokens[counted]

    def _raise(self, where: Where, column: int, at_least: Int32 | int) -> None:
        np.maximum.at(self._rows[:, column], where, at_least)


def _listed(numbers: Sequence[int] | npt.NDArray[np.integer]) -> Sequence[int]:
    return numbers.tolist() if isinstance(numbers, np.ndarray) else numbers


def _each(waiting: list[Pending]) -> Iterator[tuple[int, int, int]]:
    for columns in waiting:
        blocks, generations, filled = columns
        yield from zip(_listed(blocks), _listed(generations), _listed(filled), strict=True)
