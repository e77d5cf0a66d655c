from __future__ import annotations

import json
import logging

import pytest

from kvscope.config import LogLevel
from kvscope.events import codec
from kvscope.events.envelope import Envelope
from kvscope.sinks.log import LINES_A_MINUTE, LogSink
from unit.sinks.conftest import Logged
from unit.sinks.support import DECLARATION, violation


@pytest.mark.parametrize(("mode", "events"), [("off", []), ("findings", ["F"]), ("all", ["B", "F"])])
def test_each_mode_logs_what_it_says_as_a_tag_and_one_object(mode: LogLevel, events: list[str], logged: Logged) -> None:
    fact = violation("a\nb")
    records: dict[str, Envelope] = {
        "B": codec.bind_record(DECLARATION),
        "F": codec.violation_record(fact.finding, fact.rule, fact.action, 0),
    }
    sink = LogSink(mode, "TAG")
    for record in records.values():
        sink.offer(record, codec.encode(record))
    messages = [entry.getMessage() for entry in logged.records]
    assert [message.split(" ", 1)[0] for message in messages] == ["TAG"] * len(events)
    assert all(len(message.splitlines()) == 1 for message in messages)
    objects = [json.loads(message.split(" ", 1)[1]) for message in messages]
    assert objects == [json.loads(codec.encode(records[name])) for name in events]


def test_a_finding_has_the_level_of_its_severity_and_comes_through_vllms_logger(
    logged: Logged,
) -> None:
    fact = violation()
    record = codec.violation_record(fact.finding, fact.rule, fact.action, 0)
    LogSink("findings", "KV_GUARD").offer(record, codec.encode(record))
    (entry,) = logged.records
    assert entry.levelno == logging.ERROR
    assert entry.name.startswith("vllm.")


def test_a_storm_is_cut_off_and_said_to_be(logged: Logged) -> None:
    now = 0
    sink = LogSink("all", "TAG", clock=lambda: now)

    def offer(request_id: str, reason: str = "write_target_mismatch") -> None:
        fact = violation(request_id, reason=reason)
        record = codec.violation_record(fact.finding, fact.rule, fact.action, 0)
        sink.offer(record, codec.encode(record))

    for index in range(LINES_A_MINUTE + 5):
        offer(f"r{index}")
    assert (len(logged.records), sink.suppressed) == (LINES_A_MINUTE, 5)
    offer("other", "double_free")
    assert "5 more findings were not logged" in logged.records[-2].getMessage()
    assert "double_free" in logged.records[-1].getMessage()
    offer("left out")
    now = 61 * 10**9
    offer("late")
    assert "1 more finding was not logged" in logged.records[-2].getMessage()
    assert "late" in logged.records[-1].getMessage()
    bind = codec.bind_record(DECLARATION)
    for _ in range(LINES_A_MINUTE + 1):  # what is asked for beside findings is not cut off
        sink.offer(bind, codec.encode(bind))
    assert len(logged.records) == 2 * LINES_A_MINUTE + 5
    sink.tell_suppressed()
    assert len(logged.records) == 2 * LINES_A_MINUTE + 5
