"""What a kv.violation says about its block: from a ledger, at the moment of the finding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvscope.checks.finding import Finding
from kvscope.events import codec
from kvscope.events.finding_schema import (
    MOST_OWNERS,
    NEIGHBOUR_WORDS,
    STATUS_WORDS,
    BlockHistory,
    BlockOwner,
    ViolationRecord,
)
from kvscope.events.histories import history_of
from kvscope.events.names import RequestNames
from kvscope.events.schema import decode_record, json_schema
from kvscope.facts.allocator import ALLOC, CACHE, FREE, HOLD, TOUCH, PoolOperation
from kvscope.state.block_columns import Status
from kvscope.state.blocks import BlockLedger
from unit.events.samples import RULE

NUM_BLOCKS = 32


def say(kind: str, block_ids: list[int], request_id: str | None = None, **fields: Any) -> PoolOperation:
    group = None if request_id is None else 0
    return PoolOperation(
        **{"kind": kind, "block_ids": block_ids, "request_id": request_id, "group_id": group, **fields}
    )


def told(*operations: tuple[int, PoolOperation], num_blocks: int = NUM_BLOCKS) -> BlockLedger:
    """Operations, each with its step."""
    ledger = BlockLedger(num_blocks, 0)
    for step, operation in operations:
        ledger.apply(operation, step)
    return ledger


def finding(block_id: int | None = 5, request_id: str | None = "a", **fields: Any) -> Finding:
    return Finding(reason="x", step=9, trace_id="t", request_id=request_id, block_id=block_id, **fields)


def known(ledger: BlockLedger, at: Finding | None = None) -> BlockHistory:
    history = history_of(at or finding(), ledger)
    assert history is not None
    return history


def words(history: BlockHistory) -> dict[int, str]:
    """The strip without what is nobody's."""
    assert history.strip is not None
    return {
        block: word for block, word in enumerate(history.strip.blocks, history.strip.first_block) if word != "nobody"
    }


A_COMES = say(ALLOC, [4, 5], "a", first_index=0)
A_GOES = say(FREE, [5, 4], "a", cause="preempt")
B_COMES = say(ALLOC, [5], "b", first_index=7)


def test_a_block_that_was_freed_and_handed_out_again_names_both_and_both_generations() -> None:
    ledger = told((2, A_COMES), (4, A_GOES), (6, B_COMES))
    ledger.declare_written([5], [2], 7)
    ledger.confirm(7)
    ledger.declare_written([5], [3], 8)
    assert known(ledger) == BlockHistory(
        generation=2,
        status="active",
        references=1,
        hash_count=0,
        init_prefix_len=2,
        init_prefix_declared=3,
        allocated_for="b",
        allocated_step=6,
        last_written_step=8,
        freed_by="a",
        freed_step=4,
        freed_cause="preempt",
        freed_generation=1,
        owners=[BlockOwner(request_id="b", group_id=0, logical_index=7, live=True)],
        num_owners=1,
        strip=known(ledger).strip,
    )
    assert words(known(ledger)) == {0: "null", 5: "other"}


def test_a_block_that_is_free_was_freed_in_its_present_generation() -> None:
    history = known(told((2, A_COMES), (2, A_GOES)))
    assert (history.status, history.references, history.generation, history.freed_generation) == ("free", 0, 1, 1)
    assert (history.owners, history.num_owners) == ([], 0)


@pytest.mark.parametrize(
    ("freed", "again", "generation"),
    [
        (4, 6, 1),  # later: handed out anew
        (4, 4, 1),  # in the step in which somebody else was preempted
    ],
)
def test_which_generation_a_release_ended(freed: int, again: int, generation: int) -> None:
    history = known(told((2, A_COMES), (freed, A_GOES), (again, B_COMES)))
    assert (history.generation, history.freed_generation) == (2, generation)


@pytest.mark.parametrize("freed", [2, 3])
def test_a_hit_does_not_begin_a_generation(freed: int) -> None:
    """Also where the request came and ended within one step."""
    cached = say(CACHE, [5], "a", hash_counts=[1], hash_tokens=[16])
    history = known(told((2, A_COMES), (2, cached), (freed, A_GOES), (6, say(TOUCH, [5], "b", first_index=0))))
    assert (history.generation, history.freed_generation, history.freed_step) == (1, 1, freed)
    assert (history.allocated_for, history.hash_count) == ("a", 1)
    assert [owner.request_id for owner in history.owners] == ["b"]


