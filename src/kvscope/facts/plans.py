"""What the model runner hands to attention: the plan, read at the last host point before the forward.

Sources: V1 ``GPUModelRunner._get_slot_mappings`` (``vllm/v1/worker/gpu_model_runner.py``), V2
``GPUModelRunner.prepare_attn`` (``vllm/v1/worker/gpu/model_runner.py``), vLLM 0.32.
"""

from __future__ import annotations

from operator import sub
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .context_parallel import ContextParallel, LocalRows
from .digest import column_weights, table_digest

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

PAD_SLOT = -1
"""The slot of a token that must not be written (``PAD_SLOT_ID``, ``vllm/v1/attention/backends/utils.py``)."""


class GroupPlan(msgspec.Struct, kw_only=True, gc=False):
    """Final block tables and slots of one KV-cache group, in batch order.

    ``tables`` is ``int32 [rows, width]``; only the first ``table_blocks[i]`` entries of row ``i`` mean anything, what
    follows is left over from earlier batches. ``slots`` is ``int64 [tokens, padding included]``. The arrays may be
    views of the host's live buffers: they are valid only until the hook returns. Where they are copies, because the
    host has them in another shape or order, ``host_slots`` and ``host_tables`` are its own arrays.
    """

    group_id: int
    tables: Int32
    table_blocks: Int32
    slots: Int64
    host_slots: npt.NDArray[Any] | None = None
    host_tables: Int32 | None = None


class Plan(msgspec.Struct, kw_only=True, gc=False):
    """One step of one rank as the runner built it. ``rows = len(request_ids)``; that list is nobody else's to change.

    ``query_start`` is ``int32 [rows + 1]``, ``positions`` ``int64 [num_tokens]``, ``seq_lens`` ``int32 [rows]``
    (tokens visible to attention after this step). ``num_tokens`` are real tokens; the slots may be longer (padding).
    ``exact`` is False where the host itself only has an upper bound of the computed tokens (asynchronous speculative
    decoding): positions and lengths are then not judged.

    ``context`` is None without context parallelism. With it the slots are this rank's own, :data:`PAD_SLOT` for tokens
    that others store. ``local`` is None unless the rank computes only a part of the batch; everything else here is
    then about the whole batch, in whose order the gathered slots were put back.
    """

    request_ids: list[str]
    query_start: Int32
    positions: Int64
    seq_lens: Int32
    num_tokens: int
    groups: list[GroupPlan]
    graph_mode: str = "NONE"
    exact: bool = True
    context: ContextParallel | None = None
    local: LocalRows | None = None

    def group(self, index: int, group_id: int) -> GroupPlan | None:
        """The plan of one group, which stands at ``index`` unless one before it is missing; None if there is none."""
        if index < len(self.groups) and self.groups[index].group_id == group_id:
            return self.groups[index]
        return next((of for of in self.groups if of.group_id == group_id), None)


class PersistentSlots(msgspec.Struct, kw_only=True, gc=False):
    """What a runner's own buffer of slots holds behind those of a dummy run's tokens.

    ``checked`` entries were looked at. ``indexes`` and ``slots``, ``int64 [n]``, are places in the buffer where a slot
    is on that a graph over more tokens than the run has would store to, and these slots.
    """

    checked: int
    indexes: Int64
    slots: Int64


class DummyRun(msgspec.Struct, kw_only=True, gc=False):
    """Slots of a run that serves no request (profiling, warm-up, capture, an idle data-parallel rank).

    ``slots[g]`` is ``int64 [tokens]`` of group ``g``; every entry must be :data:`PAD_SLOT`. ``persistent[g]`` is the
    rest of the buffer that they stand in. In a ``warm_up`` the worker makes up requests, which do store their tokens,
    in blocks that nobody must have.
    """

    slots: dict[int, Int64]
    num_tokens: int
    persistent: dict[int, PersistentSlots] = msgspec.field(default_factory=dict)
    warm_up: bool = False


class GroupSnapshot(msgspec.Struct, kw_only=True, gc=False):
    """What is kept of a :class:`GroupPlan` after the hook: own copies, small enough to queue.

    ``slots`` ``int64 [num_tokens]`` are the slots of the real tokens (fewer where the plan has not one for each),
    ``padding_slots`` counts the entries behind
    them and ``padding_enabled`` ``int64 [n]`` holds those that are not :data:`PAD_SLOT`. ``table_blocks``,
    ``blocks_needed``, ``window_skipped`` are ``int32 [rows]``; ``digests`` ``uint64 [rows]`` is
    :func:`table_digest` over the entries ``window_skipped .. blocks_needed`` of each row. ``tables`` holds these
    entries themselves for the rows that need them spelled out: those that differ from the replayed declaration, or
    all rows in ``records = "full"``.
    """

    group_id: int
    slots: Int64
    padding_slots: int
    padding_enabled: Int64
    table_blocks: Int32
    blocks_needed: Int32
    window_skipped: Int32
    digests: npt.NDArray[np.uint64]
    tables: dict[int, Int32]


