"""What the pool did and what is known of its blocks, on their way through a record."""

from __future__ import annotations

import json
from timeit import repeat
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope.events import codec
from kvscope.events.names import RequestNames
from kvscope.events.pool_schema import POOL_RECORDS, FreeRecord, StateRecord
from kvscope.events.schema import BoundaryRecord, decode_record
from kvscope.facts import allocator
from kvscope.facts.allocator import ALLOC, CACHE, FREE, HOLD, KINDS, RECEIVE, RESET, TOUCH, PoolOperation
from kvscope.state.blocks import BlockLedger, LedgerSnapshot
from unit.events import samples
from unit.events.samples import same
from unit.events.wire import IDENTITY, through_a_line

NAME = "chatcmpl-0123456789abcdef0123456789abcdef"


def said(operation: PoolOperation) -> dict[str, Any]:
    record = codec.operation_record(operation)
    through_a_line(record)
    fields: dict[str, Any] = json.loads(codec.encode(record))
    return fields


# Operations -----------------------------------------------------------------------------------------------------------


@given(samples.operations())
def test_an_operation_comes_back_equal(operation: PoolOperation) -> None:
    assert codec.operation_from(through_a_line(codec.operation_record(operation))) == operation


def test_every_kind_has_an_event_and_every_event_of_the_allocator_a_kind() -> None:
    events = {kind: said(PoolOperation(kind=kind, block_ids=[1]))["event"] for kind in KINDS}
    own = {kind: f"kv.{kind}" for kind in KINDS if kind not in {HOLD, RECEIVE}}
    assert events == {**own, HOLD: "kv.free", RECEIVE: "kv.boundary"}
    assert set(events.values()) == {*POOL_RECORDS, "kv.boundary"} - {"kv.state"}
    with pytest.raises(ValueError, match="'lend' is nothing that a pool does"):
        codec.operation_record(PoolOperation(kind="lend", block_ids=[1]))


def test_a_release_and_a_hold_are_told_apart_by_a_field() -> None:
    free, hold = (said(PoolOperation(kind=kind, block_ids=[3], ref_counts=[1])) for kind in (FREE, HOLD))
    assert "held" not in free
    assert hold["held"] is True
    assert {name for name in hold if hold[name] != free.get(name)} == {"held"}


def test_a_completed_receive_says_how_much_of_each_block_is_valid() -> None:
    fields = said(PoolOperation(kind=RECEIVE, block_ids=[3, 4], request_id="r", group_id=1, filled=[16, 5], step=7))
    assert {name: fields[name] for name in ("kind", "request_id", "group_id", "block_ids", "filled", "after_step")} == {
        "kind": "connector_result", "request_id": "r", "group_id": 1, "block_ids": [3, 4], "filled": [16, 5],
        "after_step": 7,
    }  # fmt: skip


@pytest.mark.parametrize("scheduling", [True, False])
def test_the_step_stands_where_the_operation_says(scheduling: bool) -> None:
    for kind in KINDS:
        record = codec.operation_record(PoolOperation(kind=kind, block_ids=[1], step=9, scheduling=scheduling))
        codec.stamp(
            record, IDENTITY, seq=1, component="allocator", boundary="b", mono_ns=1, wall_ns=1, after_step=4,
            trace_id="t" if scheduling else None,
        )  # fmt: skip
        fields = json.loads(codec.encode(record))
        assert (fields.get("step"), fields.get("after_step")) == ((9, None) if scheduling else (None, 9))
        assert fields.get("trace_id") == ("t" if scheduling else None)


def test_what_does_not_apply_is_not_written() -> None:
    always = {"event", "schema", "after_step", "seq", "component", "boundary", "engine_id", "mono_ns", "wall_ns"}
    always |= {"dp_rank", "tp_rank"}
    assert set(said(PoolOperation(kind=RESET, block_ids=[]))) - always == {"block_ids", "cause"}
    assert set(said(PoolOperation(kind=TOUCH, block_ids=[2], ref_counts=[2]))) - always == {
        "block_ids", "cause", "ref_count",
    }  # fmt: skip


