"""What the trace of a run is worth: the offline check, and whether each request can be followed through it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvscope.analysis.reader import Trace
from kvscope.analysis.replay import Replay
from kvscope.analysis.verdict import CLEAN, FINDINGS, verdict_of
from kvscope.testing.following import Following

_SHOWN = 3


class TraceVerdict(msgspec.Struct, kw_only=True):
    """``findings`` counts by reason, live and in the replay; ``not_judged`` are rows by group without rules for them.

    ``complaints`` say what is wrong beside findings: something lost, skipped or not followed.
    """

    word: str
    coverage: str
    rows_audited: int
    rows_scheduled: int
    share: float
    steps: int
    ranks: int
    findings: dict[str, int]
    examples: list[str]
    not_judged: dict[str, int]
    preemptions: int
    chunked_prompts: int
    hook_faults: dict[str, int]
    complaints: list[str]


def verdict_on(folder: Path, client_ids: Iterable[str], *, ranks: int = 1, judged: bool = True) -> TraceVerdict:
    """Check the only run in a folder. `ranks` are those of one engine; `judged` is false where no rule has anything to
    say about the model, so that nothing can be clean.
    """
    trace, following = Trace.open(folder), Following()
    replay = Replay(trace)
    replay.run(following.watch(trace.records()))
    verdict = verdict_of(replay)
    faults = {
        f"{log.name}: {hook}": count
        for log in trace.logs
        if log.coverage
        for hook, count in log.coverage.hook_faults.items()
        if count
    }
    complaints = [f"{count} faults in {hook}" for hook, count in faults.items()]
    if judged:
        complaints += verdict.reasons if verdict.word != CLEAN else []
        lacking = following.missing(client_ids, ranks)
        complaints += lacking[:_SHOWN]
        if len(lacking) > _SHOWN:
            complaints.append(f"and {len(lacking) - _SHOWN} more steps in which a request cannot be followed")
    elif replay.coverage.scheduled or not replay.coverage.other_rows:
        complaints.append("something was judged, although no rule is said to apply")
    if verdict.findings and not verdict.agree:
        complaints.append("live and replay do not agree on the findings")
    return TraceVerdict(
        word=verdict.word,
        coverage=verdict.coverage_line,
        rows_audited=replay.coverage.audited,
        rows_scheduled=replay.coverage.scheduled,
        share=replay.coverage.share,
        steps=replay.coverage.steps,
        ranks=sum(len(setup.ranks) for setup in replay.setups),
        findings={entry.first.reason: entry.count for entry in verdict.findings} if verdict.word == FINDINGS else {},
        examples=[f"{f.first.reason}: {f.first.actual}, expected {f.first.expected}" for f in verdict.findings],
        not_judged=dict(replay.coverage.other_rows),
        preemptions=following.preemptions,
        chunked_prompts=following.chunked_prompts,
        hook_faults=faults,
        complaints=complaints,
    )
