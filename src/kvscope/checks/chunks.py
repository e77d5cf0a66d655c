"""Which part of a batch a rank of prefill context parallelism must compute, and what it does compute.

A prompt of ``n`` tokens in a step is cut into ``2 * pcp_size`` chunks of ``ceil(n / (2 * pcp_size))``, of which rank
``r`` gets the ``r``-th from the front and the ``r``-th from the back, so that all have the same work under a causal
mask; later chunks may be short or empty. What is not cut (decodes, and under decode context parallelism prompts that
are too short) is computed whole, by every rank or by one.
Source: ``PCPManager._iter_rank_chunks`` (``vllm/v1/worker/gpu/pcp_manager.py``), vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..facts.context_parallel import NO_WRITER, ContextParallel, LocalRows
from ..facts.plans import Int64
from .plan_view import Bool, StepView

Rows = npt.NDArray[np.intp]


class Disorder(NamedTuple):
    """A row of the whole batch, one of its tokens, and what is wrong about it."""

    row: int
    token: int
    expected: str
    actual: str


class LocalView:
    """The local rows of a plan, held against the whole batch. ``local rows`` below is their number."""

    def __init__(self, step: StepView, context: ContextParallel, local: LocalRows) -> None:
        self._step, self._local = step, local
        self._size, self._rank = context.pcp_size, context.pcp_rank
        self._lengths: Int64 = np.diff(local.query_start).astype(np.int64)
        self._starts: Int64 = local.query_start[:-1].astype(np.int64)

    @property
    def agrees(self) -> bool:
        """Whether every token is stored once, and nothing is out of order."""
        return bool(
            (self.times_written == 1).all()
            and not self._unknown
            and self._right.all()
            and self._complete.all()
            and self._gathered_in_order.all()
        )

    @cached_property
    def times_written(self) -> Int64:
        """``int64 [num_tokens]``: from how many places each token of the batch is stored."""
        tokens, count = self._local.writers, self._step.plan.num_tokens
        inside = tokens[(tokens >= 0) & (tokens < count)]
        return np.bincount(inside, minlength=count).astype(np.int64)

    def disorder(self) -> Iterator[Disorder]:
        """What is out of order, at most one a row of the batch."""
        step, told = self._step, set[int]()
        if self._unknown:
            return  # another request than those of the batch: there is no row to name
        for index in np.flatnonzero(~self._right).tolist():
            row = int(self._rows[index])
            if row not in told:
                told.add(row)
                yield Disorder(row, self._a_token(row), self._must(row), self._has(index))
        for row in np.flatnonzero(~self._complete).tolist():
            if row not in told:
                told.add(row)
                mine = np.flatnonzero(self._rows == row).tolist()
                yield Disorder(row, self._a_token(row), self._must(row), " and ".join(map(self._has, mine)) or "none")
        for place in np.flatnonzero(~self._gathered_in_order).tolist():
            token, taken = int(self._tokens[place]), int(self._places[place])
            row = int(self._rows[self._row_of_token[place]])
            if row not in told and 0 <= token < step.plan.num_tokens:
                told.add(row)
                yield Disorder(row, token, f"token {token} of the batch", f"taken for token {taken}")

    # What the rank computes -------------------------------------------------------------------------------------------

    @cached_property
    def _unknown(self) -> bool:
        return any(request_id not in self._step.row_of for request_id in self._local.request_ids)

    @cached_property
    def _rows(self) -> Rows:
        """``intp [local rows]``: the row of the batch that each is a part of."""
        return np.fromiter(map(self._step.row_of.__getitem__, self._local.request_ids), np.intp)

    @cached_property
    def _row_of_token(self) -> Rows:
        """``intp [local tokens]``: the local row of each."""
        return np.repeat(np.arange(len(self._lengths)), np.maximum(self._lengths, 0))

    @cached_property
    def _first(self) -> Int64:
        """``int64 [local rows]``: the position of each row's first token; of an empty row, where it would be."""
        positions, last = self._local.positions, len(self._local.positions) - 1
        first: Int64 = positions[np.minimum(self._starts, last)] if last >= 0 else np.zeros_like(self._starts)
        return first

    def _chunk(self, index: int) -> tuple[Int64, Int64]:
        """``int64 [rows]``: where a chunk begins within the step's tokens of each row, and how many it has."""
        scheduled = self._step.scheduled
        size = -(-scheduled // (2 * self._size))
        begin = size * index
        return begin, np.clip(scheduled - begin, 0, size)

    @cached_property
    def _kinds(self) -> tuple[Bool, Bool, Bool]:
        """``bool [local rows]`` each: the whole row, this rank's chunk from the front, this rank's from the back."""
        rows, lengths = self._rows, self._lengths
        begins = self._first - self._step.computed[rows]
        whole = (begins == 0) & (lengths == self._step.scheduled[rows])
        kinds = [whole]
        for index in (self._rank, 2 * self._size - 1 - self._rank):
            begin, count = self._chunk(index)
            kinds.append(~whole & (lengths > 0) & (begins == begin[rows]) & (lengths == count[rows]))
        return kinds[0], kinds[1], kinds[2]

    @cached_property
    def _right(self) -> Bool:
        """``bool [local rows]``: the row is one that this rank has to compute, and knows where it ends."""
        whole, front, back = self._kinds
        nothing = (self._lengths == 0) & (len(self._lengths) == 1)  # a rank that has no part stands there with one row
        positions = self._local.positions
        covered = self._row_of_token[: len(positions)]
        run = self._first[covered] + np.arange(len(covered)) - self._starts[covered]
        broken = np.zeros(len(self._lengths), bool)
        broken[covered[positions[: len(covered)] != run]] = True
        ends = self._local.seq_lens == self._first + self._lengths
        right: Bool = nothing | ((whole | front | back) & ~broken & ends)
        return right

    @cached_property
    def _complete(self) -> Bool:
        """``bool [rows]``: of each row of the batch the rank has all that it must have, once, or nothing."""
        count = len(self._step.rows)
        whole, front, back = (np.bincount(self._rows[kind], minlength=count) for kind in self._kinds)
        has_front = self._chunk(self._rank)[1] > 0
        has_back = self._chunk(2 * self._size - 1 - self._rank)[1] > 0
        chunks: Bool = (whole == 0) & (front == has_front) & (back == has_back)
        other: Bool = (front == 0) & (back == 0) & (whole <= 1)
        return chunks | other

    # Where it goes ----------------------------------------------------------------------------------------------------

    @cached_property
    def _tokens(self) -> Int64:
        """``int64 [local tokens]``: the token of the whole batch that each is."""
        step, positions = self._step, self._local.positions
        rows = self._rows[self._row_of_token[: len(positions)]]
        tokens: Int64 = step.plan.query_start[rows] + positions[: len(rows)] - step.computed[rows]
        return tokens

    @cached_property
    def _places(self) -> Int64:
        """``int64 [local tokens]``: the token for which the gathered place of each is taken."""
        begin = self._rank * (len(self._local.writers) // self._size)
        return self._local.writers[begin : begin + len(self._tokens)]

    @cached_property
    def _gathered_in_order(self) -> Bool:
        count = len(self._places)
        in_order: Bool = (self._places == NO_WRITER) | (self._places == self._tokens[:count])
        return in_order

    # In words ---------------------------------------------------------------------------------------------------------

    def _a_token(self, row: int) -> int:
        return min(int(self._step.plan.query_start[row]), self._step.plan.num_tokens - 1)

    def _must(self, row: int) -> str:
        computed, spans = int(self._step.computed[row]), []
        for index in (self._rank, 2 * self._size - 1 - self._rank):
            begin, count = (int(values[row]) for values in self._chunk(index))
            if count:
                spans.append(f"{computed + begin} to {computed + begin + count - 1}")
        return f"positions {' and '.join(spans)}, or the whole row" if spans else "the whole row, or nothing"

    def _has(self, index: int) -> str:
        first, count = int(self._first[index]), int(self._lengths[index])
        return f"positions {first} to {first + count - 1}" if count > 0 else "no token"
