from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvscope.events import codec
from kvscope.events.finding_schema import ViolationRecord
from kvscope.sinks.ring import INCIDENTS_A_MINUTE, MOST_INCIDENTS, FlightRecorder
from unit.sinks.support import violation

ENABLED = b'{"event":"kv.enabled"}\n'


def record(request_id: str = "r", reason: str = "write_target_mismatch") -> tuple[ViolationRecord, bytes]:
    fact = violation(request_id, reason=reason)
    made = codec.violation_record(fact.finding, fact.rule, fact.action, 0)
    return made, codec.encode(made) + b"\n"


def line(step: int) -> bytes:
    return b'{"event":"kv.bind","step":%d}\n' % step


def fill(ring: FlightRecorder, steps: int) -> None:
    for step in range(1, steps + 1):
        ring.keep(step, 100, lambda step=step: [line(step)])


def told(path: Path | None) -> list[object]:
    assert path is not None
    return [entry.get("step", entry["event"]) for entry in map(json.loads, path.read_bytes().splitlines())]


def test_an_incident_has_kv_enabled_the_last_steps_and_the_violation(tmp_path: Path) -> None:
    ring = FlightRecorder(steps=3, max_bytes=10_000)
    fill(ring, 10)
    made, text = record()
    made.step = 10
    ring.keep(10, 100, lambda: [text])  # the violation is kept, too, and told once
    path = ring.write_incident(tmp_path, ENABLED, made, text)
    assert path == tmp_path / "incident-0.jsonl"
    assert told(path)[:4] == ["kv.enabled", 8, 9, 10]
    assert len(told(path)) == 5
    assert path.read_bytes().endswith(text)


def test_the_bytes_are_bounded_as_well(tmp_path: Path) -> None:
    ring = FlightRecorder(steps=1000, max_bytes=250)
    fill(ring, 10)
    assert told(ring.write_incident(tmp_path, ENABLED, *record()))[1:-1] == [9, 10]
    ring.keep(11, 10_000, lambda: [line(11)])
    assert told(ring.write_incident(tmp_path, ENABLED, *record("other")))[1:-1] == []


def test_one_incident_a_reason_and_request(tmp_path: Path) -> None:
    ring = FlightRecorder(steps=3, max_bytes=1000)
    assert ring.write_incident(tmp_path, ENABLED, *record("a")) is not None
    assert ring.write_incident(tmp_path, ENABLED, *record("a")) is None
    assert ring.write_incident(tmp_path, ENABLED, *record("b")) is not None
    assert ring.write_incident(tmp_path, ENABLED, *record("a", "read_after_release")) is not None
    assert ring.suppressed == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_the_rate_is_limited_and_recovers(tmp_path: Path) -> None:
    now = 0
    ring = FlightRecorder(steps=3, max_bytes=1000, clock=lambda: now)
    written = [ring.write_incident(tmp_path, ENABLED, *record(f"r{index}")) for index in range(20)]
    assert sum(path is not None for path in written) == 8
    now = 61 * 10**9
    assert ring.write_incident(tmp_path, ENABLED, *record("r19")) is not None
    assert ring.suppressed == 12


def test_many_incidents_of_one_reason_leave_room_for_another(tmp_path: Path) -> None:
    """Within a minute, and in all."""
    now = 0
    ring = FlightRecorder(steps=3, max_bytes=1000, clock=lambda: now)
    for index in range(INCIDENTS_A_MINUTE):
        ring.write_incident(tmp_path, ENABLED, *record(f"r{index}"))
    assert ring.write_incident(tmp_path, ENABLED, *record("late")) is None
    assert ring.write_incident(tmp_path, ENABLED, *record("late", "double_free")) is not None
    for index in range(200):
        now += 61 * 10**9
        ring.write_incident(tmp_path, ENABLED, *record(f"q{index}"))
    assert len(list(tmp_path.iterdir())) == MOST_INCIDENTS
    now += 61 * 10**9
    assert ring.write_incident(tmp_path, ENABLED, *record("late", "leak_after_finish")) is not None
    assert ring.write_incident(tmp_path, ENABLED, *record("later", "leak_after_finish")) is None


def test_processes_of_a_run_share_the_numbers(tmp_path: Path) -> None:
    one, other = (FlightRecorder(steps=3, max_bytes=1000) for _ in range(2))
    paths = [ring.write_incident(tmp_path, ENABLED, *record()) for ring in (one, other)]
    assert [path.name for path in paths if path] == ["incident-0.jsonl", "incident-1.jsonl"]


def test_an_incident_that_could_not_be_written_is_tried_again(tmp_path: Path) -> None:
    ring = FlightRecorder(steps=3, max_bytes=1000)
    with pytest.raises(OSError):
        ring.write_incident(tmp_path / "missing", ENABLED, *record())
    assert ring.write_incident(tmp_path, ENABLED, *record()) is not None
