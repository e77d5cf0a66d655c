"""A run is read in order whatever happened to its files, and what is missing is counted."""

from __future__ import annotations

import mmap
import re
import time
from datetime import datetime
from pathlib import Path

import pytest
from tests import budget

from kvscope.analysis.files import find
from kvscope.analysis.reader import Trace, step_of
from kvscope.analysis.replay import Replay
from kvscope.analysis.row_coverage import NO_PLAN
from kvscope.analysis.summary import summarize
from kvscope.analysis.verdict import CLEAN, EXIT_CODES, INCONCLUSIVE, NO_ORDERLY_END, verdict_of
from kvscope.errors import UnreadableTraceError
from kvscope.events.schema import BindRecord
from kvscope.sinks.shared import C_CLOSED, C_PRODUCED, SharedFile
from kvscope.testing.trace import TraceBuilder


def make(directory: Path, *, steps: int = 3, coverage: bool = True, **layout: int) -> Path:
    builder = TraceBuilder(directory, **layout)
    builder.step({"r1": 20})
    for _ in range(steps - 1):
        builder.step({"r1": 1})
    return builder.close(coverage=coverage)


def read(path: Path) -> Trace:
    trace = Trace.open(path)
    for _ in trace.records():
        pass
    return trace


def only_file(run: Path) -> Path:
    (path,) = run.glob("all-*.jsonl")
    return path


def test_the_declaration_of_a_step_comes_before_what_workers_do_with_it(tmp_path: Path) -> None:
    trace = Trace.open(make(tmp_path / "run", ranks=3))
    order = [(step_of(entry.record), isinstance(entry.record, BindRecord)) for entry in trace.records()]
    assert [step for step, _ in order] == sorted(step for step, _ in order)
    for step in (1, 2, 3):
        # kv.enabled is written after step 0, so a step's records begin with its declaration.
        assert next(bind for of, bind in order if of == step)


def test_of_several_runs_the_newest_is_read_and_the_others_are_named(tmp_path: Path) -> None:
    old, new = make(tmp_path / "a"), make(tmp_path / "b")
    files = find(tmp_path)
    assert (files.directory, files.others) == (new, [old])


