"""vLLM's own schedulers without an engine, and the results that a worker would have given them."""

from __future__ import annotations

from typing import Any

BLOCK = 32


def make_scheduler(*, asynchronous: bool = False, num_blocks: int = 200) -> Any:
    """A ``Scheduler`` or ``AsyncScheduler`` of one full-attention group, with prefix caching."""
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from kvscope.testing import models

    init_none_hash(sha256)
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=512,
            max_model_len=512,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
        ),
        model_config=ModelConfig(model=str(models.build("qwen3")), dtype="float32", seed=0, skip_tokenizer_init=True),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return (AsyncScheduler if asynchronous else Scheduler)(
        vllm_config=config,
        kv_cache_config=groups,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )


def add(scheduler: Any, name: str, tokens: list[int], max_tokens: int = 8, client: int = 0) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    sampling.update_from_generation_config({}, 2)
    request = Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=sampling,
        pooling_params=None,
        client_index=client,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    scheduler.add_request(request)
    return request


def result_of(scheduler_output: Any, token: int = 7) -> Any:
    """One sampled token for everybody who was scheduled."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(scheduler_output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[token] for _ in names],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def answers(outputs: dict[int, Any]) -> dict[str, tuple[int, str | None]]:
    """``{request: (tokens, finish reason)}`` of what ``update_from_output`` returned."""
    return {
        output.request_id: (
            len(output.new_token_ids),
            None if output.finish_reason is None else str(output.finish_reason),
        )
        for client in outputs.values()
        for output in client.outputs
    }
