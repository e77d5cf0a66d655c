"""Runs that serve no request, on a real engine: which of them happen here, and that what they leave behind is seen.

Profiling comes before there is a cache, and so before there is anything to observe; here it is run once more, with the
cache in place. Graphs are not captured on a CPU. V2's warm-up, whose requests the worker makes up, is one of GPUs: the
part of it that Triton's interpreter can run is run here by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from kvscope.events.schema import BoundaryRecord
from kvscope.testing import engine, selftest
from kvscope.testing.faults import SETTINGS, workload
from kvscope.testing.live import LiveTrace, findings_in

MOST_TOKENS = SETTINGS["max_num_batched_tokens"]


@pytest.fixture(scope="module")
def observed(runner: engine.Runner) -> Iterator[tuple[Any, LiveTrace]]:
    with selftest.observed("log", SETTINGS) as pair:
        yield pair


def dummies(trace: LiveTrace, run: Callable[[], object]) -> list[BoundaryRecord]:
    """The runs without requests that were recorded meanwhile; there is no finding."""
    trace.mark()
    before = trace.run.coverage.dummy_runs
    run()
    records = trace.records()
    assert findings_in(records) == []
    found = [record for record in records if isinstance(record, BoundaryRecord) and record.kind == "dummy"]
    assert trace.run.coverage.dummy_runs - before == len(found)
    return found


def sizes(records: list[BoundaryRecord]) -> list[tuple[Any, Any]]:
    """Tokens of each run, and how many entries of the slot buffer there were behind them."""
    return [(record.num_tokens, record.persistent_slots) for record in records]


def test_a_warm_up_is_told_apart_from_runs_that_store_nothing(
    runner: engine.Runner, observed: tuple[Any, LiveTrace], cell: Any
) -> None:
    """First of all, since a warm-up comes before any step."""
    llm, trace = observed
    if runner == "v1":
        pytest.skip("V1 makes up no requests: its warm-ups are dummy runs")
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

    worker = engine.worker(llm)

    def warm_up() -> None:
        assert run_mixed_prefill_decode_warmup(
            worker.model_runner, worker.execute_model, worker.sample_tokens, num_tokens=16
        )

    found = dummies(trace, warm_up)
    assert [(record.num_tokens, record.warm_up) for record in found] == [(2, True), (16, True)]
    cell("warm-up: 2 runs with made-up requests observed, 0 findings")


def test_profiling_again_with_the_cache_in_place(runner: engine.Runner, observed: tuple[Any, LiveTrace]) -> None:
    llm, trace = observed

    # V2 samples at the end, with a kernel that the interpreter refuses.
    refused: tuple[type[Exception], ...] = (Exception,) if runner == "v2" else ()

    def profile() -> None:
        with suppress(*refused):
            engine.model_runner(llm).profile_run()

    # V2 hands nothing to attention then (`skip_attn`).
    assert sizes(dummies(trace, profile)) == ([(MOST_TOKENS, [0])] if runner == "v1" else [])


def test_an_idle_data_parallel_rank_is_looked_at_over_its_whole_buffer(
    observed: tuple[Any, LiveTrace], cell: Any
) -> None:
    llm, trace = observed
    found = dummies(trace, lambda: workload(llm, max_tokens=4, dummy_every=3))
    assert found
    assert set(map(str, sizes(found))) == {str((1, [MOST_TOKENS - 1]))}
    cell(f"idle data-parallel rank: {len(found)} runs between steps, {MOST_TOKENS} slots each, 0 findings")


def test_dummy_runs_of_other_shapes(runner: engine.Runner, observed: tuple[Any, LiveTrace]) -> None:
    llm, trace = observed
    run = engine.model_runner(llm)._dummy_run  # what a capture and a warm-up call
    workload(llm, max_tokens=2)  # leaves slots in the buffer
    shapes: list[dict[str, Any]] = [{"num_tokens": 16}, {"num_tokens": 8, "uniform_decode": True}]
    if runner == "v1":
        shapes.append({"num_tokens": 8, "create_mixed_batch": True, "force_attention": True})
    else:
        shapes.append({"num_tokens": 8, "context_len": 32})
    for shape in shapes:
        (found,) = dummies(trace, lambda shape=shape: run(**shape))  # type: ignore[misc]  # its default binds it
        assert sizes([found]) == [(shape["num_tokens"], [MOST_TOKENS - shape["num_tokens"]])]


def test_a_capture_of_which_there_is_none_here_counts_nothing(observed: tuple[Any, LiveTrace]) -> None:
    llm, trace = observed
    assert dummies(trace, lambda: engine.model_runner(llm).capture_model()) == []
    assert not any(check == "dummy" for check, _ in trace.run.coverage.skipped)


def test_the_next_real_steps_are_sound(observed: tuple[Any, LiveTrace]) -> None:
    llm, trace = observed
    trace.mark()
    assert all(len(tokens) == 4 for tokens in workload(llm, max_tokens=4))
    assert findings_in(trace.records()) == []
