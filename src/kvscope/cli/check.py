"""``kvscope check``: replay a trace through the live rules, and say what they find."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvscope.cli.screen import (
    JSON_OPTION,
    TRACE_ARGUMENT,
    WIDTH,
    Line,
    next_command,
    run_text,
    show,
    show_json,
    typed,
    wrapped,
)

if TYPE_CHECKING:
    from kvscope.analysis.replay import Replay
    from kvscope.analysis.tally import Key
    from kvscope.analysis.verdict import Verdict

MIN_COVERAGE_OPTION = typer.Option(
    0.99, "--min-coverage", min=0.0, max=1.0, help="Audited share of the scheduled rows below which nothing is clean."
)


def command(
    path: Path = TRACE_ARGUMENT,
    min_coverage: float = MIN_COVERAGE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Judge a trace: clean, findings or inconclusive.

    Exit 0 clean, 1 findings, 2 unreadable, 3 inconclusive.
    """
    from kvscope.analysis.reader import Trace
    from kvscope.analysis.replay import Replay
    from kvscope.analysis.verdict import verdict_of
    from kvscope.cli.progress import watched

    trace = Trace.open(path)
    replay = Replay(trace)
    replay.run(watched(trace))
    verdict = verdict_of(replay, min_coverage)
    if as_json:
        show_json(_document(path, replay, verdict))
    else:
        run = run_text(trace.run_id, trace.started, len(trace.logs))
        show(_report(path, run, verdict))
    raise typer.Exit(verdict.exit_code)


def _document(path: Path, replay: Replay, verdict: Verdict) -> dict[str, object]:
    from kvscope.checks.catalog import RULES
    from kvscope.events.frozen import frozen_line

    findings = []
    for entry in verdict.findings:
        rule = RULES.get(entry.first.reason)
        line = frozen_line(entry.first, rule, entry.action) if rule else None
        findings.append({"frozen": line, "check": rule.check if rule else None, "entry": entry})
    return {
        "path": str(path),
        "run_id": replay.trace.run_id,
        "started": replay.trace.started,
        "other_runs": [other.name for other in replay.trace.files.others],
        "verdict": verdict.word,
        "exit_code": verdict.exit_code,
        "coverage": verdict.coverage_line,
        "coverage_share": replay.coverage.share,
        "rows_audited": replay.coverage.audited,
        "rows_scheduled": replay.coverage.scheduled,
        "rows_skipped": dict(replay.coverage.skipped),
        "reasons": verdict.reasons,
        "notes": verdict.notes,
        "live_and_replay_agree": verdict.agree,
        "only_live": verdict.only_live,
        "only_replay": verdict.only_replay,
        "findings": findings,
    }


def _report(path: Path, run: str, verdict: Verdict) -> list[Line]:
    from kvscope.checks.catalog import RULES
    from kvscope.reports.prepare import prepare
    from kvscope.reports.terminal import draw

    lines: list[Line] = []
    for entry in verdict.findings:
        lines += [*draw(prepare(entry, typed())), ("", "")]
    if lines:
        lines += [("dim", "-" * WIDTH)]
    lines += [(_STYLE_OF[verdict.word], _headline(verdict)), ("", verdict.coverage_line)]
    lines += wrapped(f"run: {run}")
    if verdict.findings:
        lines += _agreement(verdict)
    if verdict.reasons:
        word = "not all of it was judged" if verdict.findings else "why it is inconclusive"
        lines += [("label", f"{word}:")]
        for reason in verdict.reasons:
            lines += wrapped(f"- {reason}", indent=2)
    for note in verdict.notes:
        lines += wrapped(f"note: {note}", style="dim")
    if verdict.findings:
        known = [entry.first.reason for entry in verdict.findings if entry.first.reason in RULES]
        return [*lines, *next_command("rules", *known[:1])]
    return [*lines, *next_command("info", path)]


_STYLE_OF = {"clean": "good", "findings": "title", "inconclusive": "warn"}


def _headline(verdict: Verdict) -> str:
    if not verdict.findings:
        return verdict.word.upper()
    count = sum(entry.count for entry in verdict.findings)
    kinds = len(verdict.findings)
    return f"FINDINGS: {count:,} of {kinds} {'kind' if kinds == 1 else 'kinds'}"


def _agreement(verdict: Verdict) -> list[Line]:
    if verdict.agree:
        return [("", "live and replay agree on every finding")]
    lines: list[Line] = []
    for word, keys in (("only live", verdict.only_live), ("only in the replay", verdict.only_replay)):
        if keys:
            shown = "; ".join(_key_text(key) for key in keys[:3])
            more = f"; and {len(keys) - 3} more" if len(keys) > 3 else ""
            lines += wrapped(f"{word}: {shown}{more}", style="warn")
    return lines


def _key_text(key: Key) -> str:
    reason, group, request = key
    return f"{reason} (request {request or '-'}, group {'-' if group is None else group})"
