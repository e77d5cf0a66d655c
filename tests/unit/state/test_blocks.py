"""The ledger of a pool: beside a pool of dicts, beside damaged facts, and what it answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.budget import examples

from kvscope.facts.allocator import ALLOC, CACHE, CAUSES, EVICT, FREE, HOLD, KINDS, RESET, TOUCH, PoolOperation
from kvscope.state import block_operations, written_prefix
from kvscope.state.block_audit import ALIASED, FREE_QUEUE, HASHES, REFERENCES, TABLE, Difference
from kvscope.state.block_columns import ALLOCATED_STEP, FREED_STEP, OWNERS, Status
from kvscope.state.blocks import BlockLedger
from kvscope.state.shares import Holders, Share
from unit.state.block_lives import BlockLives
from unit.state.pools import DictPool


class Lives(BlockLives):
    make_pool = DictPool


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

NUM_BLOCKS = 12
EVERYTHING = list(range(NUM_BLOCKS))


def say(kind: str, block_ids: list[int], request_id: str | None = None, **fields: Any) -> PoolOperation:
    group = None if request_id is None else 0
    return PoolOperation(
        **{"kind": kind, "block_ids": block_ids, "request_id": request_id, "group_id": group, **fields}
    )


def told(*operations: PoolOperation, num_blocks: int = NUM_BLOCKS) -> BlockLedger:
    """Each operation in a step of its own, from 1 on."""
    ledger = BlockLedger(num_blocks, 0)
    for step, operation in enumerate(operations, start=1):
        ledger.apply(operation, step)
    return ledger


# One healthy life, and the same with one fact changed ----------------------------------------------------------------

A_COMES = say(ALLOC, [1, 2, 3], "a", first_index=0, cause="allocate", ref_counts=[1, 1, 1])
A_IS_FULL = say(CACHE, [1, 2], "a", ref_counts=[1, 1], hash_counts=[1, 1], hash_tokens=[16, 16])
B_HITS = say(TOUCH, [1, 2], "b", first_index=0, cause="hit", ref_counts=[2, 2])
B_GROWS = say(ALLOC, [4], "b", first_index=2, cause="allocate", ref_counts=[1])
A_ENDS = say(FREE, [3, 2, 1], "a", cause="finish", ref_counts=[0, 1, 1])
C_COMES = say(ALLOC, [3, 5], "c", first_index=0, cause="allocate", ref_counts=[1, 1])
LIFE = [A_COMES, A_IS_FULL, B_HITS, B_GROWS, A_ENDS, C_COMES]

REF_COUNTS = [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]  # that of the null block means nothing
HASH_COUNTS = [0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
FREE_IDS = [6, 7, 8, 9, 10, 11]
HOST_TABLES = {"b": [[1, 2, 4]], "c": [[3, 5]]}


def audited(*operations: PoolOperation) -> list[Difference]:
    return told(*operations).differences(REF_COUNTS, FREE_IDS, HOST_TABLES, HASH_COUNTS)


def references(block_id: int, ours: int, host: int) -> Difference:
    return Difference(kind=REFERENCES, block_id=block_id, ours=ours, host=host)


def hashes(block_id: int, ours: int, host: int) -> Difference:
    return Difference(kind=HASHES, block_id=block_id, ours=ours, host=host)


def place(request_id: str, index: int | None, ours: int | None, host: int | None) -> Difference:
    block_id = ours if host is None else host
    assert block_id is not None
    return Difference(
        kind=TABLE, block_id=block_id, ours=ours, host=host, request_id=request_id, group_id=0, index=index
    )


def without(lost: PoolOperation) -> list[PoolOperation]:
    return [operation for operation in LIFE if operation is not lost]


def twice(repeated: PoolOperation) -> list[PoolOperation]:
    return [again for operation in LIFE for again in [operation] * (1 + (operation is repeated))]


def instead(of: PoolOperation, **fields: Any) -> list[PoolOperation]:
    return [msgspec.structs.replace(o, **fields) if o is of else o for o in LIFE]


def test_a_healthy_life_shows_no_difference() -> None:
    assert audited(*LIFE) == []


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        pytest.param(
            without(A_ENDS),
            [
                *(references(1, 2, 1), references(2, 2, 1), references(3, 2, 1)),
                *(place("a", 0, 1, None), place("a", 1, 2, None), place("a", 2, 3, None)),
            ],
            id="a free is lost",
        ),
        pytest.param(twice(A_ENDS), [references(1, 0, 1), references(2, 0, 1)], id="a free is heard twice"),
        pytest.param(
            instead(A_ENDS, block_ids=[3, 2, 2]),
            [references(1, 2, 1), references(2, 0, 1), place("a", 0, 1, None)],
            id="a free is about another block",
        ),
        pytest.param(
            instead(A_ENDS, request_id="b"),
            [
                *(place("b", 0, None, 1), place("b", 1, None, 2)),
                *(place("a", 0, 1, None), place("a", 1, 2, None), place("a", 2, 3, None)),
            ],
            id="a free is said to be another request's",
        ),
        pytest.param(without(B_GROWS), [references(4, 0, 1), place("b", 2, None, 4)], id="an allocation is lost"),
        pytest.param(
            instead(B_GROWS, block_ids=[2]),
            [references(2, 2, 1), references(4, 0, 1), hashes(2, 0, 1), place("b", 2, 2, 4)],
            id="a live block is allocated",
        ),
        pytest.param(
            instead(B_GROWS, first_index=3),
            [place("b", 2, None, 4), place("b", 3, 4, None)],
            id="a block is one further",
        ),
        pytest.param(
            instead(C_COMES, block_ids=[5, 3]), [place("c", 0, 5, 3), place("c", 1, 3, 5)], id="another order"
        ),
        pytest.param(
            without(B_HITS),
            [*(references(1, 0, 1), references(2, 0, 1)), *(place("b", 0, None, 1), place("b", 1, None, 2))],
            id="a hit is lost",
        ),
        pytest.param(
            twice(B_HITS),
            [*(references(1, 2, 1), references(2, 2, 1)), *(place("b", None, 1, None), place("b", None, 2, None))],
            id="a hit is heard twice",
        ),
        pytest.param(without(A_IS_FULL), [hashes(1, 0, 1), hashes(2, 0, 1)], id="hashes are lost"),
        pytest.param(
            instead(C_COMES, hash_counts=[1, 0]), [hashes(3, 1, 0)], id="a hash is left on a block that is reused"
        ),
        pytest.param([*LIFE, say(EVICT, [2])], [hashes(2, 0, 1)], id="an eviction too many"),
        pytest.param([*LIFE, say(RESET, [])], [hashes(1, 0, 1), hashes(2, 0, 1)], id="a reset too many"),
        pytest.param([*LIFE, say(TOUCH, [4])], [references(4, 2, 1)], id="a pin too many"),
    ],
)
def test_one_wrong_fact_shows_as_exactly_that(operations: list[PoolOperation], expected: list[Difference]) -> None:
    assert audited(*operations) == expected


@pytest.mark.parametrize(
    ("free_ids", "expected"),
    [
        ([6, 7, 8, 9, 10], [(11, 1, 0)]),
        ([6, 7, 8, 9, 10, 11, 11], [(11, 1, 2)]),
        ([6, 7, 8, 9, 10, 11, 4], [(4, 0, 1)]),
        ([0, 6, 7, 8, 9, 10, 11], [(0, 0, 1)]),
        ([6, 7, 8, 9, 10, 11, -1, 12, 12], [(-1, 0, 1), (12, 0, 2)]),
    ],
)
def test_a_free_queue_that_contradicts_the_hosts_own_counts(
    free_ids: list[int], expected: list[tuple[int, int, int]]
) -> None:
    found = told(*LIFE).differences(REF_COUNTS, free_ids)
    assert found == [Difference(kind=FREE_QUEUE, block_id=b, ours=ours, host=host) for b, ours, host in expected]


def test_a_block_in_two_live_tables_with_one_reference_is_aliased() -> None:
    """Both books agree with each other, and with the host's count; only who has the block does not."""
    ledger = told(*LIFE, say(TOUCH, [4], "c", first_index=2), say(FREE, [4], "x"))
    tables = {"b": [[1, 2, 4]], "c": [[3, 5, 4]]}
    expected = [Difference(kind=ALIASED, block_id=4, ours=2, host=1)]
    assert ledger.differences(REF_COUNTS, FREE_IDS, tables, HASH_COUNTS) == expected
    assert [share.request_id for share in ledger.owners(4)] == ["b", "c"]
    assert ledger.references_of([4]).tolist() == [1]


