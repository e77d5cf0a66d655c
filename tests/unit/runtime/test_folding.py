"""Of many findings few are written, the last one among them, and none hides that of another request."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvscope.checks.finding import Finding
from kvscope.runtime.folding import SECONDS_A_SUBJECT, SUBJECTS, FindingFolds
from kvscope.sinks.log import LINES_A_MINUTE
from kvscope.sinks.ring import INCIDENTS_A_MINUTE
from unit.runtime.support import last_coverage, make_run, of_event, records

STEPS = 10_000


def finding(step: int = 1, request_id: str | None = "a", reason: str = "write_foreign_block", **more: Any) -> Finding:
    return Finding(**{"reason": reason, "step": step, "trace_id": "t", "request_id": request_id, "group_id": 0, **more})


def written(folds: FindingFolds, findings: Iterator[Finding] | list[Finding], now: float = 0.0) -> list[Finding]:
    return [found for found in findings if folds.take(found, "runner", "plan", now)]


def test_ever_fewer_repetitions_are_written() -> None:
    folds = FindingFolds()
    steps = [found.step for found in written(folds, map(finding, range(1, 101)))]
    assert steps == [1, 2, 4, 8, 16, 32, 64]
    assert [last.finding.step for last in folds.take_unwritten()] == [100]
    assert list(folds.take_unwritten()) == []


def test_what_was_written_is_not_written_again_at_the_end() -> None:
    folds = FindingFolds()
    written(folds, [finding(1), finding(2)])
    assert list(folds.take_unwritten()) == []


@pytest.mark.parametrize("other", [{"request_id": "b"}, {"reason": "null_block_write"}, {"group_id": 1}])
def test_an_endless_repetition_hides_no_other(other: dict[str, Any]) -> None:
    folds = FindingFolds()
    written(folds, map(finding, range(1, 1000)))
    another = finding(1000, **other)
    assert written(folds, [another]) == [another]


def test_where_no_request_is_named_blocks_are_told_apart() -> None:
    folds = FindingFolds()
    found = [finding(step, None, "double_free", block_id=step % 3) for step in range(3, 15)]
    assert [(f.block_id, f.step) for f in written(folds, found)] == [
        (0, 3), (1, 4), (2, 5), (0, 6), (1, 7), (2, 8), (0, 12), (1, 13), (2, 14),
    ]  # fmt: skip


def test_very_many_requests_are_written_as_they_come_and_then_a_few_at_a_time() -> None:
    """Bounded in memory and in rate, and never full."""
    folds = FindingFolds()
    storm = [finding(step, f"r{step}") for step in range(1, STEPS + 1)]
    assert written(folds, storm) == storm[:SUBJECTS]
    fold = folds.of("write_foreign_block", 0)
    assert fold is not None
    assert fold.unnamed == STEPS - SUBJECTS
    later = [finding(STEPS + 1, f"late{n}") for n in range(5)]
    assert len(written(folds, later, now=2 * SECONDS_A_SUBJECT)) == 2
    assert len(fold._subjects) == SUBJECTS
    everybody = [finding(STEPS + 2, f"next{n}") for n in range(200)]
    assert len(written(folds, everybody, now=1e6)) == SUBJECTS


# What comes out of a run ---------------------------------------------------------------------------------------------


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("vllm.kvscope")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_one_fault_in_a_run_of_ten_thousand_steps_is_told_a_few_times_and_counted_exactly(
    tmp_path: Path, lines: Lines
) -> None:
    run = make_run(tmp_path, log="findings")
    run.open()
    for step in range(1, STEPS + 1):
        run.report([finding(step, block_id=step % 7)], "runner", "plan")
    said = of_event(run, "kv.violation")
    assert [record["step"] for record in said] == [2**n for n in range(14)] + [STEPS]
    assert [record["repeats"] for record in said] == [record["step"] - 1 for record in said]
    assert len([text for text in lines.texts if text.startswith("KV_GUARD ")]) == 15
    assert [path.name for path in run.stream.folder.glob("incident-*")] == ["incident-0.jsonl"]
    coverage = last_coverage(run)
    assert coverage["findings"] == [
        {
            "reason": "write_foreign_block", "group_id": 0, "count": STEPS, "first_step": 1, "last_step": STEPS,
            "written": 15, "unnamed": 0, "last_request_id": "a", "last_block_id": STEPS % 7,
        }
    ]  # fmt: skip
    assert (coverage["log_suppressed"], coverage["incidents_suppressed"]) == (0, 14)
    assert records(run)[-1]["event"] == "kv.coverage"


def test_a_fault_that_hits_ten_thousand_requests_leaves_room_for_others(tmp_path: Path, lines: Lines) -> None:
    """In the trace, in the log and among the incidents."""
    run = make_run(tmp_path, log="findings")
    run.open()
    for step in range(1, STEPS + 1):
        run.report([finding(step, f"r{step}")], "runner", "plan")
    run.report([finding(STEPS, "victim", "null_block_write")], "runner", "plan")
    said = of_event(run, "kv.violation")
    assert SUBJECTS + 2 <= len(said) <= SUBJECTS + 4  # a slow machine takes more than ten seconds for it
    assert {said[-1]["request_id"], said[-2]["request_id"]} == {f"r{STEPS}", "victim"}
    logged = [text for text in lines.texts if text.startswith("KV_GUARD ")]
    assert LINES_A_MINUTE < len(logged) <= LINES_A_MINUTE + 2
    assert any("victim" in text for text in logged)
    told = [text for text in lines.texts if "more findings were not logged" in text]
    assert told
    incidents = [path.read_text() for path in run.stream.folder.glob("incident-*")]
    assert INCIDENTS_A_MINUTE < len(incidents) <= INCIDENTS_A_MINUTE + 1
    assert sum("victim" in text for text in incidents) == 1
    coverage = last_coverage(run)
    assert {said["reason"]: said["count"] for said in coverage["findings"]} == {
        "write_foreign_block": STEPS, "null_block_write": 1,
    }  # fmt: skip
    assert coverage["log_suppressed"] == len(said) - len(logged)
    assert coverage["incidents_suppressed"] == len(said) - len(incidents)


def test_what_was_forgotten_is_written_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.open()
    run.report([finding(1), finding(2), finding(3)], "runner", "plan")
    run.forget_findings()
    run.report([finding(4)], "runner", "plan")
    assert [(said["step"], said["repeats"]) for said in of_event(run, "kv.violation")] == [(1, 0), (2, 1), (4, 0)]