def test_request_ids_stand_there_as_they_may_be_written() -> None:
    for kind in (ALLOC, RECEIVE):
        operation = PoolOperation(kind=kind, block_ids=[1], request_id=NAME)
        hashed = RequestNames("hashed", b"0123456789abcdef")
        assert codec.operation_record(operation, hashed).request_id == hashed(NAME)
        assert codec.operation_from(codec.operation_record(operation, hashed)).request_id == hashed(NAME)
        omitted = through_a_line(codec.operation_record(operation, RequestNames("omitted")))
        assert omitted.request_id is None
        with pytest.raises(ValueError, match="omitted"):
            codec.operation_from(omitted)
        nobodys = PoolOperation(kind=kind, block_ids=[1])
        assert codec.operation_from(codec.operation_record(nobodys, RequestNames("omitted"))) == nobodys


@pytest.mark.parametrize("damage", [{"block_ids": [[1]]}, {"block_ids": [[0, 10**12]]}, {"ref_count": [[1, 2, 3]]}])
def test_a_damaged_list_is_refused(damage: dict[str, Any]) -> None:
    line = json.dumps({**said(PoolOperation(kind=FREE, block_ids=[1], ref_counts=[0])), **damage})
    record = decode_record(line)
    assert isinstance(record, FreeRecord)
    with pytest.raises(ValueError, match=r"is not a run|are the most"):
        codec.operation_from(record)