def test_a_pool_can_be_audited_piece_by_piece() -> None:
    ledger = told(*without(A_ENDS), say(EVICT, [2]))
    broken_queue = [6, 7, 8, 9, 10, 4]
    whole = ledger.differences(REF_COUNTS, broken_queue, None, HASH_COUNTS)
    pieces = [
        difference
        for first in range(0, NUM_BLOCKS, 5)
        for difference in ledger.differences(
            REF_COUNTS[first : first + 5], broken_queue, None, HASH_COUNTS[first : first + 5], first_block=first
        )
    ]
    assert {d.kind for d in whole} == {REFERENCES, HASHES, FREE_QUEUE}
    assert sorted(pieces, key=repr) == sorted(whole, key=repr)


def test_some_tables_can_be_compared_without_the_others() -> None:
    ledger = told(*without(A_ENDS))
    some = {"b": HOST_TABLES["b"]}
    assert {d.request_id for d in ledger.differences(REF_COUNTS, None, some) if d.kind == TABLE} == {"a", "c"}
    assert [d for d in ledger.differences(REF_COUNTS, None, some, all_requests=False) if d.kind == TABLE] == []


def test_a_group_whose_table_means_something_else_is_not_compared() -> None:
    ledger = told(say(ALLOC, [1], "r", group_id=0, first_index=0), say(ALLOC, [2], "r", group_id=1, first_index=0))
    relocated = {"r": [[1], [0, 2]]}
    assert [d.group_id for d in ledger.differences([0, 1, 1], None, relocated)] == [1, 1]
    assert ledger.differences([0, 1, 1], None, {"r": [[1], None]}) == []
    assert [d.block_id for d in ledger.differences([0, 1, 1], None, {"r": [[1]]})] == [2]
    ledger.apply(say(ALLOC, [3], "r", group_id=1), 3)
    assert ledger.differences([0, 1, 1, 1], None, {"r": [[1], None]}) == []
    assert [d.index for d in ledger.differences([0, 1, 1, 1], None, {"r": [[1], [2]]})] == [None]


def test_where_a_block_stands_need_not_be_known() -> None:
    """Its owner counts all the same; a table that has it anywhere is right, one that has it twice is not."""
    ledger = told(say(ALLOC, [1, 2], "r"), say(ALLOC, [3], "r", group_id=None))
    shares = {(share.block_id, share.group_id, share.index) for share in ledger.owned_by("r")}
    assert shares == {(1, 0, None), (2, 0, None), (3, None, None)}
    assert ledger.is_owner("r", EVERYTHING).nonzero()[0].tolist() == [1, 2, 3]
    assert [ledger.owns("r", block) for block in (1, 2, 3, 4)] == [True, True, True, False]
    counts = [0, 1, 1, 1]
    assert ledger.differences(counts, None, {"r": [[2, 0, 1, 3]]}) == []
    found = ledger.differences(counts, None, {"r": [[2, 1, 3, 3]]})
    assert found == [Difference(kind=ALIASED, block_id=3, ours=2, host=1), place("r", 3, None, 3)]
    assert ledger.differences(counts, None, {"r": [[2, 3]]}) == [place("r", None, 1, None)]


# What a rule asks before it takes an operation over -------------------------------------------------------------------


def test_a_block_in_use_that_is_handed_out_has_references_before_and_one_more_generation_after() -> None:
    ledger = told(*LIFE)
    assert ledger.references_of([4, 6]).tolist() == [1, 0]
    assert ledger.generation_of([4, 6]).tolist() == [1, 0]
    ledger.apply(say(ALLOC, [4, 6], "d", first_index=0), 9)
    assert ledger.references_of([4, 6]).tolist() == [2, 1]
    assert ledger.generation_of([4, 6]).tolist() == [2, 1]
    assert [share.request_id for share in ledger.owners(4)] == ["b", "d"]


