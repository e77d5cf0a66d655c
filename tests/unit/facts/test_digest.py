from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvscope.facts.digest import column_weights, table_digest

BLOCK = st.integers(-(2**31), 2**31 - 1)
MODULUS = 1 << 64


def by_hand(row: list[int], judged: list[bool], weights: list[int]) -> int:
    """The definition, in Python's own integers."""
    return sum(block * weight for block, look, weight in zip(row, judged, weights, strict=True) if look) % MODULUS


@given(st.data())
def test_a_digest_is_the_weighted_sum_of_the_judged_entries(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    tables = [data.draw(st.lists(BLOCK, min_size=width, max_size=width)) for _ in range(rows)]
    judged = [data.draw(st.lists(st.booleans(), min_size=width, max_size=width)) for _ in range(rows)]
    weights = column_weights(width)
    digests = table_digest(np.array(tables, np.int32), np.array(judged), weights)
    assert digests.tolist() == [by_hand(t, j, weights.tolist()) for t, j in zip(tables, judged, strict=True)]


@given(st.lists(BLOCK, min_size=1, max_size=40), st.data())
def test_one_other_entry_is_always_another_digest(row: list[int], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(row) - 1))
    other = list(row)
    other[index] = data.draw(BLOCK.filter(lambda block: block != row[index]))
    tables = np.array([row, other], np.int32)
    one, two = table_digest(tables, np.ones(tables.shape, bool), column_weights(len(row))).tolist()
    assert one != two


def test_entries_that_are_not_judged_do_not_count() -> None:
    judged = np.array([[True, False, True]] * 2)
    one, two = table_digest(np.array([[4, 7, 2], [4, 900, 2]], np.int32), judged, column_weights(3)).tolist()
    assert one == two


def test_two_blocks_in_each_others_place_are_seen() -> None:
    tables = np.array([[4, 7], [7, 4]], np.int32)
    one, two = table_digest(tables, np.ones((2, 2), bool), column_weights(2)).tolist()
    assert one != two


def test_weights_are_odd_distinct_and_a_prefix_of_the_wider_ones() -> None:
    weights = column_weights(4096)
    assert (weights & np.uint64(1)).all()
    assert len(set(weights.tolist())) == 4096
    assert (column_weights(100) == weights[:100]).all()


def test_weights_are_the_published_ones_in_every_process() -> None:
    """A reader of another process, today or in a year, computes the same digests: the first weights stand here."""
    code = "from kvscope.facts.digest import column_weights; print(*column_weights(3).tolist())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [int(weight) for weight in printed] == column_weights(3).tolist()
    golden = 0x9E3779B97F4A7C15

    def weight(column: int) -> int:
        mixed = column * golden % MODULUS
        mixed ^= mixed >> 29
        return mixed * golden % MODULUS | 1

    assert column_weights(3).tolist() == [weight(1), weight(2), weight(3)]
