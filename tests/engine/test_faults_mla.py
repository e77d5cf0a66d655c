"""Faults in a model with latent attention: at least one of each check, under log and under raise.

What these faults do and what is found of them is the same as with full attention (``test_faults``); another are the
kernels, the backend that builds the metadata, and the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvscope.checks.catalog import RULES
from kvscope.errors import ViolationError
from kvscope.testing import engine, selftest
from kvscope.testing.faults import FAULTS, LATENT, arm, occasion, workload
from kvscope.testing.live import LiveTrace, findings_in

from .test_faults import AFTER_STEPS
from .test_healthy import switched_on

ONE_OF_EACH = (
    "slot_plus_one",
    "premature_free",
    "slot_foreign_block",
    "table_ids_rotated",
    "dummy_writes_loaded_prefix",
    "slot_null_block",
)
FURTHER = ("slot_switched_off", "offset_short", "table_block_twice", "table_null_in_tail", "dummy_persistent_slot")


@pytest.fixture(scope="module")
def observed(runner: engine.Runner) -> Iterator[tuple[Any, LiveTrace]]:
    with selftest.observed("log", LATENT) as pair:
        yield pair


def test_the_faults_are_of_every_check_of_a_plan() -> None:
    assert sorted(RULES[FAULTS[name].expected].check for name in ONE_OF_EACH) == ["C1", "C2", "C3", "C4", "C5", "C6"]


def test_the_control_run_is_silent(observed: tuple[Any, LiveTrace], cell: Any) -> None:
    llm, trace = observed
    trace.mark()
    rows = trace.run.coverage.rows
    assert all(len(tokens) == 6 for tokens in workload(llm, max_tokens=6))
    assert findings_in(trace.records()) == []
    assert [group.kind for group in trace.run.topology.groups] == ["mla"] if trace.run.topology else False
    cell(f"latent attention, control run: {trace.run.coverage.rows - rows} rows, 0 findings")


@pytest.mark.parametrize("name", [*ONE_OF_EACH, *FURTHER])
def test_a_fault_is_found_under_log_and_the_engine_goes_on(name: str, observed: tuple[Any, LiveTrace]) -> None:
    llm, trace = observed
    outcome = selftest.inject(llm, trace, name)
    assert outcome.injected
    assert outcome.mistakes == []
    trace.mark()
    assert all(len(tokens) == 2 for tokens in workload(llm, max_tokens=2))
    assert findings_in(trace.records()) == []


@pytest.mark.long_v2
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_fault_stops_the_engine_under_raise(name: str, tmp_path: Path) -> None:
    with engine.running(additional_config=switched_on(tmp_path, log="off"), **LATENT) as llm:
        trace = LiveTrace(llm)
        with arm(name, after_steps=AFTER_STEPS) as injection, pytest.raises(ViolationError) as stopped:
            workload(llm, **occasion(FAULTS[name])[1])
        assert injection.what is not None
        records = trace.records()
        assert not selftest.mistakes_in(FAULTS[name], injection.what, findings_in(records), selftest.steps_in(records))
        first = findings_in(records)[0]
        assert (stopped.value.reason, stopped.value.step) == (first.reason, first.step)
        with pytest.raises(ViolationError):
            llm.llm_engine.step()
