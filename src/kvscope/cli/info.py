"""``kvscope info``: what a trace holds, how complete it is, and what recording it cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvscope.cli.screen import JSON_OPTION, TRACE_ARGUMENT, Line, facts, next_command, run_text, show, show_json

if TYPE_CHECKING:
    from kvscope.analysis.summary import ProcessSummary, Summary


def command(
    path: Path = TRACE_ARGUMENT,
    as_json: bool = JSON_OPTION,
) -> None:
    """Describe a trace: what it holds, what is lost, what it cost.

    Versions, processes, events, coverage, losses, kvscope's own time, and how often what was found.
    """
    from kvscope.analysis.reader import Trace
    from kvscope.analysis.replay import Replay
    from kvscope.analysis.summary import summarize
    from kvscope.cli.progress import watched

    trace = Trace.open(path)
    replay = Replay(trace)
    replay.run(watched(trace))
    summary = summarize(replay)
    if as_json:
        show_json(summary)
    else:
        show([*_page(summary), ("", ""), *next_command(*_next(summary))])


def _next(summary: Summary) -> list[str]:
    """Where ``kvscope check``, which names this verb, has told the verdict already, it is not named again."""
    if summary.verdict == "findings":
        return ["check", summary.path]
    return ["rules"] if summary.verdict == "clean" else ["doctor"]


def _page(summary: Summary) -> list[Line]:
    versions = ", ".join(f"{_NAMES.get(name, name)} {said or 'not said'}" for name, said in summary.versions.items())
    steps = f"{summary.steps:,}"
    if summary.first_step is not None:
        numbers = f"numbers {summary.first_step:,} to {summary.last_step:,}; empty ones take one, too"
        steps += f" with work ({numbers}), {summary.duration_s:,.1f} s"
    lines = facts([
        ("run", run_text(summary.run_id, summary.started, len(summary.processes))),
        ("path", summary.path),
        ("versions", versions or "not recorded"),
        ("runner", summary.runner or "not recorded"),
        ("parts", ", ".join(f"{part} {state}" for part, state in summary.parts.items()) or "not recorded"),
        ("steps", steps),
        ("verdict", _VERDICTS.get(summary.verdict, summary.verdict)),
        ("coverage", summary.coverage.removeprefix("coverage: ")),
    ])  # fmt: skip
    skipped = [*summary.rows_skipped.items(), *((f"not judged: {k}", v) for k, v in summary.rows_not_judged.items())]
    lines += facts([("", f"{count:,} rows: {cause}") for cause, count in skipped])
    lines += facts([("stalled", f"{check} since step {step:,}") for check, step in summary.checks_stalled.items()])
    lines += facts([("events", "  ".join(f"{event} {count:,}" for event, count in summary.events.items()))])
    if summary.dummy_runs:
        lines += facts([("dummy runs", f"{summary.dummy_runs:,}")])
    found = [f"{reason}: {n['live']:,} live, {n['replay']:,} in the replay" for reason, n in summary.findings.items()]
    lines += facts([("findings", text) for text in found] or [("findings", "none")])
    if summary.seams_absent:
        lines += facts([("seam absent", f"{seam}: {reason}") for seam, reason in summary.seams_absent.items()])
    lines += _own_time(summary)
    lines += [("", ""), ("label", "processes")]
    for process in summary.processes:
        lines += _process(process)
    if summary.incidents:
        lines += facts([("incidents", f"{summary.incidents:,} files of the flight recorder")])
    if summary.other_runs:
        lines += facts([("other runs", ", ".join(summary.other_runs))])
    return lines


_VERDICTS = {
    "findings": "findings; kvscope check shows each of them",
    "inconclusive": "inconclusive; kvscope check says why",
}
_NAMES = {"vllm": "vLLM", "python": "Python"}


def _own_time(summary: Summary) -> list[Line]:
    if summary.own_ns_per_step is None:
        lines = facts([("own time", "not known: the last kv.coverage of EngineCore or of its workers is missing")])
    else:
        said = f"{summary.own_ns_per_step / 1000:,.1f} µs a step, scheduler and slowest worker together"
        lines = facts([("own time", said)])
    apart: dict[str, int] = {}
    for process in summary.processes:
        hooks = ", ".join(f"{hook} {ns / 1000:,.1f}" for hook, ns in process.own_ns_per_step.items())
        if hooks:
            lines += facts([("", f"{process.name}: {hooks}")])
        for hook, ns in process.own_ns_apart.items():
            apart[hook] = apart.get(hook, 0) + ns
    if apart:
        hooks = ", ".join(f"{hook} {ns / 1e6:,.1f}" for hook, ns in sorted(apart.items(), key=lambda item: -item[1]))
        lines += facts([("start-up", f"{sum(apart.values()) / 1e6:,.1f} ms, admissions and shutdown with it: {hooks}")])
    return lines


def _process(process: ProcessSummary) -> list[Line]:
    files = "1 file" if process.files == 1 else f"{process.files} files"
    end = "cut off in its last line" if process.truncated else "ended" if process.ended else "not ended"
    lines = facts(
        [
            (
                process.name,
                f"{process.records:,} records, {files}, seq {process.first_seq:,}..{process.last_seq:,}, {end}",
            )
        ],
        indent=2,
        label_width=24,
    )
    from kvscope.analysis.verdict import counted

    troubles = [counted(count, what) for what, count in process.lost.items()]
    troubles += [f"{count:,} dropped ({cause})" for cause, count in process.dropped.items()]
    troubles += [f"{counted(count, 'faults')} in hook {hook}" for hook, count in process.hook_faults.items()]
    return lines + facts([("", text) for text in troubles], indent=2, label_width=24)
