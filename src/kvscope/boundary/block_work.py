"""What a worker does with whole blocks before it computes: those that it clears, and those that it copies.

Source (vLLM 0.32): V1 ``GPUModelRunner._zero_block_ids`` (the CPU's runner has its own), called by ``_update_states``;
V2 ``KVBlockZeroer.zero_block_ids`` (``vllm/v1/worker/utils.py``), called by ``update_requests``; both runners then call
``copy_kv_cache_blocks_inplace`` by the name that they have imported.
"""

from __future__ import annotations

from typing import Any

from .ledger import OBSERVER, Seam
from .wrapping import around, function


def block_work_seams(hub: Any) -> tuple[Seam, ...]:
    """``hub`` knows whose caches a copy is about."""
    v1, cpu = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.cpu_model_runner"
    v2, utils = "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.utils"
    copied = function(lambda args, kwargs: after_copy(hub, args, kwargs))
    cleared: dict[str, Any] = {
        "fact": "the blocks that the worker clears",
        "lost": "whether what is to be cleared is cleared is not judged",
        "needs": ("block_ids",),
    }
    copies: dict[str, Any] = {
        "fact": "the blocks that the worker copies",
        "lost": "whether what is to be copied is copied is not judged",
        "needs": ("kv_caches", "kv_cache_block_copies"),
    }
    return (
        Seam(
            "runner_v1.zero", f"{v1}:GPUModelRunner._zero_block_ids", "worker_v1", around(after=after_zero), **cleared
        ),
        Seam(
            "runner_v1.zero_cpu",
            f"{cpu}:CPUModelRunner._zero_block_ids",
            "worker_v1",
            around(after=after_zero),
            when_loaded=True,
            **cleared,
        ),
        Seam("runner_v1.copy", f"{v1}:copy_kv_cache_blocks_inplace", "worker_v1", copied, **copies),
        Seam(
            "runner_v2.zero", f"{utils}:KVBlockZeroer.zero_block_ids", "worker_v2", around(after=after_zero), **cleared
        ),
        Seam("runner_v2.copy", f"{v2}:copy_kv_cache_blocks_inplace", "worker_v2", copied, **copies),
    )


def observe_block_work(runner: Any, observer: Any) -> None:
    """The V2 runner leaves clearing to an object of its own, which it has where the model needs it."""
    zeroer = getattr(runner, "kv_block_zeroer", None)
    if zeroer is not None:
        setattr(zeroer, OBSERVER, observer)
    owner = next((c for c in type(runner).__mro__ if "_zero_block_ids" in vars(c)), None)
    if owner is None:
        observer.expect_block_work("runner_v2.zero" if zeroer is not None else None, "runner_v2.copy")
    else:
        own = "runner_v1.zero" if owner.__name__ == "GPUModelRunner" else "runner_v1.zero_cpu"
        observer.expect_block_work(own, "runner_v1.copy")


def after_zero(observer: Any, host: Any, args: Any, kwargs: Any, result: Any) -> None:
    observer.on_cleared(list(args[0] if args else kwargs["block_ids"]))


def after_copy(hub: Any, args: Any, kwargs: Any) -> None:
    observer = hub.worker_of(args[0] if args else kwargs["kv_caches"])
    if observer is not None:
        copies = args[2] if len(args) > 2 else kwargs["kv_cache_block_copies"]
        observer.on_copied([(copy.src_block_id, copy.dst_block_id) for copy in copies])
