"""Action isolate on a real engine: the named requests end with an error, and nobody else notices anything."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from kvscope.testing import engine
from kvscope.testing.faults import SETTINGS, arm, workload
from kvscope.testing.live import LiveTrace
from kvscope.testing.storm import forced_async

from .test_healthy import switched_on
from .traces import Trace

ROOMY: dict[str, Any] = SETTINGS | {"num_blocks": 400}
"""5 % of it are 20 blocks, and a request has five."""

QUIET = ["slot_plus_one", "slot_foreign_block", "table_foreign_block"]
CRASHING = ["slot_outside_cache"]


def ended_early(healthy: list[list[int]], tokens: list[list[int]]) -> list[str]:
    """The requests that have fewer tokens than they should; those that they and all others have are the right ones."""
    assert all(right[: len(got)] == got for right, got in zip(healthy, tokens, strict=True))
    return [f"workload-0-{n}" for n, (a, b) in enumerate(zip(healthy, tokens, strict=True)) if len(b) < len(a)]


def finish_reasons(llm: Any) -> dict[str, str | None]:
    """Why each request ended, as its client is told, the last time that it ran; goes on with the engine."""
    step, reasons = llm.llm_engine.step, {}

    def noting() -> Any:
        outputs = step()
        reasons.update({output.request_id: output.outputs[0].finish_reason for output in outputs if output.finished})
        return outputs

    llm.llm_engine.step = noting
    return reasons


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.long_v2)], ids=["sync", "async"])
def test_only_who_is_named_ends_and_all_others_have_their_tokens(asynchronous: bool, tmp_path: Path, cell: Any) -> None:
    config = switched_on(tmp_path, "isolate", log="off")
    with ExitStack() as stack:
        if asynchronous:
            stack.enter_context(forced_async())
        llm = stack.enter_context(engine.running(additional_config=config, async_scheduling=asynchronous, **ROOMY))
        judge = engine.scheduler(llm)._kvscope_observer
        trace = LiveTrace(llm)
        told = finish_reasons(llm)
        healthy = workload(llm)
        assert set(told.values()) == {"length"}
        for name in [*QUIET, *CRASHING]:
            trace.mark()
            with arm(name, after_steps=6) as injection:
                tokens = workload(llm)
            assert injection.what is not None
            ended = ended_early(healthy, tokens)
            # What a server answers with status 500.
            assert ended == sorted(request for request, reason in told.items() if reason == "error")
            victim = str(injection.what["request_id"]).rpartition("-")[0]
            assert victim in ended
            assert len(ended) < len(healthy)
            assert judge.isolation.held
            pool = engine.scheduler(llm).kv_cache_manager.block_pool
            assert all(pool.blocks[block].ref_cnt == 1 for block in judge.isolation.held)
            assert pool.get_num_free_blocks() == len(pool.blocks) - 1 - len(judge.isolation.held)
            # The next run begins with a reset of the prefix cache, and has all blocks again.
            assert workload(llm) == healthy
            assert judge.isolation.held == set()
            cell(f"{'async' if asynchronous else 'sync'}, isolate: {name} ended {len(ended)} of {len(healthy)}")
        found = Trace(tmp_path)
        assert {record.action for record in found.violations} == {"isolate"}
        assert found.faults() == {}


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "rank", "parallel"),
    [
        ("slot_plus_one", None, {}),
        # How another rank's finding gets to EngineCore does not depend on the runner.
        pytest.param("slot_foreign_block", 1, {"tensor_parallel_size": 2}, marks=pytest.mark.once),
    ],
    ids=["one worker", "rank 1 of 2 alone"],
)
def test_in_processes_of_its_own_the_engine_goes_on(
    name: str, rank: int | None, parallel: dict[str, int], tmp_path: Path, cell: Any
) -> None:
    config = switched_on(tmp_path / "out", "isolate", log="off", request_ids="hashed")
    report = tmp_path / "injected.json"
    config["kvscope_fault"] = {"name": name, "rank": rank, "after_steps": 6, "report": str(report)}
    with engine.running(additional_config=config, in_process=False, **ROOMY, **parallel) as llm:
        tokens = workload(llm)
        healthy = workload(llm)
    ended = ended_early(healthy, tokens)
    assert all(len(right) == 24 for right in healthy)
    assert str(json.loads(report.read_text())["request_id"]).rpartition("-")[0] in ended
    assert len(ended) < len(healthy)
    assert {record.action for record in Trace(tmp_path / "out").violations} == {"isolate"}
    cell(f"multi-process, {parallel or 'one worker'}, isolate: {name} ended {len(ended)} of {len(healthy)}")


@pytest.mark.long
@pytest.mark.once
@pytest.mark.server
def test_a_client_is_told_of_the_error_and_the_server_goes_on(runner: engine.Runner, tmp_path: Path) -> None:
    config = switched_on(tmp_path / "out", "isolate", log="off")
    config["kvscope_fault"] = {"name": "slot_plus_one", "after_steps": 6, "report": str(tmp_path / "injected.json")}
    arguments = ["--num-gpu-blocks-override", "400"]
    log = tmp_path / "server.log"
    with engine.serving(log, runner=runner, additional_config=config, arguments=arguments) as server:
        with pytest.raises(HTTPError) as refused:
            server.complete(range(5, 75), 24)
        assert refused.value.code == 500
        assert len(server.complete(range(5, 75), 24)["choices"][0]["token_ids"]) == 24
    assert "kvscope: isolate (write_target_mismatch) ended " in log.read_text()
