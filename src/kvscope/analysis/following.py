"""A trace as it grows: after each look the tables and blocks as they are now, without judging anything anew.

What ``kvscope top`` shows of a run's folder or a trace. A look reads what came since the one before, so that a long
trace is read once. Findings and coverage are what the live processes recorded; ``analysis.replay`` judges again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from kvscope.analysis.engines import EngineSetup, engines_of
from kvscope.analysis.files import find
from kvscope.analysis.pool import ScheduledPool, pool_operation
from kvscope.analysis.reader import ProcessLog, Trace
from kvscope.analysis.replay import DAMAGE
from kvscope.analysis.tails import Tail
from kvscope.checks.judge import judge_content
from kvscope.events.codec import declaration_from, result_from
from kvscope.events.coverage_schema import CoverageRecord
from kvscope.events.finding_schema import ViolationRecord
from kvscope.events.schema import BindRecord, BoundaryRecord, Record, UnknownRecord, decode_record
from kvscope.facts.allocator import CAUSE_DEFERRED, CAUSE_PIN
from kvscope.facts.topology import Topology
from kvscope.metrics.view import Hold, RequestBlocks
from kvscope.state.bindings import Bindings
from kvscope.state.block_columns import Status
from kvscope.state.blocks import BlockLedger

Sample = tuple[str, dict[str, str], float]

_PLANS = (b'{"event":"kv.write"', b'{"event":"kv.read"')
"""Most of a trace, and nothing that tables or blocks are made of."""
_REMARKS = (b'{"event":"kv.coverage"', b'{"event":"kv.violation"', b'{"event":"kv.enabled"')
"""All that is asked of a process that does not schedule."""

_LOST = "the trace lacks records before this point, so that its tables cannot be told"
_UNOBSERVED = "the trace does not say what the block pool did: KV Guard was off"
_IDS_OMITTED = "this trace leaves request ids out (kv_output.request_ids)"
_NO_ADMISSIONS = "a trace counts no admissions; KV Monitor does"
_NO_TRANSFERS = "a trace measures no transfers; KV Monitor does"
_NOTHING_DECLARED = "this trace declares no step; KV Trace and KV Guard record them"


class Followed(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace says at its end of now. ``samples`` are named as metrics are, without prefix."""

    at_s: float
    samples: list[Sample]
    requests: list[RequestBlocks] | None
    holds: list[Hold] | None
    coverage_share: float | None
    no_data: dict[str, str]


class RunFollower:
    """Follows the run at this path: a run's folder, an output folder (its newest run), or one trace file.

    Raises:
        UnreadableTraceError: there is no trace, here or in a look; or of a schema that this version does not read.
    """

    def __init__(self, path: Path | str) -> None:
        files = find(Path(path))
        self.path = files.directory if files.whole_run else files.asked
        self.run_id = files.directory.name
        self._engines: dict[str, _Engine] = {}
        self._tails: dict[str, Tail] = {}
        self._remarks: dict[str, _Remarks] = {}
        self._last_wall_ns = 0

    def look(self, progress: Callable[[int, int], None] = lambda _done, _all: None) -> Followed:
        """Read on. ``progress`` is told how many bytes of how many have been read in this look."""
        trace = Trace.open(self.path)
        self.run_id = trace.run_id
        for setup in engines_of(trace.logs, whole_run=trace.files.whole_run):
            if setup.declaring is not None and setup.topology is not None:
                known = self._engines.get(setup.declaring.name)
                if known is None:
                    self._engines[setup.declaring.name] = _Engine(setup, setup.topology)
                else:
                    known.setup = setup
        done = 0
        for log in trace.logs:
            for line in self._tails.setdefault(log.name, Tail()).lines(log.files):
                done += len(line) + 1
                self._take(log, line)
                progress(done, trace.size_bytes)
        for name, engine in self._engines.items():
            engine.is_lost |= self._tails[name].is_cut
        return self._followed()

    def _take(self, log: ProcessLog, line: bytes) -> None:
        engine = self._engines.get(log.name)
        if not line.startswith(_REMARKS) and (engine is None or line.startswith(_PLANS)):
            return
        try:
            record = decode_record(line)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            if engine is not None:
                engine.is_lost = True
            return
        if isinstance(record, UnknownRecord):
            return
        self._last_wall_ns = max(self._last_wall_ns, record.wall_ns)
        self._remarks.setdefault(log.name, _Remarks(str(log.dp_rank), log.is_worker)).take(record)
        if engine is not None:
            engine.take(record)

    def _followed(self) -> Followed:
        samples = [sample for remarks in self._remarks.values() for sample in remarks.samples()]
        samples += [sample for engine in self._engines.values() for sample in engine.samples()]
        why = {"reuse": _NO_ADMISSIONS, "transfers": _NO_TRANSFERS}
        troubles = [trouble for engine in self._engines.values() if (trouble := engine.trouble())]
        if not self._engines:
            troubles = [_NOTHING_DECLARED]
        requests = None if troubles else [held for engine in self._engines.values() for held in engine.requests()]
        if requests is None:
            why["requests"] = troubles[0]
        known = [engine.holds() for engine in self._engines.values()]
        holds = [hold for of_engine in known if of_engine is not None for hold in of_engine]
        if None in known or not known:
            why["holds"] = why["pool"] = _UNOBSERVED
        return Followed(
            at_s=self._last_wall_ns / 1e9,
            samples=samples,
            requests=requests,
            holds=None if "holds" in why else holds,
            coverage_share=self._coverage_share(),
            no_data=why,
        )

    def _coverage_share(self) -> float | None:
        """Audited rows of those that were scheduled for every worker; None before both sides have said theirs."""
        audited = scheduled = 0
        for engine in {remarks.engine for remarks in self._remarks.values()}:
            said = [remarks for remarks in self._remarks.values() if remarks.engine == engine]
            audited += sum(remarks.rows()[0] for remarks in said)
            scheduled += sum(remarks.rows()[1] for remarks in said) * sum(remarks.is_worker for remarks in said)
        return min(audited / scheduled, 1.0) if scheduled and audited else None


