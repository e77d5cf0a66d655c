"""Traces of releases, as real engines wrote them: each can be read by every later release."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from kvscope.analysis.reader import Trace
from kvscope.analysis.replay import Replay
from kvscope.analysis.verdict import FINDINGS, verdict_of
from kvscope.events.schema import RECORDS, json_schema

FIXTURES = Path(__file__).parents[2] / "fixtures"
TRACES = sorted(path.name for path in FIXTURES.glob("trace-*"))


def test_there_is_a_trace_of_this_schema() -> None:
    assert TRACES


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_of_a_release_is_read_and_judged_as_it_was_live(name: str) -> None:
    replay = Replay(Trace.open(FIXTURES / name)).run()
    verdict = verdict_of(replay)
    assert (verdict.word, verdict.agree, verdict.reasons) == (FINDINGS, True, [])
    assert "write_foreign_block" in {found.first.reason for found in verdict.findings}
    assert replay.coverage.share == 1.0
    assert replay.coverage.audited > 100


@pytest.mark.parametrize("name", TRACES)
def test_its_records_fit_the_schema(name: str) -> None:
    validators = {event: jsonschema.Draft202012Validator(json_schema(event)) for event in RECORDS}
    files = sorted((FIXTURES / name).rglob("*.jsonl"))
    assert files
    for path in files:
        for line in path.read_bytes().splitlines():
            record = json.loads(line)
            validators[record["event"]].validate(record)
