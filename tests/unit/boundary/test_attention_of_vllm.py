"""What vLLM's own functions make of a batch, on the host, is agreed to; and one wrong entry in it is not.

Batches cut in two (DBO) and blocks expanded for a kernel need hardware or models that are not at hand everywhere; the
functions that prepare them are plain arithmetic on tensors, and run here on the scenes of the rules' own tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.budget import examples

from kvscope.boundary import runner_v1, runner_v2
from kvscope.boundary.attention import LAYOUT, AttentionLayout, Extent
from kvscope.checks.finding import Finding
from kvscope.facts.operators import OperatorArguments
from kvscope.facts.plans import Plan
from unit.boundary.fakes import Told
from unit.checks.operator_world import judged
from unit.checks.scenes import ONE_GROUP, Scene
from unit.checks.worlds import LAYOUTS, World, group, pool

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

REASON = "operator_argument_mismatch"
LOCAL_MODULE = "vllm.model_executor.layers.attention.chunked_local_attention"


def scene() -> Plan:
    """``a`` computes 40 tokens, ``b`` decodes its token 40, ``c`` computes 21: 62 tokens in all, none of padding."""
    of = Scene()
    of.say(new=[("b", ([4, 5, 6],), 0, 40)])
    said = of.say(new=[("a", ([1, 2, 3],), 0, 40), ("c", ([7, 8],), 0, 21)], known=[("b", None, 40, 1)])
    return of.plan(said, pad=0)


def common_of(plan: Plan, rows: int | None = None) -> Any:
    """The common metadata that a runner would make of the plan."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    lengths = torch.from_numpy(plan.seq_lens.copy())
    starts = torch.from_numpy(plan.query_start.copy())
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths.clone(),
        num_reqs=len(plan.request_ids),
        num_actual_tokens=plan.num_tokens,
        max_query_len=40,
        max_seq_len=41,
        block_table_tensor=torch.from_numpy(plan.groups[0].tables.copy()),
        slot_mapping=torch.from_numpy(plan.groups[0].slots.copy()),
    )


class CPUAttentionMetadata:
    """What a CPU backend keeps of the common metadata."""

    def __init__(self, common: Any) -> None:
        self.block_table, self.seq_lens = common.block_table_tensor, common.seq_lens
        self.query_start_loc, self.slot_mapping = common.query_start_loc, common.slot_mapping


