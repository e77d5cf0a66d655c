"""Model Runner V1: final slots and tables, and what the forward gets.

Source: ``vllm/v1/worker/gpu_model_runner.py`` (0.32).

``_get_slot_mappings`` is the last call before the attention metadata is built; ``_dummy_run`` calls it too, and only
afterwards turns every slot off, so a dummy run is read when it has ended.

A dummy run turns off what it hands on, padding included, and leaves the rest of the buffer as the last real step left
it: every run fills what it hands on itself, so nothing replays that. What a run must not do is switch on more.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..facts.operators import OperatorArguments
from ..facts.plans import PAD_SLOT, DummyRun, GroupPlan, Int64, PersistentSlots, Plan
from .attention import LAYOUT, AttentionLayout, extents
from .context_parallel import context_of_v1
from .device import CAPTURING, Array, Clone, CloneRing, hand_on_dummy, hand_on_plan, ring_of, table_width
from .graphs import EAGER, GRAPH_MODE, graph_mode_of
from .slots import as_slots, is_direct

VIEWS = "_kvscope_views"
"""Attribute by which a runner carries the arrays over its own buffers."""
HANDED = "_kvscope_handed_slots"
"""Attribute by which it carries how many slots it has handed on outside of a step, padding included."""
BEFORE_DUMMY = "_kvscope_slots_before"
"""Attribute by which it carries its slot buffers as they were before the dummy run that is under way."""


class HostViews:
    """NumPy arrays over the buffers that a runner on the host keeps for its lifetime.

    Making an array out of a tensor, or a slice of one, costs as much as judging it in a decoding batch. So the whole
    arrays are made once for each set of buffers, and their slices once for each size of a batch. On a CPU a table's
    "device" buffer is its host buffer (``CPUModelRunner._postprocess_tensors``).
    """

    def __init__(self, runner: Any) -> None:
        self.batch = runner.input_batch
        self.positions_tensor, self.seq_lens_tensor = runner.positions, runner.seq_lens
        self.query_start_buffer = runner.query_start_loc
        self.positions = runner.positions.numpy()
        self.seq_lens = runner.seq_lens.numpy()
        self.exact = not runner.use_async_spec_decode
        self.context = context_of_v1(runner)
        self.tables = [
            (
                table.block_table.gpu.numpy(),
                table.num_blocks_per_row,
                table.slot_mapping.gpu.data_ptr(),
                table.slot_mapping.gpu.numpy(),
                table.block_size,
            )
            for table in runner.input_batch.block_table.block_tables
        ]
        self._are_views = all(is_direct(table[3]) for table in self.tables)
        self._sizes: list[int] = []
        self._plan: Plan

    def fits(self, runner: Any) -> bool:
        """Whether the runner still has these buffers; it makes others when its cache is laid out anew."""
        return (
            runner.input_batch is self.batch
            and runner.positions is self.positions_tensor
            and runner.seq_lens is self.seq_lens_tensor
            and runner.query_start_loc is self.query_start_buffer
        )

    def plan_of(self, request_ids: list[str], slots_by_group: Any, num_tokens: int) -> Plan:
        """The plan of this step: the very object of the step before, with other ids, if all its arrays still fit."""
        sizes = [len(request_ids), num_tokens]
        for group_id, slots in slots_by_group.items():
            sizes += (group_id, slots.data_ptr(), slots.shape[0])
        if sizes != self._sizes or not self._are_views:
            self._sizes, self._plan = sizes, self._lay_out(len(request_ids), slots_by_group, num_tokens)
        self._plan.request_ids = request_ids
        return self._plan

    def _lay_out(self, rows: int, slots_by_group: Any, num_tokens: int) -> Plan:
        groups = []
        for group_id, slots in slots_by_group.items():
            if group_id >= len(self.tables):
                continue  # encoder-only attention, which stores nothing and has no table
            table, counts, address, buffer, block_size = self.tables[group_id]
            # What is handed on is a slice of the table's own buffer, as a rule; anything else is read as what it is.
            handed = buffer[: slots.shape[0]] if slots.data_ptr() == address else slots.numpy()
            groups.append(
                GroupPlan(
                    group_id=group_id,
                    tables=table[:rows],
                    table_blocks=counts[:rows],
                    slots=as_slots(handed, block_size),
                    host_slots=None if self._are_views else handed,
                )
            )
        return Plan(
            request_ids=[],
            query_start=self.query_start_buffer.np[: rows + 1],
            positions=self.positions[:num_tokens],
            seq_lens=self.seq_lens[:rows],
            num_tokens=num_tokens,
            groups=groups,
            exact=self.exact,
            context=self.context,
        )


def after_slot_mappings(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    by_group, _ = result
    if by_group is None:
        return
    if observer.expects_no_plan:
        setattr(runner, HANDED, max((slots.shape[0] for slots in by_group.values()), default=0))
        return
    num_tokens = kwargs["num_tokens_unpadded"]
    if observer.reads_host_tensors:
        observer.on_plan(read_plan(runner, by_group, num_tokens))
        return
    ring = ring_of(observer, runner)
    hand_on_plan(observer, ring if isinstance(ring, str) else clone_plan(ring, runner, by_group, num_tokens))


def read_plan(runner: Any, slots_by_group: Any, num_tokens: int) -> Plan:
    """The plan as views of the runner's own buffers; the next call may hand out the same object again."""
    views = runner.__dict__.get(VIEWS)
    if views is None or not views.fits(runner):
        views = HostViews(runner)
        setattr(runner, VIEWS, views)
    batch = views.batch
    plan: Plan = views.plan_of(batch.req_ids[: batch.num_reqs], slots_by_group, num_tokens)
    plan.graph_mode = getattr(runner, GRAPH_MODE, EAGER)  # as graph_mode_of, which every step would call
    if views.context is not None:
        plan.context = context_of_v1(runner)
    return plan


