"""How many tokens each request has, in batches that go on and in all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.budget import examples

from kvscope.state.progress import Progress
from unit.checks.scenes import declare


def going_on(ends: Mapping[str, int], count: int = 1) -> Any:
    return declare(1, known=[(name, None, end, count) for name, end in ends.items()])


def started(**ends: int) -> Progress:
    progress = Progress([16])
    progress.set(list(ends), list(ends.values()))
    return progress


def test_a_batch_goes_on_by_one_token_each_from_where_it_is() -> None:
    progress = started(a=10, b=15)
    assert progress.goes_on(going_on({"a": 10, "b": 15}))
    assert (progress.end_of("a"), progress.end_of("b")) == (11, 16)
    assert [progress.end_at(row) for row in (0, 1)] == [11, 16]


def test_it_does_not_go_on_from_elsewhere_or_by_more_than_one_token() -> None:
    progress = started(a=10, b=15)
    assert not progress.goes_on(going_on({"a": 10, "b": 14}))
    assert not progress.goes_on(going_on({"a": 10, "b": 15}, count=2))
    assert not progress.goes_on(going_on({"a": 10}))
    assert progress.end_of("a") == 10


def test_rows_that_fill_a_block_are_named_in_that_step_by_the_size_of_their_blocks() -> None:
    progress = Progress([16, 4, 16])
    progress.set(["a", "b"], [14, 2])
    filled = []
    for step in range(4):
        assert progress.goes_on(going_on({"a": 14 + step, "b": 2 + step}))
        filled.append({size: list(rows) for size, rows in progress.filled.items()})
    assert filled == [{}, {4: [0, 1], 16: [0]}, {}, {}]


@pytest.mark.parametrize("broken_off", [lambda p: p.correct("b", 15), Progress.clear])
def test_steps_without_work_after_a_batch_was_broken_off_leave_it_at_that(
    broken_off: Callable[[Progress], None],
) -> None:
    """A step without work looks like one that goes on from a batch of nobody."""
    progress = started(a=10, b=17)
    broken_off(progress)
    known = progress.end_of("a"), progress.end_of("b")
    for _ in range(3):
        progress.goes_on(declare(1))
    assert (progress.end_of("a"), progress.end_of("b")) == known
    progress.set(["a"], [11])
    assert (progress.end_of("a"), progress.end_of("b")) == (11, known[1])


def test_who_is_not_in_the_batch_keeps_what_it_has() -> None:
    progress = started(a=10, b=15)
    progress.set(["a"], [11])
    assert progress.goes_on(going_on({"a": 11}))
    assert (progress.end_of("a"), progress.end_of("b"), progress.end_of("c")) == (12, 15, None)
    progress.set(["b"], [16])
    assert (progress.end_of("a"), progress.end_of("b")) == (12, 16)


def test_whoever_begins_behind_what_it_has_lags() -> None:
    progress = started(a=10)
    progress.goes_on(going_on({"a": 10}))
    assert not progress.lags(["a", "new"], [11, 50])
    assert not progress.lags(["a"], [5])
    assert progress.lags(["a"], [12])


def test_a_correction_and_a_departure_end_the_batch() -> None:
    progress = started(a=10, b=15)
    progress.goes_on(going_on({"a": 10, "b": 15}))
    progress.correct("a", 9)
    assert not progress.goes_on(going_on({"a": 11, "b": 16}))
    assert (progress.end_of("a"), progress.end_of("b")) == (9, 16)
    progress.forget(["a", "nobody"])
    assert (progress.end_of("a"), progress.end_of("b")) == (None, 16)
    progress.clear()
    assert progress.end_of("b") is None


@settings(max_examples=examples(100), deadline=None)
@given(
    ends=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 70), min_size=1),
    sizes=st.lists(st.sampled_from([1, 2, 3, 16, 32]), min_size=1, max_size=3),
    steps=st.integers(1, 70),
    asked=st.sets(st.integers(1, 70)),
)
def test_a_long_way_in_one_batch_is_the_same_as_many_steps(
    ends: dict[str, int], sizes: list[int], steps: int, asked: set[int]
) -> None:
    progress, names = Progress(sizes), list(ends)
    progress.set(names, list(ends.values()))
    for step in range(1, steps + 1):
        assert progress.goes_on(going_on(ends))
        ends = {name: end + 1 for name, end in ends.items()}
        if step in asked:
            assert {name: progress.end_of(name) for name in names} == ends
        expected = {
            size: [row for row, end in enumerate(ends.values()) if end % size == 0] for size in dict.fromkeys(sizes)
        }
        assert {size: list(rows) for size, rows in progress.filled.items()} == {s: r for s, r in expected.items() if r}
    progress.leave()
    assert {name: progress.end_of(name) for name in names} == ends
