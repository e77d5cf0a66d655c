"""Action isolate on a real engine: the named requests end with an error, and nobody else notices anything."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_only_who_is_named_ends_and_all_others_have_their_tokens(asynchronous: bool, tmp_path: Path, cell: Any) -> None:
    config = switched_on(tmp_path, "isolate", log="off")
    with ExitStack() as stack:
        if asynchronous:
            stack.enter_context(forced_async())
        llm = stack.enter_context(engine.running(additional_config=config, async_scheduling=asynchronous, **ROOMY))
        judge = engine.scheduler(llm)._kvscope_observer
        trace = LiveTrace(llm)
        healthy = workload(llm)
        for name in [*QUIET, *CRASHING]:
            trace.mark()
            with arm(name, after_steps=6) as injection:
                tokens = workload(llm)
            assert injection.what is not None
            ended = ended_early(healthy, tokens)
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


@pytest.mark.multiprocess
def test_in_processes_of_its_own_the_engine_goes_on(tmp_path: Path, cell: Any) -> None:
    config = switched_on(tmp_path / "out", "isolate", log="off", request_ids="hashed")
    report = tmp_path / "injected.json"
    config["kvscope_fault"] = {"name": "slot_plus_one", "rank": None, "after_steps": 6, "report": str(report)}
    with engine.running(additional_config=config, in_process=False, **ROOMY) as llm:
        tokens = workload(llm)
        healthy = workload(llm)
    ended = ended_early(healthy, tokens)
    assert str(json.loads(report.read_text())["request_id"]).rpartition("-")[0] in ended
    assert len(ended) < len(healthy)
    assert {record.action for record in Trace(tmp_path / "out").violations} == {"isolate"}
    cell(f"multi-process, isolate: slot_plus_one ended {len(ended)} of {len(healthy)}")
