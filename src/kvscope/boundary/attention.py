"""Reads what attention operators are called with. Metadata differs by backend: one small adapter a shape.

Sources: ``AttentionGroup`` (``vllm/v1/worker/utils.py``), ``CPUAttentionMetadata``
(``vllm/v1/attention/backends/cpu_attn.py``), ``MLACommonMetadata``
(``vllm/model_executor/layers/attention/mla_attention.py``), ``ForwardContext`` (``vllm/forward_context.py``), 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from ..facts.operators import OperatorArguments, OperatorGroup, OperatorRows, OperatorSlots
from ..facts.topology import Topology
from .ledger import OBSERVER
from .slots import as_slots, is_direct

LAYOUT = "_kvscope_attention"
"""Attribute by which a runner carries its :class:`AttentionLayout`."""


class Extent(NamedTuple):
    """Which part of a batch one set of metadata is about: rows from ``first_row`` on and tokens ``first_token`` to
    ``end_token``, of which those from ``num_tokens`` on are padding.
    """

    first_row: int
    rows: int
    first_token: int
    end_token: int
    num_tokens: int


Layered = Mapping[str, Any]
"""Something for each layer, by its name."""
Rows = Callable[[Any, Extent], list[OperatorRows]]
Tensors = Callable[[Any], tuple[Any, ...]]


class Adapter(NamedTuple):
    """How one class of metadata, made by one class of builder, is read.

    ``tensors`` are slots, tables, lengths and offsets, if that is all that ``rows`` reads: where they lie where they
    lay, so does what was read from them. Else it is empty.
    """

    metadata: str
    tensors: Tensors
    rows: Rows


_paged_tensors: Tensors = attrgetter("slot_mapping", "block_table", "seq_lens", "query_start_loc")


def _paged_rows(metadata: Any, extent: Extent) -> list[OperatorRows]:
    return [
        OperatorRows(
            first_row=extent.first_row,
            rows=extent.rows,
            first_token=extent.first_token,
            end_token=extent.end_token,
            tables=metadata.block_table.numpy(),
            seq_lens=metadata.seq_lens.numpy(),
            query_start=metadata.query_start_loc.numpy(),
        )
    ]


def _latent_tensors(metadata: Any) -> tuple[Any, ...]:
    """Where the batch has rows that do not decode there is more to be read."""
    decode = metadata.decode
    if decode is None or metadata.prefill is not None:
        return ()
    return metadata.slot_mapping, decode.block_table, decode.seq_lens, metadata.query_start_loc


def _latent_rows(metadata: Any, extent: Extent) -> list[OperatorRows]:
    """Rows that decode come first (the runner has ordered them so), and each sort has tables of its own. The others are
    given no lengths: those without a context need none.
    """
    decodes, starts = int(metadata.num_decodes), metadata.query_start_loc.numpy()
    split = extent.first_token + int(metadata.num_decode_tokens)
    prefill, decode = metadata.prefill, metadata.decode
    parts = []
    if decode is not None:
        parts.append(
            OperatorRows(
                first_row=extent.first_row,
                rows=min(decodes, extent.rows),
                first_token=extent.first_token,
                end_token=extent.end_token if prefill is None else split,
                tables=decode.block_table.numpy(),
                seq_lens=decode.seq_lens.numpy(),
                query_start=starts[: decodes + 1],
            )
        )
    if prefill is not None:
        parts.append(
            OperatorRows(
                first_row=extent.first_row + decodes,
                rows=extent.rows - decodes,
                first_token=split,
                end_token=extent.end_token,
                tables=prefill.block_table.numpy(),
                query_start=prefill.query_start_loc.numpy(),
            )
        )
    return parts


_PAGED = Adapter("CPUAttentionMetadata", _paged_tensors, _paged_rows)
_LATENT = Adapter("MLACommonMetadata", _latent_tensors, _latent_rows)

ADAPTERS: dict[tuple[str, str], Adapter] = {
    ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionMetadataBuilder"): _PAGED,
    ("vllm.model_executor.layers.attention.mla_attention", "MLACommonMetadataBuilder"): _LATENT,
}
"""By module and name of the builder, exactly: a builder made out of another one is there to change something."""


_LOCAL_BUILDER = ("vllm.model_executor.layers.attention.chunked_local_attention", "ChunkedLocalAttentionBuilder")


def _no_tensors(metadata: Any) -> tuple[Any, ...]:
    """Made anew in every step."""
    return ()


def _adapter_of(builder: type) -> Adapter | None:
    """How the metadata of a builder is read; None where that is not known.

    That of chunked-local attention cuts rows into pieces, and has another builder make of them what it always makes.
    """
    name = (builder.__module__, builder.__name__)
    if name != _LOCAL_BUILDER:
        return ADAPTERS.get(name)
    below = _adapter_of(builder.__bases__[0])
    return None if below is not _PAGED else Adapter(below.metadata, _no_tensors, below.rows)


class _Layers:
    """The layers of one ``AttentionGroup``: they share their metadata."""

    def __init__(self, group: Any, adapter: Adapter) -> None:
        self.group_id = int(group.kv_cache_group_id)
        self.adapter = adapter
        names = tuple(group.layer_names)
        self.count = len(names)
        self.of_all: Callable[[Mapping[str, Any]], tuple[Any, ...]] = (
            itemgetter(*names) if len(names) > 1 else lambda by_layer: (by_layer[names[0]],)
        )
        self.chunk_tokens: int | None = getattr(group.kv_cache_spec, "attention_chunk_size", None)
        self.block_size = size = int(group.kv_cache_spec.block_size)
        kernel_size = group.kernel_block_size
        self.kernel_blocks = size // kernel_size if kernel_size is not None else 1
        self.kernel_stride = int(group.kernel_block_stride or self.kernel_blocks) if kernel_size is not None else 1

    def read(self, metadata: Any, slots: Sequence[Any], parts: list[OperatorRows], extent: Extent) -> OperatorGroup:
        """``slots`` are the mappings that the forward has for these layers, beside that of the metadata."""
        tokens = min(extent.end_token, extent.num_tokens) - extent.first_token
        for part in parts:
            part.chunk_tokens = self.chunk_tokens
        return OperatorGroup(
            group_id=self.group_id,
            parts=parts,
            slots=[
                self._slots(mapping.numpy(), extent.first_token, max(tokens, 0))
                for mapping in {id(mapping): mapping for mapping in (metadata.slot_mapping, *slots)}.values()
            ],
            kernel_blocks=self.kernel_blocks,
            kernel_stride=self.kernel_stride,
        )

    def _slots(self, mapping: Any, first_token: int, tokens: int) -> OperatorSlots:
        slots = as_slots(mapping, self.block_size)
        host_slots = None if is_direct(mapping) else mapping
        return OperatorSlots(first_token=first_token, tokens=tokens, slots=slots, host_slots=host_slots)


class AttentionLayout:
    """The attention groups of one runner, as ``initialize_kv_cache`` has laid them out.

    ``kernel_block_sizes`` has by KV-cache group what its kernels count in.
    """

    def __init__(self, attn_groups: Iterable[Iterable[Any]]) -> None:
        self.layers: list[_Layers] = []
        self.kernel_block_sizes: dict[int, int] = {}
        self._unknown: dict[int, str] = {}
        for group in (group for groups in attn_groups for group in groups):
            group_id = int(group.kv_cache_group_id)
            self.kernel_block_sizes[group_id] = int(group.kernel_block_size or group.kv_cache_spec.block_size)
            builder = type(group.get_metadata_builder())
            adapter = _adapter_of(builder)
            if adapter is None:
                self._unknown[group_id] = f"metadata of {builder.__name__}"
            else:
                self.layers.append(_Layers(group, adapter))
        self.layers = [layers for layers in self.layers if layers.group_id not in self._unknown]
        self._whole = Extent(0, 0, 0, 0, 0)
        self._places: list[Any] = []
        self._arguments = OperatorArguments(groups=[])

    @classmethod
    def of_runner(cls, runner: Any) -> AttentionLayout:
        """Empty where this runner has no such groups: then nothing is known of any."""
        try:
            return cls(runner.attn_groups)
        except (AttributeError, TypeError, ValueError, IndexError, AssertionError):
            return cls(())

    def unread(self, group_id: int) -> str | None:
        """Why the arguments of this KV-cache group cannot be read, None if they can be."""
        if group_id in self.kernel_block_sizes:
            return self._unknown.get(group_id)
        return "no attention group"

    def attach(self, runner: Any, observer: Any, wrappers: Sequence[object], topology: Topology) -> dict[int, str]:
        """Let an observer read what the operators of a runner get, as far as it can be read.

        ``wrappers`` are the functions that stand in place of the host's. By KV-cache group, why it cannot be.
        """
        source = getattr(runner, "model_state", None)
        carriers = [runner] if source is None else [runner, source, getattr(runner, "ubatch_runner", None)]
        for carrier in filter(None, carriers):
            setattr(carrier, LAYOUT, self)
            setattr(carrier, OBSERVER, observer)
        name = "_model_forward" if source is None else "prepare_attn"
        owner = type(source or runner)
        missing = None
        if not observer.reads_host_tensors:
            missing = "device_tensors"
        elif topology.context_parallel:  # lengths are a rank's own there, and rows may be in another order
            missing = "context_parallel"
        elif getattr(owner, name, None) not in wrappers:
            missing = f"{owner.__name__} has its own {name}"
        judged = [group.group_id for group in topology.groups if group.judged]
        self._leave_out_all_but(judged)
        unread = {group_id: missing or self.unread(group_id) for group_id in judged}
        told = {group_id: cause for group_id, cause in unread.items() if cause is not None}
        observer.reads_operators = len(told) < len(judged)
        return told

    def _leave_out_all_but(self, judged: Sequence[int]) -> None:
        """Nothing is asked of other groups, so nothing is read of them and nothing counted."""
        self.layers = [layers for layers in self.layers if layers.group_id in judged]
        self._unknown = {group_id: cause for group_id, cause in self._unknown.items() if group_id in judged}

    def arguments(self, metadata: Layered, slots: Layered | None, rows: int, num_tokens: int) -> OperatorArguments:
        """What all layers get in one forward of a whole batch; the very object of the step before if everything still
        lies there.

        ``slots`` is None where the forward has yet to be given its own. Raises KeyError for a layer that has no
        metadata or no slots: the host's own forward cannot run then. This runs in every step.
        """
        extent = self._whole
        if rows != extent.rows or num_tokens != extent.num_tokens:
            extent = self._whole = Extent(0, rows, 0, num_tokens, num_tokens)
        places: list[Any] = [extent]
        lengths = starts = None
        try:
            for layers in self.layers:
                of_layers = layers.of_all(metadata)
                first = of_layers[0]
                # Whether all are the same object is what `count` asks first; others it compares by what they hold.
                if of_layers.count(first) != layers.count or type(first).__name__ != layers.adapter.metadata:
                    return self._read(metadata, slots, extent)
                tensors = layers.adapter.tensors(first)
                if not tensors:
                    return self._read(metadata, slots, extent)
                if slots is not None:
                    mappings = layers.of_all(slots)
                    mapping = mappings[0]
                    if mappings.count(mapping) != layers.count:
                        return self._read(metadata, slots, extent)
                    if mapping is not tensors[0]:
                        places += (mapping.data_ptr(), mapping.shape)
                if tensors[2] is lengths and tensors[3] is starts:  # all groups of a batch are given the same
                    tensors = tensors[:2]
                else:
                    _, _, lengths, starts = tensors
                for tensor in tensors:
                    places += (tensor.data_ptr(), tensor.shape)
        except (RuntimeError, ValueError):  # tensors of several elements that are not the same cannot be compared so
            return self._read(metadata, slots, extent)
        if places != self._places:
            self._arguments = self._read(metadata, slots, extent)
            are_views = all(each.host_slots is None for group in self._arguments.groups for each in group.slots)
            self._places = places if are_views else []
        return self._arguments

    def _read(self, metadata: Layered, slots: Layered | None, extent: Extent) -> OperatorArguments:
        groups, unread = [], dict(self._unknown)
        for layers in self.layers:
            if layers.chunk_tokens is not None and extent.end_token - extent.first_token != extent.num_tokens:
                unread[layers.group_id] = "chunks of a micro-batch"
                continue
            mappings = layers.of_all(slots) if slots is not None else ()
            for of_layers in {id(each): each for each in layers.of_all(metadata)}.values():
                if type(of_layers).__name__ != layers.adapter.metadata:
                    unread[layers.group_id] = f"metadata of {type(of_layers).__name__}"
                    continue
                parts = layers.adapter.rows(of_layers, extent)
                groups.append(layers.read(of_layers, mappings, parts, extent))
        return OperatorArguments(groups=groups, unread=unread)

    def micro_batches(self, of_batches: Iterable[tuple[Layered, Layered, Extent]]) -> OperatorArguments:
        """The same where a batch is cut into several that overlap each other."""
        all_arguments = [self._read(metadata, slots, extent) for metadata, slots, extent in of_batches]
        return OperatorArguments(
            groups=[group for arguments in all_arguments for group in arguments.groups],
            unread={group: cause for arguments in all_arguments for group, cause in arguments.unread.items()},
        )


def extents(slices: Sequence[Any], rows: int, num_tokens: int) -> Iterator[Extent]:
    """Where the micro-batches of ``UBatchSlice`` lie, real rows only (``vllm/v1/worker/ubatch_utils.py``)."""
    for part in slices:
        first, stop = part.request_slice.start, min(part.request_slice.stop, rows)
        yield Extent(first, max(stop - first, 0), part.token_slice.start, part.token_slice.stop, num_tokens)
