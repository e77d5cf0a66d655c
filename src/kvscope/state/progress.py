"""How many tokens each request has once the step that was declared last has run.

A batch that goes on by one token a request costs two passes over a list: which of its rows fill a block in the next
step, and in the ones after that, is known from where they stand when it begins to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import add, gt

from ..facts.requests import Declaration

_NO_ROWS: Mapping[int, Sequence[int]] = {}


class Progress:
    """``block_sizes`` are those of the groups. A step is taken over by :meth:`goes_on`, or where that is False by
    :meth:`set`.

    ``filled`` has, after a step in which the batch goes on, by block size the rows of the batch that fill a block in
    it, and ``batch`` is whom they belong to.
    """

    def __init__(self, block_sizes: Iterable[int]) -> None:
        self.batch: list[str] = []
        self.filled: Mapping[int, Sequence[int]] = _NO_ROWS
        self._sizes = sorted(set(block_sizes))
        self._ends: dict[str, int] = {}
        self._next: list[int] = []
        self._row_of: dict[str, int] | None = None
        self._by_phase: list[tuple[int, list[list[int]]]] | None = None
        self._steps = 0

    def end_of(self, request_id: str) -> int | None:
        """Tokens of a request, None if it has not been declared since it came or came back."""
        if self._steps:
            if self._row_of is None:
                self._row_of = {name: row for row, name in enumerate(self.batch)}
            row = self._row_of.get(request_id)
            if row is not None:
                return self._next[row]
        return self._ends.get(request_id)

    def end_at(self, row: int) -> int:
        """Tokens of a row of the batch."""
        return self._next[row]

    def goes_on(self, declaration: Declaration, ends: list[int] | None = None) -> bool:
        """Whether the batch of the step before, which the caller knows to be the same, goes on by one token each.

        It is then taken over. ``ends`` has the tokens of each after it, if somebody has counted them already.
        """
        requests = declaration.requests
        if requests.cached_computed != self._next or declaration.total_num_scheduled_tokens != len(self._next):
            return False
        if self._by_phase is None:
            self._by_phase = [(size, self._phases(size)) for size in self._sizes]
        self._steps += 1
        self._next = ends if ends is not None else list(map(add, self._next, repeat(1)))
        filled = _NO_ROWS
        for size, phases in self._by_phase:
            rows = phases[-self._steps % size]
            if rows:
                filled = {**filled, size: rows}
        self.filled = filled
        return True

    def lags(self, request_ids: Sequence[str], starts: Sequence[int]) -> bool:
        """Whether one of them is about to begin behind what it has."""
        self.leave()
        return any(map(gt, starts, map(self._ends.get, request_ids, starts)))

    def set(self, request_ids: list[str], ends: list[int]) -> None:
        """Take over a step."""
        self.leave()
        self._ends.update(zip(request_ids, ends, strict=True))
        self.batch, self._next = request_ids, ends

    def correct(self, request_id: str, tokens: int) -> None:
        """The request has fewer tokens than was declared."""
        self.leave()
        self.batch, self._next = [], []
        self._ends[request_id] = tokens

    def forget(self, request_ids: Iterable[str]) -> None:
        """These come or go: what they had says nothing."""
        self.leave()
        for request_id in request_ids:
            self._ends.pop(request_id, None)

    def clear(self) -> None:
        """Nothing is known of anybody."""
        self._steps, self._ends = 0, {}
        self.batch, self._next = [], []
        self._row_of = self._by_phase = None

    def leave(self) -> None:
        """The batch does not go on any further; note how far it has come."""
        if self._steps:
            self._steps = 0
            self._ends.update(zip(self.batch, self._next, strict=True))
        self._row_of = self._by_phase = None

    def _phases(self, size: int) -> list[list[int]]:
        """The rows by how many tokens they have in their last block."""
        phases: list[list[int]] = [[] for _ in range(size)]
        for row, tokens in enumerate(self._next):
            phases[tokens % size].append(row)
        return phases
