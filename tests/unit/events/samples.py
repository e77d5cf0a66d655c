"""Facts as hypothesis draws them, a decode batch as a server has it, and equality for facts that hold arrays."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from kvscope.checks.finding import Finding
from kvscope.checks.rule import Rule
from kvscope.facts import allocator
from kvscope.facts.allocator import PoolOperation
from kvscope.facts.plans import AgreedGroup, AgreedPlan, GroupSnapshot, PlanSnapshot
from kvscope.facts.requests import Declaration, StepRequests

RULE = Rule(
    reason="write_target_mismatch",
    check="C1",
    severity="error",
    title="a token is written where the declaration does not put it",
    fires="the slot differs",
    silent="the slot is the declared one",
    sources=("the declaration", "the slots"),
    proves_not="that the device wrote there",
    rank=50,
)


def say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """A measured number, told on the terminal also where the test passes."""
    with capsys.disabled():
        sys.stdout.write(f"\n  {text}")


def same(left: Any, right: Any) -> bool:
    """Equality by value, of the same type all the way down."""
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, msgspec.Struct):
        names = left.__struct_fields__
        return type(left) is type(right) and all(same(getattr(left, name), getattr(right, name)) for name in names)
    if isinstance(left, list):
        return isinstance(right, list) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return type(left) is type(right) and bool(left == right)


ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
small = st.integers(0, 40)
counts = st.integers(0, 2**31 - 1)
optional_blocks = st.none() | st.lists(counts | small, max_size=6)


def arrays(elements: st.SearchStrategy[int], size: int, dtype: Any) -> st.SearchStrategy[Any]:
    return st.lists(elements, min_size=size, max_size=size).map(lambda values: np.array(values, dtype=dtype))


int32 = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 20)
int64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 20)


@st.composite
def step_requests(draw: st.DrawFn) -> StepRequests:
    block_ids = st.lists(st.lists(small | counts, max_size=5), max_size=3).map(tuple)
    new_ids, cached_ids = draw(st.lists(ids, max_size=3, unique=True)), draw(st.lists(ids, max_size=3, unique=True))
    some = st.sampled_from([*new_ids, *cached_ids, "elsewhere", "nowhere"])
    return StepRequests(
        new_ids=new_ids,
        new_blocks=[draw(block_ids) for _ in new_ids],
        new_computed=[draw(counts) for _ in new_ids],
        cached_ids=cached_ids,
        cached_blocks=[draw(st.none() | block_ids) for _ in cached_ids],
        cached_computed=[draw(counts) for _ in cached_ids],
        resumed=draw(st.sets(some, max_size=2)),
        scheduled=draw(st.dictionaries(some, counts, max_size=4)),
        finished=draw(st.sets(ids, max_size=2)),
        preempted=draw(st.sets(ids, max_size=2)),
    )


@st.composite
def declarations(draw: st.DrawFn) -> Declaration:
    requests = draw(step_requests())
    some = st.sampled_from([*requests.new_ids, *requests.cached_ids, "draft only"])
    return Declaration(
        step=draw(counts),
        trace_id=draw(ids),
        requests=requests,
        new_prompt_tokens=[draw(counts) for _ in requests.new_ids],
        cached_output_tokens=[draw(counts) for _ in requests.cached_ids],
        spec_tokens=draw(st.dictionaries(some, small, max_size=2)),
        invalid_spec_tokens=draw(st.dictionaries(some, small, max_size=2)),
        total_num_scheduled_tokens=draw(counts),
        token_budget=draw(st.none() | counts),
        zero_blocks=draw(optional_blocks),
        copies=draw(st.none() | st.lists(st.tuples(small, small), max_size=3)),
        connector_plan=draw(st.none() | ids),
        operations_before=draw(st.none() | counts),
        after_unseen=draw(st.booleans()),
    )


@st.composite
def operations(draw: st.DrawFn) -> PoolOperation:
    """Whatever a pool may have done, with every list that its kind has, observed or not."""
    kind = draw(st.sampled_from(allocator.KINDS))
    neighbours = st.builds(lambda first, count: list(range(first, first + count)), counts, st.integers(0, 9))
    block_ids = draw(neighbours | neighbours.map(lambda blocks: blocks[::-1]) | st.lists(small | counts, max_size=9))
    observed = st.none() | st.lists(small | counts, min_size=len(block_ids), max_size=len(block_ids))
    operation = PoolOperation(
        kind=kind,
        block_ids=block_ids,
        step=draw(counts),
        scheduling=draw(st.booleans()),
        pool=draw(st.integers(0, 3)),
        cause=draw(st.sampled_from(allocator.CAUSES)),
        request_id=draw(st.none() | ids),
        group_id=draw(st.none() | small),
    )
    if kind == allocator.RECEIVE:
        operation.filled = draw(observed)
        return operation
    operation.first_index = draw(st.none() | counts)
    operation.ref_counts, operation.hash_counts, operation.hash_tokens = draw(observed), draw(observed), draw(observed)
    if kind == allocator.ALLOC:
        operation.generations, operation.reserved = draw(observed), draw(st.booleans())
    return operation


@st.composite
def snapshots(draw: st.DrawFn) -> PlanSnapshot:
    """Sound and damaged plans: lengths that do not cover the slots, negative ones, columns that do not follow."""
    rows = draw(st.integers(0, 4))
    query_lens = draw(arrays(st.integers(0, 5) | st.just(1) | st.integers(-2, 9), rows, np.int32))
    sound = draw(st.booleans())
    num_tokens = int(np.maximum(query_lens, 0).sum()) if sound else draw(st.integers(0, 12))
    first = draw(arrays(st.integers(0, 2**40), rows, np.int64))
    last = first + query_lens - 1
    computed, seq_lens = first.astype(np.int32), (first.astype(np.int32) + query_lens).astype(np.int32)
    if not sound:
        last = draw(arrays(int64, rows, np.int64))
        computed, seq_lens = draw(arrays(int32, rows, np.int32)), draw(arrays(int32, rows, np.int32))
    return PlanSnapshot(
        step=draw(counts),
        trace_id=draw(ids),
        request_ids=draw(st.lists(ids, min_size=rows, max_size=rows)),
        query_lens=query_lens,
        first_positions=first,
        last_positions=last,
        positions=draw(st.none() | arrays(int64, num_tokens, np.int64)),
        computed=computed,
        seq_lens=seq_lens,
        num_tokens=num_tokens,
        graph_mode=draw(st.sampled_from(["NONE", "FULL", "PIECEWISE"])),
        exact=draw(st.booleans()),
        groups=[draw(_group(group_id, rows, num_tokens)) for group_id in range(draw(st.integers(0, 2)))],
    )


@st.composite
def _group(draw: st.DrawFn, group_id: int, rows: int, num_tokens: int) -> GroupSnapshot:
    quiet = draw(st.booleans())
    needed = draw(arrays(counts, rows, np.int32))
    return GroupSnapshot(
        group_id=group_id,
        slots=draw(arrays(int64, num_tokens, np.int64)),
        padding_slots=draw(small),
        padding_enabled=draw(arrays(int64, 0 if quiet else draw(st.integers(0, 3)), np.int64)),
        table_blocks=needed.copy() if quiet else draw(arrays(counts, rows, np.int32)),
        blocks_needed=needed,
        window_skipped=np.zeros(rows, dtype=np.int32) if quiet else draw(arrays(counts, rows, np.int32)),
        digests=draw(arrays(st.integers(0, 2**64 - 1), rows, np.uint64)),
        tables={
            row: draw(st.integers(0, 5).flatmap(lambda size: arrays(int32, size, np.int32)))
            for row in range(rows)
            if not quiet and draw(st.booleans())
        },
    )


@st.composite
def agreed_plans(draw: st.DrawFn) -> list[AgreedPlan]:
    """Decoding steps behind each other, which share their groups."""
    rows = draw(st.integers(0, 5))
    groups = [draw(_agreed_group(group_id, rows)) for group_id in range(draw(st.integers(1, 3)))]
    computed = draw(st.lists(st.integers(0, 2**31 - 5) | small, min_size=rows, max_size=rows))
    request_ids = draw(st.lists(ids | st.sampled_from(["r-1", "r-\ud800"]), min_size=rows, max_size=rows))
    return [
        AgreedPlan(
            step=7 + later,
            trace_id=draw(ids),
            request_ids=request_ids,
            computed=[position + later for position in computed],
            graph_mode=draw(st.sampled_from(["NONE", "FULL", "PIECEWISE"])),
            groups=groups,
        )
        for later in range(3)
    ]


@st.composite
def _agreed_group(draw: st.DrawFn, group_id: int, rows: int) -> AgreedGroup:
    """With or without a window and padding; tables as long as they have to be, or longer."""
    width = draw(st.integers(1, 6))
    needed = draw(arrays(st.integers(1, width), rows, np.int64))
    windowed, longer = draw(st.booleans()), draw(st.booleans())
    first_visible = draw(arrays(st.integers(0, width + 1 if windowed else 0), rows, np.int64))
    beyond = draw(arrays(st.integers(0, 3 if longer else 0), rows, np.int64))
    blocks = draw(arrays(counts | small, rows * width, np.int32))
    return AgreedGroup(
        group_id=group_id,
        tail_starts=draw(st.lists(st.integers(-(2**40), 2**40) | small, min_size=rows, max_size=rows)),
        padding_slots=draw(st.sampled_from([0, 0, 3])),
        table_blocks=(needed + beyond).tolist(),
        needed=needed.tolist(),
        first_visible=first_visible.tolist(),
        tables=blocks.tobytes(),
        width=width,
    )


findings = st.builds(
    Finding,
    reason=st.sampled_from(["write_target_mismatch", "read_row_request_mismatch"]),
    step=counts,
    trace_id=ids,
    request_id=st.none() | ids,
    other_request_id=st.none() | ids,
    row=st.none() | small,
    group_id=st.none() | small,
    token_index=st.none() | small,
    position=st.none() | counts,
    block_id=st.none() | int64,
    slot=st.none() | int64,
    generation=st.none() | counts,
    expected=st.none() | int64 | ids,
    actual=st.none() | int64 | ids,
    also=st.lists(ids, max_size=2).map(tuple),
    tp_rank=st.none() | small,
    pp_rank=st.none() | small,
    launch_fatal=st.booleans(),
)


def decode_batch(rows: int = 8, *, group_id: int = 0) -> tuple[Declaration, PlanSnapshot]:
    """One decode step of ``rows`` requests, 1500 tokens into 16-token blocks; every 16th row needs a new block."""
    names = [f"chatcmpl-{row:032x}" for row in range(rows)]
    computed = np.arange(1500, 1500 + rows, dtype=np.int32)
    needed = (computed + 16) // 16
    declaration = Declaration(
        step=1234,
        trace_id="5f0c2b9ad1e34f77",
        requests=StepRequests(
            new_ids=[],
            new_blocks=[],
            new_computed=[],
            cached_ids=names,
            cached_blocks=[([9000 + row],) if count % 16 == 0 else None for row, count in enumerate(computed.tolist())],
            cached_computed=computed.tolist(),
            resumed=set(),
            scheduled=dict.fromkeys(names, 1),
            finished=set(),
            preempted=set(),
        ),
        new_prompt_tokens=[],
        cached_output_tokens=list(range(500, 500 + rows)),
        spec_tokens={},
        invalid_spec_tokens={},
        total_num_scheduled_tokens=rows,
        token_budget=8192,
        zero_blocks=None,
        copies=None,
        connector_plan=None,
    )
    snapshot = PlanSnapshot(
        step=1234,
        trace_id="5f0c2b9ad1e34f77",
        request_ids=names,
        query_lens=np.ones(rows, dtype=np.int32),
        first_positions=computed.astype(np.int64),
        last_positions=computed.astype(np.int64),
        positions=None,
        computed=computed,
        seq_lens=computed + 1,
        num_tokens=rows,
        graph_mode="FULL",
        exact=True,
        groups=[
            GroupSnapshot(
                group_id=group_id,
                slots=np.arange(rows, dtype=np.int64) * 1601 + 52345,
                padding_slots=0,
                padding_enabled=np.array([], dtype=np.int64),
                table_blocks=needed,
                blocks_needed=needed,
                window_skipped=np.zeros(rows, dtype=np.int32),
                digests=np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15),
                tables={},
            )
        ],
    )
    return declaration, snapshot


def agreed_decode_batch(rows: int = 8, *, beyond: int = 0, skipped: int = 0) -> AgreedPlan:
    """One decode step in two groups of 16-token blocks. In the second, tables have ``beyond`` more blocks than are
    needed, and a window hides the first ``skipped``.
    """
    names = [f"chatcmpl-{row:032x}" for row in range(rows)]
    computed = list(range(1500, 1500 + rows))
    needed = [position // 16 + 1 for position in computed]
    blocks = np.arange(1, rows * 96 + 1, dtype=np.int32)
    groups = [
        AgreedGroup(
            group_id=group_id,
            tail_starts=[16 * 96 * row for row in range(rows)],
            padding_slots=0,
            table_blocks=[count + more for count in needed],
            needed=needed,
            first_visible=[hidden] * rows,
            tables=blocks.tobytes(),
            width=96,
        )
        for group_id, more, hidden in ((0, 0, 0), (1, beyond, skipped))
    ]
    return AgreedPlan(
        step=1234, trace_id="5f0c2b9ad1e34f77", request_ids=names, computed=computed, graph_mode="FULL", groups=groups
    )
