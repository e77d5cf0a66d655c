"""``kvscope selftest``: inject every fault into a real engine, and show which finding it caused.

The work is done by ``kvscope.testing.selftest.run(runner) -> SelftestResult``. What this verb reads of the result::

    class FaultOutcome:          # one fault, injected once
        fault: str               # its name in kvscope.testing.faults
        expected: str            # the reason that it must cause
        found: list[str]         # the reasons that were found, in order
        injected: bool           # whether the fault took effect at all
        mistakes: list[str]      # what is wrong with the findings, in words; empty: detected

    class SelftestResult:
        runner: str              # "v1" or "v2"
        outcomes: list[FaultOutcome]
        control_rows: int        # rows audited in the run without a fault
        control_findings: list[str]   # reasons found in it: each one is false
        duration_s: float
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Protocol, cast

import typer

from kvscope.cli.screen import JSON_OPTION, Line, facts, next_command, show, show_json, stdout_to_stderr, wrapped
from kvscope.errors import KvscopeError


class RunnerName(str, enum.Enum):
    v1 = "v1"
    v2 = "v2"


RUNNER_OPTION = typer.Option(RunnerName.v1, "--runner", help="Which of vLLM's model runners to test.")


class FaultOutcome(Protocol):
    """See the module."""

    fault: str
    expected: str
    found: Sequence[str]
    injected: bool
    mistakes: Sequence[str]


class SelftestResult(Protocol):
    """See the module."""

    runner: str
    outcomes: Sequence[FaultOutcome]
    control_rows: int
    control_findings: Sequence[str]
    duration_s: float


class UnavailableError(KvscopeError):
    """The self-test needs something that is not here."""


def command(
    runner: RunnerName = RUNNER_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Inject every fault into a real engine, and see it found.

    Exit 1 if one is missed or found as something else, or if the control run without a fault finds anything.
    """
    result = _run(runner.value)
    numbers = _numbers(result)
    if as_json:
        show_json({"runner": result.runner, "duration_s": result.duration_s, "numbers": numbers,
                   "control_rows": result.control_rows, "control_findings": list(result.control_findings),
                   "faults": [_outcome(outcome) for outcome in result.outcomes]})  # fmt: skip
    else:
        show(_page(result, numbers))
    passed = numbers["detected"] == numbers["faults"] and not numbers["false findings"]
    raise typer.Exit(0 if passed and numbers["faults"] else 1)


def _run(runner: str) -> SelftestResult:
    if not vllm_is_here():
        raise UnavailableError("selftest: needs vLLM, which is not installed here")
    try:
        module = importlib.import_module("kvscope.testing.selftest")
        with stdout_to_stderr():
            return cast("SelftestResult", module.run(runner))
    except ModuleNotFoundError as error:  # the engines and models are loaded when they are needed
        missing = (error.name or "?").partition(".")[0]
        what = "not in this version" if missing == "kvscope" else f"needs {missing}, which is not installed here"
        raise UnavailableError(f"selftest: {what}") from error


def vllm_is_here() -> bool:
    """Whether vLLM can be imported, under whichever name it was installed."""
    return importlib.util.find_spec("vllm") is not None


def verdict_on(outcome: FaultOutcome) -> str:
    """``detected``, ``wrong``, ``missed`` or ``not injected``. The right reason in the wrong place is wrong, too."""
    if not outcome.injected:
        return "not injected"
    if not outcome.mistakes:
        return "detected"
    return "wrong" if outcome.found else "missed"


def _numbers(result: SelftestResult) -> dict[str, int]:
    verdicts = [verdict_on(outcome) for outcome in result.outcomes]
    return {
        "faults": len(verdicts),
        **{word: verdicts.count(word) for word in ("detected", "wrong", "missed", "not injected")},
        "false findings": len(result.control_findings),
    }


def _outcome(outcome: FaultOutcome) -> dict[str, object]:
    return {
        "fault": outcome.fault,
        "expected": outcome.expected,
        "found": list(outcome.found),
        "verdict": verdict_on(outcome),
        "mistakes": list(outcome.mistakes),
    }


def _page(result: SelftestResult, numbers: dict[str, int]) -> list[Line]:
    lines: list[Line] = [("label", f"{'fault':32}{'must be found as':32}result")]
    for outcome in result.outcomes:
        verdict = verdict_on(outcome)
        style = "" if verdict == "detected" else "bad"
        lines += [(style, f"{outcome.fault:31} {outcome.expected:31} {verdict}")]
        for mistake in outcome.mistakes:
            lines += wrapped(f"- {mistake}", style="bad", indent=2)
    lines += [("", "")]
    lines += facts([(name, f"{count:,}") for name, count in numbers.items()], label_width=18)
    control = ", ".join(sorted(set(result.control_findings))) or "nothing found"
    lines += facts([("control run", f"{result.control_rows:,} rows audited, {control}")], label_width=18)
    lines += facts([("runner", f"{result.runner}, {result.duration_s:.0f} s")], label_width=18)
    wrong = [outcome.expected for outcome in result.outcomes if verdict_on(outcome) != "detected"]
    return [*lines, ("", ""), *next_command("rules", *wrong[:1])]
