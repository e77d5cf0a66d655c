"""A healthy engine under trace and guard with action raise: nothing is found, nothing is missed, nothing changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvscope.testing import engine

from .traces import Trace

ROWS_REQUIRED = 5_000
CHUNK_TOKENS = 128

# A pool in which the running requests do not all fit, so that some are preempted and resumed.
CROWDED: dict[str, Any] = {
    "num_blocks": 72,
    "max_num_seqs": 24,
    "max_num_batched_tokens": CHUNK_TOKENS,
    "max_model_len": 384,
    "disable_log_stats": False,
}


def prompts(count: int, seed: int = 11) -> list[list[int]]:
    """Prompts of 40 to 200 tokens; two in three share one of three prefixes of two blocks."""
    numbers = random.Random(seed)
    prefixes = [[numbers.randrange(4, 260) for _ in range(64)] for _ in range(3)]
    tails = [[numbers.randrange(4, 260) for _ in range(numbers.randrange(40, 137))] for _ in range(count)]
    return [(prefixes[i % 3] if i % 3 or i % 2 else []) + tail for i, tail in enumerate(tails)]


def switched_on(folder: Path, action: str = "raise", **output: object) -> dict[str, Any]:
    part = {"enabled": True, "action": action}
    return {"kv_trace": part, "kv_guard_config": part, "kv_output": {"dir": str(folder), **output}}


def answers(llm: Any, requests: list[list[int]], max_tokens: int) -> tuple[list[list[int]], list[str], int]:
    """``(tokens, request ids as the client sees them, tokens from the prefix cache)`` of a greedy run."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    parameters = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    inputs = [TokensPrompt(prompt_token_ids=tokens) for tokens in requests]
    outputs = llm.generate(inputs, parameters, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return tokens, [output.request_id for output in outputs], cached


def counter(llm: Any, name: str) -> int:
    """One of vLLM's own counters."""
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == name)


def assert_clean(trace: Trace, client_ids: list[str], ranks: int = 1) -> None:
    assert not trace.violations, trace.violations[:3]
    assert not trace.unfollowed(client_ids, ranks)
    assert trace.rows_audited() == ranks * trace.rows_scheduled() > 0
    assert not trace.skipped()
    assert not trace.dropped()
    assert not trace.faults()


@pytest.mark.timeout(900)  # V2 is interpreted
def test_in_process_with_hits_chunks_and_preemptions(runner: engine.Runner, tmp_path: Path, cell: Any) -> None:
    requests = prompts(52)
    # Runner V2 is interpreted: it answers as much with kvscope, and without it the beginnings.
    compared = 100 if runner == "v1" else 25
    with engine.running(**CROWDED) as llm:
        expected, _, _ = answers(llm, requests, compared)
    with engine.running(additional_config=switched_on(tmp_path), **CROWDED) as llm:
        tokens, client_ids, cached = answers(llm, requests, 100)
        preemptions = counter(llm, "vllm:num_preemptions")
    trace = Trace(tmp_path)
    assert [of_request[:compared] for of_request in tokens] == expected
    assert_clean(trace, client_ids)
    assert cached > 0
    assert trace.chunked_prompts() > 0
    assert trace.preemptions() == preemptions > 0
    assert trace.rows_audited() >= ROWS_REQUIRED
    assert [record.process for record in trace.enabled] == ["all"]
    assert trace.enabled[0].runner == runner.upper()
    cell(f"in-process: {trace.rows_audited()} rows, {preemptions} preemptions, {cached} cached tokens, 0 findings")


@pytest.mark.long  # two tensor-parallel ranks are processes of their own as well
@pytest.mark.multiprocess
def test_in_processes_of_their_own(runner: engine.Runner, tmp_path: Path, cell: Any) -> None:
    requests = prompts(12)
    settings = CROWDED | {"num_blocks": 26, "max_num_seqs": 8}
    with engine.running(**settings) as llm:
        expected, _, _ = answers(llm, requests, 24)
    with engine.running(additional_config=switched_on(tmp_path), in_process=False, **settings) as llm:
        tokens, client_ids, cached = answers(llm, requests, 24)
    trace = Trace(tmp_path)
    assert tokens == expected
    assert_clean(trace, client_ids)
    assert cached > 0
    assert trace.preemptions() > 0
    assert sorted({record.process for record in trace.enabled}) == ["engine", "frontend", "worker"]
    cell(f"multi-process: {trace.rows_audited()} rows, {trace.preemptions()} preemptions, 0 findings")
