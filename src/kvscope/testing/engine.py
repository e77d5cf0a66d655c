"""Starts a real vLLM engine around a tiny model, in this process or in processes of its own, and takes it down again.

    apply_environment("v1")
    with running(additional_config={"kv_trace": {"enabled": True}}) as llm:
        tokens = generate(llm, [[5, 6, 7]], max_tokens=8)

An engine in this process (the default) starts in about two seconds and lets a test reach its scheduler and its runner.
With `in_process=False` the scheduler and each worker have their own process, as in production.
"""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvscope.plugin import register
from kvscope.testing import models
from kvscope.testing.environment import Runner, apply_environment, cache_directory, environment
from kvscope.testing.server import Server, ServerFailedError, serving, start_server

__all__ = [
    "Runner",
    "Server",
    "ServerFailedError",
    "apply_environment",
    "arguments",
    "cache_directory",
    "environment",
    "generate",
    "model_runner",
    "running",
    "scheduler",
    "serving",
    "start",
    "start_server",
    "stop",
    "worker",
]

KV_CACHE_BYTES = 64 << 20
"""Naming a size keeps vLLM from claiming half of the machine's memory and from a warm-up that an eager model lacks."""


def start(
    model: models.Kind | Path = "qwen3",
    *,
    in_process: bool = True,
    additional_config: Mapping[str, object] | None = None,
    num_blocks: int | None = 128,
    block_size: int = 32,
    dtype: str = "float32",
    max_model_len: int = 512,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 512,
    tensor_parallel_size: int = 1,
    seed: int = 0,
    **engine_arguments: Any,
) -> Any:
    """A `vllm.LLM`; `apply_environment` must have run before. The runner is the one that was named there.

    `block_size` is in tokens and must be a multiple of 32 on a CPU (latent attention always uses 16). With
    `num_blocks=None` the pool has what 64 MiB hold. Anything else that `vllm.LLM` takes can be added by its name:
    `distributed_executor_backend="mp"` leaves the scheduler in this process and gives each worker one of its own.
    """
    path = model if isinstance(model, Path) else models.build(model)
    if in_process and tensor_parallel_size > 1 and "distributed_executor_backend" not in engine_arguments:
        raise ValueError("this process can be one worker only; more need in_process=False or an executor backend")
    if "VLLM_USE_V2_MODEL_RUNNER" not in os.environ:
        raise RuntimeError("call apply_environment before starting an engine")
    import vllm.envs
    from vllm import LLM

    # vLLM loads plugins once a process, and an engine with everything off has kvscope remove what it had wrapped.
    register()

    # The first engine in a process freezes what vLLM reads from the environment; the next may want another layout.
    vllm.envs.disable_envs_cache()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    if in_process:
        engine_arguments.setdefault("distributed_executor_backend", "uni")
    return LLM(
        **arguments(
            path,
            additional_config=additional_config,
            num_gpu_blocks_override=num_blocks,
            block_size=block_size,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            tensor_parallel_size=tensor_parallel_size,
            seed=seed,
            **engine_arguments,
        )
    )


def arguments(
    model: Path, *, additional_config: Mapping[str, object] | None = None, **engine_arguments: Any
) -> dict[str, Any]:
    """What every engine here is given, for `vllm.LLM` as for `AsyncEngineArgs`; `engine_arguments` win."""
    return {
        "model": str(model),
        "enforce_eager": True,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "additional_config": dict(additional_config or {}),
        **engine_arguments,
    }


def stop(llm: Any) -> None:
    """End the engine and its processes. The caller's own reference keeps the object alive, but nothing runs in it."""
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


@contextmanager
def running(model: models.Kind | Path = "qwen3", **settings: Any) -> Iterator[Any]:
    """`start` for the duration of a `with` block."""
    llm = start(model, **settings)
    try:
        yield llm
    finally:
        stop(llm)
        del llm
        gc.collect()


def generate(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int = 16, **sampling: Any) -> list[list[int]]:
    """The greedy continuation of each prompt (token ids), in the order of the prompts, exactly `max_tokens` long."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    settings = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | sampling
    inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    outputs = llm.generate(inputs, SamplingParams(**settings), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def scheduler(llm: Any) -> Any:
    """The `Scheduler` of an engine in this process."""
    return _core(llm).scheduler


def worker(llm: Any) -> Any:
    """The worker of an engine in this process."""
    return _core(llm).model_executor.driver_worker.worker


def model_runner(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    return worker(llm).model_runner


def _core(llm: Any) -> Any:
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        raise RuntimeError("this engine runs in processes of its own; start it with in_process=True to reach inside")
    return core
