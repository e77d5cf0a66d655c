"""Reads what kvscope has recorded about an engine that still runs in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvscope.checks.finding import Finding
from kvscope.events.codec import finding_from
from kvscope.events.envelope import Envelope
from kvscope.events.finding_schema import ViolationRecord
from kvscope.events.schema import BindRecord, decode_record
from kvscope.plugin import HUB
from kvscope.runtime.run import Run


class LiveTrace:
    """The records of one engine's run in this process, from the last `mark` on."""

    def __init__(self, llm: Any) -> None:
        run_id = str(llm.llm_engine.vllm_config.instance_id)
        self.run: Run = HUB.run(os.getpid(), run_id)
        self._read: dict[Path, int] = {}
        self.mark()

    def mark(self) -> None:
        """Forget what has been recorded so far, and let every finding be written out again."""
        self.records()
        self.run.forget_findings()

    def records(self) -> list[Envelope]:
        """What was recorded since the last call."""
        self.run.stream.flush(10.0)
        fresh: list[Envelope] = []
        for path in sorted(self.run.stream.folder.glob(f"{self.run.stream.stem}.*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines = file.readlines()
                self._read[path] = file.tell()
            fresh += [record for record in map(decode_record, lines) if isinstance(record, Envelope)]
        return fresh


def findings_in(records: list[Envelope]) -> list[Finding]:
    """The findings among some records, in their order."""
    return [finding_from(record) for record in records if isinstance(record, ViolationRecord)]


def steps_in(records: list[Envelope]) -> list[int]:
    """The steps with work among some records: entry `i - 1` is the number of the `i`-th one."""
    return [int(record.step) for record in records if isinstance(record, BindRecord) and isinstance(record.step, int)]