def before_forward(observer: Any, runner: Any, args: Any, kwargs: Any) -> None:
    """``_model_forward`` is called with the forward context in place, for real batches only."""
    if observer.awaits_operators:
        context = sys.modules["vllm.forward_context"]._forward_context
        batch = runner.input_batch
        observer.on_operators(read_operators(runner.__dict__[LAYOUT], context, batch.num_reqs, observer.planned_tokens))


def read_operators(layout: AttentionLayout, context: Any, rows: int, num_tokens: int) -> OperatorArguments:
    """What a forward context holds; lists of it where the batch is cut into micro-batches (DBO)."""
    metadata, slots = context.attn_metadata, context.slot_mapping
    if isinstance(metadata, dict):
        return layout.arguments(metadata, slots, rows, num_tokens)
    parts = extents(context.ubatch_slices, rows, num_tokens)
    return layout.micro_batches(zip(metadata, slots, parts, strict=True))


def whole_plan(runner: Any) -> list[Any]:
    """All tensors of which a plan is made, in their full size."""
    tables = runner.input_batch.block_table.block_tables
    own = [runner.query_start_loc.gpu, runner.positions, runner.seq_lens]
    return [*own, *(t.block_table.gpu for t in tables), *(t.slot_mapping.gpu for t in tables)]


def clone_plan(ring: CloneRing, runner: Any, slots_by_group: Any, num_tokens: int) -> Clone[Plan] | None:
    """A clone of the plan whose tensors are on a device; None: it does not fit.

    Offsets, positions and lengths are those of the device, where they are exact even when the host only has an upper
    bound of them; how many blocks a row has only the host knows.
    """
    batch = runner.input_batch
    rows = batch.num_reqs
    request_ids, exact = batch.req_ids[:rows], not runner.use_async_spec_decode
    graph_mode, context = graph_mode_of(runner), context_of_v1(runner)
    longest = int(runner.optimistic_seq_lens_cpu[:rows].max())
    sources = [runner.query_start_loc.gpu[: rows + 1], runner.positions[:num_tokens], runner.seq_lens[:rows]]
    counted = []
    tables = batch.block_table.block_tables
    for group_id, slots in slots_by_group.items():
        if group_id >= len(tables):
            continue  # as in `HostViews`
        table = tables[group_id]
        counts, entries = table.num_blocks_per_row[:rows].copy(), table.block_table.gpu
        width = table_width(counts, longest, table.block_size, entries.shape[1])
        sources += [entries[:rows, :width], slots]
        counted.append((group_id, counts, table.block_size))

    def make(arrays: list[Array]) -> Plan:
        groups = [
            GroupPlan(
                group_id=group_id,
                tables=arrays[3 + 2 * index],
                table_blocks=counts,
                slots=as_slots(arrays[4 + 2 * index], block_size),
            )
            for index, (group_id, counts, block_size) in enumerate(counted)
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


def before_dummy_run(observer: Any, runner: Any, args: Any, kwargs: Any) -> None:
    setattr(runner, HANDED, 0)
    if observer.reads_host_tensors and not kwargs.get("is_graph_capturing"):
        setattr(runner, BEFORE_DUMMY, [slots.copy() for slots in _read(runner, _slot_buffers(runner))])


def after_dummy_run(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    if kwargs.get("is_graph_capturing"):
        observer.on_dummy_skipped(CAPTURING)
        return
    buffers, handed = _slot_buffers(runner), getattr(runner, HANDED)
    num_tokens = args[0] if args else kwargs["num_tokens"]
    if observer.reads_host_tensors:
        before = runner.__dict__.pop(BEFORE_DUMMY)
        observer.on_dummy(read_dummy(_read(runner, buffers), before, num_tokens, handed))
        return

    def make(arrays: list[Array]) -> DummyRun:
        slots = _read(runner, arrays)
        return read_dummy(slots, slots, num_tokens, handed)

    # What was not handed on would have to be cloned before the run as well, so nothing is said about it.
    hand_on_dummy(observer, runner, [buffer[: max(handed, num_tokens)] for buffer in buffers], make)


def _slot_buffers(runner: Any) -> list[Any]:
    """The persistent slots of each group, tensors of ``[most tokens of a batch]``."""
    return [table.slot_mapping.gpu for table in runner.input_batch.block_table.block_tables]


def _read(runner: Any, buffers: Sequence[Any]) -> list[Int64]:
    """The slots of each group, of tensors on the host or arrays in whatever shape the host has them."""
    tables = runner.input_batch.block_table.block_tables
    return [as_slots(np.asarray(buffer), tables[group_id].block_size) for group_id, buffer in enumerate(buffers)]


def read_dummy(buffers: Sequence[Int64], before: Sequence[Int64], num_tokens: int, handed: int) -> DummyRun:
    """What a dummy run has left in the slot buffers, of which it has handed on the first ``handed`` entries."""
    persistent = {}
    for group_id, (now, was) in enumerate(zip(buffers, before, strict=True)):
        enabled = now != PAD_SLOT
        enabled[:num_tokens] = False
        enabled[handed:] &= now[handed:] != was[handed:]
        indexes = np.flatnonzero(enabled)
        persistent[group_id] = PersistentSlots(checked=now.size - num_tokens, indexes=indexes, slots=now[indexes])
    slots = {group_id: buffer[:num_tokens].astype(np.int64, copy=False) for group_id, buffer in enumerate(buffers)}
    return DummyRun(slots=slots, num_tokens=num_tokens, persistent=persistent)
