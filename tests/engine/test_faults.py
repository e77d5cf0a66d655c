"""Every injected fault is found with the right reason, request, group, block and step, under log and under raise."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvscope.checks.catalog import RULES
from kvscope.errors import ViolationError
from kvscope.testing import engine, selftest
from kvscope.testing.faults import DRAFTING, FAULTS, LOADING, PREEMPTING, SETTINGS, Fault, arm, occasion, workload
from kvscope.testing.faults.group_faults import GROUP_FAULT
from kvscope.testing.live import LiveTrace, findings_in

from .test_healthy import switched_on
from .traces import Trace

CRASHING = [name for name, fault in FAULTS.items() if fault.crashes]
QUIET = [name for name, fault in FAULTS.items() if not fault.crashes]
LOADED = [name for name, fault in FAULTS.items() if occasion(fault)[0] is LOADING]
AFTER_STEPS = 3


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = selftest.detectable(metafunc.config.getoption("--runner"))
    of_each_way, of_each_point = _first_by(_way, names), _first_by(lambda fault: fault.point, names)
    quiet = [name for name in names if name in QUIET]
    for fixture, chosen in (
        ("quiet", [name for name in quiet if name not in LOADED]),
        ("loaded", [name for name in quiet if name in LOADED]),
    ):
        if fixture in metafunc.fixturenames:
            always = _first_by(_way, chosen)
            metafunc.parametrize(fixture, [_marked(name, name in always, pytest.mark.long_v2) for name in chosen])
    if "fault" in metafunc.fixturenames:
        metafunc.parametrize(
            "fault",
            [
                _marked(name, name in of_each_point, pytest.mark.long_v2 if name in of_each_way else pytest.mark.long)
                for name in names
            ],
        )


def _way(fault: Fault) -> tuple[object, ...]:
    """What may be another matter for each fault: where it is found, by which check, and whether a launch is refused.

    `make test` has all faults found with V1, whose steps are quick here, the first of each way with V2, and all others
    with `--long`. An engine that `raise` has stopped cannot go on, so each fault needs one of its own: there it is
    the first of each way with V1 and, with V2, of each place where it is found.
    """
    return fault.point, RULES[fault.expected].check, fault.crashes


def _first_by(way: Callable[[Fault], object], names: Sequence[str]) -> set[str]:
    return set({way(FAULTS[name]): name for name in reversed(names)}.values())


def _marked(name: str, always: bool, otherwise: pytest.MarkDecorator) -> object:
    return name if always else pytest.param(name, marks=otherwise)


@pytest.fixture(scope="module")
def observed(runner: engine.Runner) -> Iterator[tuple[Any, LiveTrace]]:
    with selftest.observed("log", SETTINGS) as pair:
        yield pair


@pytest.fixture(scope="module")
def observed_preempting(runner: engine.Runner) -> Iterator[tuple[Any, LiveTrace]]:
    with selftest.observed("log", PREEMPTING) as pair:
        yield pair


@pytest.fixture(scope="module")
def observed_drafting(runner: engine.Runner) -> Iterator[tuple[Any, LiveTrace]]:
    with selftest.observed("log", DRAFTING) as pair:
        yield pair


def test_the_control_run_is_silent(observed: tuple[Any, LiveTrace], cell: Any) -> None:
    llm, trace = observed
    trace.mark()
    rows = trace.run.coverage.rows
    assert all(len(tokens) == 24 for tokens in workload(llm))
    assert findings_in(trace.records()) == []
    cell(f"control run: {trace.run.coverage.rows - rows} rows, 0 findings")


def test_a_fault_is_found_under_log_and_the_engine_goes_on(quiet: str, request: pytest.FixtureRequest) -> None:
    settings = occasion(FAULTS[quiet])[0]
    engines = [(SETTINGS, "observed"), (PREEMPTING, "observed_preempting"), (DRAFTING, "observed_drafting")]
    _inject(*request.getfixturevalue(next(name for at, name in engines if at is settings)), quiet)


class TestUnderAConnector:
    """vLLM has one connector a process: while an engine with one lives, no engine without can run a step."""

    @pytest.fixture(scope="class")
    def observed_loading(self) -> Iterator[tuple[Any, LiveTrace]]:
        with selftest.observed("log", LOADING) as pair:
            yield pair

    def test_a_fault_is_found_under_log_and_the_engine_goes_on(
        self, loaded: str, observed_loading: tuple[Any, LiveTrace]
    ) -> None:
        _inject(*observed_loading, loaded)


def _inject(llm: Any, trace: LiveTrace, name: str) -> None:
    outcome = selftest.inject(llm, trace, name)
    assert outcome.injected
    assert outcome.mistakes == []
    # It was logged and the engine goes on: the next run is whole, and silent again.
    trace.mark()
    assert all(len(tokens) == 4 for tokens in workload(llm, max_tokens=4))
    assert findings_in(trace.records()) == []


def test_a_fault_stops_the_engine_under_raise(fault: str, tmp_path: Path) -> None:
    config = switched_on(tmp_path, log="off")
    settings, traffic = occasion(FAULTS[fault])
    with engine.running(additional_config=config, **settings) as llm:
        trace = LiveTrace(llm)
        with arm(fault, after_steps=AFTER_STEPS) as injection, pytest.raises(ViolationError) as stopped:
            workload(llm, **traffic)
        assert injection.what is not None
        records = trace.records()
        assert not selftest.mistakes_in(FAULTS[fault], injection.what, findings_in(records), selftest.steps_in(records))
        error = stopped.value
        first = findings_in(records)[0]
        assert (error.reason, error.request, error.group, error.block, error.step) == (
            first.reason,
            first.request_id,
            first.group_id,
            first.block_id,
            first.step,
        )
        # It stays latched: no further step runs, and no output comes.
        with pytest.raises(ViolationError):
            llm.llm_engine.step()
    found = Trace(tmp_path)
    assert found.violations[0].action == "raise"
    assert str(error).startswith(f"KV_GUARD reason={found.violations[0].reason} ")
    incident = json.loads(found.incidents[0].read_bytes().splitlines()[-1])
    assert incident["event"] == "kv.violation"
    assert incident["reason"] == found.violations[0].reason


_CRASH = """
import sys
from kvscope.testing.engine import apply_environment
apply_environment(sys.argv[1])
from kvscope.testing.engine import running
from kvscope.testing.faults import SETTINGS, arm, workload
part = {"enabled": True, "action": "log"}
config = {"kv_trace": part, "kv_guard_config": part, "kv_output": {"dir": sys.argv[3]}}
with running(additional_config=config, **SETTINGS) as llm, arm(sys.argv[2], after_steps=3):
    workload(llm)
