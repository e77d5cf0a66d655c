"""The engine that all other engine tests rely on is real: right runner, and tokens that depend on the KV cache."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvscope.testing import engine

NUMBERS = random.Random(1)
PROMPTS = [[NUMBERS.randrange(4, 260) for _ in range(100)] for _ in range(3)]


def test_the_runner_is_the_one_asked_for(plain_llm: Any, runner: engine.Runner) -> None:
    module = type(engine.model_runner(plain_llm)).__module__
    assert module == {"v1": "vllm.v1.worker.cpu_model_runner", "v2": "vllm.v1.worker.cpu.model_runner"}[runner]
    assert type(engine.scheduler(plain_llm)).__name__ == "Scheduler"


def test_tokens_are_the_same_with_and_without_a_prefix_cache_hit(plain_llm: Any) -> None:
    plain_llm.reset_prefix_cache()
    assert engine.generate(plain_llm, PROMPTS) == engine.generate(plain_llm, PROMPTS)


def test_tokens_depend_on_what_the_kv_cache_holds(plain_llm: Any) -> None:
    plain_llm.reset_prefix_cache()
    expected = engine.generate(plain_llm, PROMPTS)
    for cache in engine.model_runner(plain_llm).kv_caches:
        cache.zero_()
    # The prompts' blocks are still hit, and now hold zeros.
    damaged = engine.generate(plain_llm, PROMPTS)
    plain_llm.reset_prefix_cache()
    assert all(before != after for before, after in zip(expected, damaged, strict=True))
    assert engine.generate(plain_llm, PROMPTS) == expected


def test_an_early_token_of_the_prompt_changes_the_continuation(plain_llm: Any) -> None:
    changed = [[*prompt[:10], 4 + (prompt[10] + 50) % 250, *prompt[11:]] for prompt in PROMPTS]
    before, after = engine.generate(plain_llm, PROMPTS), engine.generate(plain_llm, changed)
    assert all(first != second for first, second in zip(before, after, strict=True))


@pytest.mark.long
@pytest.mark.multiprocess
def test_processes_of_their_own_give_the_same_tokens(plain_llm: Any) -> None:
    expected = engine.generate(plain_llm, PROMPTS)
    with engine.running(in_process=False) as llm:
        assert engine.generate(llm, PROMPTS) == expected
        with pytest.raises(RuntimeError, match="in_process=True"):
            engine.scheduler(llm)


@pytest.mark.long
@pytest.mark.server
def test_a_server_answers_and_ends_cleanly_on_sigterm(plain_llm: Any, runner: engine.Runner, tmp_path: Path) -> None:
    expected = engine.generate(plain_llm, PROMPTS[:1])
    with engine.serving(tmp_path / "server.log", runner=runner) as server:
        answer = server.complete(PROMPTS[0], 16)
        assert answer["choices"][0]["token_ids"] == expected[0]
        assert server.stop() == 0


@pytest.mark.long
@pytest.mark.once
def test_a_server_that_cannot_start_says_why(tmp_path: Path, runner: engine.Runner) -> None:
    with pytest.raises(engine.ServerFailedError, match="no-such-option"):
        engine.start_server(tmp_path / "server.log", runner=runner, arguments=["--no-such-option"])


_HASTE = """
import sys, torch, triton, triton.language as tl
from triton.runtime import interpreter

@triton.jit
def halved(value, factor: tl.constexpr):
    return tl.where(value % 2 == 0, value // 2, -value * factor)

@triton.jit
def kernel(source, target, total, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < size, other=0)
    tl.store(target + at, halved(values, 3).to(tl.float32) / 7 + tl.max(values, axis=0), mask=at < size)
    tl.atomic_add(total, tl.sum(values, axis=0))

def run():
    source = torch.arange(1000, dtype=torch.int32) * 37 % 501
    target, total = torch.zeros(1000), torch.zeros(1, dtype=torch.int64)
    kernel[(8,)](source, target, total, 1000, BLOCK=128)
    return target.tolist(), total.item()

assert interpreter.interpreter_builder.options.sanitize_overflow
expected = run()
sys.path.insert(0, sys.argv[1])
from kvscope_triton_interpreter.haste import hasten
hasten(interpreter)
assert not interpreter.interpreter_builder.options.sanitize_overflow
assert run() == run() == expected
print(expected[1])
"""


@pytest.mark.long_v1  # V2 alone has its kernels interpreted
def test_an_interpreter_that_is_spared_needless_work_computes_the_same(plain_llm: Any, tmp_path: Path) -> None:
    from triton.runtime import interpreter

    assert not interpreter.interpreter_builder.options.sanitize_overflow, "the engine's own has been spared it"
    shims = next(path for path in sys.path if path.endswith("shims/triton"))
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = tmp_path / "haste.py"  # Triton reads the text of its kernels
    script.write_text(_HASTE, encoding="utf-8")
    command = [sys.executable, str(script), shims]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain, timeout=120)
    assert done.stdout.strip() == str(sum(index * 37 % 501 for index in range(1000))), done.stderr[-2000:]
