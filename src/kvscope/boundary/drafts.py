"""How many drafts of each row a runner took and how many it threw away. Wrapped only where drafts are configured.

Source (vLLM 0.32): V2 ``GPUModelRunner.sample`` (``vllm/v1/worker/gpu/model_runner.py``), whose counts move the
computed tokens on (``post_update``); V1 ``GPUModelRunner._sample`` (``vllm/v1/worker/gpu_model_runner.py``), whose
output has the accepted tokens, and ``SpecDecodeBaseProposer.prepare_inputs_padded``
(``vllm/v1/spec_decode/llm_base_proposer.py``), which counts the rejected ones where the drafter is a model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..facts.requests import Verification
from .ledger import OBSERVER, Seam
from .wrapping import around

NO_TOKEN = -1
"""Stands for a token that was not accepted (``PLACEHOLDER_TOKEN_ID``, ``vllm/v1/sample/rejection_sampler.py``)."""


def draft_seams() -> tuple[Seam, ...]:
    v1, v2 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
    proposer = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
    counts: dict[str, Any] = {
        "fact": "how many drafts of each row were accepted",
        "lost": "whether drafts are counted right is not judged",
    }
    return (
        Seam(
            "runner_v1.verify",
            f"{v1}._sample",
            "drafts_v1",
            around(after=after_sample_v1),
            needs=("spec_decode_metadata",),
            **counts,
        ),
        Seam(
            "runner_v1.rejected",
            f"{proposer}.prepare_inputs_padded",
            "drafts_v1",
            around(after=after_prepare_inputs),
            fact="how many drafts of each row the drafter counts as rejected",
            lost="whether rejected drafts are counted right is not judged",
            needs=("valid_sampled_tokens_count",),
        ),
        Seam(
            "runner_v2.verify",
            f"{v2}.sample",
            "drafts_v2",
            around(after=after_sample_v2),
            needs=("input_batch",),
            **counts,
        ),
    )


def observe_drafts(runner: Any, observer: Any) -> None:
    """Only the last pipeline stage samples, and in V1 only it has a drafter."""
    drafter = getattr(runner, "drafter", None)
    if drafter is not None:
        setattr(drafter, OBSERVER, observer)
        observer.expect_drafts("runner_v1.verify")
    elif getattr(runner, "is_last_pp_rank", False):
        observer.expect_drafts("runner_v2.verify")


def after_sample_v1(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    metadata = args[1] if len(args) > 1 else kwargs["spec_decode_metadata"]
    if metadata is None:
        return
    batch = runner.input_batch
    rows = batch.num_reqs
    sampled = result.sampled_token_ids
    if sampled.device.type != "cpu":
        observer.on_verification_skipped("device_tensors", rows)
        return
    accepted = (sampled.numpy() != NO_TOKEN).sum(axis=1) - 1
    # A row in the middle of its prompt samples nothing that counts.
    unfinished = np.flatnonzero(runner.discard_request_mask.np[:rows]).tolist()
    observer.on_verified(
        Verification(
            request_ids=batch.req_ids[:rows],
            drafted=list(map(int, metadata.num_draft_tokens)),
            accepted=_without(accepted.tolist()[:rows], unfinished),
            rejected=[None] * rows,
        )
    )


def after_prepare_inputs(observer: Any, drafter: Any, args: Any, kwargs: Any, result: Any) -> None:
    rejected = result[2]
    if rejected.device.type == "cpu":
        observer.on_rejected(rejected.tolist())


def after_sample_v2(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    batch = args[1] if len(args) > 1 else kwargs["input_batch"]
    if not batch.num_draft_tokens or batch.num_draft_tokens_per_req is None:
        return
    rows, (_, sampled, rejected) = batch.num_reqs, result
    if sampled.device.type != "cpu":
        observer.on_verification_skipped("device_tensors", rows)
        return
    counts = sampled.numpy()[:rows]
    observer.on_verified(
        Verification(
            request_ids=batch.req_ids[:rows],
            drafted=batch.num_draft_tokens_per_req[:rows].tolist(),
            accepted=_without((counts - 1).tolist(), np.flatnonzero(counts == 0).tolist()),
            rejected=rejected.numpy()[:rows].tolist(),
            trimmed=runner.adaptive_verification is not None,
        )
    )


def _without(accepted: list[int | None], rows: list[int]) -> list[int | None]:
    for row in rows:
        if row < len(accepted):
            accepted[row] = None
    return accepted