def test_a_second_free_is_of_a_block_that_the_request_does_not_have() -> None:
    ledger = told(*LIFE[:4])
    assert ledger.is_owner("a", [3, 2, 1]).all()
    ledger.apply(A_ENDS, 5)
    assert not ledger.is_owner("a", [3, 2, 1]).any()
    assert not ledger.owns("a", 1)
    assert ledger.owns("b", 1)
    ledger.apply(A_ENDS, 6)
    assert ledger.references_of([3, 2, 1]).tolist() == [0, 0, 0]
    # Whoever has the block in its table still has it: it was freed under it.
    assert ledger.owners(1) == [Share(block_id=1, request_id="b", group_id=0, index=0)]
    assert ledger.status_of([1]).tolist() == [Status.FREE]


@pytest.mark.parametrize("fields", [{"hash_counts": [1, 2, 3]}, {"hash_counts": []}, {"hash_tokens": [1, 2, 3]}])
def test_a_list_of_another_length_is_not_known(fields: dict[str, Any]) -> None:
    ledger = told(say(ALLOC, [1, 2], "a", first_index=0), say(CACHE, [1, 2], "a", **fields))
    assert ledger.hashes_of([1, 2]).tolist() == [1, 1]
    assert ledger.hash_tokens_of([1, 2]).tolist() == [-1, -1]


def test_more_hashes_of_a_block_are_not_forgotten_when_one_is_set() -> None:
    ledger = told(say(ALLOC, [1, 2], "a", first_index=0), say(CACHE, [1], "a", hash_counts=[2]), say(CACHE, [1, 2]))
    assert ledger.hashes_of([1, 2]).tolist() == [2, 1]


@pytest.mark.parametrize("operation", LIFE, ids=lambda operation: operation.kind)
def test_the_hosts_count_is_a_second_source(operation: PoolOperation) -> None:
    ledger = BlockLedger(NUM_BLOCKS, 0)
    for step, earlier in enumerate(LIFE, start=1):
        ledger.apply(earlier, step)
        if earlier is operation:
            break
    assert ledger.references_of(operation.block_ids).tolist() == operation.ref_counts
    ledger.apply(say(TOUCH, operation.block_ids[:1]), 7)
    assert ledger.references_of(operation.block_ids).tolist() != operation.ref_counts


def test_a_hash_on_a_block_that_has_just_been_handed_out_can_be_seen() -> None:
    ledger = told(say(ALLOC, [1, 2], "a", first_index=0, hash_counts=[0, 1]))
    assert ledger.hashes_of([1, 2]).tolist() == [0, 1]
    assert ledger.hash_tokens_of([1, 2]).tolist() == [0, -1]
    assert ledger.written_of([1, 2])[0].tolist() == [0, 0]


def test_a_new_generation_knows_nothing_of_the_old_one_but_who_freed_it() -> None:
    ledger = told(say(ALLOC, [1], "a", first_index=0), say(CACHE, [1], "a", hash_tokens=[16]))
    ledger.declare_written([1], [16], 2)
    ledger.confirm(2)
    ledger.apply(say(FREE, [1], "a", cause="preempt"), 3)
    assert (ledger.hashes_of([1]), ledger.hash_tokens_of([1]), ledger.written_of([1])) == (1, 16, (16, 16))
    ledger.apply(say(ALLOC, [1], "b", group_id=3, first_index=7), 4)
    assert (ledger.hashes_of([1]), ledger.hash_tokens_of([1]), ledger.written_of([1])) == (0, 0, (0, 0))
    history = ledger.history(1)
    assert history is not None
    assert msgspec.structs.asdict(history) == {
        "block_id": 1,
        "generation": 2,
        "status": Status.ACTIVE,
        "allocated_for": "b",
        "allocated_step": 4,
        "written_step": None,
        "freed_by": "a",
        "freed_step": 3,
        "freed_cause": "preempt",
    }
    ledger.declare_written([1], [3], 5)
    assert getattr(ledger.history(1), "written_step", None) == 5


def test_a_block_without_a_history() -> None:
    ledger = BlockLedger(NUM_BLOCKS, 0)
    history = ledger.history(5)
    assert history is not None
    assert (history.generation, history.status) == (0, Status.FREE)
    assert set(msgspec.structs.astuple(history)[3:]) == {None}
    assert [ledger.history(block) for block in (-1, NUM_BLOCKS, 1 << 70)] == [None] * 3
    null = ledger.history(0)
    assert null is not None
    assert null.status == Status.NULL


def test_ids_outside_of_the_pool_are_answered_as_such() -> None:
    ledger = told(say(ALLOC, [1, NUM_BLOCKS - 1], "a", first_index=0))
    for ids in ([-1, NUM_BLOCKS, 1 << 40], [-(1 << 70), NUM_BLOCKS, 1 << 70], np.array([-5, 99, NUM_BLOCKS])):
        for answer in (ledger.generation_of, ledger.references_of, ledger.hashes_of, ledger.hash_tokens_of):
            assert answer(ids).tolist() == [-1] * 3
        assert [values.tolist() for values in ledger.written_of(ids)] == [[-1] * 3] * 2
        assert set(ledger.status_of(ids).tolist()) == {Status.OUTSIDE}
        assert not ledger.is_owner("a", ids).any()
        assert [ledger.owners(block) for block in ids] == [[]] * 3
        assert not any(ledger.owns("a", block) for block in ids)


def test_the_null_block_is_never_counted() -> None:
    ledger = told(say(ALLOC, [0, 1], "a", first_index=0), say(TOUCH, [0], "a"), say(CACHE, [0]), say(FREE, [0], "a"))
    assert (ledger.references_of([0, 1]).tolist(), ledger.generation_of([0, 1]).tolist()) == ([0, 1], [0, 1])
    assert ledger.status_of([0]).tolist() == [Status.NULL]
    assert ledger.owners(0) == []
    assert [(share.block_id, share.index) for share in ledger.owned_by("a")] == [(1, 1)]
    other = BlockLedger(4, 2)
    other.apply(say(ALLOC, [0, 2, 3], "a", first_index=0), 1)
    assert other.references_of([0, 1, 2, 3]).tolist() == [1, 0, 0, 1]
    assert other.status_of([2]).tolist() == [Status.NULL]


