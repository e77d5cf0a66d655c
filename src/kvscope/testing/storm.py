"""A load under which the block pool has no quiet moment: hits, chunks, preemptions, aborts, resets and samples at once.

with forced_async(), running(additional_config=..., **STORM) as llm:
    numbers = storm(llm, rows=5_000, rows_so_far=lambda: run.coverage.rows)
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

STORM: dict[str, Any] = {
    "num_blocks": 20,
    "block_size": 32,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "disable_log_stats": False,
}
"""For `kvscope.testing.engine.running`: 19 blocks for up to 16 requests of up to 8 blocks each."""

LIVE_REQUESTS = 64
_PREFIXES, _PREFIX_TOKENS = 4, 64
_LONGEST_TAIL, _LONGEST_ANSWER = 70, 60
_IDLE_STEPS = 500


@dataclass
class Numbers:
    """What a storm came to."""

    steps: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    resets: int = 0
    samples: int = 0
    preemptions: int = 0
    cached_tokens: int = 0


@contextmanager
def forced_async() -> Iterator[None]:
    """Asynchronous scheduling, which vLLM's CPU platform switches off (`CpuPlatform.check_and_update_config`).

    For engines in this process that are started meanwhile with `async_scheduling=True`.
    """
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.__dict__["check_and_update_config"]

    def keep(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        original.__func__(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(keep)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = original


def storm(llm: Any, *, rows: int, rows_so_far: Callable[[], int], seed: int = 1) -> Numbers:
    """Keep 64 requests waiting or running until so many rows were scheduled, then let all of them finish."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    dice = random.Random(seed)
    engine, numbers = llm.llm_engine, Numbers()
    prefixes = [[dice.randrange(4, 260) for _ in range(_PREFIX_TOKENS)] for _ in range(_PREFIXES)]
    live: dict[str, int] = {}
    idle = 0

    def add() -> None:
        tail = [dice.randrange(4, 260) for _ in range(dice.randrange(1, _LONGEST_TAIL))]
        prompt = (dice.choice(prefixes) if dice.random() < 0.7 else []) + tail
        samples = 2 if dice.random() < 0.1 else 1
        name = f"storm-{seed}-{numbers.requests}"
        numbers.requests += 1
        numbers.samples += samples
        live[name] = samples
        parameters = SamplingParams(
            temperature=0.8 if samples > 1 else 0.0,
            n=samples,
            ignore_eos=True,
            max_tokens=dice.randrange(1, _LONGEST_ANSWER),
        )
        engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), parameters)

    while live or rows_so_far() < rows:
        while len(live) < LIVE_REQUESTS and rows_so_far() < rows:
            add()
        chance = dice.random()
        if chance < 0.03 and live:
            name = dice.choice(list(live))
            engine.abort_request([name])
            del live[name]
            numbers.aborted += 1
        elif chance < 0.035:
            numbers.resets += bool(llm.reset_prefix_cache(reset_running_requests=True))
        outputs = engine.step()
        numbers.steps += 1
        for output in outputs:
            if output.finished and output.request_id in live:
                del live[output.request_id]
                numbers.finished += 1
                numbers.cached_tokens += output.num_cached_tokens or 0
        idle = 0 if outputs else idle + 1
        if idle > _IDLE_STEPS:
            raise RuntimeError(f"no request got a token in {idle} steps")
    numbers.preemptions = sum(
        int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
    )
    return numbers
