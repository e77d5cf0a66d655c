"""Lists of integers as ranges and runs (see ``events.envelope``), exactly and without a Python loop over integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvscope.events.envelope import Ranges, Runs

Integers = npt.NDArray[np.integer[Any]]

MOST_VALUES = 1 << 22
"""No step has more tokens and no request more blocks: a damaged number must not ask for all of the reader's memory."""


def _starts(values: Integers) -> npt.NDArray[np.bool_]:
    """True where an ascending run of neighbours starts. ``values`` is not empty."""
    starts = np.ones(len(values), dtype=np.bool_)
    # The order is compared as well, because a difference that overflows may look like 1.
    starts[1:] = (np.diff(values) != 1) | (values[1:] <= values[:-1])
    return starts


def to_ranges(values: Integers | Sequence[int]) -> Ranges:
    """Inclusive ranges of ascending neighbours, in the order of ``values``."""
    if len(values) == 0:
        return []
    if len(values) == 1:
        return [[int(values[0]), int(values[0])]]
    array = np.asarray(values)
    first = np.flatnonzero(_starts(array))
    last = np.append(first[1:], len(array)) - 1
    return [[low, high] for low, high in zip(array[first].tolist(), array[last].tolist(), strict=True)]


def from_ranges(ranges: Ranges) -> list[int]:
    """The inverse of :func:`to_ranges`.

    Raises:
        ValueError: an item is no range, or there are more than ``MOST_VALUES`` values.
    """
    _require_few(sum(max(last - first + 1, 0) for first, last in ranges))
    return [value for first, last in ranges for value in range(first, last + 1)]


def to_runs(values: Integers, lengths: Integers) -> list[Runs]:
    """One entry a row of ``lengths[i]`` values; the lengths are not negative and add up to ``len(values)``."""
    if len(values) == 0:
        return [[] for _ in range(len(lengths))]
    if len(lengths) == len(values) and bool((lengths == 1).all()):
        single: list[Runs] = values.tolist()
        return single
    row_starts = np.zeros(len(values) + 1, dtype=np.bool_)
    row_ends = np.cumsum(lengths)
    row_starts[row_ends - lengths] = True
    starts = _starts(values) | row_starts[:-1]

    # Runs first; then single values that stand several times in a row are counted.
    first = np.flatnonzero(starts)
    size = np.diff(np.append(first, len(values)))
    value = values[first]
    repeats = np.zeros(len(first), dtype=np.bool_)
    repeats[1:] = (value[1:] == value[:-1]) & (size[1:] == 1) & (size[:-1] == 1) & ~row_starts[first[1:]]
    head = np.flatnonzero(~repeats)
    count = np.diff(np.append(head, len(first)))
    last = values[first[head] + size[head] - 1]

    items: list[int | list[int]] = [
        low if times == 1 and low == high else [low, high] if times == 1 else [low, high, times]
        for low, high, times in zip(value[head].tolist(), last.tolist(), count.tolist(), strict=True)
    ]
    # Where each row's items start: every row with values starts an item of its own.
    edges = np.searchsorted(first[head], np.append(row_ends - lengths, len(values))).tolist()
    rows: list[Runs] = []
    for row in range(len(lengths)):
        entry = items[edges[row] : edges[row + 1]]
        rows.append(entry[0] if len(entry) == 1 and isinstance(entry[0], int) else entry)
    return rows


def to_run(values: list[int]) -> Runs:
    """One list of integers that are few, or neighbours, or all the same: what this is quick for.

    Descending neighbours are one range, since blocks are released from the end of a table.
    """
    count = len(values)
    if count == 1:
        return values[0]
    if count < 3:
        return list(values)
    first, last = values[0], values[-1]
    if last - first == count - 1 and values == list(range(first, last + 1)):
        return [[first, last]]
    if first - last == count - 1 and values == list(range(first, last - 1, -1)):
        return [[first, last]]
    if first == last and values.count(first) == count:
        return [[first, first, count]]
    items: list[int | list[int]] = []
    start = 0
    while start < count:
        first, end = values[start], start + 1
        step = values[end] - first if end < count else 2
        if -1 <= step <= 1:
            while end < count and values[end] - values[end - 1] == step:
                end += 1
        if end - start < 3:  # two values are shorter than a range of two
            items.append(first)
            start += 1
        else:
            items.append([first, values[end - 1]] if step else [first, first, end - start])
            start = end
    return items


def from_run(run: Runs) -> list[int]:
    """The inverse of :func:`to_run`, and of a row of :func:`to_runs`.

    Raises:
        ValueError: as :func:`from_runs`.
    """
    return [run] if isinstance(run, int) else from_runs([run]).tolist()


def from_runs(rows: Sequence[Runs]) -> npt.NDArray[np.int64]:
    """All rows behind each other.

    Raises:
        ValueError: an item is neither a value nor a range nor a counted value, or there are more than ``MOST_VALUES``.
    """
    _require_few(sum(_size(item) for row in rows if not isinstance(row, int) for item in row))
    values: list[int] = []
    for row in rows:
        if isinstance(row, int):
            values.append(row)
            continue
        for item in row:
            if isinstance(item, int):
                values.append(item)
            elif len(item) == 2:
                first, last = item
                values.extend(range(first, last + 1) if first <= last else range(first, last - 1, -1))
            elif len(item) == 3 and item[0] == item[1]:
                values.extend([item[0]] * item[2])
            else:
                raise ValueError(f"{item} is not a run")
    return np.array(values, dtype=np.int64)


def _size(item: int | list[int]) -> int:
    if isinstance(item, int):
        return 1
    return abs(item[1] - item[0]) + 1 if len(item) == 2 else item[-1] if len(item) == 3 else 0


def _require_few(count: int) -> None:
    if count > MOST_VALUES:
        raise ValueError(f"{count} values stand where {MOST_VALUES} are the most")