print("survived")
"""


@pytest.mark.parametrize("name", [_marked(name, name == CRASHING[0], pytest.mark.long) for name in CRASHING])
def test_under_log_the_finding_is_on_disk_before_the_crash(name: str, runner: engine.Runner, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CRASH, runner, name, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = f"it should have crashed: {process.stdout[-500:]} {process.stderr[-500:]}"
    # Unmapped memory is a signal; where a group is missing the host itself raises.
    assert process.returncode > 0 if name == GROUP_FAULT else process.returncode < 0, said
    assert "survived" not in process.stdout
    violations = Trace(tmp_path).violations
    assert violations[0].reason == FAULTS[name].expected
    assert violations[0].action == "log"
    assert violations[0].launch_fatal is True
    assert [line for line in process.stdout.splitlines() if "KV_GUARD {" in line and FAULTS[name].expected in line]


@pytest.mark.long_v2
def test_with_everything_off_no_fault_is_noticed(
    runner: engine.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fired = []
    with engine.running(**SETTINGS) as llm:
        for name in QUIET:
            # Without kvscope nothing is attached that could be lost; here nothing is preempted, drafted or loaded.
            same_engine = occasion(FAULTS[name])[0] is SETTINGS
            if runner in FAULTS[name].runners and same_engine and name != "declaration_lost":
                with arm(name, after_steps=AFTER_STEPS) as injection:
                    workload(llm, until=lambda: injection.fired, **occasion(FAULTS[name])[1])
                fired.append(injection.fired)
    assert all(fired)
    assert len(fired) >= 50
    assert list(tmp_path.iterdir()) == []
    captured = capfd.readouterr()
    assert "KV_GUARD" not in captured.out + captured.err
