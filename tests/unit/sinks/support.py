"""A stream in a folder, and what a reader finds there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvscope.checks.finding import Finding
from kvscope.config import OutputConfig
from kvscope.events.codec import Identity, coverage_record, enabled_record
from kvscope.events.names import PLAIN, RequestNames
from kvscope.events.schema import EnabledRecord
from kvscope.facts.topology import Ranks
from kvscope.sinks.kinds import Violation
from kvscope.sinks.stream import Stream
from unit.events.samples import RULE, decode_batch

RUN = "run-1"
DECLARATION, SNAPSHOT = decode_batch(2)


def enabled() -> EnabledRecord:
    return enabled_record(run_id=RUN, process="worker", pid=1, configuration={}, parts={}, actions={})


def make_stream(folder: Path, *, names: RequestNames = PLAIN, **output: Any) -> Stream:
    output.setdefault("log", "off")
    return Stream(
        folder,
        RUN,
        "worker",
        3,
        output=OutputConfig(**output),
        identity=Identity(engine_id="0", ranks=Ranks(dp=0, tp=1, world=3)),
        names=names,
    )


def put_bind(stream: Stream, step: int = 1, **more: Any) -> None:
    stream.put("bind", DECLARATION, component="scheduler", boundary="Scheduler.schedule", step=step, **more)


def put_plan(stream: Stream, step: int = 1, **more: Any) -> None:
    stream.put("plan", SNAPSHOT, component="runner", boundary="GPUModelRunner", step=step, **more)


def violation(request_id: str = "r", *, reason: str = "write_target_mismatch", step: int = 1) -> Violation:
    finding = Finding(reason=reason, step=step, trace_id="t", request_id=request_id)
    return Violation(finding=finding, rule=RULE, action="log", repeats=0)


def files(stream: Stream) -> list[Path]:
    return sorted(stream.folder.glob("*-3-*.jsonl"), key=lambda path: int(path.name.split(".")[-2]))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def put_coverage(stream: Stream) -> None:
    record = coverage_record(
        steps=1,
        empty_steps=0,
        rows_scheduled=1,
        rows=1,
        tokens=1,
        checks_run={},
        checks_skipped={},
        hook_calls={},
        hook_faults={},
        hook_time_ns={},
    )
    stream.put("coverage", record, component="worker", boundary="end")


def written(stream: Stream) -> list[dict[str, Any]]:
    return [record for path in files(stream) for record in lines(path)]
