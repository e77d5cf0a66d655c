"""Reads the pool, its groups and the ranks. Source: ``vllm/v1/kv_cache_interface.py``, ``vllm/config/parallel.py``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..facts.topology import CHUNKED_LOCAL, FULL_ATTENTION, MLA, SLIDING_WINDOW, Group, Ranks, Topology

NULL_BLOCK_ID = 0
"""``BlockPool.null_block`` is the first block taken at construction, and ``NULL_BLOCK_ID`` in the workers."""

_KIND_OF_SPEC = {
    "FullAttentionSpec": FULL_ATTENTION,
    "MLAAttentionSpec": MLA,
    "SlidingWindowSpec": SLIDING_WINDOW,
    "ChunkedLocalAttentionSpec": CHUNKED_LOCAL,
}


def read_topology(
    kv_cache_config: Any, vllm_config: Any = None, kernel_block_sizes: Mapping[int, int] | None = None
) -> Topology:
    """The groups of a KVCacheConfig. A spec class that is not in the table gets its own name as kind: not judged.

    A group that decode context parallelism deals out over ranks has blocks of as many times its spec's tokens
    (``SingleTypeKVCacheManager``, ``vllm/v1/core/single_type_kv_cache_manager.py``); ``vllm_config`` None: none is.
    ``kernel_block_sizes`` by group, where a runner of this process has them.
    """
    pcp_size, dcp_size = (1, 1) if vllm_config is None else _context_sizes(vllm_config)
    kernel_sizes = kernel_block_sizes or {}
    groups = tuple(
        _group(index, group, dcp_size, kernel_sizes.get(index))
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    return Topology(
        num_blocks=kv_cache_config.num_blocks,
        null_block_id=NULL_BLOCK_ID,
        groups=groups,
        pcp_size=pcp_size,
        dcp_size=dcp_size,
    )


def _context_sizes(vllm_config: Any) -> tuple[int, int]:
    """Over how many ranks prefill and decode context parallelism are configured."""
    parallel = vllm_config.parallel_config
    pcp_size = getattr(parallel, "prefill_context_parallel_size", 1)
    return pcp_size, getattr(parallel, "decode_context_parallel_size", 1)


def _group(group_id: int, group: Any, dcp_size: int, kernel_block_size: int | None) -> Group:
    spec = group.kv_cache_spec
    kind, visible = _semantics(spec)
    shards = dcp_size if getattr(spec, "dcp_sharded", False) else 1
    return Group(
        group_id=group_id,
        kind=kind,
        block_size=spec.block_size * shards,
        kernel_block_size=kernel_block_size,
        layers=len(group.layer_names),
        visible_tokens=visible,
        shards=shards,
    )


def _semantics(spec: Any) -> tuple[str, int | None]:
    """``(kind, visible tokens)``. Exact classes only: a subclass may mean something else by its table."""
    layers = getattr(spec, "kv_cache_specs", None)
    if isinstance(layers, dict) and layers:  # UniformTypeKVCacheSpecs: one type of spec under several names
        kinds = {_semantics(layer) for layer in layers.values()}
        return kinds.pop() if len(kinds) == 1 else ("mixed", None)
    name = type(spec).__name__
    kind = _KIND_OF_SPEC.get(name)
    if kind is None:
        return _snake(name.removesuffix("Spec")), None
    if kind == SLIDING_WINDOW:
        return kind, spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    if kind == CHUNKED_LOCAL:
        return kind, spec.attention_chunk_size
    return kind, None


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def read_ranks(vllm_config: Any, rank: int | None) -> Ranks:
    """Coordinates of a worker (``rank`` in its engine), or of the scheduler (None).

    Rank order within an engine is PP, PCP, TP from outermost to innermost (``initialize_model_parallel``). DCP groups
    are cut out of PCP first and TP then: with PCP the DCP rank follows the order TP x PCP, without it is the TP rank
    modulo the DCP size.
    """
    parallel = vllm_config.parallel_config
    dp = getattr(parallel, "data_parallel_index", 0) or 0
    if rank is None:
        return Ranks(dp=dp)
    tp_size = parallel.tensor_parallel_size
    pcp_size, dcp_size = _context_sizes(vllm_config)
    pcp_first = rank % tp_size * pcp_size + rank // tp_size % pcp_size
    return Ranks(
        dp=dp,
        tp=rank % tp_size,
        pcp=rank // tp_size % pcp_size if pcp_size > 1 else None,
        pp=rank // (tp_size * pcp_size) % parallel.pipeline_parallel_size,
        dcp=pcp_first % dcp_size if dcp_size > 1 else None,
        world=rank,
    )


def returns_results(vllm_config: Any, ranks: Ranks) -> bool:
    """Whether vLLM returns this rank's result (``MultiprocExecutor._get_output_rank``): TP rank 0 of the last stage."""
    return ranks.tp == 0 and ranks.pp == vllm_config.parallel_config.pipeline_parallel_size - 1


def api_server_of(vllm_config: Any) -> tuple[int, int]:
    """Which of how many API servers this configuration is for; the number is -1 in the process that launches them.

    Each server makes a VllmConfig of its own (``run_multi_api_server``, ``vllm/entrypoints/cli/serve.py``); a front end
    without a launcher is number 0 of 1.
    """
    parallel = vllm_config.parallel_config
    return getattr(parallel, "_api_process_rank", 0), getattr(parallel, "_api_process_count", 1)


def run_id_of(vllm_config: Any) -> str:
    """The ``instance_id`` without a data-parallel suffix: the same in every process of one run."""
    return re.sub(r"_dp\d+$", "", str(vllm_config.instance_id)) or "run"


def runner_of(vllm_config: Any) -> str:
    """``V2`` or ``V1``: which model runner this engine has."""
    return "V2" if vllm_config.use_v2_model_runner else "V1"
