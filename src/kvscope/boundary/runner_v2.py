"""Model Runner V2: final slots and tables, and what the forward gets.

Source: ``vllm/v1/worker/gpu/model_runner.py`` and ``vllm/v1/worker/gpu/model_states`` (0.32).

``prepare_attn`` returns the very tensors that the metadata builders, graphs and kernels use; it is called for real
batches only, ``prepare_dummy_attn`` for the others. Among the real ones are those of a warm-up, whose requests the
worker makes up (``vllm/v1/worker/gpu/warmup.py``) before there are others. A capture takes its slots elsewhere
(``prepare_inputs_to_capture``, ``cudagraph_utils.py``), and nothing of ours runs inside it.

The metadata is what ``prepare_attn`` of the model's state makes of them. The slots by layer go into the forward
context, which nothing that could be wrapped sees before the forward: they are read when ``execute_model`` returns,
where they are kept for the speculator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..facts.plans import PAD_SLOT, DummyRun, GroupPlan, Int64, PersistentSlots, Plan
from .attention import LAYOUT, extents
from .context_parallel import context_of_v2, read_partitioned_plan
from .device import CAPTURING, WARM_UP, Array, Clone, CloneRing, hand_on_dummy, hand_on_plan, ring_of, table_width
from .graphs import graph_mode_of
from .slots import as_slots

PARTITIONED = "device_tensors_of_a_part"
"""Cause under which rows are counted of a rank that computes a part of the batch, all of whose maps are on a device."""


def after_prepare_attn(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    if observer.expects_no_plan:
        if observer.is_warming_up:
            _read_warm_up(observer, runner, result[1])
        return
    block_tables, slot_mappings = result
    batch = args[0] if args else kwargs["input_batch"]
    if observer.reads_host_tensors:
        observer.on_plan(read_plan(runner, batch, block_tables, slot_mappings))
        return
    ring = ring_of(observer, runner) if getattr(runner, "pcp_manager", None) is None else PARTITIONED
    hand_on_plan(
        observer, ring if isinstance(ring, str) else clone_plan(ring, runner, batch, block_tables, slot_mappings)
    )


def read_plan(runner: Any, batch: Any, block_tables: Any, slot_mappings: Any) -> Plan:
    """The plan as views of the runner's own buffers (whole ones first: slicing an array costs less than a tensor)."""
    context = context_of_v2(runner)
    if context is not None and context.pcp_size > 1:
        plan = read_partitioned_plan(runner, context, batch, block_tables, slot_mappings)
        plan.exact, plan.graph_mode = _knows_lengths(runner), graph_mode_of(runner)
        return plan
    rows = batch.num_reqs
    lengths = runner.block_tables.num_blocks.np[:, batch.idx_mapping_np]
    mappings = slot_mappings.numpy()
    slots = _by_group(runner, mappings)
    groups = [
        GroupPlan(
            group_id=group_id,
            tables=table.numpy()[:rows],
            table_blocks=lengths[group_id],
            slots=slots_of_group,
            host_slots=None if slots is mappings else mappings[group_id],
        )
        for group_id, (table, slots_of_group) in enumerate(zip(block_tables, slots, strict=False))  # one may be missing
    ]
    return Plan(
        request_ids=batch.req_ids,
        query_start=batch.query_start_loc_np[: rows + 1],
        positions=batch.positions.numpy()[: batch.num_tokens],
        seq_lens=batch.seq_lens.numpy()[:rows],
        num_tokens=batch.num_tokens,
        groups=groups,
        graph_mode=graph_mode_of(runner),
        exact=_knows_lengths(runner),
        context=context,
    )


def after_metadata(observer: Any, model_state: Any, args: Any, kwargs: Any, result: Any) -> None:
    """A micro-batch comes with its number, and is read with the others (:func:`after_micro_batches`)."""
    if observer.awaits_operators and "ubatch_idx" not in kwargs:
        batch = args[0] if args else kwargs["input_batch"]
        layout = model_state.__dict__[LAYOUT]
        observer.on_operators(layout.arguments(result, None, batch.num_reqs, batch.num_tokens))


