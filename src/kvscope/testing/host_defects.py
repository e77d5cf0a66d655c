"""Defects of vLLM itself that the guard finds in an engine that nobody has tampered with, each as small as it gets.

    python -m kvscope.testing.host_defects failed-load [v1|v2]
    python -m kvscope.testing.host_defects example-connector [v1|v2]

``docs/known-host-defects.md`` says where in vLLM's source each of them is.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvscope.checks.finding import Finding
from kvscope.testing import engine
from kvscope.testing.live import LiveTrace, findings_in

_PART = {"enabled": True, "action": "log"}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """``wrong`` and ``right``: greedy tokens of the same prompt, with the defect and without a cache."""

    findings: list[Finding]
    wrong: list[int]
    right: list[int]


def prompt(tokens: int, seed: int = 5) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(4, 260) for _ in range(tokens)]


def failed_load(folder: Path) -> Outcome:
    """A load inside a step fails and its request is aborted before it has repeated it; the next one hits the blocks."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    from kvscope.testing.connectors import LOST  # which needs vLLM, and that needs its environment first

    transfer = {
        "kv_connector": "LostLoads",
        "kv_connector_module_path": "kvscope.testing.connectors",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    tokens = prompt(80)
    with _watched(folder, kv_transfer_config=transfer) as llm:
        trace = LiveTrace(llm)
        core = llm.llm_engine
        parameters = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8)
        core.add_request(LOST, TokensPrompt(prompt_token_ids=tokens), parameters)
        core.step()
        core.abort_request([LOST])
        (wrong,) = engine.generate(llm, [tokens], max_tokens=8)
        found = findings_in(trace.records())
        llm.reset_prefix_cache()
        (right,) = engine.generate(llm, [tokens], max_tokens=8)
    return Outcome(findings=found, wrong=wrong, right=right)


def example_connector(folder: Path) -> Outcome:
    """A request that was preempted finds more of itself in the cache than the connector has of its prompt."""
    tokens = [prompt(66, seed) for seed in (1, 2)]
    with tempfile.TemporaryDirectory() as store:
        transfer = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": store},
        }
        with _watched(folder, kv_transfer_config=transfer, num_blocks=9, max_model_len=256) as llm:
            trace = LiveTrace(llm)
            right = engine.generate(llm, [tokens[0]], max_tokens=70) + engine.generate(llm, [tokens[1]], max_tokens=70)
            llm.reset_prefix_cache()
            wrong = engine.generate(llm, tokens, max_tokens=70)
            found = findings_in(trace.records())
    return Outcome(findings=found, wrong=wrong[1], right=right[1])


def _watched(folder: Path, **settings: Any) -> Any:
    config = {"kv_trace": _PART, "kv_guard_config": _PART, "kv_output": {"dir": str(folder), "log": "off"}}
    return engine.running(additional_config=config, **settings)


DEFECTS: dict[str, Callable[[Path], Outcome]] = {"failed-load": failed_load, "example-connector": example_connector}


def main(arguments: list[str]) -> int:
    """Run one of :data:`DEFECTS`. Exit code 1: the guard has found nothing, so that vLLM may have mended it."""
    if not arguments or arguments[0] not in DEFECTS:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    runner: engine.Runner = "v2" if "v2" in arguments[1:] else "v1"
    engine.apply_environment(runner)
    with tempfile.TemporaryDirectory() as folder:
        outcome = DEFECTS[arguments[0]](Path(folder))
    for finding in outcome.findings:
        sys.stdout.write(
            f"{finding.reason} request={finding.request_id} block={finding.block_id} step={finding.step}: "
            f"{finding.actual}, expected {finding.expected}\n"
        )
    sys.stdout.write(f"tokens  {outcome.wrong}\nwithout {outcome.right}\n")
    return 0 if outcome.findings else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