def attention_group(kernel: int | None = None, kernel_stride: int = 0, size: int = 16) -> Any:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.worker.utils import AttentionGroup

    of: Any = AttentionGroup(
        backend=object,  # type: ignore[arg-type]  # never asked
        layer_names=["layer"],
        kv_cache_spec=SimpleNamespace(block_size=size),  # type: ignore[arg-type]  # only its size is
        kv_cache_group_id=0,
        kernel_block_size=kernel,
        kernel_block_stride=kernel_stride,
        metadata_builders=[CPUAttentionMetadataBuilder.__new__(CPUAttentionMetadataBuilder)],
    )
    if kernel is not None:
        of.kernel_block_table = torch.zeros(2, 8, 64, dtype=torch.int32)
        of.kernel_block_offsets = torch.arange(size // kernel, dtype=torch.int32)
    return of


# Blocks of a kernel ---------------------------------------------------------------------------------------------------


def expanded(size: int, kernel: int, kernel_stride: int, spoil: tuple[int, int, int] | None) -> list[Finding]:
    topology = pool(group(0, block_size=size))
    of = Scene(topology)
    plan = of.plan(of.say(new=[("a", ([3, 9],), 0, size + 5), ("b", ([4, 1],), 0, size + 7)]), pad=0)
    layers = attention_group(kernel, kernel_stride, size)
    metadata = CPUAttentionMetadata(layers._with_kernel_block_table(common_of(plan)))
    if spoil is not None:
        row, column, value = spoil
        metadata.block_table[row, column] = value
    arguments = AttentionLayout([[layers]]).arguments({"layer": metadata}, None, 2, plan.num_tokens)
    return judged(plan, arguments, topology)


@pytest.mark.parametrize(("size", "kernel"), [(128, 16), (128, 32), (128, 64), (64, 16), (32, 32)])
@pytest.mark.parametrize("kernel_stride", [0, 40])
def test_blocks_that_vllm_has_expanded_are_put_together(size: int, kernel: int, kernel_stride: int) -> None:
    assert expanded(size, kernel, kernel_stride, None) == []
    ratio = size // kernel
    apart = kernel_stride or ratio
    (found,) = expanded(size, kernel, kernel_stride, (1, ratio, 9 * apart))
    assert (found.reason, found.request_id, found.row) == (REASON, "b", 1)
    assert (found.position, found.block_id, found.expected, found.actual) == (size, 9, 1, 9)
    if ratio > 1:
        (found,) = expanded(size, kernel, kernel_stride, (0, 1, 3 * apart))
        assert (found.position, found.expected) == (kernel, f"kernel block {3 * apart + 1}")


# Batches that are cut in two ------------------------------------------------------------------------------------------


def slices(at: int, plan: Plan) -> Any:
    from vllm.v1.worker.ubatch_utils import UBatchSlice

    ends = plan.query_start[1:].tolist()
    last = next(row for row, end in enumerate(ends) if end >= at)
    first = last if ends[last] > at else last + 1
    return [
        UBatchSlice(slice(0, last + 1), slice(0, at)),
        UBatchSlice(slice(first, len(ends)), slice(at, plan.num_tokens)),
    ]


def cut_by_v1(plan: Plan, at: int, change: Callable[[list[Any]], object]) -> OperatorArguments:
    """The forward context of V1, with metadata as ``_build_attention_metadata`` splits it."""
    from vllm.v1.worker.ubatch_utils import split_attn_metadata

    common, parts = common_of(plan), slices(at, plan)
    metadata = [CPUAttentionMetadata(of) for of in split_attn_metadata(parts, common)]
    change(metadata)
    context = SimpleNamespace(
        attn_metadata=[{"layer": of} for of in metadata],
        slot_mapping=[{"layer": common.slot_mapping[part.token_slice]} for part in parts],
        ubatch_slices=parts,
    )
    layout = AttentionLayout([[attention_group()]])
    return runner_v1.read_operators(layout, context, len(plan.request_ids), plan.num_tokens)


def cut_by_v2(plan: Plan, at: int, change: Callable[[list[Any]], object]) -> OperatorArguments:
    """The contexts of V2, with offsets and lengths as ``UBatchRunner.prepare`` computes them."""
    from vllm.v1.worker.gpu.ubatch_utils import _slice_query_start_loc, _slice_seq_lens

    common, parts, metadata = common_of(plan), slices(at, plan), []
    for part in parts:
        rows, tokens = part.request_slice, part.token_slice
        count = rows.stop - rows.start
        starts, lengths = torch.zeros(count + 1, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
        cut = SimpleNamespace(
            query_start_loc=_slice_query_start_loc(
                common.query_start_loc, starts, rows.start, rows.stop, tokens.start, part.num_tokens
            ),
            seq_lens=_slice_seq_lens(
                common.seq_lens, lengths, common.query_start_loc, rows.start, rows.stop, tokens.stop
            ),
            block_table_tensor=common.block_table_tensor[rows],
            slot_mapping=common.slot_mapping[tokens],
        )
        metadata.append(CPUAttentionMetadata(cut))
    change(metadata)
    contexts = [
        SimpleNamespace(attn_metadata={"layer": of}, slot_mapping={"layer": of.slot_mapping}) for of in metadata
    ]
    ubatch_runner, observer = SimpleNamespace(), Told(awaits_operators=True)
    setattr(ubatch_runner, LAYOUT, AttentionLayout([[attention_group()]]))
    batch = SimpleNamespace(num_reqs=len(plan.request_ids), num_tokens=plan.num_tokens)
    state = SimpleNamespace(slices=parts, forward_contexts=contexts)
    runner_v2.after_micro_batches(observer, ubatch_runner, (batch,), {}, state)
    ((_, (arguments,)),) = observer.calls
    made: OperatorArguments = arguments
    return made


@pytest.mark.parametrize("cut", [cut_by_v1, cut_by_v2])
@pytest.mark.parametrize("at", [1, 17, 39, 40, 41, 50, 61])
def test_batches_that_vllm_has_cut_in_two(cut: Any, at: int) -> None:
    plan = scene()
    assert judged(plan, cut(plan, at, lambda _: None), ONE_GROUP) == []

    def length(metadata: list[Any]) -> None:
        metadata[0].seq_lens = metadata[0].seq_lens.clone()
        metadata[0].seq_lens[0] += 1

    def table(metadata: list[Any]) -> None:
        metadata[1].block_table = metadata[1].block_table.clone()
        metadata[1].block_table[-1, 1] = 9

    def slot(metadata: list[Any]) -> None:
        metadata[1].slot_mapping = metadata[1].slot_mapping.clone()
        metadata[1].slot_mapping[0] += 1

    def offset(metadata: list[Any]) -> None:
        metadata[1].query_start_loc = metadata[1].query_start_loc + 1

    rows = np.repeat(np.arange(3), np.diff(plan.query_start))
    for change, row in ((length, 0), (table, 2), (slot, int(rows[at])), (offset, int(rows[at]))):
        (found,) = judged(plan, cut(plan, at, change), ONE_GROUP)
        assert (found.reason, found.row) == (REASON, row), change.__name__


# Rows that are cut where a chunk ends ---------------------------------------------------------------------------------


def local_group(chunk_tokens: int, kernel: int | None) -> Any:
    from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    of = attention_group(kernel)
    of.kv_cache_spec.attention_chunk_size = chunk_tokens
    builder = create_chunked_local_attention_backend(CPUAttentionBackend, chunk_tokens).get_builder_cls()
    of.metadata_builders = [builder.__new__(builder)]
    return of


def pieces(
    plan: Plan, kernel: int | None, change: Callable[[Any], object], chunk_tokens: int = 48
) -> OperatorArguments:
    """What ``ChunkedLocalAttentionBuilder`` hands to the builder below it, for chunks of 48 tokens."""
    chunk_tokens = 48
    from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches

    layers = local_group(chunk_tokens, kernel)
    if kernel is not None:
        layers.kernel_block_table = torch.zeros(1, 64, 512, dtype=torch.int32)
    common = layers._with_kernel_block_table(common_of(plan))
    cut, _ = make_local_attention_virtual_batches(chunk_tokens, common, kernel or 16)
    metadata = CPUAttentionMetadata(cut)
    change(metadata)
    layout = AttentionLayout([[layers]])
    assert layout.unread(0) is None
    slots = {"layer": metadata.slot_mapping}
    return layout.arguments({"layer": metadata}, slots, len(plan.request_ids), plan.num_tokens)


def spoiled(plan: Plan, rng: random.Random) -> tuple[Callable[[Any], object], int]:
    """One change of the pieces, and the row that it hurts."""
    rows, tokens = np.repeat(np.arange(len(plan.request_ids)), np.diff(plan.query_start)), plan.num_tokens
    token = rng.randrange(tokens)
    row, position = int(rows[token]), int(plan.positions[token])
    index = position % 48 // 16

    def piece_of(metadata: Any) -> int:
        return int(np.searchsorted(metadata.query_start_loc.numpy()[1:], token, side="right"))

    def table(metadata: Any) -> None:
        ratio = metadata.block_table.shape[1] // 3
        metadata.block_table[piece_of(metadata), index * ratio] += 1

    def length(metadata: Any) -> None:
        metadata.seq_lens[piece_of(metadata)] -= 1

    def slot(metadata: Any) -> None:
        metadata.slot_mapping[token] += 1

    return rng.choice([table, length, slot]), row


@pytest.mark.parametrize("kernel", [None, 8])
@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 10))
def test_rows_that_vllm_has_cut_where_a_chunk_ends(kernel: int | None, seed: int, steps: int) -> None:
    world, rng = World(seed, LAYOUTS["chunks"]), random.Random(seed)
    for _ in range(steps):
        declaration = world.step()
        if not declaration.requests.scheduled:
            continue
        plan = world.plan(declaration)
        assert judged(plan, pieces(plan, kernel, lambda _: None), world.topology) == []
        change, row = spoiled(plan, rng)
        found = judged(plan, pieces(plan, kernel, change), world.topology)
        assert [(of.reason, of.row, of.request_id) for of in found] == [(REASON, row, plan.request_ids[row])]


def test_chunks_of_a_batch_that_is_cut_in_two_are_not_read() -> None:
    plan = scene()
    layout = AttentionLayout([[local_group(48, None)]])
    metadata = CPUAttentionMetadata(common_of(plan))
    arguments = layout.micro_batches([({"layer": metadata}, {"layer": metadata.slot_mapping}, Extent(0, 1, 0, 30, 62))])
    assert (arguments.groups, arguments.unread) == ([], {0: "chunks of a micro-batch"})


def test_chunks_over_a_builder_that_is_not_known_are_not_read() -> None:
    of = attention_group()
    below = type("ChunkedLocalAttentionBuilder", (object,), {"__module__": LOCAL_MODULE})
    of.metadata_builders = [below()]
    assert AttentionLayout([[of]]).unread(0) == "metadata of ChunkedLocalAttentionBuilder"
