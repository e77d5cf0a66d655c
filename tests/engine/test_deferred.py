"""The audit of tensors on a device, on real engines whose tensors count as a device's: what a machine with one runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvscope.errors import ViolationError
from kvscope.testing import engine, selftest
from kvscope.testing.deferral import deferring
from kvscope.testing.faults import FAULTS, SETTINGS, arm, occasion, workload
from kvscope.testing.live import LiveTrace, findings_in

from .test_faults import AFTER_STEPS
from .test_healthy import CROWDED, answers, assert_clean, prompts, switched_on
from .traces import Trace

FOUND = (
    "slot_plus_one",
    "slot_foreign_block",
    "slot_null_block",
    "two_slots_equal",
    "position_shifted",
    "seq_len_plus",
    "seq_len_minus",
    "table_null_in_tail",
    "table_foreign_block",
    "table_ids_swapped",
    "rows_swapped",
    "table_short",
    "padding_slot_enabled",
    "dummy_slot",
    "dummy_writes_loaded_prefix",
)
"""Faults of slots, tables, positions and lengths, and of a dummy run, which stand in the tensors that are cloned."""

STOPPING = ("slot_plus_one", "table_foreign_block", "position_shifted", "seq_len_plus")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    known = selftest.detectable(metafunc.config.getoption("--runner"))
    for fixture, names in (("found", FOUND), ("stopping", STOPPING)):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, [name for name in names if name in known])


@pytest.fixture(scope="module")
def deferred(runner: engine.Runner) -> Iterator[tuple[Any, LiveTrace]]:
    with deferring(), selftest.observed("log", SETTINGS) as pair:
        yield pair


def test_the_control_run_is_silent_and_audits_every_row(deferred: tuple[Any, LiveTrace], cell: Any) -> None:
    llm, trace = deferred
    trace.mark()
    coverage = trace.run.coverage
    rows, scheduled, dummies = coverage.rows, coverage.rows_scheduled, coverage.dummy_runs
    assert all(len(tokens) == 24 for tokens in workload(llm, dummy_every=4))
    assert findings_in(trace.records()) == []
    assert coverage.rows - rows == coverage.rows_scheduled - scheduled > 0
    assert coverage.dummy_runs > dummies
    assert not coverage.skipped
    assert trace.run.device_clone_bytes
    cell(f"control run from copies: {coverage.rows - rows} rows, 0 skipped, 0 findings")


def test_a_fault_is_found_with_the_same_facts(found: str, deferred: tuple[Any, LiveTrace]) -> None:
    llm, trace = deferred
    outcome = selftest.inject(llm, trace, found)
    assert outcome.injected
    assert outcome.mistakes == []
    trace.mark()
    assert all(len(tokens) == 4 for tokens in workload(llm, max_tokens=4))
    assert findings_in(trace.records()) == []


@pytest.mark.long_v2
def test_a_fault_stops_the_engine_before_its_steps_result_takes_effect(stopping: str, tmp_path: Path) -> None:
    config = switched_on(tmp_path, log="off")
    settings, traffic = occasion(FAULTS[stopping])
    with deferring(), engine.running(additional_config=config, **settings) as llm:
        trace = LiveTrace(llm)
        with arm(stopping, after_steps=AFTER_STEPS) as injection, pytest.raises(ViolationError) as stopped:
            workload(llm, **traffic)
        assert injection.what is not None
        records = trace.records()
        assert not selftest.mistakes_in(
            FAULTS[stopping], injection.what, findings_in(records), selftest.steps_in(records)
        )
        steps = selftest.steps_in(records)
        assert stopped.value.step == steps[injection.what["step"] - 1]
        with pytest.raises(ViolationError):
            llm.llm_engine.step()


@pytest.mark.long_v2
def test_a_busy_engine_is_judged_whole_and_answers_the_same(runner: engine.Runner, tmp_path: Path, cell: Any) -> None:
    """Hits, chunks and preemptions; and the trace of it replays to the same."""
    requests = prompts(12)
    settings = CROWDED | {"num_blocks": 26, "max_num_seqs": 8}
    with engine.running(**settings) as llm:
        expected, _, _ = answers(llm, requests, 24)
    with deferring(), engine.running(additional_config=switched_on(tmp_path), **settings) as llm:
        tokens, client_ids, cached = answers(llm, requests, 24)
    trace = Trace(tmp_path)
    assert tokens == expected
    assert_clean(trace, client_ids)
    assert cached > 0
    assert trace.preemptions() > 0
    assert trace.enabled[0].device_clone_bytes
    cell(f"from copies: {trace.rows_audited()} rows, {trace.preemptions()} preemptions, 0 findings")


@pytest.mark.long
@pytest.mark.once
@pytest.mark.multiprocess
def test_a_rank_whose_results_nobody_takes_stops_the_engine(tmp_path: Path, cell: Any) -> None:
    """In processes of their own: rank 1 judges in a thread and posts what it finds."""
    from vllm.v1.engine.exceptions import EngineDeadError

    report = tmp_path / "injected.json"
    config = switched_on(tmp_path / "out", extensions=["kvscope.testing.deferring_extension"])
    config["kvscope_fault"] = {"name": "slot_plus_one", "rank": 1, "after_steps": AFTER_STEPS, "report": str(report)}
    with (
        engine.running(additional_config=config, in_process=False, tensor_parallel_size=2, **SETTINGS) as llm,
        pytest.raises(EngineDeadError),
    ):
        workload(llm)
    trace = Trace(tmp_path / "out")
    assert [(record.reason, record.tp_rank) for record in trace.violations] == [("write_target_mismatch", 1)]
    workers = [record for record in trace.enabled if record.process == "worker"]
    assert len(workers) == 2
    assert all(record.device_clone_bytes for record in workers)
    cell("tensor-parallel 2 from copies, raise: write_target_mismatch on rank 1 alone stopped the engine")
