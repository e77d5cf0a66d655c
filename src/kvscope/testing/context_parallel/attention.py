"""Attention of decode context parallelism on a CPU, in plain PyTorch: slow, and right.

Each rank attends with the queries of all ranks to the keys that it stores, and what the ranks found is weighed by how
much attention each had to give. vLLM does the same on a GPU (``cp_lse_ag_out_rs``, ``vllm/v1/attention/ops``); its CPU
backend has nothing of it and refuses to start (``check_attention_cp_compatibility``, ``vllm/v1/worker/cp_utils.py``).
Everything else is vLLM's own: the scheduler, its blocks, the tables, the slots, the local lengths.
"""

from itertools import pairwise
from typing import Any


def install(interleave: int) -> None:
    """Give the CPU backend of this process what it lacks; once is enough."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Backend

    if Backend.can_return_lse_for_decode:
        return
    Backend.can_return_lse_for_decode = True
    plain_forward, plain_update = Backend.forward, Backend.do_kv_cache_update

    def update(self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> Any:
        if self.dcp_world_size == 1:
            return plain_update(self, layer, key, value, kv_cache, slot_mapping)
        stored = slot_mapping >= 0
        slots, count = slot_mapping[stored], slot_mapping.shape[0]
        for cache, states in zip(_caches(kv_cache), (key, value), strict=True):
            size = cache.shape[2]
            cache[slots // size, :, slots % size] = states[:count][stored].to(cache.dtype)
        return None

    def forward(
        self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, output: Any, **more: Any
    ) -> Any:
        if self.dcp_world_size == 1 or metadata is None:
            return plain_forward(self, layer, query, key, value, kv_cache, metadata, output, **more)
        return _attend(self, query, kv_cache, metadata, output, interleave)

    Backend.do_kv_cache_update, Backend.forward = update, forward


def _caches(kv_cache: Any) -> Any:
    """Keys and values ``[blocks, heads, slots, size]``, as ``CPUAttentionBackendImpl.forward`` views them."""
    blocks, heads, slots, _ = kv_cache.size()
    return kv_cache.view((blocks, heads, slots * 2, -1)).chunk(2, dim=2)


def _attend(backend: Any, query: Any, kv_cache: Any, metadata: Any, output: Any, interleave: int) -> Any:
    import torch
    from vllm.distributed.parallel_state import get_dcp_group

    group, ranks, rank = get_dcp_group(), backend.dcp_world_size, backend.dcp_rank
    count, own = metadata.num_actual_tokens, query.shape[1]
    queries = group.all_gather(query[:count].contiguous(), dim=1)
    keys, values = _caches(kv_cache)
    found = torch.zeros(count, queries.shape[1], keys.shape[-1])
    weight = torch.full((count, queries.shape[1]), float("-inf"))
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for row, (begin, end) in enumerate(pairwise(starts)):
        positions = torch.arange(lengths[row])
        stored = positions[positions // interleave % ranks == rank]
        if end == begin or not len(stored):
            continue
        block_size = keys.shape[2] * ranks
        offsets = stored % block_size
        slots = offsets // (interleave * ranks) * interleave + offsets % interleave
        blocks = metadata.block_table[row].long()[stored // block_size]
        scores = torch.einsum("thd,kd->thk", queries[begin:end].float(), keys[blocks, 0, slots].float())
        at = torch.arange(lengths[row] - (end - begin), lengths[row])
        scores = (scores * backend.scale).masked_fill((stored[None] > at[:, None])[:, None], float("-inf"))
        weight[begin:end] = torch.logsumexp(scores, dim=-1)
        # Of a query before all stored keys nothing is found, and its weight is none.
        shares = torch.exp(scores - weight[begin:end].nan_to_num(neginf=0.0)[..., None])
        found[begin:end] = torch.einsum("thk,kd->thd", shares, values[blocks, 0, slots].float())
    all_found, all_weights = group.all_gather(found[None], dim=0), group.all_gather(weight[None], dim=0)
    whole = (all_found * torch.softmax(all_weights, dim=0)[..., None]).sum(0)
    output[:count] = whole[:, rank * own : (rank + 1) * own].to(output.dtype).view_as(output[:count])
    return output
