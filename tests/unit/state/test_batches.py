"""The declared tables of a batch, entry by entry against the bindings' own lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.budget import examples

from kvscope.facts.digest import column_weights
from kvscope.state.batches import BatchTable
from kvscope.state.bindings import Bindings
from unit.checks.scenes import declare
from unit.checks.worlds import LAYOUTS, World, blocks_for, first_visible, pool


def refreshed(bindings: Bindings, table: BatchTable, names: list[str]) -> None:
    rows = bindings.rows_of(names)
    table.refresh(rows, bindings.computed[rows], bindings.seq_lens[rows])


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 12))
def test_a_batch_holds_what_attention_must_see_however_often_it_is_refreshed(
    layout: str, seed: int, steps: int
) -> None:
    world = World(seed, LAYOUTS[layout])
    bindings = Bindings(world.topology)
    tables = [BatchTable(bindings, index) for index in range(len(world.groups))]
    for number in range(steps):
        declaration = world.step(decode_only=number % 3 == 2 and bool(world.live))
        bindings.apply(declaration.requests)
        names = list(declaration.requests.scheduled)
        if not names:
            continue
        for index, table in enumerate(tables):
            refreshed(bindings, table, names)
            of = world.groups[index]
            for row, name in enumerate(names):
                request = world.live[name]
                first, needed = first_visible(of, request.computed), blocks_for(request.declared, of.block_size)
                assert (int(table.first_visible[row]), int(table.needed[row])) == (first, needed)
                assert np.flatnonzero(table.visible[row]).tolist() == list(range(first, needed))
                told = request.tables[index]
                assert table.declared[row, first:needed].tolist() == told[first:needed]
                weights = column_weights(needed).tolist()
                digest = sum(told[i] * weights[i] for i in range(first, needed)) % 2**64
                assert int(table.digests_of(table.declared)[row]) == digest
                assert not table.declared[row][~table.visible[row]].any()
            assert table.sound
            assert table.equals_declared(table.declared)


def one_request(blocks: list[int], computed: int, scheduled: int) -> tuple[Bindings, BatchTable]:
    bindings = Bindings(pool(*LAYOUTS["full"]))
    bindings.apply(declare(1, new=[("r", (blocks,), computed, scheduled)]).requests)
    table = BatchTable(bindings, 0)
    refreshed(bindings, table, ["r"])
    return bindings, table


@pytest.mark.parametrize("blocks", [[1, 0], [1, 64], [-1, 2]])
def test_a_declaration_with_a_block_that_nothing_may_touch_is_not_sound(blocks: list[int]) -> None:
    assert not one_request(blocks, 0, 20)[1].sound


def test_a_batch_is_kept_while_nothing_about_it_changes() -> None:
    bindings, table = one_request([1, 2], 0, 20)
    kept = table.declared
    refreshed(bindings, table, ["r"])
    assert table.declared is kept
    bindings.apply(declare(2, known=[("r", ([3],), 20, 20)]).requests)
    refreshed(bindings, table, ["r"])
    assert table.declared[table.visible].tolist() == [1, 2, 3]


def test_a_batch_that_could_not_be_gathered_is_gathered_with_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings, table = one_request([1, 2], 0, 20)
    bindings.apply(declare(2, known=[("r", ([3],), 20, 20)]).requests)
    with monkeypatch.context() as patch:
        patch.setattr(Bindings, "ensure_width", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            refreshed(bindings, table, ["r"])
    refreshed(bindings, table, ["r"])
    assert table.declared[table.visible].tolist() == [1, 2, 3]


def test_tables_that_are_too_narrow_are_not_the_declared_ones() -> None:
    _, table = one_request([1, 2], 0, 20)
    assert not table.equals_declared(np.array([[1]], np.int32))
    assert table.equals_declared(np.array([[1, 2, 77]], np.int32))
    assert not table.equals_declared(np.array([[1, 3, 77]], np.int32))
    assert table.equals_declared(np.array([[1, 2]], np.int32))


def test_a_block_behind_the_sequence_is_the_null_block_however_far_behind() -> None:
    _, table = one_request([1, 2], 0, 20)
    assert table.blocks_at(np.array([0, 1, 2, 99]), np.zeros(4, np.intp)).tolist() == [1, 2, 0, 0]
    assert table.blocks_at(np.array([5]), None).tolist() == [0]
    full = list(range(1, 9))
    _, table = one_request(full, 0, 8 * 16)
    assert table.blocks_at(np.array([7, 8, 99]), np.zeros(3, np.intp)).tolist() == [8, 0, 0]


@pytest.mark.parametrize(
    ("blocks", "rows", "apart"),
    [
        ([5, 6], None, True),
        ([5, 5], None, False),
        ([5, 5, 6], [0, 0, 1], True),
        ([5, 6, 6], [0, 0, 1], False),
        ([5, 6, 5], [0, 0, 0], False),
        ([5, 6, 7, 8], [0, 0, 1, 1], True),
        ([5, 6, 7, 5], [0, 0, 1, 1], False),
    ],
)
def test_rows_that_write_in_one_block_are_seen_also_after_rows_that_did_not(
    blocks: list[int], rows: list[int] | None, apart: bool
) -> None:
    _, table = one_request([1, 2], 0, 20)
    row = None if rows is None else np.array(rows, np.intp)
    for _ in range(2):
        assert table.rows_write_apart(np.array(blocks), row) is apart
        assert table.rows_write_apart(np.array([11, 12]), None)


def test_other_tables_have_the_digests_of_their_own_entries() -> None:
    _, table = one_request([1, 2], 0, 20)
    other = table.declared.copy()
    other[0, 2:] = 77  # nothing looks there
    assert table.digests_of(other).tolist() == table.digests_of(table.declared).tolist()
    other[0, 1] = 3
    assert table.digests_of(other).tolist() != table.digests_of(table.declared).tolist()
