"""Injects every fault into a real engine in this process, and holds what was found against what was done.

A fault counts as detected when a finding has the right reason, request, group, block, slot and step, and everything
else that was found is a consequence that the fault names. What would crash the engine is injected under action
`raise`, where kvscope must refuse the launch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from kvscope.checks.catalog import RULES
from kvscope.checks.finding import Finding
from kvscope.errors import ViolationError
from kvscope.testing.engine import Runner, apply_environment, running
from kvscope.testing.faults import FAULTS, SETTINGS, Fault, arm, occasion, workload
from kvscope.testing.live import LiveTrace, findings_in, steps_in

COMPARED = ("group_id", "block_id", "slot", "position", "token_index", "row")
"""Fields of a finding that must be what the injector did, where both say something. The request must be named, too:
the one whose row it is or, where nobody's row is wrong (padding, a dummy run), the one whose block is hit.
"""

_AFTER_STEPS = 3


class FaultOutcome(msgspec.Struct, kw_only=True):
    """One fault, injected once. `mistakes` say in words what is wrong with the findings; empty: it was detected."""

    fault: str
    expected: str
    found: list[str]
    injected: bool
    mistakes: list[str]


class SelftestResult(msgspec.Struct, kw_only=True):
    """All faults of one runner, and the run without a fault."""

    runner: str
    outcomes: list[FaultOutcome]
    control_rows: int
    control_findings: list[str]
    duration_s: float


def run(runner: Runner) -> SelftestResult:
    """The self-test with one of vLLM's model runners. Takes one to three minutes, and this process."""
    apply_environment(runner)
    began = time.monotonic()
    names = detectable(runner)
    outcomes: dict[str, FaultOutcome] = {}
    with observed("log", SETTINGS) as (llm, trace):
        control = workload(llm)
        assert all(control), "the control run made no tokens"
        control_rows = trace.run.coverage.rows
        control_findings = [finding.reason for finding in findings_in(trace.records())]
        for name in names:
            if not FAULTS[name].crashes and occasion(FAULTS[name])[0] is SETTINGS:
                outcomes[name] = inject(llm, trace, name)
    for name in names:
        if name in outcomes:
            continue
        settings, crashes = occasion(FAULTS[name])[0], FAULTS[name].crashes
        with observed("raise" if crashes else "log", settings) as (llm, trace):
            together = [each for each in names if occasion(FAULTS[each])[0] is settings and not FAULTS[each].crashes]
            for each in [name] if crashes else together:
                outcomes[each] = inject(llm, trace, each)
    return SelftestResult(
        runner=runner,
        outcomes=[outcomes[name] for name in names],
        control_rows=control_rows,
        control_findings=control_findings,
        duration_s=time.monotonic() - began,
    )


def detectable(runner: str) -> list[str]:
    """The faults that one of the model runners can have, and that this version has a rule for; in an order in which one
    engine can have them.
    """
    names = [name for name, fault in FAULTS.items() if runner in fault.runners and fault.expected in RULES]
    return sorted(names, key=lambda name: FAULTS[name].blinds)


@contextmanager
def observed(action: str, settings: dict[str, Any]) -> Iterator[tuple[Any, LiveTrace]]:
    """An engine in this process with trace and guard on, and its live trace, in a folder that goes away."""
    with tempfile.TemporaryDirectory(prefix="kvscope-selftest-") as folder:
        part = {"enabled": True, "action": action}
        config = {"kv_trace": part, "kv_guard_config": part, "kv_output": {"dir": folder, "log": "off"}}
        with running(additional_config=config, **settings) as llm:
            yield llm, LiveTrace(llm)


def inject(llm: Any, trace: LiveTrace, name: str) -> FaultOutcome:
    """Inject one fault while the workload runs, and judge the findings of that time."""
    fault = FAULTS[name]
    trace.mark()
    with arm(name, after_steps=_AFTER_STEPS) as injection, suppress(ViolationError):
        workload(llm, until=lambda: injection.fired, **occasion(fault)[1])
    records = trace.records()
    findings = findings_in(records)
    return FaultOutcome(
        fault=name,
        expected=fault.expected,
        found=[finding.reason for finding in findings],
        injected=injection.fired,
        mistakes=mistakes_in(fault, injection.what, findings, steps_in(records)),
    )


def mistakes_in(fault: Fault, what: dict[str, Any] | None, findings: list[Finding], steps: list[int]) -> list[str]:
    """What is wrong with the findings of one injected fault. `steps` are the steps with work since it was armed."""
    if what is None:
        return ["the fault found no occasion"]
    expected = str(what["expected"])
    matching = [finding for finding in findings if finding.reason == expected]
    if not matching:
        found = ", ".join(sorted({finding.reason for finding in findings})) or "nothing"
        return [f"{expected} was not found, but {found}"]
    mistakes = min((_differences(finding, what, fault, steps) for finding in matching), key=len)
    allowed = {fault.expected, expected, *fault.alternatives, *fault.allowed_also}
    return mistakes + [f"false finding {reason}" for reason in sorted({f.reason for f in findings} - allowed)]


def _differences(finding: Finding, what: dict[str, Any], fault: Fault, steps: list[int]) -> list[str]:
    differences = [
        f"{field} is {getattr(finding, field)}, injected was {what[field]}"
        for field in COMPARED
        if what.get(field) is not None
        and getattr(finding, field) is not None
        and getattr(finding, field) != what[field]
    ]
    if what.get("request_id") not in {None, finding.request_id, finding.other_request_id}:
        differences.append(f"request is {finding.request_id}, injected was {what['request_id']}")
    if what.get("block_id") is not None and finding.block_id is None and fault.point not in {"dummy", "handover"}:
        differences.append(f"block is missing, injected was {what['block_id']}")
    # Some of what an allocator does only an audit can find, at a time of its own.
    number = what["step"] or 0
    if fault.point != "dummy" and 0 < number <= len(steps) and finding.step != steps[number - 1]:
        differences.append(f"step is {finding.step}, injected was {steps[number - 1]}")
    return differences