def after_micro_batches(observer: Any, ubatch_runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    if observer.awaits_operators:
        batch = args[0] if args else kwargs["input_batch"]
        parts = extents(result.slices, batch.num_reqs, batch.num_tokens)
        of_batches = [
            (context.attn_metadata, context.slot_mapping, part)
            for context, part in zip(result.forward_contexts, parts, strict=True)
        ]
        observer.on_operators(ubatch_runner.__dict__[LAYOUT].micro_batches(of_batches))


def after_forward(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    state = runner.execute_model_state
    if observer.awaits_operators and state is not None and state.attn_metadata is not None:
        layout = runner.__dict__[LAYOUT]
        batch, slots = state.input_batch, state.slot_mappings_by_layer
        observer.on_operators(layout.arguments(state.attn_metadata, slots, batch.num_reqs, batch.num_tokens))


def _knows_lengths(runner: Any) -> bool:
    return not (runner.num_speculative_steps > 0 and runner.scheduler_config.async_scheduling)


def whole_plan(runner: Any) -> list[Any]:
    """All tensors of which a plan is made, in their full size."""
    own, tables = runner.input_buffers, runner.block_tables
    return [own.query_start_loc, own.positions, own.seq_lens, *tables.input_block_tables, tables.slot_mappings]


def clone_plan(ring: CloneRing, runner: Any, batch: Any, block_tables: Any, slot_mappings: Any) -> Clone[Plan] | None:
    """A clone of the plan whose tensors are on a device; None: it does not fit.

    Offsets, positions and lengths are those of the device, where they are exact even when the host only has an upper
    bound of them; how many blocks a row has only the host knows.
    """
    rows, num_tokens, request_ids = batch.num_reqs, batch.num_tokens, batch.req_ids
    exact, context, graph_mode = _knows_lengths(runner), context_of_v2(runner), graph_mode_of(runner)
    counted = runner.block_tables.num_blocks.np[:, batch.idx_mapping_np]
    longest = int(batch.seq_lens_cpu_upper_bound[:rows].max())
    sources = [batch.query_start_loc[: rows + 1], batch.positions[:num_tokens], batch.seq_lens[:rows], slot_mappings]
    for group_id, table in enumerate(block_tables):
        size = runner.block_tables.block_sizes[group_id]
        sources.append(table[:rows, : table_width(counted[group_id], longest, size, table.shape[1])])

    def make(arrays: list[Array]) -> Plan:
        slots = _by_group(runner, arrays[3])
        groups = [
            GroupPlan(group_id=group_id, tables=table, table_blocks=counted[group_id], slots=slots[group_id])
            for group_id, table in enumerate(arrays[4:])
        ]
        return Plan(
            request_ids=request_ids,
            query_start=arrays[0],
            positions=arrays[1].astype(np.int64, copy=False),
            seq_lens=arrays[2],
            num_tokens=num_tokens,
            groups=groups,
            graph_mode=graph_mode,
            exact=exact,
            context=context,
        )

    return ring.clone(sources, make)


def _by_group(runner: Any, mappings: Any) -> Sequence[Int64]:
    """``int64 [tokens]`` of each group: the very mappings, unless the host has them in another shape than vLLM."""
    if mappings.itemsize == 8 and mappings.ndim == 2:
        own: Sequence[Int64] = mappings
        return own
    return [as_slots(of, size) for of, size in zip(mappings, runner.block_tables.block_sizes, strict=False)]


def after_prepare_dummy_attn(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    _, slot_mappings = result
    # A context-parallel manager hands on a buffer of its own.
    whole = runner.block_tables.slot_mappings if runner.pcp_manager is None else slot_mappings
    num_tokens = slot_mappings.shape[1]
    if observer.reads_host_tensors:
        observer.on_dummy(read_dummy(runner, whole.numpy(), num_tokens))
    else:
        hand_on_dummy(observer, runner, [whole], lambda arrays: read_dummy(runner, arrays[0], num_tokens))


def read_dummy(runner: Any, buffer: Array, num_tokens: int) -> DummyRun:
    """The slots that a dummy run hands to attention, and what else the buffer holds that graphs read them from.

    ``get_dummy_slot_mappings`` turns off the whole buffer ``int64 [groups, most tokens of a batch]``, since a kernel
    may look beyond the tokens.
    """
    persistent = {}
    for group_id, rest in enumerate(_by_group(runner, buffer[:, num_tokens:])):
        enabled = np.flatnonzero(rest != PAD_SLOT)
        persistent[group_id] = PersistentSlots(
            checked=rest.size, indexes=enabled + num_tokens, slots=rest[enabled].astype(np.int64)
        )
    slots = dict(enumerate(_by_group(runner, buffer[:, :num_tokens])))
    return DummyRun(slots=slots, num_tokens=num_tokens, persistent=persistent)


def _read_warm_up(observer: Any, runner: Any, slot_mappings: Any) -> None:
    if not observer.reads_host_tensors:
        observer.on_dummy_skipped(WARM_UP)
        return
    slots = _by_group(runner, slot_mappings.numpy())
    observer.on_dummy(DummyRun(slots=dict(enumerate(slots)), num_tokens=slot_mappings.shape[1], warm_up=True))


def after_capture(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    if result:  # the bytes that the graphs took: none where there was nothing to capture
        observer.on_dummy_skipped(CAPTURING)
