"""What a rank says of its place, and of its part of a batch, comes back from a line as it was."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import UNSET

from kvscope.events import codec
from kvscope.events.context_parallel import context_from, context_record
from kvscope.events.schema import BoundaryRecord
from kvscope.facts.context_parallel import ContextParallel, LocalLengths, LocalRows
from kvscope.facts.topology import FULL_ATTENTION, Group, Topology
from unit.events.wire import through_a_line

COORDINATES = ContextParallel(pcp_size=2, pcp_rank=1, dcp_size=4, dcp_rank=3, interleave=16, sharded=(0, 2))
LENGTHS = LocalLengths(request_ids=["a", "b"], lengths=np.array([20, 34], np.int32))
ROWS = LocalRows(
    request_ids=["a", "b", "b"],
    query_start=np.array([0, 1, 11, 21], np.int32),
    positions=np.array([40, *range(10, 30)]),
    seq_lens=np.array([41, 20, 30], np.int32),
    writers=np.array([40, *range(10), -1, *range(10, 30), -1]),
)


def plain(fact: Any) -> dict[str, Any]:
    values = {name: getattr(fact, name) for name in fact.__struct_fields__}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


@pytest.mark.parametrize(
    "fact",
    [
        COORDINATES,
        ContextParallel(),
        LENGTHS,
        LocalLengths(request_ids=["b"], lengths=np.array([4], np.int32), seq_lens=np.array([10], np.int32)),
        ROWS,
    ],
)
def test_a_fact_of_context_parallelism_comes_back_equal(fact: Any) -> None:
    record = through_a_line(codec.boundary_record("cp_context", fact))
    back = context_from(record)
    assert type(back) is type(fact)
    assert plain(back) == plain(fact)


def test_names_are_written_as_they_may_be() -> None:
    omitted = msgspec.structs.replace(context_record(LENGTHS), local_requests=[None, None])
    with pytest.raises(ValueError, match="omitted"):
        context_from(omitted)


@pytest.mark.parametrize(
    "damage",
    [{"local_requests": UNSET}, {"seq_len": UNSET}, {"query_len": [1, 10]}, {"seq_len": [41]}],
)
def test_a_record_that_contradicts_itself_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        context_from(msgspec.structs.replace(context_record(ROWS), **damage))


def test_a_record_that_says_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="neither"):
        context_from(BoundaryRecord(kind="cp_context"))


@pytest.mark.parametrize("shards", [1, 4])
def test_kv_enabled_says_how_blocks_are_dealt_out(shards: int) -> None:
    group = Group(group_id=0, kind=FULL_ATTENTION, block_size=64, kernel_block_size=None, layers=1, shards=shards)
    record = codec.enabled_record(
        run_id="r",
        process="worker",
        pid=1,
        configuration={},
        parts={},
        actions={},
        topology=Topology(num_blocks=8, null_block_id=0, groups=(group,), dcp_size=shards),
    )
    back = through_a_line(record)
    (said,) = back.groups or []
    assert (said.block_size, said.shards) == (64, 4 if shards > 1 else UNSET)
    assert (back.context_parallel is UNSET) == (shards == 1)
