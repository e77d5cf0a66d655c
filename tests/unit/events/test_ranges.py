from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope.events.ranges import from_ranges, from_run, from_runs, to_ranges, to_run, to_runs
from unit.events.samples import int64

rows_of_values = st.lists(st.lists(int64 | st.just(-1), max_size=8), max_size=5)


@given(st.lists(int64, max_size=30))
def test_ranges_give_back_any_list_in_its_order(values: list[int]) -> None:
    assert from_ranges(to_ranges(values)) == values
    assert from_ranges(to_ranges(np.array(values, dtype=np.int64))) == values


def test_ranges_join_ascending_neighbours_only() -> None:
    assert to_ranges([7, 8, 9, 4, 3, 3, 4]) == [[7, 9], [4, 4], [3, 3], [3, 4]]
    assert to_ranges([]) == []


def test_an_overflowing_difference_is_no_neighbour() -> None:
    assert to_ranges([2**63 - 1, -(2**63)]) == [[2**63 - 1, 2**63 - 1], [-(2**63), -(2**63)]]
    assert from_ranges(to_ranges(np.array([2**31 - 1, -(2**31)], dtype=np.int32))) == [2**31 - 1, -(2**31)]


@given(rows_of_values)
def test_runs_give_back_any_rows(rows: list[list[int]]) -> None:
    values = np.array([value for row in rows for value in row], dtype=np.int64)
    runs = to_runs(values, np.array([len(row) for row in rows], dtype=np.int64))
    assert len(runs) == len(rows)
    assert [from_runs([run]).tolist() for run in runs] == rows


def test_runs_are_short_for_decode_prefill_and_padding() -> None:
    def runs(*rows: list[int]) -> object:
        values = np.array([value for row in rows for value in row], dtype=np.int64)
        return to_runs(values, np.array([len(row) for row in rows], dtype=np.int64))

    assert runs([5], [90]) == [5, 90]
    assert runs([160, 161, 162, 32, 33], [7], []) == [[[160, 162], [32, 33]], 7, []]
    assert runs([-1, -1, -1, 4, 5], [-1]) == [[[-1, -1, 3], [4, 5]], -1]
    assert runs([9, 8, 7, 7]) == [[9, 8, [7, 7, 2]]]
    # A row's end ends a run, although the next row goes on where it stopped.
    assert runs([1, 2], [3, 4], [4], [4]) == [[[1, 2]], [[3, 4]], 4, 4]


@given(st.lists(int64, max_size=12) | st.lists(st.integers(0, 3), max_size=30))
def test_one_list_comes_back_in_its_order(values: list[int]) -> None:
    assert from_run(to_run(values)) == values


def test_one_list_is_short_where_its_values_are_neighbours_in_either_direction() -> None:
    assert to_run([]) == []
    assert to_run([7]) == 7
    assert to_run([4, 5]) == [4, 5]
    assert to_run([4, 5, 6]) == [[4, 6]]
    assert to_run([9, 8, 7, 6]) == [[9, 6]]
    assert to_run([1, 1, 1]) == [[1, 1, 3]]
    assert to_run([5, 9, 8, 7, 7, 7, 8, 8]) == [5, [9, 7], 7, 7, 8, 8]
    assert to_run([3, 2, 1, 0, -1, 40, 41, 42, 6, 6, 6, 6]) == [[3, -1], [40, 42], [6, 6, 4]]


@pytest.mark.parametrize("damaged", [[[1]], [[1, 2, 3]], [[1, 1, 1, 1]], [[]]])
def test_an_item_that_is_no_run_is_refused(damaged: list[int | list[int]]) -> None:
    with pytest.raises(ValueError, match="is not a run"):
        from_runs([damaged])


@pytest.mark.parametrize("last", [10**8, 2**63, 10**30])
def test_a_damaged_number_does_not_ask_for_all_memory(last: int) -> None:
    for read in (
        lambda: from_ranges([[0, last]]),
        lambda: from_ranges([[0, 10**6]] * 5),
        lambda: from_runs([[[0, last]]]),
        lambda: from_runs([[[last, 0]]]),
        lambda: from_runs([[[7, 7, last]]]),
    ):
        with pytest.raises(ValueError, match="are the most"):
            read()
    assert from_ranges([[5, 2], [3, -(10**30)]]) == []
