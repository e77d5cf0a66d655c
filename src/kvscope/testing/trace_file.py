"""The file of one process of a built trace."""

from __future__ import annotations

from pathlib import Path

from msgspec import UnsetType

from kvscope.events.codec import Identity, encode, stamp
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