# Who has a block ------------------------------------------------------------------------------------------------------


def test_the_blocks_of_a_request_that_has_ended_are_held_until_their_references_go() -> None:
    ledger = told(say(ALLOC, [1, 2], "a", first_index=0), say(TOUCH, [1], "b", first_index=0))
    ledger.request_ended("a")
    assert ledger.status_of([1, 2]).tolist() == [Status.ACTIVE, Status.HELD]
    assert not ledger.is_owner("a", [1, 2]).any()
    assert [(share.block_id, share.live) for share in ledger.owned_by("a")] == [(1, False), (2, False)]
    assert [(share.request_id, share.live) for share in ledger.owners(1)] == [("b", True), ("a", False)]
    ledger.apply(say(FREE, [2, 1], cause="deferred"), 5)
    assert ledger.status_of([1, 2]).tolist() == [Status.ACTIVE, Status.FREE]
    assert ledger.owned_by("a") == []
    assert getattr(ledger.history(2), "freed_by", None) == "a"


def test_a_name_that_comes_back_has_its_new_blocks_beside_those_that_it_gave_up() -> None:
    """A preempted request may be resumed before the deferred free of its old blocks, and may even hit them."""
    ledger = told(say(ALLOC, [1, 2], "a", first_index=0))
    ledger.request_ended("a")
    ledger.apply(say(TOUCH, [1], "a", first_index=0), 2)
    ledger.apply(say(ALLOC, [3], "a", first_index=1), 2)
    assert ledger.is_owner("a", [1, 2, 3]).tolist() == [True, False, True]
    assert ledger.differences([0, 2, 1, 1], None, {"a": [[1, 3]]}) == []
    ledger.apply(say(FREE, [2, 1], "a", cause="deferred"), 3)
    assert ledger.is_owner("a", [1, 2, 3]).tolist() == [True, False, True]
    assert ledger.references_of([1, 2, 3]).tolist() == [1, 0, 1]
    ledger.request_ended("a")
    assert ledger.status_of([1, 2, 3]).tolist() == [Status.HELD, Status.FREE, Status.HELD]


@pytest.mark.parametrize(
    ("cause", "left"), [("deferred", ["a", "b"]), ("unpin", ["a", "b", "c"]), ("unknown", ["a", "b", "c"])]
)
def test_a_reference_of_nobody_goes_before_one_of_a_request_that_has_ended(cause: str, left: list[str]) -> None:
    ledger = told(*(say(TOUCH, [1], name, first_index=0) for name in "abc"), say(TOUCH, [1], cause="pin"))
    ledger.request_ended("c")
    ledger.apply(say(FREE, [1], cause=cause), 5)
    assert [share.request_id for share in ledger.owners(1)] == left

    ledger.apply(say(FREE, [1], cause=cause), 6)
    assert [share.request_id for share in ledger.owners(1)] == ["a", "b"]


@pytest.mark.parametrize("cause", ["deferred", "unpin", "unknown"])
def test_many_blocks_that_go_in_nobodys_name_are_as_many_releases_of_one(cause: str) -> None:
    """One has a reference of nobody, one was given up and is used, one is used alone, one was given up alone."""
    together, apart = (
        told(
            say(ALLOC, [1, 2, 3], "a", first_index=0),
            say(TOUCH, [1]),
            say(TOUCH, [2], "b", first_index=0),
            say(ALLOC, [4], "b", first_index=1),
        )
        for _ in range(2)
    )
    for ledger in (together, apart):
        ledger.request_ended("b")
    for blocks in ([1, 2, 3, 4], [4, 2]):
        together.apply(say(FREE, blocks, cause=cause), 5)
        for block in blocks:
            apart.apply(say(FREE, [block], cause=cause), 5)
        assert together.equals(apart)


def test_whether_a_request_has_something_is_known_without_going_through_it() -> None:
    ledger = told(say(ALLOC, [1], "a", first_index=0))
    assert (ledger.has_live("a"), ledger.has_given_up("a")) == (True, False)
    ledger.request_ended("a")
    assert (ledger.has_live("a"), ledger.has_given_up("a")) == (False, True)
    ledger.apply(say(FREE, [1], "a"), 5)
    assert (ledger.has_live("a"), ledger.has_given_up("a")) == (False, False)


def test_a_deferred_free_is_of_what_was_given_up_wherever_that_stood() -> None:
    ledger = told(say(TOUCH, [1], "a", first_index=0), say(TOUCH, [1], "b", first_index=3), say(TOUCH, [1]))
    ledger.request_ended("b")
    ledger.apply(say(FREE, [1], cause="deferred"), 5)
    assert [share.request_id for share in ledger.owners(1)] == ["a"]
    ledger.apply(say(FREE, [1], cause="deferred"), 6)
    assert [share.request_id for share in ledger.owners(1)] == ["a"]


def test_a_release_by_nobody_is_the_only_owners_or_nobodys() -> None:
    shared = told(say(ALLOC, [1], "a", first_index=0), say(TOUCH, [1], "b", first_index=0), say(FREE, [1]))
    assert [share.request_id for share in shared.owners(1)] == ["a", "b"]
    shared.apply(say(FREE, [1]), 4)
    assert [share.request_id for share in shared.owners(1)] == ["a", "b"]
    alone = told(say(ALLOC, [1], "a", first_index=0), say(FREE, [1]))
    assert alone.owners(1) == []
    assert getattr(alone.history(1), "freed_by", None) == "a"
    assert alone._holders.by_id == {}


def test_a_release_by_nobody_is_rather_of_what_was_given_up_than_of_what_is_used() -> None:
    ledger = told(say(ALLOC, [1], "a", first_index=0))
    ledger.request_ended("a")
    ledger.apply(say(TOUCH, [1], "a", first_index=0), 2)
    ledger.apply(say(FREE, [1]), 3)
    assert ledger.owned_by("a") == [Share(block_id=1, request_id="a", group_id=0, index=0)]


