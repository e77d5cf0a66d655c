"""One run as one process sees it: its configuration, its place among the ranks, and where its records go."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Literal

from msgspec import UNSET

from .. import __version__
from ..checks.catalog import RULES
from ..checks.finding import Finding
from ..checks.rule import Part
from ..config import Config
from ..errors import ViolationError
from ..events.codec import NOT_DELIVERED, Identity, coverage_record, enabled_record
from ..events.coverage_schema import CoverageRecord, ErrorRecord
from ..events.finding_schema import BlockHistory, FindingCount
from ..events.frozen import frozen_line
from ..events.histories import history_of
from ..events.names import RequestNames
from ..events.schema import EnabledRecord
from ..facts.topology import Ranks, Topology
from ..logs import say
from ..sinks.kinds import Violation
from ..sinks.mailbox import MailboxReader, find_mailboxes
from ..sinks.stream import QuietStream, Stream
from ..sinks.subscribers import SUBSCRIBERS
from ..state.blocks import BlockLedger
from ..state.coverage import Coverage
from .checks_counted import checks_run, checks_stalled
from .collectors_called import is_wanted
from .concerned import concerned_blocks
from .exporting import RunExporter
from .folding import FindingFolds
from .hook_book import HookBook
from .inactive import inactive_checks
from .process_monitor import ProcessMonitor
from .salt import run_salt

COVERAGE_INTERVAL_SECONDS = 10.0
STATE_INTERVAL_SECONDS = 1.0
"""Findings that are written are accompanied by the state of the blocks that they concern, at most so often."""

ProcessRole = Literal["frontend", "engine", "worker"]


class Run:
    """What the observers of one run share within one process.

    ``pending`` holds findings that are not just logged until EngineCore, if it lives in this process, takes them up;
    another process posts them into its mailbox, and keeps the first in ``undelivered`` where it could not have one.

    ``device_clone_bytes`` is what the clones for the deferred audit take of a device's memory, None without such an
    audit, and ``before_close`` who has something to say before the last record is written.
    """

    def __init__(self, run_id: str, config: Config, hooks: HookBook, versions: tuple[str | None, str | None]) -> None:
        self.run_id = run_id
        self.config = config
        self.pid = os.getpid()
        self.roles: set[ProcessRole] = set()
        self.ranks = Ranks()
        self.api_server = 0
        self.topology: Topology | None = None
        self.runner: str | None = None
        self.parts: frozenset[Part] = frozenset(_enabled_parts(config))
        self.coverage = Coverage()
        self.names = RequestNames(
            config.output.request_ids, run_salt() if config.output.request_ids == "hashed" else b""
        )
        self.pending: list[Finding] = []
        self.undelivered: list[Finding] = []
        self.unjudged_cause: str | None = None
        self.kernel_block_sizes: dict[int, int] = {}
        self.unread_operators: dict[int, str] = {}
        self.device_clone_bytes: int | None = None
        self.before_close: list[Callable[[], None]] = []
        self.monitor: ProcessMonitor | None = None
        self.is_open = False
        self.is_closed = False
        self.exporter: RunExporter | None = None
        self._hooks = hooks
        self._hooks_before = hooks.hook_numbers()
        self._versions = versions
        self._folds = FindingFolds()
        self._state_due = 0.0
        self.coverage_due = 0.0

    @property
    def allocator_faults(self) -> list[int]:
        """Faults of the hooks of the block pool in this process: a list of one number, which goes on counting."""
        return self._hooks.allocator_faults

    @property
    def connector_faults(self) -> int:
        """Faults of the hooks of what is planned with a connector, in this process."""
        return self._hooks.connector_faults()

    def works(self, seam: str) -> bool:
        """Whether a seam is wrapped and its hook has not failed in this process."""
        return self._hooks.works(seam)

    @property
    def process(self) -> str:
        """Name of this process in file names and records: ``all`` has a scheduler and its only worker, with the front
        end or without. It is known when the stream is made, since vLLM makes the worker before the scheduler.
        """
        if "engine" in self.roles:
            return "all" if "worker" in self.roles else "engine"
        return "worker" if "worker" in self.roles else "frontend"

    @cached_property
    def stream(self) -> Stream:
        """Where records go; made on first use, so that a process which has nothing to say makes no file."""
        self.coverage_due = monotonic() + COVERAGE_INTERVAL_SECONDS
        return (QuietStream if self.config.only_counts else Stream)(
            Path(self.config.output.dir),
            self.run_id,
            self.process,
            self.rank,
            output=self.config.output,
            identity=Identity(engine_id=self.engine_id, ranks=self.ranks),
            names=self.names,
        )

    @property
    def rank(self) -> int:
        """What stands in the names of this process' files: its data-parallel rank, a worker's, or an API server's."""
        if self.process == "frontend":
            return self.api_server
        return self.ranks.dp if "engine" in self.roles or self.ranks.world is None else self.ranks.world

    @property
    def engine(self) -> int:
        """Data-parallel rank of the engine that this process is of."""
        return self.ranks.dp

    @property
    def has_stream(self) -> bool:
        """Whether this process has had something to say."""
        return "stream" in self.__dict__

    @property
    def engine_id(self) -> str:
        """One engine of the run: its data-parallel rank makes it distinct."""
        return f"{self.run_id}.{self.ranks.dp}"

    def open(self) -> None:
        """Start writing: everything that kv.enabled says is known now."""
        if not self.is_open:
            self.is_open = True
            sizes = {group.group_id: group.slots_per_block for group in self.topology.groups} if self.topology else None
            if self.config.monitor.enabled:
                self.monitor = ProcessMonitor(self)
            self.stream.open(self.enabled, block_sizes=sizes)
            if "engine" in self.roles:
                parts = ", ".join(f"{part} {_action(self.config, part)}" for part in sorted(self.parts))
                text = "kvscope %s: on (%s), records in %s"
                say(logging.INFO, text, __version__, parts or "nothing", self.stream.folder)
                self.export()

    def collect(self) -> None:
        """In a worker in which nothing else is done: have the collectors called that are registered for it."""
        if self.monitor is None and self.process == "worker" and is_wanted(self.process):
            self.monitor = ProcessMonitor(self)

    def export(self) -> None:
        """Have the metrics of this run served, by this process or another one of its host; from the first call on."""
        if self.config.monitor.enabled and self.exporter is None:
            self.exporter = RunExporter(self)
            self.exporter.start()

    def enabled(self) -> EnabledRecord:
        """The first record of every file."""
        config = self.config
        return enabled_record(
            run_id=self.run_id,
            process=self.process,
            pid=self.pid,
            configuration=config.to_public_dict(),
            parts=_parts_said(config, self.monitor),
            actions={part: _action(config, part) for part in ("kv_trace", "kv_guard_config", "kv_transfer")},
            seams_installed=self._hooks.seams_installed(),
            seams_absent=self._hooks.seams_absent(),
            checks_active=[rule.reason for rule in RULES.values() if rule.part in self.parts],
            checks_inactive=inactive_checks(self),
            topology=self.topology,
            vllm_version=self._versions[0],
            platform_version=self._versions[1],
            runner=self.runner if self.runner is not None else UNSET,
            rank=self.ranks.world,
            device_clone_bytes=self.device_clone_bytes,
            shared_file=f"{self.stream.stem}.shared" if self.stream.shared is not None else None,
        )

    def report(
        self, findings: Sequence[Finding], component: str, boundary: str, *, ledger: BlockLedger | None = None
    ) -> None:
        """Record findings, and keep those that are not just logged for EngineCore.

        With a ledger the record has what became of the finding's block until now, and ahead of it stands a kv.state of
        the blocks that the findings concern: so call this before the ledger takes over the operation that they are
        about. Repetitions are folded (see ``runtime.folding``). A finding whose access can crash the process is on disk
        when this returns, unless it is folded; and one that may end the process is in its metrics.
        """
        for finding in findings:
            finding.tp_rank, finding.pp_rank = self.ranks.tp, self.ranks.pp
            repeats = self.coverage.count_finding(finding.reason, finding.group_id, finding.step)
            acts = self.acts_on(finding)
            if self._folds.take(finding, component, boundary, monotonic()):
                history = None
                if ledger is not None:
                    self._put_state(findings, ledger, component, boundary)
                    history = history_of(finding, ledger, self.names)
                violation = self._violation(finding, repeats, history)
                urgent = self.stops(finding) or finding.launch_fatal
                self.stream.violation(violation, component=component, boundary=boundary, urgent=urgent)
                if urgent and self.monitor is not None:
                    self.monitor.publish_urgently()
            if acts:
                self.deliver(finding)
            SUBSCRIBERS.publish(finding, RULES[finding.reason], self.names)

    def _put_state(self, findings: Sequence[Finding], ledger: BlockLedger, component: str, boundary: str) -> None:
        """Ahead of the finding, so that it stands in the incident file, too."""
        now = monotonic()
        if now < self._state_due:
            return
        self._state_due = now + STATE_INTERVAL_SECONDS
        snapshot = ledger.snapshot(concerned_blocks(findings, ledger))
        self.stream.put(
            "state",
            snapshot,
            component=component,
            boundary=boundary,
            step=findings[0].step,
            trace_id=findings[0].trace_id,
            approx_bytes=256 + 128 * len(snapshot.block_ids),
        )

    def forget_findings(self) -> None:
        """Count and write from here on as if there had been none."""
        self._folds.clear()
        self._state_due = 0.0
        self.coverage.findings.clear()

    def acts_on(self, finding: Finding) -> bool:
        """Whether this finding is more than recorded."""
        return _action(self.config, RULES[finding.reason].part) != "log"

    def stops(self, finding: Finding) -> bool:
        """Whether this finding's action is ``raise``."""
        return _action(self.config, RULES[finding.reason].part) == "raise"

    def deliver(self, finding: Finding) -> None:
        """Hand a finding to the EngineCore of this run, wherever that is."""
        if "engine" in self.roles:
            self.pending.append(finding)
        elif self.stream.mailbox is not None:
            self.stream.mailbox.post(finding)
        elif not self.undelivered:  # one is enough to stop for, and they may go on coming
            self.undelivered.append(finding)

    def violation(self, finding: Finding, names: RequestNames | None = None) -> ViolationError:
        """The error by which ``raise`` stops the engine; its text spells request ids as ``names`` does."""
        rule = RULES[finding.reason]
        text = frozen_line(
            finding, rule, _action(self.config, rule.part), tag=self.config.output.log_tag, names=names or self.names
        )
        return ViolationError(
            text,
            reason=finding.reason,
            request=finding.request_id,
            group=finding.group_id,
            block=finding.block_id,
            step=finding.step,
        )

    def cover(self, component: str, boundary: str, *, now: bool = False) -> None:
        """Write kv.coverage if it is due, or at once."""
        time = monotonic()
        if now or time >= self.coverage_due:
            self.coverage_due = time + COVERAGE_INTERVAL_SECONDS
            self.stream.put("coverage", self._coverage(), component=component, boundary=boundary)

    def native_error(self, error_type: str, *, component: str, boundary: str, after_step: int | None = None) -> None:
        """The host raised across a seam; only the type is recorded."""
        record = ErrorRecord(error_type=error_type)
        self.stream.put("error", record, component=component, boundary=boundary, after_step=after_step)

    def close(self) -> None:
        """Write the last findings, the last coverage and what is queued, and end this process' stream. A second call
        does nothing.
        """
        if self.exporter is not None:
            self.exporter.stop()
        if self.has_stream and not self.is_closed:
            for say_last in self.before_close:
                say_last()
            self.is_closed = True
            for last in self._folds.take_unwritten():
                finding = last.finding
                repeats = self.coverage.findings[finding.reason, finding.group_id].count - 1
                violation = self._violation(finding, repeats)
                self.stream.violation(violation, component=last.component, boundary=last.boundary)
            self.cover("scheduler" if "engine" in self.roles else "worker", "shutdown", now=True)
            self.stream.close()
            if self.monitor is not None:
                self.monitor.close()

    def mailboxes(self) -> list[MailboxReader]:
        """The mailboxes of this engine's workers that live in processes of their own, on this host."""
        folder = Path(self.config.output.dir) / self.run_id
        return [MailboxReader(path) for path in find_mailboxes(folder, self.ranks.dp)]

    def _coverage(self) -> CoverageRecord:
        coverage, spent = self.coverage, self.hooks_spent()
        return coverage_record(
            steps=coverage.steps,
            empty_steps=coverage.empty_steps,
            rows_scheduled=coverage.rows_scheduled,
            rows=coverage.rows,
            tokens=coverage.tokens,
            checks_run=checks_run(coverage, self.parts),
            checks_skipped=coverage.skipped_by_check(),
            hook_calls={name: values[0] for name, values in spent.items()},
            hook_faults={name: values[1] for name, values in spent.items() if values[1]},
            hook_time_ns={name: values[2] for name, values in spent.items()},
            checks_stalled=checks_stalled(coverage, self.parts) or None,
            findings=self._finding_counts(),
            tail_entries=coverage.tail_entries or None,
        )

    def hooks_spent(self) -> dict[str, tuple[int, int, int]]:
        """``{hook: (calls, faults, own time in ns)}`` since this run began."""
        before = self._hooks_before
        return {
            name: (calls - was[0], faults - was[1], time_ns - was[2])
            for name, (calls, faults, time_ns) in self._hooks.hook_numbers().items()
            for was in (before.get(name, (0, 0, 0)),)
        }

    def records_dropped(self) -> dict[str, int]:
        """Records that were made and not written, by every cause that there is."""
        return self.stream.dropped if self.has_stream else {}

    def _violation(self, finding: Finding, repeats: int, history: BlockHistory | None = None) -> Violation:
        rule = RULES[finding.reason]
        action = _action(self.config, rule.part)
        return Violation(finding=finding, rule=rule, action=action, repeats=repeats, history=history)

    def _finding_counts(self) -> list[FindingCount]:
        counts: list[FindingCount] = []
        for (reason, group_id), tally in self.coverage.findings.items():
            count = FindingCount(
                reason=reason,
                group_id=group_id,
                count=tally.count,
                first_step=tally.first_step,
                last_step=tally.last_step,
            )
            fold = self._folds.of(reason, group_id)
            if fold is not None:
                last = fold.last.finding
                count.written, count.unnamed = fold.written, fold.unnamed
                count.last_request_id = UNSET if last.request_id is None else self.names(last.request_id)
                count.last_block_id = UNSET if last.block_id is None else last.block_id
            counts.append(count)
        return counts


def _enabled_parts(config: Config) -> list[Part]:
    parts: list[Part] = []
    if config.trace.enabled:
        parts.append("kv_trace")
    if config.guard.enabled:
        parts.append("kv_guard_config")
    return parts


def _action(config: Config, part: Part) -> str:
    """What a finding of the part does."""
    return config.action_for(part)


def _parts_said(config: Config, monitor: ProcessMonitor | None) -> dict[str, str]:
    unread = monitor.store.reason if monitor is not None else None
    return {
        "kv_trace": "on" if config.trace.enabled else "off",
        "kv_guard_config": "on" if config.guard.enabled else "off",
        "kv_monitor": "off" if not config.monitor.enabled else "on" if unread is None else f"on; {unread}",
        "kv_transfer": NOT_DELIVERED if config.transfer.enabled else "off",
    }