TYPICAL = {
    "one block": PoolOperation(
        kind=ALLOC, block_ids=[4711], step=1234, scheduling=True, cause="allocate", request_id=NAME, group_id=0,
        first_index=93, ref_counts=[1], generations=[3],
    ),
    "a prompt": PoolOperation(
        kind=ALLOC, block_ids=[*range(100, 190), 7, 3], step=1234, scheduling=True, cause="allocate", request_id=NAME,
        group_id=0, first_index=0, ref_counts=[1] * 92, generations=[3] * 92,
    ),
    "full": PoolOperation(
        kind=CACHE, block_ids=[4711], step=1234, scheduling=True, cause="allocate", request_id=NAME, group_id=0,
        ref_counts=[1], hash_counts=[1], hash_tokens=[16],
    ),
    "finish": PoolOperation(
        kind=FREE, block_ids=[3, 7, *range(189, 99, -1)], step=1234, cause="finish", request_id=NAME, group_id=0,
        ref_counts=[0] * 92,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TYPICAL)
def test_a_call_of_the_pool_is_small_and_encoded_soon(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    operation = TYPICAL[what]

    def one() -> bytes:
        record = codec.operation_record(operation)
        codec.stamp(record, IDENTITY, seq=1, component="allocator", boundary="b", mono_ns=1, wall_ns=1, trace_id="t")
        return codec.encode_line(record)

    took_us = min(repeat(one, number=500, repeat=10)) / 500 * 1e6
    own_bytes = len(one()) - len(NAME)
    samples.say(capsys, f"{what}, {len(operation.block_ids)} blocks: {took_us:.1f} us, {own_bytes} bytes and the id")
    assert own_bytes < 360
    assert took_us < 300  # a few on an idle machine: see the number


# State ----------------------------------------------------------------------------------------------------------------


@st.composite
def ledgers(draw: st.DrawFn) -> BlockLedger:
    ledger = BlockLedger(12, 0)
    blocks, names = st.lists(st.integers(0, 13), max_size=5), st.none() | st.sampled_from("abc")
    for step in range(draw(st.integers(0, 12))):
        if draw(st.integers(0, 3)) == 0:
            written = draw(blocks)
            ledger.declare_written(written, [draw(st.integers(1, 16)) for _ in written], step)
        elif draw(st.integers(0, 3)) == 0:
            ledger.confirm(draw(st.integers(0, 12)))
        else:
            operation = PoolOperation(
                kind=draw(st.sampled_from([ALLOC, ALLOC, *KINDS])),
                block_ids=draw(blocks),
                cause=draw(st.sampled_from(allocator.CAUSES)),
                request_id=draw(names),
                group_id=draw(st.none() | st.integers(0, 1)),
                first_index=draw(st.none() | st.integers(0, 4)),
                reserved=draw(st.booleans()),
            )
            ledger.apply(operation, step)
    return ledger


@given(ledgers(), st.none() | st.lists(st.integers(0, 13), max_size=6))
def test_a_snapshot_comes_back_equal(ledger: BlockLedger, block_ids: list[int] | None) -> None:
    snapshot = ledger.snapshot(block_ids)
    assert same(codec.state_from(through_a_line(codec.state_record(snapshot))), snapshot)


def a_pool(num_blocks: int) -> LedgerSnapshot:
    """Requests of eight blocks each, the first of which have finished."""
    ledger = BlockLedger(num_blocks, 0)
    names = [f"r-{number}" for number in range((num_blocks - 1) // 8)]
    for number, name in enumerate(names):
        blocks = list(range(1 + 8 * number, 9 + 8 * number))
        ledger.apply(PoolOperation(kind=ALLOC, block_ids=blocks, request_id=name, group_id=0, first_index=0), number)
        ledger.declare_written(blocks, [16] * 8, number)
    for number, name in enumerate(names[: len(names) // 2]):
        blocks = list(range(8 + 8 * number, 8 * number, -1))
        operation = PoolOperation(kind=FREE, block_ids=blocks, request_id=name, group_id=0, cause="finish")
        ledger.apply(operation, len(names))
    return ledger.snapshot()


def test_a_state_says_who_has_what_and_who_had_it() -> None:
    record = codec.state_record(a_pool(33))
    fields = json.loads(codec.encode(through_a_line(record)))
    assert fields["requests"] == ["r-0", "r-1", "r-2", "r-3"]
    assert fields["status"] == {"free": [[1, 16]], "active": [[17, 32]]}
    assert fields["freed_cause"] == {"finish": [[1, 16]]}
    assert fields["init_prefix_declared"] == [[16, 16, 32]]
    assert fields["init_prefix_len"] == [[0, 0, 32]]
    assert fields["owners"] == [
        {"request_id": "r-2", "block_ids": [[17, 24]], "group_id": 0, "first_index": 0},
        {"request_id": "r-3", "block_ids": [[25, 32]], "group_id": 0, "first_index": 0},
    ]


def test_a_state_is_compact() -> None:
    assert len(codec.encode(codec.state_record(a_pool(1025)))) < 20 * 1024


def test_a_state_names_requests_as_they_may_be_named() -> None:
    snapshot = a_pool(33)
    hashed = RequestNames("hashed", b"0123456789abcdef")
    back = codec.state_from(through_a_line(codec.state_record(snapshot, hashed)))
    assert back.allocated_for == [name and hashed(name) for name in snapshot.allocated_for]
    omitted = through_a_line(codec.state_record(snapshot, RequestNames("omitted")))
    assert omitted.requests == [None] * 4
    with pytest.raises(ValueError, match="omitted"):
        codec.state_from(omitted)


@pytest.mark.parametrize(
    "damage", [{"generation": [1]}, {"status": {}}, {"status": {"gone": [[1, 32]]}}, {"freed_by": [[9, 9, 32]]}]
)
def test_a_state_that_contradicts_itself_is_refused(damage: dict[str, Any]) -> None:
    fields = json.loads(codec.encode(codec.state_record(a_pool(33))))
    record = decode_record(json.dumps({**fields, **damage}))
    assert isinstance(record, StateRecord)
    with pytest.raises((ValueError, LookupError)):
        codec.state_from(record)


def test_a_rule_of_the_spelling_holds_for_both_ways_to_make_it() -> None:
    """Columns of a state are made as arrays, lists of an operation are not; a reader knows one spelling."""
    record = codec.operation_record(PoolOperation(kind=RECEIVE, block_ids=[1, 2, 3], filled=[4, 4, 4]))
    assert isinstance(record, BoundaryRecord)
    assert (record.block_ids, record.filled) == ([[1, 3]], [[4, 4, 3]])
    assert codec.state_record(a_pool(9)).block_ids == [[1, 8]]
    assert np.array_equal(codec.state_from(codec.state_record(a_pool(9))).block_ids, np.arange(1, 9))