class PlanSnapshot(msgspec.Struct, kw_only=True, gc=False):
    """What is kept of a :class:`Plan` for the record: one kv.write and one kv.read.

    ``query_lens``, ``computed`` (tokens before this step, as the declaration has it), ``seq_lens`` are
    ``int32 [rows]``; ``first_positions`` and ``last_positions`` ``int64 [rows]``. ``positions`` is None where every
    row is a run of consecutive positions, else ``int64 [num_tokens]``. ``first_offset`` is where the query offsets
    begin: 0 in any sound plan. ``coordinates`` are ``local`` where slots are counted within this rank's share of the
    blocks.
    """

    step: int
    trace_id: str
    request_ids: list[str]
    query_lens: Int32
    first_positions: Int64
    last_positions: Int64
    positions: Int64 | None
    computed: Int32
    seq_lens: Int32
    num_tokens: int
    graph_mode: str
    exact: bool
    groups: list[GroupSnapshot]
    coordinates: str = "global"
    first_offset: int = 0


class AgreedColumns(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a record says alike in every step that shares an :class:`AgreedGroup`, as lists ``[rows]`` of blocks.

    Many records hold the same lists: nobody may change them. ``digests`` are spelled as in records, 16 hex digits
    each; ``tail_ignored`` is ``table_blocks - blocks_needed``. ``has_skipped`` and ``has_ignored`` say whether there is
    anything but zeros in ``window_skipped`` and ``tail_ignored``.
    """

    blocks_needed: list[int]
    digests: list[str]
    window_skipped: list[int]
    tail_ignored: list[int]
    has_skipped: bool
    has_ignored: bool


class AgreedGroup(msgspec.Struct, kw_only=True, gc=False):
    """One group of an :class:`AgreedPlan`.

    All lists are ``[rows]``: ``tail_starts[i]`` and the position of the row's last token add up to its slot;
    ``table_blocks`` are the blocks that the plan counts and ``needed`` those that attention reads, from
    ``first_visible`` on. ``tables`` are the bytes of ``int32 [rows, width]``, whose other entries mean nothing.
    ``slots`` are the bytes of ``int64 [num_tokens]`` where rows have more than one token, else None. Nothing is changed
    after it was made, so that several steps share what did not change between them.
    """

    group_id: int
    tail_starts: list[int]
    padding_slots: int
    table_blocks: list[int]
    needed: list[int]
    first_visible: list[int]
    tables: bytes
    width: int
    slots: bytes | None = None
    digests: npt.NDArray[np.uint64] | None = None
    columns: AgreedColumns | None = None

    def shared_digests(self) -> npt.NDArray[np.uint64]:
        """``uint64 [rows]``, made once for all steps that share the group; for the writer's thread."""
        if self.digests is None:
            columns = np.arange(self.width)
            tables = np.frombuffer(self.tables, np.int32).reshape(len(self.needed), self.width)
            needed, first = np.array(self.needed, np.int64), np.array(self.first_visible, np.int64)
            visible = (columns < needed[:, None]) & (columns >= first[:, None])
            self.digests = table_digest(tables, visible, column_weights(self.width))
        return self.digests

    def shared_columns(self) -> AgreedColumns:
        """Made once for all steps that share the group; for the writer's thread."""
        if self.columns is None:
            skipped = list(map(min, self.first_visible, self.needed))
            ignored = list(map(sub, self.table_blocks, self.needed))
            self.columns = AgreedColumns(
                blocks_needed=self.needed,
                digests=[f"{digest:016x}" for digest in self.shared_digests().tolist()],
                window_skipped=skipped,
                tail_ignored=ignored,
                has_skipped=any(skipped),
                has_ignored=any(ignored),
            )
        return self.columns

    def snapshot(self, computed: Int64) -> GroupSnapshot:
        """The same, spelled out."""
        return GroupSnapshot(
            group_id=self.group_id,
            slots=np.array(self.tail_starts, np.int64) + computed
            if self.slots is None
            else np.frombuffer(self.slots, np.int64),
            padding_slots=self.padding_slots,
            padding_enabled=np.zeros(0, np.int64),
            table_blocks=np.array(self.table_blocks, np.int32),
            blocks_needed=np.array(self.needed, np.int32),
            window_skipped=np.array(list(map(min, self.first_visible, self.needed)), np.int32),
            digests=self.shared_digests(),
            tables={},
        )


class AgreedPlan(msgspec.Struct, kw_only=True, gc=False):
    """A plan that was found equal to its declaration in everything.

    It says the same as a :class:`PlanSnapshot` in less: what was compared and found equal is kept as it was declared.
    ``computed`` ``[rows]`` are the tokens before this step, which is where a row's positions begin. ``query_lens``
    ``[rows]`` is None where every row has one token, as in nearly every step of a server: records of such a plan are
    made without arrays (``events.plans.agreed_records``).
    """

    step: int
    trace_id: str
    request_ids: list[str]
    computed: list[int]
    graph_mode: str
    groups: list[AgreedGroup]
    query_lens: list[int] | None = None

    def snapshot(self) -> PlanSnapshot:
        """The same, spelled out; for ``records = "full"`` and for whoever compares the two. In the writer's thread."""
        computed = np.array(self.computed, np.int64)
        lengths = np.ones(len(computed), np.int32) if self.query_lens is None else np.array(self.query_lens, np.int32)
        return PlanSnapshot(
            step=self.step,
            trace_id=self.trace_id,
            request_ids=self.request_ids,
            query_lens=lengths,
            first_positions=computed,
            last_positions=computed + (lengths - 1),
            positions=None,
            computed=computed.astype(np.int32),
            seq_lens=(computed + lengths).astype(np.int32),
            num_tokens=int(lengths.sum()),
            graph_mode=self.graph_mode,
            exact=True,
            groups=[group.snapshot(computed) for group in self.groups],
        )
