"""The file that the flight recorder leaves is enough to read what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvscope.checks.finding import Finding
from kvscope.cli import main
from kvscope.facts.allocator import PoolOperation
from kvscope.state.blocks import BlockLedger
from unit.runtime.support import Live

Capture = pytest.CaptureFixture[str]
STEPS = 9


def said(kind: str, block_ids: list[int], request_id: str, **fields: Any) -> PoolOperation:
    return PoolOperation(
        **{"kind": kind, "block_ids": block_ids, "request_id": request_id, "group_id": 0, "first_index": 0, **fields}
    )


@pytest.fixture(params=["compact", "findings", "full"])
def incident(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Left by a process that wrote a finding with its block's history, and was killed."""
    live = Live(tmp_path, records=request.param, ring_steps=4)
    ledger = BlockLedger(16, 0)
    live.warm()
    ledger.apply(said("alloc", [4, 5, 6], "z"), 1)
    for step in range(2, STEPS + 1):
        live.decode(38 + step)
    ledger.apply(said("free", [4, 5, 6], "z", cause="preempt"), 6)
    ledger.apply(said("alloc", [4, 5, 6], "b"), 7)
    finding = Finding(
        reason="write_foreign_block", step=STEPS, trace_id=f"run.0.{STEPS}", request_id="a", other_request_id="b",
        row=0, group_id=0, position=47, block_id=5, slot=85, expected=63, actual=85,
    )  # fmt: skip
    live.run.report([finding], "runner", "plan", ledger=ledger)
    live.run.stream.flush()
    (path,) = live.run.stream.folder.glob("incident-*.jsonl")
    return path


def test_an_incident_has_the_last_steps_and_then_the_finding(incident: Path) -> None:
    lines = [json.loads(line) for line in incident.read_bytes().splitlines()]
    assert (lines[0]["event"], lines[-1]["event"]) == ("kv.enabled", "kv.violation")
    assert sorted({line["step"] for line in lines[1:]}) == [6, 7, 8, 9]
    assert lines[-2]["event"] == "kv.state"
    assert {"kv.bind", "kv.write", "kv.read"} <= {line["event"] for line in lines}
    assert sum(line["event"] == "kv.violation" for line in lines) == 1


@pytest.mark.parametrize("color", [False, True])
def test_an_incident_alone_tells_the_whole_story(
    incident: Path, color: bool, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not color:
        monkeypatch.setenv("NO_COLOR", "1")
    assert main(["check", str(incident)]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out  # it goes to no terminal, whatever the environment says
    text = " ".join(out.split())
    assert "KV_GUARD reason=write_foreign_block check=C3 action=log request=a group=0 block=5 slot=85" in text
    assert "allocated for b in step 7: generation 2 (the 2nd time that it was handed out)" in text
    assert "freed by z in step 6, when it was preempted: the end of generation 1" in text
    assert "neighbours N . . . R R R . . ." in text
    assert [line for line in out.splitlines() if len(line) > 80 and not line.startswith("KV_GUARD ")] == []


def test_info_reads_an_incident(incident: Path, capsys: Capture) -> None:
    assert main(["info", str(incident)]) == 0
    assert "findings      write_foreign_block: 1 live, 0 in the replay" in capsys.readouterr().out


def test_a_folder_with_incidents_is_read_without_counting_twice(incident: Path, capsys: Capture) -> None:
    assert main(["info", str(incident.parent)]) == 0
    out = capsys.readouterr().out
    assert "write_foreign_block: 1 live" in out
    assert "incidents     1 files of the flight recorder" in out


def test_json_has_the_history(incident: Path, capsys: Capture) -> None:
    main(["check", str(incident), "--json"])
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["entry"]["history"]["freed_cause"] == "preempt"
