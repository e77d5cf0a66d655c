"""What is asked of some blocks at once: one by one or as rows, the answer is that of the single blocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.budget import examples

from kvscope.facts.allocator import ALLOC, FREE, TOUCH, PoolOperation
from kvscope.state import block_columns
from kvscope.state.blocks import BlockLedger

NUM_BLOCKS, NULL = 12, 0
IDS = st.lists(st.integers(-2, NUM_BLOCKS + 1) | st.sampled_from([1, 2, 3, 1 << 40]), max_size=6)


def ledger() -> BlockLedger:
    """1 is ``a``'s, 2 is shared, 3 was freed under ``a`` by somebody else, 4 has two references and one owner."""
    said = [
        (ALLOC, [1, 2, 3, 4], "a"),
        (TOUCH, [2], "b"),
        (TOUCH, [4], None),
        (FREE, [3], "x"),
    ]
    ledger = BlockLedger(NUM_BLOCKS, NULL)
    for kind, blocks, name in said:
        ledger.apply(PoolOperation(kind=kind, block_ids=blocks, request_id=name, group_id=0, first_index=0), 1)
    return ledger


@pytest.mark.parametrize("one_by_one", [0, 100])
@settings(max_examples=examples(300), deadline=None)
@given(ids=IDS, change=st.sampled_from([None, -1, 0, 1]), at=st.integers(0, 5))
def test_some_blocks_are_what_each_of_them_is(one_by_one: int, ids: list[int], change: int | None, at: int) -> None:
    of = ledger()
    known = all(0 < block < NUM_BLOCKS for block in ids)
    once = len(set(ids)) == len(ids)
    references, places = of.references_of(ids).tolist(), of.places_of(ids).tolist()
    said = None if change is None else list(references)
    if said and change is not None:
        said[at % len(said)] += change
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_columns, "COUNTED_ONE_BY_ONE", one_by_one)
        assert of.all_unused(ids) == (known and once and not any(references))
        assert of.all_in_use(ids) == (known and once and all(references))
        owned = all(o <= r for o, r in zip(places, references, strict=True))
        assert of.balanced(ids, said) == (known and owned and said in (None, references))


def test_where_blocks_stand_and_since_when() -> None:
    of = ledger()
    assert of.places_of([0, 1, 2, 3, 4, 5, 99]).tolist() == [0, 1, 2, 1, 1, 0, -1]
    assert of.allocated_step_of([1, 5, 99]).tolist() == [1, -1, -1]
