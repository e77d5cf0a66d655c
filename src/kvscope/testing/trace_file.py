"""The file of one process of a built trace, and what stands at its end."""

from __future__ import annotations

from pathlib import Path

from msgspec import UnsetType

from kvscope.events.codec import Identity, coverage_record, encode, stamp
from kvscope.events.coverage_schema import CoverageRecord
from kvscope.events.envelope import Envelope
from kvscope.facts.topology import Ranks

STEP_NS = 1_000_000


class TraceFile:
    """The file of one process. Its clock advances by a microsecond a record and a millisecond a step, and by
    ``waited_ns``.
    """

    def __init__(self, directory: Path, process: str, rank: int, pid: int, engine_id: str, ranks: Ranks) -> None:
        self.process, self.rank, self.pid = process, rank, pid
        self.path = directory / f"{process}-{rank}-{pid}.0.jsonl"
        self.identity = Identity(engine_id=engine_id, ranks=ranks)
        self.seq = 0
        self.waited_ns = 0
        self._file = self.path.open("wb")

    def write(
        self, record: Envelope, component: str, boundary: str, *, step: int | None = None, after: int = 0
    ) -> None:
        self.seq += 1
        when = step if step is not None else after if isinstance(record.step, UnsetType) else record.step
        mono_ns = self.clock(when)
        stamp(
            record,
            self.identity,
            seq=self.seq,
            component=component,
            boundary=boundary,
            mono_ns=mono_ns,
            wall_ns=1_700_000_000_000_000_000 + mono_ns,
            step=step,
            after_step=after,
        )
        self._file.write(encode(record) + b"\n")

    def clock(self, step: int) -> int:
        """Nanoseconds, as the last record has them if it is about the step."""
        return self.waited_ns + step * STEP_NS + self.seq * 1_000

    def close(self) -> None:
        self._file.close()


def coverage_of(
    stream: TraceFile, declares: bool, audits: bool, *, steps: int, rows: int, tokens: int
) -> CoverageRecord:
    """What a process of this role counts: steps and scheduled rows in EngineCore alone, audited rows in workers."""
    once = ["scheduler.create"] if declares else []
    once += ["worker.cache"] if audits else []
    hooks = ["scheduler.schedule"] if declares else []
    hooks += ["worker.execute", "runner_v1.slots"] if audits else []
    record = coverage_record(
        steps=steps if declares else 0,
        empty_steps=0,
        rows_scheduled=rows if declares else 0,
        rows=rows if audits else 0,
        tokens=tokens if audits else 0,
        checks_run={"C1": rows} if audits else {},
        checks_skipped={},
        hook_calls={**dict.fromkeys(once, 1), **dict.fromkeys(hooks, steps)},
        hook_faults={},
        hook_time_ns={**dict.fromkeys(once, 5_000_000), **dict.fromkeys(hooks, steps * 20_000)},
    )
    record.records_written = stream.seq
    return record