def test_one_file_can_be_read_alone(tmp_path: Path) -> None:
    run = make(tmp_path / "run", in_process=True)
    renamed = run / "saved.jsonl"
    only_file(run).rename(renamed)
    assert verdict_of(Replay(Trace.open(renamed)).run()).word == CLEAN


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"hello\nworld\n", "holds no complete"), (b'{"schema":', "holds no complete")],
)
def test_what_is_no_trace_is_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(UnreadableTraceError, match=message) as caught:
        Trace.open(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_trace_and_a_path_without_anything(tmp_path: Path) -> None:
    with pytest.raises(UnreadableTraceError, match="no trace in this folder"):
        Trace.open(tmp_path)
    with pytest.raises(UnreadableTraceError, match="no such file or folder"):
        Trace.open(tmp_path / "absent")


def test_another_schema_is_refused(tmp_path: Path) -> None:
    run = make(tmp_path / "run", in_process=True)
    path = only_file(run)
    path.write_text(path.read_text().replace("kvscope.trace/1", "kvscope.trace/10"))
    with pytest.raises(UnreadableTraceError, match=r"kvscope.trace/10.*reads 'kvscope.trace/1'"):
        Trace.open(run)


def test_garbage_unknown_events_and_gaps_are_counted(tmp_path: Path) -> None:
    run = make(tmp_path / "run", in_process=True)
    path = only_file(run)
    lines = path.read_text().splitlines()
    future = lines[3].replace('"kv.write"', '"kv.future"').replace('"event":"kv.boundary"', '"event":"kv.future"')
    extended = lines[5].replace('{"event"', '{"a_new_field":[1,{}],"event"')
    path.write_text("\n".join([*lines[:3], future, "\x00\xff garbage", extended, *lines[7:]]) + "\n")
    (log,) = read(run).logs
    assert (log.garbage, log.unknown, log.missing, log.truncated) == (1, 1, 2, False)
    assert log.events["kv.future"] == 1
    assert verdict_of(Replay(Trace.open(run)).run()).word == INCONCLUSIVE


def test_rotated_files_are_one_stream(tmp_path: Path) -> None:
    run = make(tmp_path / "run", in_process=True, steps=12)
    _rotate(only_file(run), pieces=11, deleted=0)
    trace = read(run)
    assert (trace.logs[0].missing, trace.logs[0].first_seq, len(trace.logs[0].files.paths)) == (0, 1, 11)
    assert verdict_of(Replay(Trace.open(run)).run()).word == CLEAN


@pytest.mark.parametrize(("declared", "excused"), [(2, True), (0, False)])
def test_a_deleted_file_is_a_gap_unless_the_process_says_that_it_deleted_it(
    tmp_path: Path, declared: int, excused: bool
) -> None:
    run = make(tmp_path / "run", in_process=True, steps=12)
    pieces = _rotate(only_file(run), pieces=4, deleted=declared)
    for piece in pieces[:2]:
        piece.unlink()
    verdict = verdict_of(Replay(Trace.open(run)).run())
    assert any("before the first one" in reason for reason in verdict.reasons) is not excused
    assert any("deleted by rotation" in note for note in verdict.notes) is excused


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_processes_that_rotated_at_different_places_cause_no_finding_and_are_not_called_clean(
    tmp_path: Path, kept: int
) -> None:
    """What is left of EngineCore's file begins elsewhere than what is left of the worker's."""
    builder = TraceBuilder(tmp_path / "run")
    live: list[str] = []
    for number in range(60):
        new = [f"r{number}"] if number % 4 == 0 else []
        gone = [live.pop(0)] if number % 6 == 5 else []
        live += new
        builder.step({**dict.fromkeys(live, 1), **dict.fromkeys(new, 20)}, finished=gone)
    run = builder.close()
    for process, pieces in (("engine", 7), ("worker", 11)):
        (path,) = run.glob(f"{process}-*.jsonl")
        for piece in _rotate(path, pieces, deleted=pieces - kept)[:-kept]:
            piece.unlink()
    replay = Replay(Trace.open(run)).run()
    verdict = verdict_of(replay)
    assert (verdict.word, verdict.findings) == (INCONCLUSIVE, [])
    assert sum("deleted by rotation" in note for note in verdict.notes) == 2
    assert not any("before the first one" in reason for reason in verdict.reasons)
    assert replay.coverage.audited + replay.coverage.skipped.total() == replay.coverage.scheduled


@pytest.mark.parametrize("clock", ["0", "-5", "backwards", "9223372036854775807"])
def test_clocks_have_no_say_in_the_order(tmp_path: Path, clock: str) -> None:
    run = make(tmp_path / "run", ranks=2, steps=6)
    for path in run.glob("*.jsonl"):
        lines = path.read_text().splitlines()
        for index, line in enumerate(lines):
            value = str(10**18 - index * 10**12) if clock == "backwards" else clock
            lines[index] = re.sub(r'"(mono_ns|wall_ns)":-?\d+', rf'"\1":{value}', line)
        path.write_text("".join(f"{line}\n" for line in lines))
    replay = Replay(Trace.open(run)).run()
    assert verdict_of(replay).word == CLEAN
    assert 0 <= summarize(replay).duration_s < 10**6


def _rotate(path: Path, pieces: int, deleted: int) -> list[Path]:
    """The trace in several files, each with its kv.enabled, numbered on as a process would."""
    first, *lines = path.read_text().splitlines()
    made: list[Path] = []
    seq = 0
    for number in range(pieces):
        piece = path.with_name(path.name.replace(".0.", f".{number}."))
        enabled = first.replace('"files_deleted":0', f'"files_deleted":{deleted}')
        part = [enabled, *lines[number * len(lines) // pieces : (number + 1) * len(lines) // pieces]]
        numbered: list[str] = []
        for line in part:
            seq += 1
            before, _, after = line.partition('"seq":')
            numbered.append(f'{before}"seq":{seq}{after[after.index(",") :]}\n')
        piece.write_text("".join(numbered))
        made.append(piece)
    return made


def _shared(run: Path, name: str = "all-0-100", *, produced: int, closed: bool = False, dropped: int = 0) -> None:
    process, rank, pid = name.split("-")
    shared = SharedFile(run / f"{name}.shared", process=process, rank=int(rank), dp_rank=0, pid=int(pid))
    shared.cells[C_PRODUCED] = produced
    shared.cells[C_CLOSED] = int(closed)
    shared.cells[16] = dropped
    assert isinstance(shared.memory, mmap.mmap)


def test_the_shared_file_tells_the_exact_loss_of_a_killed_process(tmp_path: Path) -> None:
    run = make(tmp_path / "run", in_process=True, coverage=False)
    written = read(run).logs[0].last_seq
    _shared(run, produced=written + 7)
    verdict = verdict_of(Replay(Trace.open(run)).run())
    assert (verdict.word, verdict.reasons) == (
        INCONCLUSIVE,
        ["all-0-100: 7 records produced and not written (killed, or still running)"],
    )


def test_a_killed_process_that_lost_nothing_can_be_clean(tmp_path: Path) -> None:
    run = make(tmp_path / "run", in_process=True, coverage=False)
    _shared(run, produced=read(run).logs[0].last_seq)
    assert verdict_of(Replay(Trace.open(run)).run()).word == CLEAN


def _killed(directory: Path, steps: int, lost: int = 0) -> Path:
    """A run whose processes were all killed, ``lost`` records of the worker with them."""
    run = make(directory / "run", steps=steps, coverage=False)
    for log in read(run).logs:
        _shared(run, log.name, produced=log.last_seq + (lost if log.process == "worker" else 0))
    return run


def test_a_run_killed_while_it_was_idle_is_judged_by_its_counts(tmp_path: Path) -> None:
    verdict = verdict_of(Replay(Trace.open(_killed(tmp_path, steps=3))).run())
    assert (verdict.word, verdict.reasons) == (CLEAN, [])
    assert verdict.coverage_line.startswith("coverage: 3 of 3 rows")
    told = "killed or still running, and nothing that it produced is missing"
    assert verdict.notes[:2] == [f"engine-0-100: {told}", f"worker-0-200: {told}"]


@pytest.mark.parametrize(("steps", "word"), [(3, INCONCLUSIVE), (300, CLEAN)])
def test_a_run_killed_within_a_step_is_judged_by_how_much_of_it_was_carried_out(
    tmp_path: Path, steps: int, word: str
) -> None:
    """The last step is declared, and no worker recorded it; nothing that was produced is missing."""
    run = make(tmp_path / "run", steps=steps, coverage=False)
    (worker,) = run.glob("worker-*")
    worker.write_text(
        "".join(f"{line}\n" for line in worker.read_text().splitlines() if f'"step":{steps},' not in line)
    )
    for log in read(run).logs:
        _shared(run, log.name, produced=log.last_seq)
    replay = Replay(Trace.open(run)).run()
    assert (replay.coverage.skipped, verdict_of(replay).word) == ({NO_PLAN: 1}, word)


def test_a_killed_run_that_lost_something_is_inconclusive(tmp_path: Path) -> None:
    verdict = verdict_of(Replay(Trace.open(_killed(tmp_path, steps=300, lost=1))).run())
    assert (verdict.word, verdict.reasons) == (
        INCONCLUSIVE,
        ["worker-0-200: 1 record produced and not written (killed, or still running)"],
    )


@pytest.mark.parametrize(("steps", "lost", "noted"), [(300, 1, True), (300, 0, False)])
def test_what_a_killed_run_lacks_has_its_usual_reason_named(tmp_path: Path, steps: int, lost: int, noted: bool) -> None:
    verdict = verdict_of(Replay(Trace.open(_killed(tmp_path, steps, lost))).run())
    assert (f"engine-0-100, worker-0-200: {NO_ORDERLY_END}" in verdict.notes) is noted


def test_a_run_began_when_the_first_of_its_processes_did(tmp_path: Path) -> None:
    run = make(tmp_path / "run", in_process=True)
    assert datetime.fromisoformat(Trace.open(run).started or "").timestamp() == 1_700_000_000
    path = only_file(run)
    path.write_text(re.sub(r'"wall_ns":\d+', '"wall_ns":0', path.read_text()))
    assert Trace.open(run).started is None
    _shared(run, produced=9)
    assert abs(datetime.fromisoformat(Trace.open(run).started or "").timestamp() - time.time()) < 60


def test_without_a_shared_file_a_trace_must_end_in_order(tmp_path: Path) -> None:
    run = make(tmp_path / "run", in_process=True, coverage=False)
    verdict = verdict_of(Replay(Trace.open(run)).run())
    assert verdict.word == INCONCLUSIVE
    assert verdict.reasons == ["all-0-100: the end is missing, the process was killed or still runs"]


def test_drops_make_a_trace_inconclusive(tmp_path: Path) -> None:
    run = make(tmp_path / "run", in_process=True)
    _shared(run, produced=read(run).logs[0].last_seq + 3, dropped=3, closed=True)
    verdict = verdict_of(Replay(Trace.open(run)).run())
    assert verdict.reasons == ["all-0-100: 3 records dropped (queue_records)"]


def test_a_damaged_shared_file_is_as_none(tmp_path: Path) -> None:
    run = make(tmp_path / "run", in_process=True)
    (run / "all-0-100.shared").write_bytes(b"KVSCOPE" * 800)
    assert Trace.open(run).logs[0].status is None


@pytest.mark.parametrize("process", ["all", "engine", "worker"])
def test_a_file_cut_at_any_byte_is_read_and_never_called_clean(tmp_path: Path, process: str) -> None:
    run = make(tmp_path / "run", steps=2, **({"in_process": True} if process == "all" else {}))
    (path,) = run.glob(f"{process}-*.jsonl")
    whole = path.read_bytes()
    words: set[str] = set()
    # With --long every byte where one file is the whole run. Else every seventh, and all around the ends of records.
    ends = [number for number, byte in enumerate(whole) if byte == ord("\n")]
    around = {size for end in ends for size in range(max(end - 2, 0), min(end + 3, len(whole)))}
    every = 1 if process == "all" and budget.is_thorough() else 7
    for size in sorted(around.union(range(0, len(whole), every))):
        path.write_bytes(whole[:size])
        try:
            replay = Replay(Trace.open(run)).run()
        except UnreadableTraceError:
            words.add("unreadable")
            assert process == "all"
            assert b"\n" not in whole[:size]
            continue
        verdict = verdict_of(replay)
        words.add(verdict.word)
        # Without its last line end the last record is still whole.
        assert verdict.word == (CLEAN if size == len(whole) - 1 else INCONCLUSIVE), size
        assert summarize(replay).coverage
        assert not verdict.findings
    assert words == {CLEAN, INCONCLUSIVE} | ({"unreadable"} if process == "all" else set())
    assert words <= {*EXIT_CODES, "unreadable"}


def test_reading_holds_no_more_than_a_few_records(tmp_path: Path) -> None:
    run = make(tmp_path / "run", in_process=True, steps=400)
    trace = Trace.open(run)
    replay = Replay(trace).run()
    engine = next(iter(replay._by_log.values()))
    assert len(engine.declared) <= 70
    assert replay.coverage.steps == 400
