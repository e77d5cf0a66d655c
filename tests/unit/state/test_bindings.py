"""The replayed tables against a model of a few lines: one dict of lists, and what each request was last given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.budget import examples

from kvscope.facts.requests import BlockIds, StepRequests
from kvscope.facts.topology import FULL_ATTENTION, SLIDING_WINDOW, Group, Topology
from kvscope.state.bindings import Bindings


def topology(groups: int) -> Topology:
    return Topology(
        num_blocks=1 << 20,
        null_block_id=0,
        groups=tuple(
            Group(group_id=index, kind=FULL_ATTENTION, block_size=16, kernel_block_size=16, layers=1)
            for index in range(groups)
        ),
    )


def requests(**fields: Any) -> StepRequests:
    empty: dict[str, Any] = {
        "new_ids": [],
        "new_blocks": [],
        "new_computed": [],
        "cached_ids": [],
        "cached_blocks": [],
        "cached_computed": [],
        "resumed": set(),
        "scheduled": {},
        "finished": set(),
        "preempted": set(),
    }
    return StepRequests(**{**empty, **fields})


def new(request_id: str, *blocks: list[int], computed: int = 0, scheduled: int = 1) -> StepRequests:
    return requests(
        new_ids=[request_id], new_blocks=[blocks], new_computed=[computed], scheduled={request_id: scheduled}
    )


def known(
    request_id: str, blocks: BlockIds | None, *, computed: int = 0, scheduled: int = 1, resumed: bool = False
) -> StepRequests:
    return requests(
        cached_ids=[request_id],
        cached_blocks=[blocks],
        cached_computed=[computed],
        resumed={request_id} if resumed else set(),
        scheduled={request_id: scheduled},
    )


IDS = [f"r{number}" for number in range(60)]
COUNT = st.integers(0, 3)


class Replayed(RuleBasedStateMachine):
    """Draws what a scheduler may say in a step, several requests at once, and says it to both."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, list[list[int]]] = {}
        self.tokens: dict[str, tuple[int, int]] = {}
        self.partial: set[str] = set()
        self.gone: set[str] = set()
        self.next_block = 1

    @initialize(groups=st.integers(1, 3))
    def start(self, groups: int) -> None:
        self.groups = groups
        self.bindings = Bindings(topology(groups))

    def blocks(self, counts: list[int]) -> BlockIds:
        given = []
        for count in (counts * self.groups)[: self.groups]:
            given.append(list(range(self.next_block, self.next_block + count)))
            self.next_block += count
        return tuple(given)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One step: some finish, some are preempted, some arrive (under used ids too), some grow, some resume."""
        live = sorted(self.model)
        finished = data.draw(st.sets(st.sampled_from([*live, "never seen"]), max_size=3))
        preempted = data.draw(
            st.sets(st.sampled_from([r for r in live if r not in finished] or ["nobody"]), max_size=2)
        )
        for request_id in finished | preempted:
            self.model.pop(request_id, None)
            self.tokens.pop(request_id, None)
            self.partial.discard(request_id)
        self.gone |= preempted

        free = [r for r in IDS if r not in self.model]
        said = requests(finished=finished, preempted=preempted)
        for request_id in data.draw(st.lists(st.sampled_from(free), max_size=5, unique=True)) if free else []:
            blocks = self.blocks(data.draw(st.lists(COUNT, min_size=1, max_size=3)))
            resume = request_id in self.gone and data.draw(st.booleans())
            self.gone.discard(request_id)
            if resume:
                said.cached_ids.append(request_id)
                said.cached_blocks.append(blocks)
                said.resumed.add(request_id)
                said.cached_computed.append(data.draw(st.integers(0, 500)))
            elif data.draw(st.integers(0, 9)) == 0:  # known to the scheduler from before we looked
                said.cached_ids.append(request_id)
                said.cached_blocks.append(data.draw(st.sampled_from([blocks, None])))
                said.cached_computed.append(data.draw(st.integers(0, 500)))
                self.partial.add(request_id)
            else:
                said.new_ids.append(request_id)
                said.new_blocks.append(blocks)
                said.new_computed.append(data.draw(st.integers(0, 500)))
            given = said.new_blocks[-1] if request_id in said.new_ids else said.cached_blocks[-1]
            self.model[request_id] = [list(group) for group in given or ((),) * self.groups]
        for request_id in data.draw(st.sets(st.sampled_from(live), max_size=6)) if live else set():
            if request_id not in self.model or request_id in (*said.new_ids, *said.cached_ids):
                continue
            delta = data.draw(st.none() | st.lists(COUNT, min_size=1, max_size=3).map(self.blocks))
            said.cached_ids.append(request_id)
            said.cached_blocks.append(delta)
            said.cached_computed.append(data.draw(st.integers(0, 500)))
            for group, more in zip(self.model[request_id], delta or ((),) * self.groups, strict=True):
                group.extend(more)
        for request_id, computed in [
            *zip(said.new_ids, said.new_computed, strict=True),
            *zip(said.cached_ids, said.cached_computed, strict=True),
        ]:
            said.scheduled[request_id] = data.draw(st.integers(1, 40))
            self.tokens[request_id] = (computed, computed + said.scheduled[request_id])
        before = self.bindings.version
        self.bindings.apply(said)
        if finished & set(live) or preempted & set(live) or said.new_ids or said.resumed or any(said.cached_blocks):
            assert self.bindings.version > before

    @rule(order=st.randoms(use_true_random=False))
    def ask_again(self, order: Any) -> None:
        """Rows are looked up before and after other steps, so that a stale answer would show."""
        asked = [*self.model, "nobody"]
        order.shuffle(asked)
        rows = self.bindings.rows_of(asked)
        assert self.bindings.rows_of(list(asked)) is rows
        assert [row == -1 for row in rows.tolist()] == [request_id not in self.model for request_id in asked]

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "bindings"):
            return
        bindings = self.bindings
        assert set(bindings.live) == set(self.model)
        assert bindings.partial == self.partial
        rows = bindings.rows_of(sorted(self.model))
        assert len(set(rows.tolist())) == len(self.model)
        for request_id, row in zip(sorted(self.model), rows.tolist(), strict=True):
            assert request_id in bindings
            for index, blocks in enumerate(self.model[request_id]):
                assert bindings.table(request_id, index).tolist() == blocks
                assert bindings.tables[index][row, : len(blocks)].tolist() == blocks
                assert bindings.lengths[index, row] == len(blocks)
                for block in blocks[-1:]:
                    assert bindings.holders(index, block) == [request_id]

    @rule()
    def count_tokens(self) -> None:
        """Not after every step: what several steps said adds up, whether or not anybody looked in between."""
        rows = self.bindings.rows_of(list(self.tokens))
        computed, seq_lens = self.bindings.computed[rows].tolist(), self.bindings.seq_lens[rows].tolist()
        assert list(zip(computed, seq_lens, strict=True)) == list(self.tokens.values())


TestReplayed = Replayed.TestCase
TestReplayed.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_rows_grow_beyond_the_first_ones_and_keep_their_tables() -> None:
    bindings = Bindings(topology(2))
    for number in range(100):
        bindings.apply(new(f"r{number}", [number + 1], [number + 1, number + 500], computed=number, scheduled=2))
    assert all(bindings.table(f"r{n}", 1).tolist() == [n + 1, n + 500] for n in range(100))
    rows = bindings.rows_of([f"r{n}" for n in range(100)])
    assert bindings.computed[rows].tolist() == list(range(100))
    assert bindings.seq_lens[rows].tolist() == list(range(2, 102))
    assert bindings.lengths.shape[1] >= 100


def test_tables_grow_wider_and_keep_what_is_in_them() -> None:
    bindings = Bindings(topology(2))
    bindings.apply(new("long", list(range(1, 11)), [900]))
    bindings.apply(new("other", [50], [901]))
    for start in range(11, 400, 7):
        bindings.apply(known("long", (list(range(start, start + 7)), [])))
    assert bindings.table("long", 0).tolist() == list(range(1, 403))
    assert bindings.table("long", 1).tolist() == [900]
    assert bindings.table("other", 0).tolist() == [50]


@pytest.mark.parametrize("width", [1, 16, 17, 1000])
def test_a_width_can_be_asked_for(width: int) -> None:
    bindings = Bindings(topology(1))
    bindings.apply(new("r", [7, 8]))
    bindings.ensure_width(0, width)
    assert bindings.tables[0].shape[1] >= width
    assert bindings.table("r", 0).tolist() == [7, 8]


def test_an_id_that_is_used_again_starts_with_an_empty_table() -> None:
    bindings = Bindings(topology(1))
    bindings.apply(new("r", [1, 2, 3]))
    stale = bindings.rows_of(["r"])
    bindings.apply(requests(finished={"r"}))
    assert "r" not in bindings
    assert bindings.rows_of(["r"]).tolist() == [-1]
    bindings.apply(new("other", [9]))
    bindings.apply(new("r", [4]))
    assert bindings.table("r", 0).tolist() == [4]
    assert bindings.rows_of(["r"]).tolist() != stale.tolist()


def test_an_id_can_end_and_begin_in_one_step() -> None:
    bindings = Bindings(topology(1))
    bindings.apply(new("r", [1, 2, 3]))
    again = new("r", [7])
    again.finished.add("r")
    bindings.apply(again)
    assert bindings.table("r", 0).tolist() == [7]


def test_a_preempted_request_comes_back_with_a_whole_table() -> None:
    bindings = Bindings(topology(1))
    bindings.apply(new("r", [1, 2, 3]))
    bindings.apply(requests(preempted={"r"}))
    assert bindings.table("r", 0).size == 0
    bindings.apply(known("r", ([5, 6],), resumed=True))
    assert bindings.table("r", 0).tolist() == [5, 6]
    assert not bindings.partial


def test_a_request_that_resumes_without_having_been_named_preempted_is_bound_anew() -> None:
    """``SchedulerOutput.preempted_req_ids`` is filled for one of the runners only."""
    bindings = Bindings(topology(1))
    bindings.apply(new("r", [1, 2, 3]))
    version, rows = bindings.version, bindings.rows_of(["r"])
    bindings.apply(known("r", ([5],), resumed=True))
    assert bindings.table("r", 0).tolist() == [5]
    assert bindings.version > version
    again = bindings.rows_of(["r"])  # what was gathered by the old array is no longer true, though the row is the same
    assert again is not rows
    assert again.tolist() == rows.tolist()


def test_behind_a_table_stands_nothing_of_what_its_row_had_before() -> None:
    """A rule that looks behind a table that falls short must not find an older one there, and agree with it."""
    bindings = Bindings(topology(2))
    bindings.apply(new("r", [1, 2, 3], [4]))
    (row,) = bindings.rows_of(["r"]).tolist()
    assert bindings.tables[0][row, :4].tolist() == [1, 2, 3, 0]
    bindings.apply(known("r", ([5], []), resumed=True))
    assert [table[row, :4].tolist() for table in bindings.tables] == [[5, 0, 0, 0], [0, 0, 0, 0]]
    bindings.apply(requests(finished={"r"}))
    bindings.apply(new("s", [6], [7]))
    assert bindings.rows_of(["s"]).tolist() == [row]
    bindings.apply(known("s", ([8], [9])))
    assert [table[row, :4].tolist() for table in bindings.tables] == [[6, 8, 0, 0], [7, 9, 0, 0]]


def test_a_request_from_before_the_first_declaration_is_partial_until_it_is_bound() -> None:
    bindings = Bindings(topology(2))
    bindings.apply(known("r", None, computed=80))
    assert bindings.partial == {"r"}
    bindings.apply(known("r", ([4], []), computed=81))
    assert bindings.partial == {"r"}
    assert bindings.table("r", 0).tolist() == [4]
    bindings.apply(known("r", ([5, 6], [7]), resumed=True))
    assert bindings.partial == set()
    assert bindings.table("r", 0).tolist() == [5, 6]


@pytest.mark.parametrize("way", ["finished", "preempted"])
def test_a_partial_request_that_is_gone_is_forgotten(way: str) -> None:
    bindings = Bindings(topology(1))
    bindings.apply(known("r", ([4],)))
    bindings.apply(requests(**{way: {"r"}}))
    assert bindings.partial == set()
    bindings.apply(new("r", [1]))
    assert bindings.partial == set()


def test_looking_up_many_batches_forgets_the_oldest_without_answering_wrongly() -> None:
    bindings = Bindings(topology(1))
    for number in range(10):
        bindings.apply(new(f"r{number}", [number + 1]))
    expected = {f"r{n}": int(bindings.rows_of([f"r{n}"])[0]) for n in range(10)}
    for first in range(10):
        for second in range(10):
            pair = [f"r{first}", f"r{second}"]
            assert bindings.rows_of(pair).tolist() == [expected[r] for r in pair]
    assert len(bindings._rows_of) <= 32


def test_holders_are_those_whose_live_table_has_the_block() -> None:
    bindings = Bindings(topology(2))
    bindings.apply(new("a", [1, 2], [3]))
    bindings.apply(new("b", [1, 4], [5]))
    bindings.apply(new("c", [6], [1]))
    assert bindings.holders(0, 1) == ["a", "b"]
    assert bindings.holders(1, 1) == ["c"]
    bindings.apply(requests(finished={"a"}))
    assert bindings.holders(0, 1) == ["b"]
    assert bindings.holders(0, 2) == []
    assert bindings.holders(0, 0) == []


def test_one_holder_is_found_as_long_as_there_is_any() -> None:
    bindings = Bindings(topology(2))
    bindings.apply(new("a", [1, 2], [3]))
    bindings.apply(new("b", [1, 4], [5]))
    assert bindings.a_holder(0, 1) in {"a", "b"}
    assert bindings.a_holder(0, 4) == "b"
    assert bindings.a_holder(1, 3) == "a"
    assert [bindings.a_holder(0, block) for block in (0, 3, 99, -1, 1 << 40)] == [None] * 5
    bindings.apply(requests(finished={"b"}))
    assert (bindings.a_holder(0, 1), bindings.a_holder(0, 4)) == ("a", None)
    bindings.apply(known("a", ([4], [])))
    assert bindings.a_holder(0, 4) == "a"


def test_a_block_is_foreign_to_whoever_was_never_given_it() -> None:
    bindings = Bindings(topology(1))
    bindings.apply(new("a", [1, 2]))
    bindings.apply(new("b", [1, 4]))
    assert bindings.foreign_holder(0, 4, "a") == "b"
    assert bindings.foreign_holder(0, 2, "b") == "a"
    assert [bindings.foreign_holder(0, block, "a") for block in (0, 1, 2, 9)] == [None] * 4


def test_a_block_that_the_pool_does_not_have_is_in_nobodys_map() -> None:
    bindings = Bindings(topology(1))
    bindings.apply(new("a", [-1, 1 << 21, 7]))
    assert bindings.a_holder(0, 7) == "a"
    assert bindings.a_holder(0, -1) is None
    assert bindings.a_holder(0, 1 << 21) is None


def test_a_block_before_the_window_is_no_longer_the_requests() -> None:
    """The manager has taken it back without a word, and may have handed it on."""
    window = Group(group_id=0, kind=SLIDING_WINDOW, block_size=16, kernel_block_size=16, layers=1, visible_tokens=16)
    bindings = Bindings(Topology(num_blocks=64, null_block_id=0, groups=(window,)))
    bindings.apply(new("a", [1, 2, 3], scheduled=40))
    assert (bindings.a_holder(0, 1), bindings.holders(0, 1)) == ("a", ["a"])
    bindings.apply(known("a", None, computed=40))
    assert (bindings.a_holder(0, 1), bindings.holders(0, 1)) == (None, [])
    assert (bindings.a_holder(0, 2), bindings.holders(0, 3)) == ("a", ["a"])
    bindings.apply(new("b", [1]))
    assert bindings.a_holder(0, 1) == "b"
    assert bindings.table("a", 0).tolist() == [1, 2, 3]


def test_an_unknown_request_has_an_empty_table() -> None:
    table = Bindings(topology(1)).table("nobody", 0)
    assert (table.size, table.dtype) == (0, np.int32)


def test_consecutive_positions_are_spelled_once() -> None:
    bindings = Bindings(topology(1))
    known = bindings.positions(3)
    assert np.frombuffer(known, np.int64)[:3].tolist() == [0, 1, 2]
    assert bindings.positions(2) is known
    assert len(bindings.positions(100)) >= 800
