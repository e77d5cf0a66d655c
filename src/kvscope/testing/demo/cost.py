"""One V1 engine with scheduler and worker in one process, and steps that are alike: eight requests, decoding.

    python -m kvscope.testing.demo.cost --dir OUT

The trace goes to `OUT/<run_id>/`; its last kv.coverage says what the hooks took. Nothing is measured but by them.
"""

import argparse
from pathlib import Path

from kvscope.testing.demo.apart import run_module
from kvscope.testing.engine import apply_environment, generate, running

REQUESTS = 8
PROMPT_TOKENS, WARM_UP_TOKENS, TOKENS = 32, 16, 256


def run_apart(directory: Path, log: Path, *, deadline_s: float) -> None:
    """`run` in a process of its own. Raises `apart.EngineFailedError`."""
    arguments = ["--dir", str(directory)]
    run_module(__name__, arguments, what="the engine that is measured", log=log, deadline_s=deadline_s)


def run(directory: Path) -> None:
    """Decode twice, a little and then for long; the steps of both stand in the trace."""
    apply_environment("v1")
    part = {"enabled": True, "action": "raise"}
    config = {"kv_trace": part, "kv_guard_config": part, "kv_output": {"dir": str(directory), "log": "off"}}
    with running(additional_config=config, max_num_seqs=REQUESTS) as llm:
        for salt, tokens in enumerate((WARM_UP_TOKENS, TOKENS)):
            generate(llm, prompts(salt), max_tokens=tokens)


def prompts(salt: int) -> list[list[int]]:
    """Token ids of the models here. No prompt begins as another one does, so that none has a block in common."""
    first = 5 + salt * REQUESTS
    return [[first + index] * PROMPT_TOKENS for index in range(REQUESTS)]


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description="Run an engine that decodes, and keep its trace.")
    parser.add_argument("--dir", type=Path, required=True)
    run(parser.parse_args().dir.absolute())


if __name__ == "__main__":
    main()