def test_a_request_that_finishes_releases_what_it_uses_before_what_it_gave_up() -> None:
    ledger = told(say(ALLOC, [1], "a", first_index=0))
    ledger.request_ended("a")
    ledger.apply(say(TOUCH, [1], "a", first_index=0), 2)
    ledger.apply(say(FREE, [1], "a", cause="finish"), 3)
    assert ledger.owned_by("a") == [Share(block_id=1, request_id="a", group_id=0, index=0, live=False)]
    ledger.apply(say(FREE, [1], "a", cause="deferred"), 4)
    assert (ledger._holders.by_id, ledger._holders.ended) == ({}, {})


def test_a_block_is_looked_for_where_its_first_owner_has_it() -> None:
    ledger = told(say(ALLOC, [1, 2], "a", first_index=0), say(FREE, [2, 1], "a"))
    ledger.apply(say(TOUCH, [1, 2], "b", group_id=1, first_index=5), 3)
    ledger.apply(say(TOUCH, [1, 2], "c", group_id=2, first_index=8), 4)
    snapshot = ledger.snapshot([1, 2])
    assert (snapshot.group.tolist(), snapshot.index.tolist()) == ([1, 1], [5, 6])
    assert all(ledger.owns(name, block) for name in "bc" for block in (1, 2))


@pytest.mark.parametrize("one_by_one", [-1, 1 << 30])
def test_a_block_that_is_handed_out_twice_at_once(one_by_one: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_operations, "ALLOCATED_ONE_BY_ONE", one_by_one)
    ledger = told(say(ALLOC, [1, 2, 1], "a", first_index=0))
    assert (ledger.generation_of([1, 2]).tolist(), ledger.references_of([1, 2]).tolist()) == ([2, 1], [2, 1])
    assert [share.index for share in ledger.owners(1)] == [0, 2]


