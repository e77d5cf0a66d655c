"""What a replay amounts to: clean, findings or inconclusive, always with how much of the run was looked at."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvscope.analysis.engines import EngineSetup
from kvscope.analysis.reader import ProcessLog
from kvscope.analysis.replay import Replay
from kvscope.analysis.row_coverage import NO_PLAN, NO_TABLE
from kvscope.analysis.tally import FoldedFinding, Key
from kvscope.checks.catalog import RULES

CLEAN, FINDINGS, INCONCLUSIVE = "clean", "findings", "inconclusive"
EXIT_CODES = {CLEAN: 0, FINDINGS: 1, INCONCLUSIVE: 3}
DEFAULT_MIN_COVERAGE = 0.99

NO_ORDERLY_END = (
    "no orderly end. Unless it still runs, the usual reason is that vLLM kills its processes as soon as the server is "
    "told to end; vllm serve --shutdown-timeout 10 gives them time to end their traces"
)


class Verdict(msgspec.Struct, kw_only=True):
    """``reasons`` say why it is inconclusive, or what limits a verdict on findings; ``notes`` are worth knowing and
    change nothing. ``only_live`` and ``only_replay`` are findings of one side alone: empty where the two agree.
    """

    word: str
    coverage_line: str
    reasons: list[str]
    notes: list[str]
    findings: list[FoldedFinding]
    only_live: list[Key]
    only_replay: list[Key]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]

    @property
    def agree(self) -> bool:
        return not self.only_live and not self.only_replay


def verdict_of(replay: Replay, min_coverage: float = DEFAULT_MIN_COVERAGE) -> Verdict:
    """The verdict on a finished replay. Findings weigh more than gaps: what was found was found."""
    findings = replay.findings.folded()
    reasons = [*_losses(replay), *_limits(replay, min_coverage)]
    only_live, only_replay = replay.findings.differences()
    return Verdict(
        word=FINDINGS if findings else INCONCLUSIVE if reasons else CLEAN,
        coverage_line=coverage_line(replay),
        reasons=reasons,
        notes=list(_notes(replay)),
        findings=findings,
        only_live=only_live,
        only_replay=only_replay,
    )


def coverage_line(replay: Replay) -> str:
    """The line without which no verdict is shown."""
    coverage = replay.coverage
    ranks = sum(len(setup.ranks) + len(setup.absent_ranks) for setup in replay.setups)
    if not coverage.scheduled:
        return "coverage: 0 rows, because no step with work was declared in this trace"
    return (
        f"coverage: {coverage.audited:,} of {coverage.scheduled:,} rows audited ({percent(coverage.share)}), "
        f"{counted(coverage.steps, 'steps')}, {counted(ranks, 'ranks')}"
    )


def percent(share: float) -> str:
    """One decimal, cut and not rounded: what is not all of it never reads 100.0 %."""
    return f"{int(share * 1000) / 10:.1f} %"


def _losses(replay: Replay) -> Iterator[str]:
    """What should be in the files and is not."""
    for log in replay.trace.logs:
        for what, count in losses_of(log).items():
            yield f"{log.name}: {counted(count, what)}"
        if log.truncated:
            yield f"{log.name}: the last line is a fragment, the file was cut off"
        elif not log.ended and log.status is None:
            yield f"{log.name}: the end is missing, the process was killed or still runs"
        for cause, count in log.dropped.items():
            yield f"{log.name}: {counted(count, 'records')} dropped ({cause})"


def counted(count: int, what: str) -> str:
    """``1 record lost``, ``2 records lost``: ``what`` starts with a plural."""
    noun, space, rest = what.partition(" ")
    return f"{count:,} {noun.removesuffix('s') if count == 1 else noun}{space}{rest}"


def losses_of(log: ProcessLog) -> dict[str, int]:
    """Records of a process that are gone, by how: only what is more than zero."""
    found = {
        "records missing before the first one": 0 if _deletion_declared(log) else log.missing_first,
        "records missing in between": log.missing,
        "lines without a record": log.garbage,
        "records out of order or twice": log.repeated,
        "records produced and not written (killed, or still running)": log.lost_at_end,
        "files that vanished while being read": len(log.vanished),
    }
    return {what: count for what, count in found.items() if count}


def _deletion_declared(log: ProcessLog) -> bool:
    """Whether the process removed what is missing at the start itself, as its settings had it."""
    return log.missing_first == 0 or 0 < log.files.first_index <= log.deleted_files


def _limits(replay: Replay, min_coverage: float) -> Iterator[str]:
    """Why the replay cannot say "clean" although nothing may be lost."""
    coverage = replay.coverage
    mode = _output_setting(replay, "records")
    if mode == "findings":
        yield 'written with records = "findings": declarations and plans are not in it'
    if replay.ids_omitted:
        yield 'written with request_ids = "omitted": requests cannot be told apart'
    for setup in replay.setups:
        name = f"engine {setup.dp_rank}" if len(replay.setups) > 1 else "the engine"
        yield from _engine_limits(setup, name)
        if (step := replay.pools_lost.get(setup.dp_rank)) is not None:
            yield f"records of {name}'s block pool are missing: its blocks are not followed from step {step:,} on"
    if replay.undeclared_steps and not replay.ids_omitted:  # else the declarations are there, and cannot be read
        yield f"without a declaration in the trace: {counted(replay.undeclared_steps, 'steps')}"
    if replay.damaged_records:
        yield f"{replay.damaged_records:,} records contradict themselves"
    for check, step in stalled(replay).items():
        yield f"{check} stands still since step {step:,}"
    if mode != "findings" and coverage.share < min_coverage:
        causes = ", ".join(f"{count:,} {cause}" for cause, count in coverage.skipped.most_common(3))
        if not causes:
            others = ", ".join(coverage.other_rows)
            causes = f"there is nothing to judge but {others}" if others else "nothing was scheduled"
        yield f"coverage {percent(coverage.share)} is below {min_coverage:g} ({causes})"
    elif unknown := coverage.skipped[NO_TABLE]:
        yield f"{unknown:,} rows: {NO_TABLE}"


def _engine_limits(setup: EngineSetup, engine: str) -> Iterator[str]:
    if setup.declaring is None:
        yield f"no file of {engine}'s scheduler: nothing to hold the plans against"
    if not setup.ranks:
        yield f"no file of {engine}'s workers: no plan to look at"
    if setup.topology is None:
        yield f"the pool of {engine} is not recorded (kv.enabled)"
    if not setup.parts:
        yield f"no part of {engine} was checking (kv_trace, kv_guard_config)"
    if setup.absent_ranks:
        yield f"no file of worker rank {', '.join(map(str, setup.absent_ranks))}"
    if setup.others:
        names = ", ".join(log.name for log in setup.others)
        yield f"more processes claim the same place than {engine} has: {names}"


def stalled(replay: Replay) -> dict[str, int]:
    """Checks that stopped running, with the step at which their seam last fired."""
    found: dict[str, int] = {}
    for log in replay.trace.logs:
        if log.coverage and isinstance(log.coverage.checks_stalled, dict):
            found.update(log.coverage.checks_stalled)
    return found


def _notes(replay: Replay) -> Iterator[str]:
    if killed := _killed_with_a_loss(replay):
        yield f"{', '.join(killed)}: {NO_ORDERLY_END}"
    for log in replay.trace.logs:
        if log.missing_first and _deletion_declared(log):
            yield f"{log.name}: the first {log.missing_first:,} records were deleted by rotation"
        if log.status and not log.ended and not log.lost_at_end and not log.truncated:
            yield f"{log.name}: killed or still running, and nothing that it produced is missing"
        for error, count in log.native_errors.items():
            yield f"{log.name}: vLLM itself failed, {counted(count, 'times')}: {error}"
        if log.unknown:
            yield f"{log.name}: {counted(log.unknown, 'records')} of events that this version does not know"
        faults = {hook: count for hook, count in log.coverage.hook_faults.items() if count} if log.coverage else {}
        if faults:
            yield f"{log.name}: {counted(sum(faults.values()), 'faults')} in kvscope's own hooks ({', '.join(faults)})"
    for name, rows in replay.coverage.other_rows.items():
        yield f"{name}: {counted(rows, 'rows')} with semantics that no rule judges"
    yield from _not_judged(replay)
    if others := replay.trace.files.others:
        yield f"this is the newest of {len(others) + 1} runs in this folder; name a run's folder to choose"
    if replay.trace.files.unreadable:
        names = ", ".join(folder.name for folder in replay.trace.files.unreadable[:3])
        yield f"folders beside this run that may not be read, and may be newer: {names}"


def _not_judged(replay: Replay) -> Iterator[str]:
    """Rules that were not asked, as in the live processes."""
    if replay.pools_unobserved:
        yield "nothing is recorded of the block pool: what only its books can show was not judged"
    for setup in replay.setups:
        off = sorted({rule.part for rule in RULES.values()} - setup.parts)
        if off and setup.parts:
            yield f"{', '.join(off)} was off: its rules were not judged"


def _killed_with_a_loss(replay: Replay) -> list[str]:
    """The processes of engines that did not end their trace, where something is missing because of it."""
    killed = [log for log in replay.trace.logs if log.process != "frontend" and not log.ended]
    lost = any(log.lost_at_end or log.truncated or log.status is None for log in killed)
    return [log.name for log in killed] if lost or replay.coverage.skipped[NO_PLAN] else []


def _output_setting(replay: Replay, name: str) -> object:
    for log in replay.trace.logs:
        if log.enabled:
            section = log.enabled.configuration.get("kv_output")
            if isinstance(section, dict) and name in section:
                return section[name]
    return None
