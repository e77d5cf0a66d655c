"""Requests for one engine, and what comes back. The same calls give the same answers, so that two runs can be compared.

All requests wait before the first step, and aborts happen when a request has so many tokens, not after some time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_IDLE_STEPS = 5_000
PREFIX_TOKENS = 64
_PREFIXES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request: vLLM's input for it, and how it is sampled. ``abort_at``: gone when it has so many tokens."""

    name: str
    prompt: Any
    sampling: Mapping[str, Any]
    adapter: str | None = None
    abort_at: int | None = None


@dataclass(kw_only=True, slots=True)
class Outcome:
    """``answers`` are token ids by request and sample; ``numbers`` what vLLM itself counted."""

    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)


def token_prompts(count: int, *, shortest: int = 40, longest: int = 136, seed: int = 11) -> list[list[int]]:
    """Prompts of which two in three begin with one of three prefixes of 64 tokens; lengths are of what comes after."""
    dice = random.Random(seed)
    prefixes = [[dice.randrange(4, 260) for _ in range(PREFIX_TOKENS)] for _ in range(_PREFIXES)]
    tails = [[dice.randrange(4, 260) for _ in range(dice.randrange(shortest, longest + 1))] for _ in range(count)]
    return [(prefixes[i % _PREFIXES] if i % 3 or i % 2 else []) + tail for i, tail in enumerate(tails)]


def plain(count: int, max_tokens: int, **lengths: int) -> list[Call]:
    """Greedy continuations of so many tokens."""
    return [
        Call(name=f"plain-{i}", prompt={"prompt_token_ids": tokens}, sampling=_greedy(max_tokens))
        for i, tokens in enumerate(token_prompts(count, **lengths))
    ]


def repetitive(count: int, max_tokens: int) -> list[Call]:
    """Prompts that repeat themselves, from which the next tokens can be guessed."""
    dice = random.Random(5)
    calls = []
    for i in range(count):
        phrase = [dice.randrange(4, 260) for _ in range(dice.randrange(4, 9))]
        tokens = (phrase * 20)[: dice.randrange(60, 140)]
        calls.append(Call(name=f"repeat-{i}", prompt={"prompt_token_ids": tokens}, sampling=_greedy(max_tokens)))
    return calls


def sampled(count: int, max_tokens: int) -> list[Call]:
    """Three samples of each prompt. Greedy requests may not have more than one in vLLM, so that these throw dice, the
    engine's own: a seed for each request ends V1 on a CPU (`gen.get_offset()` in `GPUModelRunner._bookkeeping_sync`).
    """
    sampling = _greedy(max_tokens) | {"n": 3, "temperature": 0.8}
    return [
        Call(name=f"samples-{i}", prompt={"prompt_token_ids": tokens}, sampling=sampling)
        for i, tokens in enumerate(token_prompts(count))
    ]


def aborting(count: int, max_tokens: int) -> list[Call]:
    """Streams of which every third is given up, after its first token, in the middle or shortly before its end."""
    moments = (1, max_tokens // 2, max_tokens - 1)
    return [
        Call(
            name=f"stream-{i}",
            prompt={"prompt_token_ids": tokens},
            sampling=_greedy(max_tokens),
            abort_at=moments[i // 3 % 3] if i % 3 == 0 else None,
        )
        for i, tokens in enumerate(token_prompts(count))
    ]


def adapted(count: int, max_tokens: int) -> list[Call]:
    """Each prompt twice, with and without a LoRA adapter: what one has cached is not the other's."""
    prompts = token_prompts((count + 1) // 2)
    return [
        Call(
            name=f"{adapter or 'base'}-{i}",
            prompt={"prompt_token_ids": tokens},
            sampling=_greedy(max_tokens),
            adapter=adapter,
        )
        for i, tokens in enumerate(prompts)
        for adapter in (None, "adapter")
    ]


def spoken(count: int, max_tokens: int) -> list[Call]:
    """A second of noise each, and the beginning of its transcript, for an encoder and a decoder."""
    import numpy as np

    dice = np.random.default_rng(3)
    return [
        Call(
            name=f"spoken-{i}",
            prompt={
                "encoder_prompt": {
                    "prompt": "",
                    "multi_modal_data": {"audio": (dice.standard_normal(16000).astype(np.float32), 16000)},
                },
                "decoder_prompt": {"prompt_token_ids": [1, *tokens[:40]]},
            },
            sampling=_greedy(max_tokens),
        )
        for i, tokens in enumerate(token_prompts(count))
    ]


def _greedy(max_tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, "detokenize": False}


def serve(llm: Any, calls: Sequence[Call], adapters: Mapping[str, Any] | None = None) -> Outcome:
    """Queue every call, then run the engine until all of them are through. `adapters` are vLLM's LoRARequests."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, outcome = llm.llm_engine, Outcome()
    aborts = {call.name: call.abort_at for call in calls if call.abort_at is not None}
    for call in calls:
        kind = RequestOutputKind.CUMULATIVE if call.name in aborts else RequestOutputKind.FINAL_ONLY
        parameters = SamplingParams(**call.sampling, output_kind=kind)
        adapter = adapters[call.adapter] if adapters and call.adapter else None
        engine.add_request(call.name, call.prompt, parameters, lora_request=adapter)
    finished: set[str] = set()
    idle = steps = 0
    while engine.has_unfinished_requests() and idle < _IDLE_STEPS:
        outputs = engine.step()
        steps += 1
        before = len(finished)
        for output in outputs:
            if output.request_id in outcome.aborted:
                continue
            outcome.answers[output.request_id] = [list(sample.token_ids) for sample in output.outputs]
            if output.finished:
                finished.add(output.request_id)
            elif len(output.outputs[0].token_ids) >= aborts.get(output.request_id, 1 << 30):
                engine.abort_request([output.request_id])
                outcome.aborted.append(output.request_id)
        idle = 0 if outputs or len(finished) > before else idle + 1
    outcome.unfinished = sorted({call.name for call in calls} - finished - set(outcome.aborted))
    outcome.numbers = {"steps": steps, "aborted": len(outcome.aborted), **dict(_counters(llm))}
    return outcome


_COUNTERS = {
    "vllm:num_preemptions": "preemptions",
    "vllm:prefix_cache_hits": "cached_tokens",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


def _counters(llm: Any) -> Iterator[tuple[str, int]]:
    for metric in llm.get_metrics():
        if metric.name in _COUNTERS:
            yield _COUNTERS[metric.name], int(metric.value)
