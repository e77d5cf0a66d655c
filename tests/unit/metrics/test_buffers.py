"""Two buffers: a reader finds a complete snapshot, whatever the order in which stores become visible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope.metrics.buffers import DoubleBuffer, latest
from kvscope.metrics.layout import HEAD

SIZE = HEAD.size + 64
START = 16


def memory() -> bytearray:
    return bytearray(START + 2 * SIZE)


def published(numbers: int) -> tuple[bytearray, DoubleBuffer]:
    stored = memory()
    writer = DoubleBuffer(memoryview(stored), START, SIZE)
    for number in range(1, numbers + 1):
        writer.publish(bytes([number]) * 40, 40, number * 10, number * 100)
    return stored, writer


def test_nothing_was_ever_published() -> None:
    assert latest(memoryview(memory()), START, SIZE) is None


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_the_last_snapshot_is_found(count: int) -> None:
    stored, _ = published(count)
    snapshot = latest(memoryview(stored), START, SIZE)
    assert snapshot is not None
    assert (snapshot.number, snapshot.mono_ns, snapshot.wall_ns) == (count, count * 10, count * 100)
    assert snapshot.payload == bytes([count]) * 40


def test_snapshots_may_differ_in_length() -> None:
    stored, writer = published(2)
    writer.publish(b"x", 1, 0, 0)
    snapshot = latest(memoryview(stored), START, SIZE)
    assert snapshot is not None
    assert snapshot.payload == b"x"


def test_what_is_too_long_is_refused_and_changes_nothing() -> None:
    stored, writer = published(2)
    before = bytes(stored)
    with pytest.raises(ValueError, match="65 bytes do not fit"):
        writer.publish(bytes(65), 65, 0, 0)
    assert bytes(stored) == before


def test_a_writer_that_has_forgotten_its_memory_stores_nothing() -> None:
    stored, writer = published(2)
    before = bytes(stored)
    writer.forget()
    writer.publish(b"x", 1, 0, 0)
    assert bytes(stored) == before


@given(
    count=st.integers(1, 6),
    order=st.permutations(range(2 * SIZE // 8)),
    visible=st.integers(0, 2 * SIZE // 8),
)
def test_stores_that_become_visible_in_any_order_never_make_a_wrong_snapshot(
    count: int, order: list[int], visible: int
) -> None:
    """A model of any machine: of one publication any subset of its 8-byte stores is seen."""
    before, writer = published(count)
    seen = bytearray(before)
    writer.publish(bytes([count + 1]) * 40, 40, (count + 1) * 10, (count + 1) * 100)
    # `before` is what the writer's memory holds now; `seen` gets a part of it.
    for word in order[:visible]:
        at = START + 8 * word
        seen[at : at + 8] = before[at : at + 8]
    snapshot = latest(memoryview(seen), START, SIZE)
    assert snapshot is not None
    assert snapshot.number in {count, count + 1}
    assert snapshot.payload == bytes([snapshot.number]) * 40
    assert snapshot.mono_ns == snapshot.number * 10
    if visible == len(order):
        assert snapshot.number == count + 1


@given(at=st.integers(0, HEAD.size + 40 - 1), flip=st.integers(1, 255))
def test_a_damaged_buffer_does_not_count(at: int, flip: int) -> None:
    stored, _ = published(3)  # the third is in the second buffer, the second in the first
    stored[START + SIZE + at] ^= flip
    snapshot = latest(memoryview(stored), START, SIZE)
    assert snapshot is not None
    assert snapshot.number == 2


def test_a_writer_that_died_in_its_very_first_store_left_nothing() -> None:
    stored, _ = published(1)
    stored[START + SIZE] ^= 1
    with pytest.raises(ValueError, match="torn"):
        latest(memoryview(stored), START, SIZE)