class _Engine:
    """The scheduler's side of one engine."""

    def __init__(self, setup: EngineSetup, topology: Topology) -> None:
        self.setup = setup
        self._topology = topology
        self._name = str(setup.dp_rank)
        self._bindings = Bindings(topology)
        self._pool = ScheduledPool(topology, self._bindings)
        self._last_mono_ns = 0
        self._ids_omitted = False
        self._last_step = 0
        self.is_lost = False

    def take(self, record: Record) -> None:
        self._last_mono_ns = record.mono_ns
        try:
            self._one(record)
        except DAMAGE as error:
            self._ids_omitted |= "omitted" in str(error)
            self.is_lost = True

    def _one(self, record: Record) -> None:
        if (operation := pool_operation(record)) is not None:
            self._pool.hear(operation, record.mono_ns)
        elif isinstance(record, BindRecord):
            declaration = declaration_from(record)
            is_next = declaration.step == self._last_step + 1 or not self._last_step
            self.is_lost |= declaration.after_unseen or (self._may_lack() and not is_next)
            self._last_step = declaration.step
            self._pool.hand_over(declaration, record)
            self._bindings.apply(declaration.requests)
            if self._pool.advance(declaration) and self._pool.legality is not None:
                judge_content(declaration, self._pool.legality, self.setup.parts)  # it may look into a half full block
            self._pool.end_finished()
        elif isinstance(record, BoundaryRecord) and record.kind == "update_input" and isinstance(record.step, int):
            self._pool.confirm(record.step, result_from(record), may_lack=self._may_lack())

    def _may_lack(self) -> bool:
        """Whether the process has dropped records: only then a step that is not there says nothing."""
        return self.setup.declaring is not None and self.setup.declaring.ever_dropped

    def trouble(self) -> str | None:
        """Why the tables cannot be told."""
        if self._ids_omitted:
            return _IDS_OMITTED
        if self.is_lost:
            return _LOST
        return None if self._last_step else _NOTHING_DECLARED

    def requests(self) -> list[RequestBlocks]:
        bindings, ledger, found = self._bindings, self._ledger(), []
        for request_id in bindings.live:
            table = bindings.table_of(request_id)
            # Who finishes is declared with the next step; the pool has the blocks back at once.
            if table is not None and (ledger is None or ledger.has_live(request_id)):
                null = self._topology.null_block_id
                blocks = sum(sum(block != null for block in group) for group in table.blocks)
                tokens = int(bindings.seq_lens[table.row])
                found.append(RequestBlocks(engine=self._name, request_id=request_id, blocks=blocks, tokens=tokens))
        return found

    def holds(self) -> list[Hold] | None:
        """By cause; None where the pool was not observed."""
        if self._ledger() is None:
            return None
        since_ns: dict[str, int] = {}
        blocks: Counter[str] = Counter()
        for operation, began_ns in self._pool.open_holds.values():
            cause = _cause(operation.cause)
            since_ns[cause] = min(since_ns.get(cause, began_ns), began_ns)
            blocks[cause] += len(operation.block_ids)
        return [
            Hold(
                engine=self._name,
                cause=cause,
                blocks=count,
                for_s=max(self._last_mono_ns - since_ns[cause], 0) / 1e9,
                since_before=False,
            )
            for cause, count in blocks.items()
        ]

    def samples(self) -> Iterator[Sample]:
        ledger = self._ledger()
        if ledger is None:
            return
        ids = np.arange(self._topology.num_blocks)
        status, hashes = ledger.status_of(ids), ledger.hashes_of(ids)
        is_free = status == Status.FREE
        states = {
            "free": is_free & (hashes == 0),
            "cached": is_free & (hashes > 0),
            "used": (status == Status.ACTIVE) | (status == Status.RESERVED),
            "null": status == Status.NULL,
        }
        for state, where in states.items():
            yield "kv_blocks", {"engine": self._name, "state": state}, float(where.sum())
        held, named = int((status == Status.HELD).sum()), 0
        for hold in self.holds() or ():
            blocks = min(hold.blocks, held - named)
            named += blocks
            yield "kv_blocks", {"engine": self._name, "state": "held", "cause": hold.cause}, float(blocks)
        yield "kv_blocks", {"engine": self._name, "state": "held", "cause": "other"}, float(held - named)
        referenced = int((~is_free).sum()) - 1  # the null block is none that could be used
        yield "kv_cache_usage_percent", {"engine": self._name}, 100 * referenced / max(self._topology.num_blocks - 1, 1)

    def _ledger(self) -> BlockLedger | None:
        return self._pool.ledger if self._pool.was_observed and not self.is_lost else None