@pytest.mark.parametrize("one_by_one", [-1, 1 << 30])
def test_places_of_a_request_are_told_apart(one_by_one: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same block in two groups, twice in one release, and at the front without having been known to be there."""
    monkeypatch.setattr(block_operations, "FREED_ONE_BY_ONE", one_by_one)
    for group, left in ((None, 1), (0, 1), (1, 0), (7, 0)):
        groups = told(*(say(ALLOC, [1], "a", group_id=group, first_index=0) for group in (1, 0)))
        groups.apply(say(FREE, [1], "a", group_id=group), 3)
        assert [(share.group_id, share.index) for share in groups.owned_by("a")] == [(left, 0)]
    twice_in_one = told(*(say(TOUCH, [1], name, first_index=0) for name in "aab"), say(FREE, [1, 1], "a"))
    assert twice_in_one.references_of([1]).tolist() == [1]
    assert [share.request_id for share in twice_in_one.owners(1)] == ["b"]
    front = told(say(ALLOC, [1], "a"), say(TOUCH, [1], "b", first_index=0), say(ALLOC, [5], "b", first_index=1))
    front.apply(say(FREE, [1], "b"), 4)
    assert front.owned_by("b") == [Share(block_id=5, request_id="b", group_id=0, index=1)]


def test_a_copy_on_write_leaves_both_ends_to_nobody_until_it_has_run() -> None:
    ledger = told(
        say(ALLOC, [1], "a", first_index=0),
        say(TOUCH, [1], "b", first_index=0),
        say(ALLOC, [2], "b", first_index=0, cause="copy"),
        say(HOLD, [1], "b", cause="copy"),
        say(TOUCH, [2], cause="copy"),
    )
    assert ledger.differences([0, 2, 2], None, {"a": [[1]], "b": [[2]]}) == []
    assert ledger.is_owner("b", [1, 2]).tolist() == [False, True]
    ledger.apply(say(FREE, [1, 2], cause="copy"), 6)
    ledger.apply(say(FREE, [1], "a"), 6)
    assert ledger.status_of([1, 2]).tolist() == [Status.FREE, Status.ACTIVE]
    assert ledger.owners(2) == [Share(block_id=2, request_id="b", group_id=0, index=0)]


def test_a_block_put_where_another_stands_displaces_it_but_takes_nothing_away() -> None:
    ledger = told(say(ALLOC, [1, 2], "a", first_index=0), say(ALLOC, [3, 4], "a", first_index=1))
    assert ledger.is_owner("a", [1, 2, 3, 4]).all()
    assert {(share.block_id, share.index) for share in ledger.owned_by("a")} == {(1, 0), (2, None), (3, 1), (4, 2)}
    ledger.apply(say(FREE, [4, 3, 2, 1], "a"), 3)
    assert ledger.owned_by("a") == []


def test_a_place_beyond_any_context_takes_no_room() -> None:
    ledger = told(say(ALLOC, [1], "a", first_index=1 << 30), say(ALLOC, [2], "a", first_index=-3))
    assert [(share.block_id, share.index) for share in ledger.owned_by("a")] == [(1, None), (2, None)]
    holder = ledger._holders.by_id["a"]
    assert sum(map(len, holder.live.tables.values())) == 0


def test_what_waits_for_a_receive_is_reserved_even_if_its_request_ends() -> None:
    ledger = told(say(ALLOC, [1, 2], "a", first_index=0, cause="external", reserved=True))
    ledger.declare_written([1], [4], 1)
    assert ledger.status_of([1, 2]).tolist() == [Status.RESERVED] * 2
    ledger.request_ended("a")
    assert ledger.status_of([1, 2]).tolist() == [Status.RESERVED] * 2
    ledger.receive([1], [16], 2)
    assert getattr(ledger.history(1), "written_step", None) == 2
    ledger.cut([2], 0)
    assert ledger.status_of([1, 2]).tolist() == [Status.HELD] * 2
    assert [values.tolist() for values in ledger.written_of([1, 2])] == [[16, 0]] * 2


def test_a_reserved_block_that_is_freed_and_handed_out_again_waits_for_nothing() -> None:
    ledger = told(say(ALLOC, [1, 2], "a", first_index=0, reserved=True), say(FREE, [2, 1], "a"))
    assert ledger.status_of([1, 2]).tolist() == [Status.FREE] * 2
    ledger.apply(say(ALLOC, [1], "b", first_index=0), 2)
    ledger.apply(say(TOUCH, [2], "b", first_index=1), 2)
    assert ledger.status_of([1, 2]).tolist() == [Status.ACTIVE] * 2


def test_indices_of_requests_that_nobody_refers_to_are_used_again() -> None:
    ledger = BlockLedger(8, 0)
    for number in range(20_000):
        ledger.apply(say(ALLOC, [1 + number % 7], f"r{number}", first_index=0), number)
        ledger.apply(say(FREE, [1 + number % 7], f"r{number}", cause="finish"), number)
    assert ledger._holders.named <= 1024
    assert (ledger._holders.by_id, ledger._holders.ended) == ({}, {})
    histories = [ledger.history(block) for block in range(1, 8)]
    named = {(history.allocated_for, history.freed_by) for history in histories if history is not None}
    assert named == {(f"r{number}", f"r{number}") for number in range(19_993, 20_000)}


def pass_by(ledger: BlockLedger, block_id: int, requests: int) -> None:
    """So many requests have the block one after the other."""
    for number in range(requests):
        ledger.apply(say(ALLOC, [block_id], f"r{number}", first_index=0), 1)
        ledger.apply(say(FREE, [block_id], f"r{number}"), 1)


def names(ledger: BlockLedger, block_id: int) -> tuple[str | None, str | None]:
    history = ledger.history(block_id)
    assert history is not None
    return history.allocated_for, history.freed_by


def test_a_request_that_a_history_names_or_that_has_a_block_keeps_its_index() -> None:
    ledger = told(say(ALLOC, [1], "first", first_index=0), say(TOUCH, [1], "last", first_index=0))
    ledger.apply(say(FREE, [1], "first"), 3)
    ledger.apply(say(FREE, [1], "last"), 3)
    ledger.apply(say(TOUCH, [3], "only holds it", first_index=0), 4)
    ledger.request_ended("only holds it")
    pass_by(ledger, 2, 3000)
    assert names(ledger, 1) == ("first", "last")
    ledger.apply(say(FREE, [3], cause="deferred"), 5)
    assert names(ledger, 3) == (None, "only holds it")


def test_a_name_that_comes_back_after_its_index_was_given_away_gets_another() -> None:
    ledger = BlockLedger(8, 0)
    pass_by(ledger, 2, 2000)
    ledger.apply(say(ALLOC, [3], "r0", first_index=0), 2)
    pass_by(ledger, 2, 3000)
    assert names(ledger, 3) == ("r0", None)


def test_unused_indices_are_not_looked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[int] = []
    sweep = Holders._sweep
    monkeypatch.setattr(Holders, "_sweep", lambda self: (sweeps.append(self.named), sweep(self)))
    ledger = BlockLedger(5001, 0)
    for block in range(1, 5001):
        ledger.apply(say(ALLOC, [block], f"r{block}", first_index=0), 1)
    assert sweeps == [1024, 2048, 4096]


def test_a_block_takes_64_bytes_and_a_place_in_a_table_4() -> None:
    ledger = BlockLedger(1000, 0)
    assert ledger.nbytes <= 64 * (1000 + 1)  # one more row stands for all ids that the pool does not have
    ledger.apply(say(ALLOC, list(range(1, 901)), "a", first_index=0), 1)
    ledger.apply(say(TOUCH, list(range(1, 901)), "b", first_index=0), 1)
    for name in "ab":
        (table,) = ledger._holders.by_id[name].live.tables.values()
        assert len(table.tobytes()) == 4 * 900
        assert ledger._holders.by_id[name].live.loose == {}


# What is written ------------------------------------------------------------------------------------------------------


def written(ledger: BlockLedger, *block_ids: int) -> list[tuple[int, int]]:
    declared, confirmed = ledger.written_of(block_ids)
    return list(zip(declared.tolist(), confirmed.tolist(), strict=True))


@pytest.fixture(params=[-1, 1 << 30], ids=["many", "few"])
def one_by_one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to write down what a step declares."""
    monkeypatch.setattr(written_prefix, "DECLARED_ONE_BY_ONE", request.param)


@pytest.mark.usefixtures("one_by_one")
def test_two_steps_on_their_way_are_confirmed_one_by_one() -> None:
    ledger = told(say(ALLOC, [1, 2], "a", first_index=0))
    ledger.declare_written([1], [16], 1)
    ledger.declare_written([1, 2], [16, 5], 2)
    assert written(ledger, 1, 2) == [(16, 0), (5, 0)]
    ledger.confirm(1)
    assert written(ledger, 1, 2) == [(16, 16), (5, 0)]
    ledger.confirm(2)
    assert written(ledger, 1, 2) == [(16, 16), (5, 5)]
    assert ledger.pending() == {}


@pytest.mark.usefixtures("one_by_one")
def test_a_step_says_nothing_about_a_block_that_was_handed_out_again_meanwhile() -> None:
    ledger = told(say(ALLOC, [1], "a", first_index=0))
    ledger.declare_written([1], [9], 1)
    ledger.apply(say(FREE, [1], "a"), 1)
    ledger.apply(say(ALLOC, [1], "b", first_index=0), 2)
    ledger.declare_written([1], [3], 2)
    ledger.confirm(1)
    assert written(ledger, 1) == [(3, 0)]
    ledger.confirm(2)
    assert written(ledger, 1) == [(3, 3)]


def test_a_block_that_was_freed_and_hit_again_is_still_written_by_the_step_on_its_way() -> None:
    ledger = told(say(ALLOC, [1], "a", first_index=0), say(CACHE, [1], "a"))
    ledger.declare_written([1], [16], 2)
    ledger.apply(say(FREE, [1], "a"), 2)
    ledger.apply(say(TOUCH, [1], "b", first_index=0), 3)
    ledger.confirm(2)
    assert written(ledger, 1) == [(16, 16)]


@pytest.mark.usefixtures("one_by_one")
def test_rejected_drafts_with_a_later_step_on_its_way() -> None:
    """Ten tokens are there. Step 1 writes one and two drafts, step 2 counts on them; then both drafts are rejected."""
    ledger = told(say(ALLOC, [1], "a", first_index=0))
    ledger.receive([1], 10, 0)
    ledger.declare_written([1], [13], 1)
    ledger.declare_written([1], [16], 2)
    ledger.confirm(1)
    assert written(ledger, 1) == [(16, 13)]
    ledger.roll_back([1], 14, confirmed=11)
    assert written(ledger, 1) == [(14, 11)]
    ledger.confirm(2)
    assert written(ledger, 1) == [(14, 14)]


@pytest.mark.usefixtures("one_by_one")
def test_writing_a_token_again_takes_nothing_away() -> None:
    ledger = told(say(ALLOC, [1], "a", first_index=0))
    ledger.receive([1], [16], 1)
    ledger.declare_written([1], [4], 2)
    ledger.confirm(2)
    assert written(ledger, 1) == [(16, 16)]
    assert getattr(ledger.history(1), "written_step", None) == 2


@pytest.mark.usefixtures("one_by_one")
def test_what_a_step_that_failed_alone_declared_is_not_written() -> None:
    ledger = told(say(ALLOC, [1, 2, 3], "a", first_index=0))
    ledger.receive([3], 2, 0)
    ledger.declare_written([1, 2], [8, 8], 1)
    ledger.declare_written([2, 3], [12, 9], 2)
    ledger.abandon(2)
    assert written(ledger, 1, 2, 3) == [(8, 0), (8, 0), (2, 2)]
    ledger.confirm(2)
    assert written(ledger, 1, 2, 3) == [(8, 0), (8, 0), (2, 2)]
    ledger.abandon(1)
    assert written(ledger, 1, 2, 3) == [(0, 0), (0, 0), (2, 2)]


def test_a_step_whose_result_never_comes_is_forgotten_in_the_end() -> None:
    ledger = told(say(ALLOC, [1, 2], "a", first_index=0))
    ledger.declare_written([1], [1], 0)
    for step in range(1, 1000):
        ledger.declare_written([2], [5], step)
    assert len(ledger.pending()) == 64
    ledger.confirm(0)
    assert written(ledger, 1) == [(1, 0)]
    ledger.confirm(999)
    assert written(ledger, 2) == [(5, 5)]


FILLED = st.dictionaries(st.integers(-2, 70), st.integers(0, 16), max_size=70)


@given(steps=st.lists(FILLED, min_size=1, max_size=4), lost=FILLED, fresh=st.sets(st.integers(1, 60)))
def test_few_and_many_blocks_are_written_alike(
    steps: list[dict[int, int]], lost: dict[int, int], fresh: set[int]
) -> None:
    def run(one_by_one: int, listed: Callable[[list[int]], Any]) -> BlockLedger:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(written_prefix, "DECLARED_ONE_BY_ONE", one_by_one)
            ledger = told(say(ALLOC, list(range(1, 61)), "a", first_index=0), num_blocks=64)
            for step, filled in enumerate(steps):
                ledger.declare_written(listed(list(filled)), listed(list(filled.values())), step)
            ledger.apply(say(ALLOC, sorted(fresh), "b"), 9)
            ledger.declare_written(sorted(fresh), [16] * len(fresh), 9)
            ledger.roll_back(list(lost), list(lost.values()))
            for step in range(0, len(steps), 2):
                ledger.confirm(step)
            ledger.confirm_written(list(lost), list(lost.values()), 3)
        return ledger

    few = run(1 << 30, list)
    for other in (run(-1, list), run(-1, np.array), run(1 << 30, np.array)):
        assert other.equals(few)
        assert other.pending() == few.pending()


# Damaged facts --------------------------------------------------------------------------------------------------------

SOUND = st.lists(st.integers(1, NUM_BLOCKS - 1), max_size=6)
BLOCKS = st.integers(0, NUM_BLOCKS - 1) | st.sampled_from([-1, NUM_BLOCKS, 1 << 31, -(1 << 70), 1 << 70])
NUMBERS = st.integers(0, 3) | st.sampled_from([-1, 1 << 31, 1 << 70])
LISTS = st.none() | st.lists(NUMBERS, max_size=6)


@st.composite
def nonsense(draw: st.DrawFn) -> PoolOperation:
    return PoolOperation(
        kind=draw(st.sampled_from([*KINDS, "no such kind"])),
        block_ids=draw(SOUND | st.lists(BLOCKS, max_size=6)),
        cause=draw(st.sampled_from([*CAUSES, "no such cause"])),
        request_id=draw(st.sampled_from([None, "", "a", "b", "c"])),
        group_id=draw(st.none() | NUMBERS),
        first_index=draw(st.none() | NUMBERS),
        reserved=draw(st.booleans()),
        hash_counts=draw(LISTS),
        hash_tokens=draw(LISTS),
    )


SAID = st.tuples(nonsense(), NUMBERS) | st.sampled_from(["a", "b"])


def play(said: list[tuple[PoolOperation, int] | str], one_by_one: int) -> Iterator[BlockLedger]:
    ledger = BlockLedger(NUM_BLOCKS, 0)
    for word in said:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_operations, "ALLOCATED_ONE_BY_ONE", one_by_one)
            patch.setattr(block_operations, "FREED_ONE_BY_ONE", one_by_one)
            if isinstance(word, str):
                ledger.request_ended(word)
            else:
                ledger.apply(*word)
        yield ledger


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(SAID, max_size=25))
def test_nonsense_is_taken_over_as_far_as_it_goes(said: list[tuple[PoolOperation, int] | str]) -> None:
    """Whatever is said, few blocks and many are treated alike, and the numbers of a block belong together."""
    generations = np.zeros(NUM_BLOCKS, np.int32)
    for few, many in zip(play(said, 1 << 30), play(said, 0), strict=True):
        assert few.equals(many)
        assert (few.references_of(EVERYTHING) >= 0).all()
        assert (few.hashes_of(EVERYTHING) >= 0).all()
        assert (few.generation_of(EVERYTHING) >= generations).all()
        generations = few.generation_of(EVERYTHING)
        shares = [share for block in EVERYTHING for share in few.owners(block)]
        owners = Counter[int]()
        for share in shares:
            owners[share.block_id] += share.count * share.live
        assert few._rows[:NUM_BLOCKS, OWNERS].tolist() == [owners[block] for block in EVERYTHING]
        assert sorted(shares, key=repr) == sorted(
            (s for name in ("", "a", "b", "c") for s in few.owned_by(name)), key=repr
        )


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([ALLOC, TOUCH, FREE]), st.permutations(range(1, 200)), st.integers(1, 199),
            st.sampled_from("ab"), st.integers(0, 3),
        ),
        max_size=6,
    )
)  # fmt: skip
def test_many_blocks_are_treated_as_few(calls: list[tuple[str, list[int], int, str, int]]) -> None:
    said: list[tuple[PoolOperation, int] | str] = [
        (say(kind, blocks[:count], name, first_index=first * 50, cause="finish"), step)
        for step, (kind, blocks, count, name, first) in enumerate(calls)
    ]

    def last(one_by_one: int) -> BlockLedger:
        ledger = BlockLedger(200, 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_operations, "ALLOCATED_ONE_BY_ONE", one_by_one)
            patch.setattr(block_operations, "FREED_ONE_BY_ONE", one_by_one)
            for word in said:
                assert not isinstance(word, str)
                ledger.apply(*word)
        return ledger

    assert last(0).equals(last(1 << 30))


