"""The three modes of ``kv_output.records``, rotation and the spellings of request ids, written by a real engine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvscope.analysis.reader import Trace as StoredTrace
from kvscope.analysis.replay import Replay
from kvscope.analysis.verdict import CLEAN, FINDINGS, INCONCLUSIVE, Verdict, verdict_of
from kvscope.events.schema import json_schema
from kvscope.plugin import HUB
from kvscope.testing import engine
from kvscope.testing.faults import SETTINGS, arm, workload

from .test_healthy import switched_on

# One validator an event, so that a record that fits none says why.
_EVENTS = {"kv.enabled", "kv.bind", "kv.write", "kv.read", "kv.boundary", "kv.coverage"}
_VALIDATORS: dict[str, Any] = {}
_HASH = re.compile("[0-9a-f]{16}")


def validated(folder: Path) -> list[dict[str, Any]]:
    """All records of a run, each held against the JSON Schema of its event that ``kvscope schema`` exports."""
    records = []
    for path in sorted(folder.glob("*/*.jsonl")):
        for line in path.read_bytes().splitlines():
            record = json.loads(line)
            name = record["event"]
            if name not in _VALIDATORS:
                _VALIDATORS[name] = jsonschema.Draft202012Validator(json_schema(name))
            _VALIDATORS[name].validate(record)
            records.append(record)
    return records


def verdict(folder: Path) -> Verdict:
    return verdict_of(Replay(StoredTrace.open(folder)).run())


def run(folder: Path, *, fault: str | None = None, tokens: int = 24, **output: Any) -> list[dict[str, Any]]:
    """The workload, once, with one fault in it or with none; every record that was written."""
    with engine.running(additional_config=switched_on(folder, "log", log="off", **output), **SETTINGS) as llm:
        if fault is None:
            workload(llm, max_tokens=tokens)
        else:
            with arm(fault, after_steps=3) as injection:
                workload(llm, max_tokens=tokens)
            assert injection.fired
    return validated(folder)


@pytest.mark.parametrize(
    ("records", "ids"), [pytest.param("full", "plain", marks=pytest.mark.long_v2), ("compact", "hashed")]
)
def test_what_is_written_is_valid_and_is_judged_offline_as_it_was_live(
    records: str, ids: str, tmp_path: Path, cell: Any
) -> None:
    written = run(tmp_path / "healthy", records=records, request_ids=ids)
    assert {record["event"] for record in written} >= _EVENTS
    judged = verdict(tmp_path / "healthy")
    assert (judged.word, judged.agree, judged.reasons) == (CLEAN, True, [])
    faulty = run(tmp_path / "faulty", fault="slot_foreign_block", records=records, request_ids=ids)
    judged = verdict(tmp_path / "faulty")
    assert (judged.word, judged.agree) == (FINDINGS, True)
    assert "write_foreign_block" in {found.first.reason for found in judged.findings}
    bound = {
        request["request_id"] for record in written if record["event"] == "kv.bind" for request in record["requests"]
    }
    found = {record["request_id"] for record in faulty if record["event"] == "kv.violation"}
    assert bound
    assert found
    assert {bool(_HASH.fullmatch(name)) for name in bound | found} == {ids == "hashed"}
    cell(f"records {records}, request_ids {ids}: {len(written) + len(faulty)} records valid, offline agrees with live")


@pytest.mark.long_v2
def test_findings_alone_and_no_request_ids_are_written_and_called_inconclusive(tmp_path: Path, cell: Any) -> None:
    written = run(tmp_path / "healthy", records="findings", request_ids="omitted")
    assert {record["event"] for record in written} <= {"kv.enabled", "kv.coverage", "kv.error"}
    assert verdict(tmp_path / "healthy").word == INCONCLUSIVE
    faulty = run(tmp_path / "faulty", fault="slot_foreign_block", records="findings", request_ids="omitted")
    # What led to it stands in the incident file all the same, which the flight recorder wrote.
    assert {record["event"] for record in faulty} >= {"kv.violation", "kv.bind", "kv.write", "kv.read"}
    assert {record.get("request_id") for record in faulty if record["event"] == "kv.violation"} == {None}
    assert verdict(tmp_path / "faulty").word == FINDINGS
    cell(f"records findings, request_ids omitted: {len(written) + len(faulty)} records valid")


@pytest.mark.long_v2
def test_rotation_keeps_the_books_balanced(tmp_path: Path, cell: Any) -> None:
    written = run(tmp_path / "kept", records="full", rotate_bytes=32 << 10, retain_files=1000)
    files = sorted((tmp_path / "kept").glob("*/*.jsonl"))
    assert len(files) > 3
    for path in files:  # each can be read by itself
        assert json.loads(path.read_bytes().splitlines()[0])["event"] == "kv.enabled"
    assert verdict(tmp_path / "kept").word == CLEAN
    assert [record["seq"] for record in written] == sorted({record["seq"] for record in written})

    run(tmp_path / "deleted", records="full", rotate_bytes=32 << 10, retain_files=2)
    judged = verdict(tmp_path / "deleted")
    assert len(list((tmp_path / "deleted").glob("*/*.jsonl"))) == 2
    assert judged.word == INCONCLUSIVE
    assert any("deleted by rotation" in note for note in judged.notes)
    assert not any("produced and not written" in reason or "missing in between" in reason for reason in judged.reasons)
    cell(f"rotation: {len(files)} files of one process kept, 2 of as many with the others declared deleted")


@pytest.mark.long_v2
def test_checks_that_no_longer_run_are_named_and_nothing_is_called_clean(runner: engine.Runner, tmp_path: Path) -> None:
    plan = "runner_v1.slots" if runner == "v1" else "runner_v2.attn"
    with engine.running(additional_config=switched_on(tmp_path, "log", log="off"), **SETTINGS) as llm:
        workload(llm, max_tokens=8)
        HUB.ledger.hooks[plan].disabled = True
        try:
            while not HUB.run(*_identity(llm)).coverage.stalled()[0]:
                workload(llm, max_tokens=24)
        finally:
            HUB.ledger.hooks[plan].disabled = False
    stalled = [record.get("checks_stalled") for record in validated(tmp_path) if record["event"] == "kv.coverage"][-1]
    assert stalled.keys() == {"C1", "C2", "C3", "C4", "C5", "C6"}
    judged = verdict(tmp_path)
    assert judged.word == INCONCLUSIVE
    assert any("C1 stands still since step" in reason for reason in judged.reasons)


def _identity(llm: Any) -> tuple[int, str]:
    return os.getpid(), str(llm.llm_engine.vllm_config.instance_id)
