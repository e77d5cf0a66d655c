"""What a run's files hold, in numbers: the content of ``kvscope info``."""

from __future__ import annotations

from typing import Any

import msgspec

from kvscope.analysis.cost import OwnTime, own_time
from kvscope.analysis.reader import ProcessLog
from kvscope.analysis.replay import Replay
from kvscope.analysis.verdict import coverage_line, losses_of, stalled, verdict_of


class ProcessSummary(msgspec.Struct, kw_only=True):
    """One process. ``lost`` counts records by how they are gone, ``dropped`` by cause; ``ended`` as in ProcessLog.

    ``own_ns_per_step`` has the hooks that run with the steps, ``own_ns_apart`` the whole time of the others (see
    ``analysis.cost``).
    """

    name: str
    files: int
    records: int
    events: dict[str, int]
    first_seq: int
    last_seq: int
    lost: dict[str, int]
    dropped: dict[str, int]
    truncated: bool
    ended: bool
    own_ns_per_step: dict[str, int]
    own_ns_apart: dict[str, int]
    hook_faults: dict[str, int]


class Summary(msgspec.Struct, kw_only=True):
    """One run. ``own_ns_per_step`` is what kvscope itself took of a step: scheduler and slowest worker together.

    ``started`` is ISO 8601 in local time, ``verdict`` the word of ``kvscope check`` at its default coverage.
    ``findings`` counts by reason: what the live processes recorded and what the replay finds.
    """

    path: str
    run_id: str
    started: str | None
    verdict: str
    versions: dict[str, str | None]
    runner: str | None
    parts: dict[str, str]
    seams_absent: dict[str, str]
    duration_s: float
    steps: int
    first_step: int | None
    last_step: int | None
    events: dict[str, int]
    coverage: str
    coverage_share: float
    rows_audited: int
    rows_scheduled: int
    rows_skipped: dict[str, int]
    rows_not_judged: dict[str, int]
    checks_stalled: dict[str, int]
    dummy_runs: int
    own_ns_per_step: int | None
    findings: dict[str, dict[str, int]]
    processes: list[ProcessSummary]
    incidents: int
    other_runs: list[str]


def summarize(replay: Replay) -> Summary:
    """The summary of a finished replay."""
    logs, coverage = replay.trace.logs, replay.coverage
    cost = own_time(logs, replay.setups)
    processes = [_process(log, cost) for log in logs]
    enabled = next((log.enabled for log in logs if log.enabled), None)
    first = min((log.first_wall_ns for log in logs if log.first_wall_ns), default=0)
    last = max((log.last_wall_ns for log in logs), default=0)
    events: dict[str, int] = {}
    for log in logs:
        for event, count in log.events.items():
            events[event] = events.get(event, 0) + count
    return Summary(
        path=str(replay.trace.files.directory if replay.trace.files.whole_run else replay.trace.files.asked),
        run_id=replay.trace.run_id,
        started=replay.trace.started,
        verdict=verdict_of(replay).word,
        versions=_versions(enabled.versions) if enabled else {},
        runner=next((setup.runner for setup in replay.setups if setup.runner), None),
        parts=dict(enabled.parts) if enabled else {},
        seams_absent={s.seam: s.reason for log in logs if log.enabled for s in log.enabled.seams_absent},
        duration_s=max(last - first, 0) / 1e9,
        steps=coverage.steps,
        first_step=coverage.first_step,
        last_step=coverage.last_step,
        events=dict(sorted(events.items())),
        coverage=coverage_line(replay),
        coverage_share=coverage.share,
        rows_audited=coverage.audited,
        rows_scheduled=coverage.scheduled,
        rows_skipped={cause: count for cause, count in coverage.skipped.most_common() if count},
        rows_not_judged=dict(coverage.other_rows),
        checks_stalled=stalled(replay),
        dummy_runs=coverage.dummy_runs,
        own_ns_per_step=cost.step_ns,
        findings=_findings(replay),
        processes=processes,
        incidents=len(replay.trace.files.incidents),
        other_runs=[other.name for other in replay.trace.files.others],
    )


def _findings(replay: Replay) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for entry in replay.findings.folded():
        of_reason = counts.setdefault(entry.first.reason, {"live": 0, "replay": 0})
        of_reason["live"] += entry.live
        of_reason["replay"] += entry.in_replay
    return counts


def _versions(versions: msgspec.Struct) -> dict[str, str | None]:
    fields: dict[str, Any] = msgspec.structs.asdict(versions)
    return fields


def _process(log: ProcessLog, cost: OwnTime) -> ProcessSummary:
    return ProcessSummary(
        name=log.name,
        files=len(log.files.paths),
        records=log.records,
        events=dict(sorted(log.events.items())),
        first_seq=log.first_seq,
        last_seq=log.last_seq,
        lost=losses_of(log),
        dropped=log.dropped,
        truncated=log.truncated,
        ended=log.ended,
        own_ns_per_step=cost.per_step_ns.get(log.name, {}),
        own_ns_apart=cost.apart_ns[log.name],
        hook_faults={hook: n for hook, n in log.coverage.hook_faults.items() if n} if log.coverage else {},
    )