# The whole state ------------------------------------------------------------------------------------------------------


def test_a_snapshot_says_what_is_asked_for_and_keeps_it() -> None:
    ledger = told(*LIFE)
    ledger.declare_written([4], [7], 6)
    before, some = ledger.snapshot(), ledger.snapshot([4, 9, 99])
    ledger.apply(say(FREE, [4, 2, 1], "b"), 7)
    assert before.block_ids.tolist() == [1, 2, 3, 4, 5]
    assert before.generation.tolist() == [1, 1, 2, 1, 1]
    assert before.references.tolist() == [1, 1, 1, 1, 1]
    assert before.hashes.tolist() == [1, 1, 0, 0, 0]
    assert before.hash_tokens.tolist() == [16, 16, 0, 0, 0]
    assert before.declared.tolist() == [0, 0, 0, 7, 0]
    assert before.confirmed.tolist() == [0, 0, 0, 0, 0]
    assert before.written_step.tolist() == [-1, -1, -1, 6, -1]
    assert before.allocated_step.tolist() == [1, 1, 6, 4, 6]
    assert before.allocated_for == ["a", "a", "c", "b", "c"]
    assert before.freed_by == [None, None, "a", None, None]
    assert before.freed_step.tolist() == [-1, -1, 5, -1, -1]
    assert before.freed_cause == [None, None, "finish", None, None]
    assert before.group.tolist() == [0] * 5
    assert before.index.tolist() == [0, 1, 0, 2, 1]
    assert before.status.tolist() == [Status.ACTIVE] * 5
    assert {(share.request_id, share.block_id) for share in before.shares} == {
        *(("b", 1), ("b", 2), ("b", 4), ("c", 3), ("c", 5))
    }
    assert some.block_ids.tolist() == [4, 9]
    assert some.status.tolist() == [Status.ACTIVE, Status.FREE]
    assert some.shares == [Share(block_id=4, request_id="b", group_id=0, index=2)]


