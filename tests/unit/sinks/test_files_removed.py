"""Somebody removes or moves the trace while it is written: it goes on in a new file, and a reader states the loss."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from kvscope.analysis.reader import ProcessLog, Trace
from kvscope.analysis.replay import Replay
from kvscope.analysis.verdict import INCONCLUSIVE, losses_of, verdict_of
from kvscope.sinks.files import TraceFiles
from kvscope.sinks.stream import Stream
from unit.sinks.conftest import Logged
from unit.sinks.support import enabled, files, lines, make_stream, put_bind, put_coverage, written

REMOVED = "removed or moved away"
FIRST = "records missing before the first one"
BETWEEN = "records missing in between"


@pytest.fixture
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscope.sinks.writer._LOOK_NS", 0)


def started(folder: Path, binds: int = 2, **output: int) -> Stream:
    """Records 1 (kv.enabled) to ``binds + 1`` are on disk."""
    stream = make_stream(folder, **output)
    stream.open(enabled)
    put(stream, binds)
    return stream


def put(stream: Stream, binds: int) -> None:
    for step in range(binds):
        put_bind(stream, step=step + 1)
    assert stream.flush(5)
    assert balanced(stream)


def balanced(stream: Stream) -> bool:
    balance = stream.balance()
    return balance.produced == balance.written + sum(balance.dropped.values()) + balance.queued


def read(folder: Path) -> tuple[ProcessLog, list[str]]:
    """The one process that is there, and why the run is inconclusive."""
    replay = Replay(Trace.open(folder)).run()
    verdict = verdict_of(replay)
    assert verdict.word == INCONCLUSIVE
    (log,) = replay.trace.logs
    return log, verdict.reasons


def told(reasons: list[str], loss: str) -> bool:
    return any(loss in reason for reason in reasons)


@pytest.mark.usefixtures("looks_always")
def test_after_its_file_was_removed_a_trace_goes_on_in_the_next_one(tmp_path: Path, logged: Logged) -> None:
    stream = started(tmp_path)
    for path in files(stream):
        path.unlink()
    put(stream, 2)
    stream.close()
    (path,) = files(stream)
    assert path.name == f"{stream.stem}.1.jsonl"
    assert [record["event"] for record in lines(path)] == ["kv.enabled", "kv.bind", "kv.bind"]
    assert [record["seq"] for record in lines(path)] == [4, 5, 6]
    assert (lines(path)[0]["file_index"], lines(path)[0]["files_deleted"]) == (1, 0)
    assert (stream.balance().written, stream.balance().dropped) == (6, {})
    assert balanced(stream)
    assert logged.text.count(REMOVED) == 1
    log, reasons = read(stream.folder)
    assert losses_of(log) == {FIRST: 3}
    assert told(reasons, f"3 {FIRST}")


@pytest.mark.usefixtures("looks_always")
def test_it_is_said_once_however_often_it_happens(tmp_path: Path, logged: Logged) -> None:
    stream = started(tmp_path)
    for _ in range(3):
        put(stream, 1)
        files(stream)[-1].unlink()
    put(stream, 1)
    stream.close()
    assert logged.text.count(REMOVED) == 1
    assert losses_of(read(stream.folder)[0]) == {FIRST: written(stream)[0]["seq"] - 1}


@pytest.mark.usefixtures("looks_always")
def test_a_removed_folder_is_made_again(tmp_path: Path, logged: Logged) -> None:
    stream = started(tmp_path)
    shutil.rmtree(tmp_path)
    put(stream, 2)
    put_coverage(stream)
    stream.close()
    assert [record["seq"] for record in written(stream)] == [4, 5, 6, 7]
    assert balanced(stream)
    assert logged.text.count(REMOVED) == 1
    log, reasons = read(stream.folder)
    assert log.ended
    assert told(reasons, f"3 {FIRST}")


@pytest.mark.usefixtures("looks_always")
def test_without_a_folder_to_make_again_records_are_dropped_and_counted(tmp_path: Path, logged: Logged) -> None:
    stream = started(tmp_path)
    shutil.rmtree(stream.folder)
    stream.folder.write_text("in the way")
    put(stream, 4)
    put(stream, 1)
    assert stream.balance().dropped == {"write_error": 5}
    assert logged.text.count(REMOVED) == 1
    assert logged.text.count("records are dropped and counted") == 1
    stream.folder.unlink()
    put(stream, 1)
    put_coverage(stream)
    stream.close()
    assert [record["seq"] for record in written(stream)] == [4, 5, 6]
    assert balanced(stream)
    log, reasons = read(stream.folder)
    assert log.dropped == {"write_error": 5}
    assert told(reasons, f"3 {FIRST}")
    assert told(reasons, "5 records dropped (write_error)")


@pytest.mark.usefixtures("looks_always")
def test_a_moved_folder_keeps_its_records_and_tells_of_the_missing_end(tmp_path: Path) -> None:
    stream = started(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "moved")
    put(stream, 2)
    stream.close()
    assert [record["seq"] for record in written(stream)] == [4, 5, 6]
    log, reasons = read(tmp_path / "moved")
    assert (log.records, log.lost_at_end) == (3, 3)
    assert told(reasons, "3 records produced and not written")


@pytest.mark.usefixtures("looks_always")
def test_a_file_put_in_the_place_of_the_trace_is_left_alone(tmp_path: Path) -> None:
    stream = started(tmp_path, retain_files=1)
    (path,) = files(stream)
    path.rename(tmp_path / "kept.jsonl")
    path.write_text("")
    put(stream, 2)
    stream.close()
    assert path.read_text() == ""
    assert [record["seq"] for record in lines(files(stream)[1])] == [4, 5, 6]
    assert [record["seq"] for record in lines(tmp_path / "kept.jsonl")] == [1, 2, 3]


@pytest.mark.usefixtures("looks_always")
def test_a_removed_file_is_never_taken_for_one_that_rotation_deleted(tmp_path: Path) -> None:
    stream = started(tmp_path, rotate_bytes=2048, retain_files=3)
    put(stream, 20)
    assert written(stream)[0]["seq"] > 1
    files(stream)[-1].unlink()
    put(stream, 60)
    stream.close()
    log, reasons = read(stream.folder)
    assert log.deleted_files == log.files.first_index - 1
    assert told(reasons, f"{log.missing_first} {FIRST}")


@pytest.mark.parametrize("pending", [0, 3])
def test_a_rotation_looks_before_it_closes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Logged, pending: int
) -> None:
    """Lines that already have their numbers do not go into a file that is known to be gone: they are counted."""
    monkeypatch.setattr("kvscope.sinks.writer._LOOK_NS", 10**18)
    stream = started(tmp_path, binds=1)
    writer = stream._writer
    size = files(stream)[0].stat().st_size
    with writer.paused():
        files(stream)[0].unlink()
        for step in range(pending + 1):
            put_bind(stream, step=step + 2)
        writer._files._rotate_bytes = size if pending == 0 else size + pending * (size // 3)
    assert stream.flush(5)
    stream.close()
    assert logged.text.count(REMOVED) == 1
    dropped = stream.balance().dropped.get("write_error", 0)
    assert (dropped > 0) == (pending > 0)
    assert [record["seq"] for record in written(stream)][:2] == [3, 4]
    assert balanced(stream)
    assert read(stream.folder)[0].missing_first == 2


def test_what_went_into_a_removed_file_unnoticed_is_a_gap_and_the_end_looks_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    monkeypatch.setattr("kvscope.sinks.writer._LOOK_NS", 10**18)
    stream = started(tmp_path)
    files(stream)[0].unlink()
    put(stream, 5)
    assert files(stream) == []
    stream.close()
    assert [(record["event"], record["seq"]) for record in written(stream)] == [("kv.enabled", 9)]
    assert balanced(stream)
    assert logged.text.count(REMOVED) == 1
    log, reasons = read(stream.folder)
    assert log.lost_at_end == 0
    assert told(reasons, f"8 {FIRST}")


@pytest.mark.usefixtures("looks_always")
def test_a_gap_between_two_files_is_stated(tmp_path: Path) -> None:
    stream = started(tmp_path)
    stream._writer._files._rotate_bytes = 1
    put(stream, 1)
    stream._writer._files._rotate_bytes = 1 << 20
    put(stream, 3)
    files(stream)[1].unlink()
    put(stream, 1)
    stream.close()
    log, reasons = read(stream.folder)
    assert log.missing_first == 0
    assert told(reasons, f"{log.missing} {BETWEEN}")
    assert log.missing > 0


def test_the_writer_looks_once_a_second_and_not_with_every_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    real = TraceFiles.close_if_removed

    def counted(self: TraceFiles) -> bool:
        nonlocal looks
        looks += 1
        return real(self)

    monkeypatch.setattr(TraceFiles, "close_if_removed", counted)
    monkeypatch.setattr("kvscope.sinks.writer._LOOK_NS", 3600 * 10**9)
    stream = started(tmp_path, binds=1)
    for _ in range(20):
        put(stream, 20)
    assert looks <= 1
    stream.close()
    assert looks <= 2


def test_it_is_noticed_without_any_further_record(tmp_path: Path, logged: Logged) -> None:
    stream = started(tmp_path)
    files(stream)[0].unlink()
    deadline = time.monotonic() + 10
    while not files(stream) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [record["event"] for record in written(stream)] == ["kv.enabled"]
    assert REMOVED in logged.text
    stream.close()


def test_a_folder_that_may_no_longer_be_entered_is_not_taken_for_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = TraceFiles(tmp_path, "worker-0-1", rotate_bytes=1000, retain=2)
    assert trace.open()

    def refuse(self: Path) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refuse)
        assert not trace.close_if_removed()
    assert not trace.close_if_removed()
    trace.path().unlink()
    assert trace.close_if_removed()
    assert not trace.close_if_removed()
