"""Engines in processes of their own: two tensor-parallel ranks, one of which alone may be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvscope.testing import engine
from kvscope.testing.faults import SETTINGS, workload

from .test_faults import AFTER_STEPS
from .test_healthy import CROWDED, answers, prompts, switched_on
from .traces import Trace

TOKENS = 16
TWO_RANKS = {"tensor_parallel_size": 2}
HEALTHY_STEPS = 70
"""More than what comes before the fault."""


def with_fault(name: str, tmp_path: Path, *, rank: int | None, after_steps: int = AFTER_STEPS) -> dict[str, Any]:
    report = str(tmp_path / "injected.json")
    fault = {"name": name, "rank": rank, "after_steps": after_steps, "report": report}
    return switched_on(tmp_path / "out") | {"kvscope_fault": fault}


def injected(tmp_path: Path) -> dict[str, Any]:
    what: dict[str, Any] = json.loads((tmp_path / "injected.json").read_text())
    return what


def errors_of_engine_core(capfd: pytest.CaptureFixture[str]) -> list[str]:
    captured = capfd.readouterr()
    return [line for line in (captured.out + captured.err).splitlines() if "ERROR" in line and "EngineCore" in line]


@pytest.mark.multiprocess
def test_two_ranks_are_clean_until_one_of_them_alone_stops_the_engine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], cell: Any
) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    requests = prompts(8)
    settings = CROWDED | {"num_blocks": 26, "max_num_seqs": 8}
    with engine.running(**settings) as llm:
        expected, _, _ = answers(llm, requests, TOKENS)
    config = with_fault("slot_plus_one", tmp_path, rank=1, after_steps=HEALTHY_STEPS)
    with engine.running(additional_config=config, in_process=False, **settings, **TWO_RANKS) as llm:
        tokens, client_ids, cached = answers(llm, requests, TOKENS)
        assert not (tmp_path / "injected.json").exists()
        with pytest.raises(EngineDeadError):
            answers(llm, requests, 2 * HEALTHY_STEPS)
    trace, what = Trace(tmp_path / "out"), injected(tmp_path)

    assert tokens == expected
    assert cached > 0
    assert trace.preemptions() > 0
    assert not trace.unfollowed(client_ids, ranks=2)
    assert not trace.skipped()
    assert not trace.dropped()
    assert not trace.faults()
    assert sorted(record.process for record in trace.enabled) == ["engine", "frontend", "worker", "worker"]
    assert {record.tp_rank for record in trace.enabled if record.process == "worker"} == {0, 1}

    assert what["rank"] == 1
    assert [(record.reason, record.tp_rank) for record in trace.violations] == [("write_target_mismatch", 1)]
    assert (trace.violations[0].request_id, trace.violations[0].slot) == (what["request_id"], what["slot"])
    assert trace.incidents
    # Rule, request, group, block and step stand in EngineCore's own log.
    wanted = f"reason=write_target_mismatch check=C1 action=raise request={what['request_id']} group=0 block="
    assert any(wanted in line for line in errors_of_engine_core(capfd))
    cell(f"tensor-parallel 2: {trace.rows_audited()} rows, {trace.preemptions()} preemptions, 0 findings, same tokens")
    cell("tensor-parallel 2, raise: write_target_mismatch on rank 1 alone stopped the engine")


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "reason", "rank", "parallel"),
    [
        ("slot_foreign_block", "write_foreign_block", None, {}),
        # How a rank keeps its access from being launched does not depend on the runner.
        pytest.param(
            "slot_outside_cache", "write_outside_cache", 1, {"tensor_parallel_size": 2}, marks=pytest.mark.once
        ),
    ],
    ids=["one worker", "rank 1 of 2 alone"],
)
def test_a_fault_stops_an_engine_in_processes_of_its_own(
    name: str,
    reason: str,
    rank: int | None,
    parallel: dict[str, int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    cell: Any,
) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    config = with_fault(name, tmp_path, rank=rank)
    with (
        engine.running(additional_config=config, in_process=False, **SETTINGS, **parallel) as llm,
        pytest.raises(EngineDeadError),
    ):
        workload(llm)
    trace, what = Trace(tmp_path / "out"), injected(tmp_path)
    assert [(record.reason, record.tp_rank) for record in trace.violations] == [(reason, rank or 0)]
    assert (trace.violations[0].request_id, trace.violations[0].slot) == (what["request_id"], what["slot"])
    assert trace.incidents
    assert any(f"reason={reason} " in line for line in errors_of_engine_core(capfd))
    cell(f"multi-process, {parallel or 'one worker'}, raise: {reason} stopped the engine")