def test_a_block_that_was_never_handed_out() -> None:
    history = known(told())
    assert history == BlockHistory(
        generation=0, status="free", references=0, hash_count=0, init_prefix_len=0, init_prefix_declared=0,
        strip=history.strip,
    )  # fmt: skip


def test_only_the_neighbours_of_a_block_that_does_not_exist() -> None:
    ledger = told((1, say(ALLOC, [31], "a", first_index=0)))
    history = known(ledger, finding(33))
    assert history == BlockHistory(strip=history.strip)
    assert history.strip is not None
    assert history.strip.first_block == 25
    assert history.strip.blocks == ["nobody"] * 6 + ["own"] + ["outside"] * 9
    assert known(ledger, finding(1 << 70)).strip is not None


def test_no_history_without_a_block() -> None:
    assert history_of(finding(None), told()) is None


def test_every_kind_of_neighbour() -> None:
    ledger = told(
        (1, say(ALLOC, [4, 5, 6], "a", first_index=0)),
        (1, say(TOUCH, [6], "b", first_index=0)),
        (1, say(ALLOC, [7], "b", first_index=1)),
        (1, say(ALLOC, [8], "r", first_index=0, reserved=True)),
        (1, say(ALLOC, [9, 10], "c", first_index=0)),
        (1, say(CACHE, [10], "c", hash_counts=[1])),
        (1, say(FREE, [10], "c", cause="window")),
        (2, say(HOLD, [9], "c", cause="finish")),
    )
    assert words(known(ledger)) == {
        0: "null", 4: "own", 5: "own", 6: "shared", 7: "other", 8: "receiving", 9: "held", 10: "cached",
    }  # fmt: skip
    assert words(known(ledger, finding(request_id=None)))[5] == "other"


@pytest.mark.parametrize("again", [False, True])
def test_a_block_that_was_freed_under_its_owner_is_disputed(again: bool) -> None:
    """Whether or not it has been handed out again."""
    thief = say(FREE, [5], "z", cause="finish")
    operations = [(2, A_COMES), (4, thief), *([(6, B_COMES)] if again else [])]
    history = known(told(*operations))
    assert words(history)[5] == "disputed"
    assert (history.freed_by, history.status) == ("z", "active" if again else "free")
    assert [owner.request_id for owner in history.owners] == ["a", "b"][: 1 + again]


def test_a_strip_stays_inside_the_pool() -> None:
    for block, first in ((1, 0), (8, 0), (9, 1), (31, 16)):
        strip = known(told(), finding(block)).strip
        assert strip is not None
        assert (strip.first_block, len(strip.blocks)) == (first, 16)
    small = known(told(num_blocks=8), finding(3)).strip
    assert small is not None
    assert small.blocks[7:] == ["nobody"] + ["outside"] * 8


def test_owners_are_bounded_and_their_number_is_not() -> None:
    hits = [(1, say(TOUCH, [5], f"r{n}", first_index=0)) for n in range(20)]
    history = known(told((1, A_COMES), *hits))
    assert (len(history.owners), history.num_owners, history.references) == (MOST_OWNERS, 21, 21)


@pytest.mark.parametrize("mode", ["hashed", "omitted"])
def test_no_request_id_gets_past_the_names(mode: Any) -> None:
    names = RequestNames(mode, b"5" * 16 if mode == "hashed" else b"")
    ledger = told((2, say(ALLOC, [5], "req-a", first_index=0)), (4, say(FREE, [5], "req-a", cause="finish")),
                  (6, say(ALLOC, [5], "req-b", first_index=0)))  # fmt: skip
    history = history_of(finding(request_id="req-a"), ledger, names)
    assert history is not None
    assert (history.allocated_for, history.freed_by) == (names("req-b"), names("req-a"))
    record = codec.violation_record(finding(request_id="req-a"), RULE, "log", 0, names, history)
    assert b"req-" not in codec.encode(record)


def test_a_history_goes_through_a_line_and_fits_its_schema() -> None:
    ledger = told((2, A_COMES), (4, A_GOES), (6, B_COMES))
    at = finding(np.int32(5))  # type: ignore[arg-type]  # a rule may take a block out of an array
    history = history_of(at, ledger)
    assert history is not None
    record = decode_record(codec.encode(codec.violation_record(at, RULE, "log", 0, history=history)))
    assert isinstance(record, ViolationRecord)
    assert record.history == history
    assert set(words(history).values()) <= set(NEIGHBOUR_WORDS)
    assert "BlockStrip" in json_schema("kv.violation")["$defs"]


def test_every_status_has_its_word() -> None:
    assert tuple(status.name.lower() for status in Status) == STATUS_WORDS
