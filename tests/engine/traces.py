"""Reads a finished run for the engine tests, and holds its events against each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from msgspec import UnsetType

from kvscope.events.coverage_schema import CoverageRecord
from kvscope.events.envelope import Envelope
from kvscope.events.finding_schema import ViolationRecord
from kvscope.events.plan_schema import ReadRecord, WriteRecord
from kvscope.events.schema import BindRecord, BoundaryRecord, EnabledRecord, decode_record

R = TypeVar("R", bound=Envelope)


class Trace:
    """All records of one run, file by file in the order of writing."""

    def __init__(self, folder: Path) -> None:
        runs = [path for path in folder.iterdir() if path.is_dir()]
        assert len(runs) == 1, f"one run expected in {folder}, found {runs}"
        self.folder = runs[0]
        self.files: dict[str, list[Envelope]] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            if not path.name.startswith("incident"):
                decoded = [decode_record(line) for line in path.read_bytes().splitlines()]
                self.files[path.name] = [record for record in decoded if isinstance(record, Envelope)]

    @property
    def incidents(self) -> list[Path]:
        return sorted(self.folder.glob("incident-*.jsonl"))

    def of(self, kind: type[R], process: str = "") -> list[R]:
        """Records of one event, of the processes whose file names start so."""
        return [
            record
            for name, records in self.files.items()
            if name.startswith(process)
            for record in records
            if isinstance(record, kind)
        ]

    @property
    def violations(self) -> list[ViolationRecord]:
        return self.of(ViolationRecord)

    @property
    def enabled(self) -> list[EnabledRecord]:
        return self.of(EnabledRecord)

    def last_coverage(self) -> dict[str, CoverageRecord]:
        """The last kv.coverage of each process that wrote one."""
        return {
            name: found[-1]
            for name, records in self.files.items()
            if (found := [record for record in records if isinstance(record, CoverageRecord)])
        }

    def rows_audited(self) -> int:
        return sum(coverage.rows for coverage in self.last_coverage().values())

    def rows_scheduled(self) -> int:
        return sum(coverage.rows_scheduled for coverage in self.last_coverage().values())

    def skipped(self) -> dict[str, dict[str, dict[str, int]]]:
        return {
            name: coverage.checks_skipped for name, coverage in self.last_coverage().items() if coverage.checks_skipped
        }

    def dropped(self) -> dict[str, dict[str, int]]:
        return {
            name: coverage.records_dropped
            for name, coverage in self.last_coverage().items()
            if coverage.records_dropped
        }

    def faults(self) -> dict[str, dict[str, int]]:
        return {name: coverage.hook_faults for name, coverage in self.last_coverage().items() if coverage.hook_faults}

    def preemptions(self) -> int:
        return sum(len(bind.preempted) for bind in self.of(BindRecord))

    def chunked_prompts(self) -> int:
        """Requests whose prompt took more than one step."""
        lengths = {
            request.request_id: request.num_prompt_tokens
            for bind in self.of(BindRecord)
            for request in bind.requests
            if request.kind == "new"
        }
        steps: dict[str | None, int] = defaultdict(int)
        for bind in self.of(BindRecord):
            for request in bind.requests:
                computed, length = request.num_computed_tokens, lengths.get(request.request_id)
                if isinstance(computed, int) and isinstance(length, int) and computed < length:
                    steps[request.request_id] += 1
        return sum(count > 1 for count in steps.values())

    def engine_ids_of(self, client_id: str) -> set[str]:
        """The engine requests that serve what the client sees as ``client_id`` (an HTTP answer's id is a prefix)."""
        found = {
            admitted.request_id
            for admitted in self.of(BoundaryRecord)
            if admitted.kind == "frontend_admit"
            and isinstance(admitted.client_request_id, str)
            and (admitted.client_request_id == client_id or admitted.client_request_id.startswith(f"{client_id}-"))
        }
        return {request_id for request_id in found if isinstance(request_id, str)}

    def unfollowed(self, client_ids: Iterable[str], ranks: int = 1) -> list[str]:
        """What is missing for these requests: each must be admitted, bound, and in each of its steps written and read
        by every rank under the trace_id of the bind. Empty when nothing is missing.
        """
        written = _requests_by_trace(self.of(WriteRecord))
        read = _requests_by_trace(self.of(ReadRecord))
        binds: dict[str, list[str]] = defaultdict(list)
        for bind in self.of(BindRecord):
            assert isinstance(bind.trace_id, str)
            for request in bind.requests:
                binds[str(request.request_id)].append(bind.trace_id)
        missing = []
        for client_id in client_ids:
            engine_ids = self.engine_ids_of(client_id)
            if not engine_ids:
                missing.append(f"{client_id}: not admitted")
            for engine_id in engine_ids:
                if not binds[engine_id]:
                    missing.append(f"{engine_id}: not bound")
                missing += [
                    f"{engine_id}: bound in {trace_id}, not written and read there"
                    for trace_id in binds[engine_id]
                    if written[trace_id].count(engine_id) != ranks or read[trace_id].count(engine_id) != ranks
                ]
        return missing


def _requests_by_trace(records: Iterable[WriteRecord] | Iterable[ReadRecord]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for record in records:
        assert not isinstance(record.trace_id, UnsetType)
        found[record.trace_id] += [str(request_id) for request_id in record.requests]
    return found
