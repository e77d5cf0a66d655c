"""An offload that runs on a CPU: vLLM's own scheduler and manager, with a worker that copies between two host tensors.

    KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config={
        "spec_name": "HostCopies", "spec_module_path": "kvscope.testing.offloading", "cpu_bytes_to_use": 8 << 20,
    })

vLLM's own worker needs a device to copy from. Source (0.32): ``vllm/v1/kv_offload/base.py`` and
``vllm/v1/kv_offload/cpu/spec.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

ASKED_BEFORE_DONE = 2
"""A copy is reported as done when it has been asked for so many times: a load then goes on for a step or two."""


class CopyingWorker(OffloadingWorker):
    """Copies when it is told to, in the order of the jobs, and says so some steps later."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, num_chunks: int) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._references = kv_caches.group_data_refs
        self._cache = [each.tensor.view(torch.int8) for each in kv_caches.tensors]
        rows = num_chunks * blocks_per_chunk
        self._store = [torch.zeros((rows, each.page_size_bytes), dtype=torch.int8) for each in kv_caches.tensors]
        self._asked: dict[int, int] = {}
        self._done: dict[int, TransferResult] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, stores=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, stores=False)

    def get_finished(self) -> list[TransferResult]:
        for job_id in self._asked:
            self._asked[job_id] += 1
        ready = [job_id for job_id, times in self._asked.items() if times >= ASKED_BEFORE_DONE]
        for job_id in ready:
            del self._asked[job_id]
        return [self._done.pop(job_id) for job_id in ready]

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever on its way."""

    def shutdown(self) -> None:
        self._asked.clear()
        self._done.clear()

    def _copy(self, job_id: int, cache: GPULoadStoreSpec, store: Any, *, stores: bool) -> bool:
        began, copied = perf_counter(), 0
        for group, blocks, rows in self._places(cache, store.block_ids):
            for reference in self._references[group]:
                size = reference.page_size_bytes
                in_cache = self._cache[reference.tensor_idx][:, :size]
                in_store = self._store[reference.tensor_idx][:, :size]
                if stores:
                    in_store[rows] = in_cache[blocks]
                else:
                    in_cache[blocks] = in_store[rows]
                copied += size * len(blocks)
        self._asked[job_id] = 0
        self._done[job_id] = TransferResult(
            job_id=job_id, success=True, transfer_size=copied, transfer_time=perf_counter() - began
        )
        return True

    def _places(self, cache: GPULoadStoreSpec, chunk_ids: Any) -> Iterator[tuple[int, Any, Any]]:
        """Per group, the blocks of the cache and the rows of the store that belong together."""
        block, chunk, size = 0, 0, self._blocks_per_chunk
        for group, (count, first) in enumerate(zip(cache.group_sizes, cache.block_indices, strict=True)):
            if not count:
                continue
            skipped = first % size
            chunks = torch.as_tensor(chunk_ids[chunk : chunk - (-(count + skipped) // size)], dtype=torch.int64)
            rows = (chunks[:, None] * size + torch.arange(size)).ravel()[skipped : skipped + count]
            yield group, torch.as_tensor(cache.block_ids[block : block + count], dtype=torch.int64), rows
            block, chunk = block + count, chunk + len(chunks)


class HostCopies(CPUOffloadingSpec):
    """vLLM's offload to host memory, with a worker that needs no device."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker: OffloadingWorker | None = CopyingWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._worker
