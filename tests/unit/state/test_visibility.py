"""Where a window begins, against a loop over the tokens that a query can see."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope.facts.topology import CHUNKED_LOCAL, FULL_ATTENTION, MLA, SLIDING_WINDOW, Group
from kvscope.state.visibility import first_visible_block


def group(kind: str, block_size: int, visible: int | None) -> Group:
    return Group(group_id=0, kind=kind, block_size=block_size, kernel_block_size=None, layers=1, visible_tokens=visible)


def first_token_seen(kind: str, visible: int, position: int) -> int:
    """The oldest token that a query at ``position`` attends to, itself included, found by looking at each."""
    for token in range(position + 1):
        if kind == SLIDING_WINDOW and position - token < visible:
            return token
        if kind == CHUNKED_LOCAL and token // visible == position // visible:
            return token
    raise AssertionError


@given(
    kind=st.sampled_from([SLIDING_WINDOW, CHUNKED_LOCAL]),
    block_size=st.sampled_from([1, 4, 16, 32]),
    visible=st.integers(1, 70),
    computed=st.lists(st.integers(0, 200), min_size=1, max_size=5),
)
def test_a_window_begins_with_the_block_of_the_oldest_token_seen(
    kind: str, block_size: int, visible: int, computed: list[int]
) -> None:
    first = first_visible_block(group(kind, block_size, visible), np.array(computed, np.int64))
    assert first.tolist() == [first_token_seen(kind, visible, position) // block_size for position in computed]


@pytest.mark.parametrize("kind", [FULL_ATTENTION, MLA])
@pytest.mark.parametrize("visible", [None, 32])
def test_attention_without_a_window_sees_everything(kind: str, visible: int | None) -> None:
    assert first_visible_block(group(kind, 16, visible), np.array([0, 500], np.int64)).tolist() == [0, 0]