CHANGES: dict[str, Callable[[BlockLedger], None]] = {
    "generation": lambda ledger: ledger.apply(say(ALLOC, [4], "b"), 9),
    "references": lambda ledger: ledger.apply(say(TOUCH, [4]), 9),
    "hashes": lambda ledger: ledger.apply(say(EVICT, [1]), 9),
    "reset": lambda ledger: ledger.apply(say(RESET, []), 9),
    "declared": lambda ledger: ledger.declare_written([4], [1], 9),
    "only pending": lambda ledger: ledger.declare_written([], [], 9),
    "confirmed": lambda ledger: ledger.confirm_written([4], 1, 9),
    "owner": lambda ledger: ledger.request_ended("b"),
    "more of an owner": lambda ledger: ledger.apply(say(TOUCH, [4], "b"), 9),
    "nobody's": lambda ledger: ledger.apply(say(HOLD, [4], "b", cause="copy"), 9),
}
A_LIFE = [A_COMES, A_ENDS]


@pytest.mark.parametrize("change", CHANGES)
def test_two_ledgers_that_were_told_otherwise_are_unequal(change: str) -> None:
    one, other = told(*LIFE), told(*LIFE)
    assert one.equals(other)
    CHANGES[change](other)
    assert not one.equals(other)
    assert not other.equals(one)


def test_who_gave_up_a_block_makes_a_difference() -> None:
    one, other = told(*LIFE), told(*LIFE)
    one.request_ended("c")
    other.apply(say(HOLD, [3, 5], "c", cause="copy"), 7)
    assert one.status_of(EVERYTHING).tolist() == other.status_of(EVERYTHING).tolist()
    assert not one.equals(other)


def test_two_ledgers_are_equal_by_names_and_not_by_the_indices_of_requests() -> None:
    one, other = told(*LIFE), told(say(FREE, [1], "nobody ever"), *LIFE)
    for ledger in (one, other):  # the steps of the second are one later
        ledger._rows[:, [FREED_STEP, ALLOCATED_STEP]] = 0
    assert one._holders.index_of("a") != other._holders.index_of("a")
    assert one.equals(other)
    assert not told(*A_LIFE).equals(told(*[msgspec.structs.replace(o, request_id="x") for o in A_LIFE]))
    assert not BlockLedger(8, 0).equals(BlockLedger(9, 0))
    assert not BlockLedger(8, 0).equals(BlockLedger(8, 1))


def test_a_step_number_beyond_32_bits_is_kept_as_the_largest() -> None:
    ledger = BlockLedger(4, 0)
    ledger.apply(say(ALLOC, [1], "a", first_index=0), 1 << 40)
    ledger.declare_written([1], [3], 1 << 40)
    ledger.confirm(1 << 40)
    assert written(ledger, 1) == [(3, 3)]
    assert getattr(ledger.history(1), "allocated_step", None) == (1 << 31) - 1
