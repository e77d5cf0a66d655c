"""What a run of the demo came to, judged from its trace alone."""

from pathlib import Path
from typing import Any

from kvscope.analysis.reader import Trace
from kvscope.analysis.replay import Replay
from kvscope.analysis.summary import summarize
from kvscope.analysis.verdict import Verdict, verdict_of


def judged(path: Path) -> tuple[Replay, Verdict]:
    """The newest run in a folder."""
    replay = Replay(Trace.open(path)).run()
    return replay, verdict_of(replay)


def numbers(replay: Replay, verdict: Verdict) -> dict[str, Any]:
    """What ``kvscope demo --json`` says of a run without a fault. The time by hook is that of all processes of the
    engine; both times are None or empty where the trace does not say them.
    """
    summary = summarize(replay)
    by_hook: dict[str, int] = {}
    for process in summary.processes:
        for hook, ns in process.own_ns_per_step.items():
            by_hook[hook] = by_hook.get(hook, 0) + ns
    return {
        "verdict": verdict.word,
        "coverage": verdict.coverage_line,
        "steps": summary.steps,
        "rows_audited": summary.rows_audited,
        "own_ns_per_step": summary.own_ns_per_step,
        "own_ns_by_hook": by_hook,
    }


def unsound(run: str, said: dict[str, Any], verdict: Verdict) -> list[str]:
    """What is wrong with a run without a fault, of which `said` has the numbers. No time is too long, as the machine
    may be a slow one, but a time there must be.
    """
    problems = [f"{run} holds {entry.first.reason}" for entry in verdict.findings]
    problems += [f"{run} is {verdict.word}: {reason}" for reason in verdict.reasons]
    if not said["own_ns_per_step"]:
        problems.append(f"kvscope's own time was not recorded in {run}")
    return problems