class _Remarks:
    """What one process said of its own work: its last kv.coverage, and the findings that it has written since."""

    def __init__(self, engine: str, is_worker: bool) -> None:
        self.engine = engine
        self.is_worker = is_worker
        self._coverage: CoverageRecord | None = None
        self._written: Counter[str] = Counter()

    def take(self, record: Record) -> None:
        if isinstance(record, CoverageRecord):
            self._coverage = record
        elif isinstance(record, ViolationRecord):
            self._written[record.reason] += 1

    def rows(self) -> tuple[int, int]:
        """Audited and scheduled."""
        said = self._coverage
        return (0, 0) if said is None else (said.rows, said.rows_scheduled)

    def samples(self) -> Iterator[Sample]:
        said = self._coverage
        told: Counter[str] = Counter()
        for finding in said.findings if said is not None else ():
            told[finding.reason] += finding.count
        for reason in self._written | told:
            yield self._sample("guard_violations_total", max(self._written[reason], told[reason]), reason=reason)
        if said is None:
            return
        yield self._sample("guard_rows_audited_total", said.rows)
        for check, causes in said.checks_skipped.items():
            for cause, count in causes.items():
                yield self._sample("guard_checks_skipped_total", count, check=check, cause=cause.partition(":")[0])
        for check in said.checks_stalled if isinstance(said.checks_stalled, dict) else ():
            yield self._sample("guard_checks_stalled", 1, check=check)
        for hook, time_ns in said.hook_time_ns.items():
            yield self._sample("hook_seconds_total", time_ns / 1e9, hook=hook)
        for hook, count in said.hook_faults.items():
            yield self._sample("hook_faults_total", count, hook=hook)
        for cause, dropped in said.records_dropped.items():
            yield self._sample("records_dropped_total", dropped, cause=cause)

    def _sample(self, name: str, value: float, **labels: str) -> Sample:
        return name, {"engine": self.engine, **labels}, float(value)


def _cause(cause: str) -> str:
    """The cause of a hold, as the metrics name it."""
    return "deferred" if cause == CAUSE_DEFERRED else "connector" if cause == CAUSE_PIN else "other"
