"""Loaded by vLLM in each process of a test's engine: acts where a worker deals out tokens, and nowhere else."""

import os
from typing import Any

from kvscope.testing.context_parallel import attention, faults, masks
from kvscope.testing.faults.hooks import Hook

_bootstrap: list[Hook] = []


def register() -> None:
    """Entry point `kvscope_context_parallel`. An engine in the caller's process has one rank, and nothing to share."""
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" or _bootstrap:
        return
    from vllm.v1.worker.worker_base import WorkerBase

    def worker(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        parallel = self.vllm_config.parallel_config
        if parallel.decode_context_parallel_size > 1:
            masks.mend()
            attention.install(parallel.cp_kv_cache_interleave_size)
            settings = (self.vllm_config.additional_config or {}).get("kvscope_context_fault")
            if settings is not None:
                faults.install(settings, int(self.rank))

    _bootstrap.append(Hook(WorkerBase, "__init__", worker))
