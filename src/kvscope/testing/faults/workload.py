"""A small workload under which every fault finds its occasion: shared prefixes, chunked prompts, growing requests."""

from collections.abc import Callable
from typing import Any

SETTINGS: dict[str, Any] = {
    "num_blocks": 48,
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
}
"""For `kvscope.testing.engine.running`: prompts come in chunks, and with `qwen3` nothing is preempted.

Latent attention cannot chunk on a CPU and needs `max_num_batched_tokens` of 256 as well, or no long prompt ever starts.
"""

PREEMPTING: dict[str, Any] = SETTINGS | {"num_blocks": 14}
"""The same with a pool that is too small, so that requests are preempted and resumed."""

_PREFIX_TOKENS = 64
_PROMPT_TOKENS = (84, 97, 69, 60, 100, 126, 30, 45)
_SHARING = 3


_IDLE_STEPS = 500
"""So many steps without a token mean that the engine will never finish: no prompt is that long."""


def prompts(salt: int = 0) -> list[list[int]]:
    """Eight prompts as token ids. The first three begin with the same two blocks; `salt` makes all of them others."""

    def tokens(seed: int, number: int) -> list[int]:
        return [5 + (seed * 7919 + salt * 104729 + index * (2 * seed + 31)) % 250 for index in range(number)]

    prefix = tokens(100, _PREFIX_TOKENS)
    return [
        prefix + tokens(index, length - _PREFIX_TOKENS) if index < _SHARING else tokens(index, length)
        for index, length in enumerate(_PROMPT_TOKENS)
    ]


def workload(
    llm: Any,
    *,
    max_tokens: int = 24,
    salt: int = 0,
    requests: int = len(_PROMPT_TOKENS),
    dummy_every: int = 0,
    until: Callable[[], bool] | None = None,
    steps_after: int = 3,
) -> list[list[int]]:
    """Run the workload greedily, and return each request's tokens in the order of the prompts.

    The engine is driven step by step from here. With `dummy_every` each worker runs a dummy batch after every so many
    steps, while requests are live. Once `until()` is true the rest is aborted `steps_after` steps later: a list then
    holds what its request had got so far. The prefix cache is emptied before, so that a run cannot inherit damage.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    engine = llm.llm_engine
    llm.reset_prefix_cache()
    names = [f"workload-{salt}-{index}" for index in range(requests)]
    parameters = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    for name, prompt in zip(names, prompts(salt), strict=False):
        engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), parameters)
    results: dict[str, list[int]] = {name: [] for name in names}
    steps, idle, left = 0, 0, None
    while engine.has_unfinished_requests():
        outputs = engine.step()
        for output in outputs:
            results[output.request_id] = list(output.outputs[0].token_ids)
        steps, idle = steps + 1, 0 if outputs else idle + 1
        if idle > _IDLE_STEPS:
            raise RuntimeError(f"no request got a token in {idle} steps")
        if dummy_every and steps % dummy_every == 0:
            llm.collective_rpc("execute_dummy_batch")
        if left is None and until is not None and until():
            left = steps_after
        if left is not None:
            if left == 0:
                engine.abort_request(names)
            left -= 1
    return [results[name] for name in names]
