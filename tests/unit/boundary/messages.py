"""Real messages of vLLM: a step with a new, a known, a resumed, a finished and a preempted request."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput


def scheduler_output(**fields: Any) -> Any:
    new = NewRequestData(
        req_id="n",
        prompt_token_ids=list(range(20)),
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=([1, 2], [3]),
        num_computed_tokens=4,
        lora_request=None,
    )
    cached = CachedRequestData(
        req_ids=["c", "r", "k"],
        resumed_req_ids={"r"},
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[([4], []), ([5], [6]), None],
        num_computed_tokens=[32, 0, 9],
        num_output_tokens=[12, 3, 0],
    )
    return SchedulerOutput(
        **{
            "scheduled_new_reqs": [new],
            "scheduled_cached_reqs": cached,
            "num_scheduled_tokens": {"n": 16, "c": 3, "r": 16, "k": 1},
            "total_num_scheduled_tokens": 36,
            "scheduled_spec_decode_tokens": {"c": [7, 8]},
            "scheduled_encoder_inputs": {},
            "finished_req_ids": {"f"},
            "free_encoder_mm_hashes": [],
            "preempted_req_ids": {"p"},
            **fields,
        }
    )
