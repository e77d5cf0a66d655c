"""Holds the calls of vLLM's CPU attention kernels themselves against what kvscope has judged: is that the truth?

    with running(additional_config=...) as llm, watching(llm) as calls:
        workload(llm)
    assert calls.rows["full_attention"] > 0 and not calls.differences

kvscope reads what operators get from their metadata, before the forward. Here the kernels of `vllm/_custom_ops.py` are
wrapped, behind every layer of Python, and each call's tensors are compared entry by entry with what had been read for
that layer's group. For tests only: it slows the forward down and has no setting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvscope.boundary.ledger import OBSERVER
from kvscope.facts.operators import OperatorArguments
from kvscope.testing.engine import model_runner
from kvscope.testing.faults.hooks import Hook


class OperatorCalls:
    """`rows` counts by the group's kind the rows of which a kernel's tables and lengths were compared, `tokens` those
    whose slots were; `layers` are all that were seen writing or reading. `differences` say in words what was not what
    had been judged: empty means that the judged point is the truth.
    """

    def __init__(self, llm: Any) -> None:
        self.rows: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.layers: set[str] = set()
        self.differences: list[str] = []
        # Groups of layers share their memory, so a cache tells only where there is one group; `layer` is who calls.
        self.layer: str | None = None
        runner = model_runner(llm)
        self._observer = getattr(runner, OBSERVER)
        self._group_of: dict[str, int] = {}
        self._layer_of: dict[int, str] = {}
        static = runner.vllm_config.compilation_config.static_forward_context
        for group_id, groups in enumerate(runner.attn_groups):
            for name in (name for group in groups for name in group.layer_names):
                self._group_of[name] = group_id
                self._layer_of[static[name].kv_cache.data_ptr()] = name
        self._judged: dict[int, dict[str, Any]] = {}

    # What was judged --------------------------------------------------------------------------------------------------

    def note(self, arguments: OperatorArguments) -> None:
        """Take copies: the forward may begin."""
        self._judged = {}
        for group in arguments.groups:
            self._judged[group.group_id] = {
                "slots": [(mapping.tokens, mapping.slots.copy()) for mapping in group.slots],
                "parts": [
                    (
                        part.rows,
                        part.tables.copy(),
                        None if part.seq_lens is None else part.seq_lens.copy(),
                        None if part.query_start is None else part.query_start.copy(),
                    )
                    for part in group.parts
                ],
                "block": self._observer._handed.topology.groups[group.group_id].block_size // group.kernel_blocks,
                "kind": self._observer._handed.topology.groups[group.group_id].kind,
            }

    def forget(self) -> None:
        """The forward is over; what kernels get now belongs to a draft model or to no step."""
        self._judged = {}

    # What a kernel gets -----------------------------------------------------------------------------------------------

    def reads(self, cache: Any, tables: Any, lengths: Any, starts: Any | None) -> None:
        """A kernel reads the cache; rows that only write are another part of the batch."""
        found = self._of(cache)
        if found is None:
            return
        layer, judged = found
        rows = lengths.shape[0]
        wanted = [part for part in judged["parts"] if part[0] == rows and part[2] is not None]
        if not wanted:
            self.differences.append(f"{layer}: a kernel reads {rows} rows, which nothing was judged to do")
            return
        self.rows[judged["kind"]] += rows
        fewest: list[str] | None = None
        for _, planned, planned_lengths, planned_starts in wanted:
            differences = []
            if lengths.tolist() != planned_lengths[:rows].tolist():
                differences.append(f"{layer}: lengths {lengths.tolist()}, judged {planned_lengths[:rows].tolist()}")
            if starts is not None and starts.tolist()[: rows + 1] != planned_starts[: rows + 1].tolist():
                differences.append(f"{layer}: offsets {starts.tolist()}, judged {planned_starts.tolist()}")
            for row, length in enumerate(lengths.tolist()):
                needed = -(-length // judged["block"])
                if tables[row, :needed].tolist() != planned[row, :needed].tolist():
                    differences.append(f"{layer}: row {row} reads {tables[row, :needed].tolist()}")
            if fewest is None or len(differences) < len(fewest):
                fewest = differences
        self.differences += fewest or []

    def writes(self, cache: Any, slots: Any) -> None:
        found = self._of(cache)
        if found is None:
            return
        layer, judged = found
        given = slots.flatten().tolist()
        for tokens, planned in judged["slots"]:
            self.tokens[judged["kind"]] += tokens
            if given[:tokens] != planned[:tokens].tolist() or any(slot != -1 for slot in given[tokens:]):
                self.differences.append(f"{layer}: writes {given[:8]}…, judged {planned[:8].tolist()}…")

    def _of(self, cache: Any) -> tuple[str, dict[str, Any]] | None:
        layer = self.layer or self._layer_of.get(cache.data_ptr())
        judged = self._judged.get(self._group_of[layer]) if layer is not None else None
        if layer is None or judged is None:
            return None
        self.layers.add(layer)
        return layer, judged


@contextmanager
def watching(llm: Any) -> Iterator[OperatorCalls]:
    """Watch the kernels of an engine in this process, on which KV Trace is on, for as long as the block lasts."""
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    calls = OperatorCalls(llm)
    observer = calls._observer
    on_operators, on_launched = observer.on_operators, observer.on_launched

    def judged(arguments: OperatorArguments) -> None:
        on_operators(arguments)
        calls.note(arguments)

    def launched() -> None:
        calls.forget()
        on_launched()

    def of_layer(original: Any, impl: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        calls.layer = layer.layer_name
        try:
            return original(impl, layer, *args, **kwargs)
        finally:
            calls.layer = None

    def attention(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls.reads(kwargs["key_cache"], kwargs["block_table"], kwargs["seq_lens"], kwargs["query_start_loc"])
        return original(*args, **kwargs)

    def reshape(original: Any, key: Any, value: Any, cache: Any, of_values: Any, slots: Any, *a: Any, **kw: Any) -> Any:
        calls.writes(cache, slots)
        return original(key, value, cache, of_values, slots, *a, **kw)

    def latent(original: Any, out: Any, query: Any, cache: Any, scale: Any, tables: Any, lengths: Any) -> Any:
        calls.reads(cache, tables, lengths, None)
        return original(out, query, cache, scale, tables, lengths)

    def latent_update(original: Any, impl: Any, key: Any, rope: Any, cache: Any, slots: Any, *a: Any, **kw: Any) -> Any:
        calls.writes(cache, slots)
        return original(impl, key, rope, cache, slots, *a, **kw)

    hooks = [
        Hook(CPUAttentionBackendImpl, "forward", of_layer),
        Hook(CPUAttentionBackendImpl, "do_kv_cache_update", of_layer),
        Hook(ops, "cpu_attention_with_kv_cache", attention),
        Hook(ops, "cpu_attn_reshape_and_cache", reshape),
        Hook(ops, "mla_decode_kvcache_cpu", latent),
        Hook(CPUMLAImpl, "do_kv_cache_update", latent_update),
    ]
    observer.on_operators, observer.on_launched = judged, launched
    try:
        yield calls
    finally:
        del observer.on_operators, observer.on_launched
        while hooks:
            hooks.pop().remove()
