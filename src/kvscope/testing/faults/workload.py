"""A small workload under which every fault finds its occasion: shared prefixes, chunked prompts, growing requests."""

from collections.abc import Callable, Mapping
from typing import Any

from kvscope.testing.environment import cache_directory
from kvscope.testing.faults.fault import Fault, Traffic
from kvscope.testing.faults.prefix_faults import ForwardFailedError

SETTINGS: dict[str, Any] = {
    "num_blocks": 48,
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
}
"""For `kvscope.testing.engine.running`: prompts come in chunks, and with `qwen3` nothing is preempted."""

LATENT: dict[str, Any] = SETTINGS | {
    "model": "deepseek-v2",
    "num_blocks": 96,
    "block_size": 16,
    "max_num_batched_tokens": 256,
}
"""The same for latent attention. On a CPU it neither chunks prompts, so that a step must have room for a whole one, nor
caches prefixes, and always has blocks of 16 tokens.
"""

PREEMPTING: dict[str, Any] = SETTINGS | {"num_blocks": 14}
"""The same with a pool that is too small, so that requests are preempted and resumed."""

DRAFTING: dict[str, Any] = SETTINGS | {
    "speculative_config": {
        "method": "draft_model",
        "model": str(cache_directory() / "models" / "qwen3"),
        "num_speculative_tokens": 3,
    }
}
"""The same with the model itself as its drafter, whose drafts are accepted."""

LOADING: dict[str, Any] = SETTINGS | {
    "kv_transfer_config": {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostCopies",
            "spec_module_path": "kvscope.testing.offloading",
            "cpu_bytes_to_use": 8 << 20,
        },
    }
}
"""The same with prompts that are stored beside the pool, and loaded from there when they come again."""

TRAFFIC: dict[Traffic, dict[str, Any]] = {
    "steady": {},
    "finishing": {"max_tokens": 6},
    "twins": {"max_tokens": 6, "twins": True},
    "again": {"max_tokens": 6, "rounds": 2},
    "twins_again": {"requests": 2, "max_tokens": 6, "twins": True, "rounds": 2},
    "long": {"requests": 2, "max_tokens": 6, "last_tokens": 110, "steps_after": 90},
    "dummies": {"dummy_every": 4},
    "preempting": {},
    "drafting": {},
    "loading": {"max_tokens": 6, "rounds": 2},
    "loading_twins": {"max_tokens": 6, "twins": True, "rounds": 2},
}
"""What `workload` is called with for a fault. `steady`: requests grow for a while. `finishing`: some end while others
run. `twins`: each hits what the one before it computes. `again`, `twins_again`: all come a second time. `long`: one
goes on for so long that every audit comes around. `dummies`: workers run batches without work in between. `preempting`:
as `steady`, in a pool that is too small. `drafting`: as `steady`, with three drafts for each token. `loading`,
`loading_twins`: as `again`, and with twins, and what comes again is loaded."""

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


def occasion(fault: Fault) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the engine and the arguments of `workload` under which a fault happens."""
    others = {"preempting": PREEMPTING, "drafting": DRAFTING, "loading": LOADING, "loading_twins": LOADING}
    settings = others.get(fault.traffic, SETTINGS)
    return settings, TRAFFIC[fault.traffic]


def workload(
    llm: Any,
    *,
    max_tokens: int = 24,
    salt: int = 0,
    requests: int = len(_PROMPT_TOKENS),
    last_tokens: int | None = None,
    twins: bool = False,
    rounds: int = 1,
    abort: Mapping[int, int] | None = None,
    reset_after: int = 0,
    dummy_every: int = 0,
    until: Callable[[], bool] | None = None,
    steps_after: int = 3,
) -> list[list[int]]:
    """Run the workload greedily, and return each request's tokens in the order of the prompts.

    The engine is driven step by step from here. The last request goes on for `last_tokens` if that is given. With
    `twins` each request is followed by one with the same prompt that goes on for four tokens more. `abort` says after
    how many steps which request (by its place in the order) is aborted. After `reset_after` steps whatever runs is
    preempted and the prefix cache emptied. With `dummy_every` each worker runs a dummy batch after every so many steps,
    while requests are live. Once `until()` is true the rest is aborted `steps_after` steps later: a list then holds
    what its request had got so far.

    The prefix cache is emptied before, so that a run cannot inherit damage, and again before each of the `rounds`, of
    which the last one's tokens are returned.
    """
    results: list[list[int]] = []
    for number in range(rounds):
        if number and until is not None and until():
            break
        llm.reset_prefix_cache()
        prefix = f"workload-{salt}" + number * "-again"
        limits = [max_tokens] * (requests - 1) + [last_tokens or max_tokens]
        names = _add(llm, prefix, prompts(salt), limits, twins=twins)
        schedule = {step: [names[index]] for step, index in (abort or {}).items()}
        tokens = _drive(llm, names, schedule, reset_after, dummy_every, until, steps_after)
        results = [tokens[name] for name in names]
    return results


def _add(llm: Any, prefix: str, prompts: list[list[int]], limits: list[int], *, twins: bool) -> list[str]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    names = []
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=False)):
        for twin in range(1 + twins):
            names.append(f"{prefix}-{index}" + twin * "-twin")
            parameters = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=limit + 4 * twin)
            llm.llm_engine.add_request(names[-1], TokensPrompt(prompt_token_ids=prompt), parameters)
    return names


def _drive(
    llm: Any,
    names: list[str],
    aborted: Mapping[int, list[str]],
    reset_after: int,
    dummy_every: int,
    until: Callable[[], bool] | None,
    steps_after: int,
) -> dict[str, list[int]]:
    engine = llm.llm_engine
    results: dict[str, list[int]] = {name: [] for name in names}
    steps, idle, left = 0, 0, None
    while engine.has_unfinished_requests():
        try:
            outputs = engine.step()
        except ForwardFailedError as failed:
            engine.abort_request(failed.request_ids, internal=True)
            outputs = []
        for output in outputs:
            results[output.request_id] = list(output.outputs[0].token_ids)
        steps, idle = steps + 1, 0 if outputs else idle + 1
        if idle > _IDLE_STEPS:
            raise RuntimeError(f"no request got a token in {idle} steps")
        if dummy_every and steps % dummy_every == 0:
            llm.collective_rpc("execute_dummy_batch")
        if steps in aborted:
            engine.abort_request(aborted[steps])
        if steps == reset_after:
            engine.reset_prefix_cache(reset_running_requests=True)
        if left is None and until is not None and until():
            left = steps_after
        if left is not None:
            if left == 0:
                engine.abort_request(names)
            left -= 1
    return results
