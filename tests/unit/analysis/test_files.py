"""Which run is meant, whatever the file system holds beside it, and what cannot be read is said."""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvscope.analysis.files import find
from kvscope.analysis.reader import Trace
from kvscope.analysis.replay import Replay
from kvscope.analysis.verdict import CLEAN, INCONCLUSIVE, Verdict, verdict_of
from kvscope.errors import UnreadableTraceError
from kvscope.testing.trace import TraceBuilder


def make(directory: Path, steps: int = 3) -> Path:
    builder = TraceBuilder(directory)
    for _ in range(steps):
        builder.step({"r1": 1})
    return builder.close()


def judged(path: Path) -> Verdict:
    return verdict_of(Replay(Trace.open(path)).run())


def test_a_folder_of_output_folders_is_told_from_one_without_traces(tmp_path: Path) -> None:
    for name in ("healthy", "fault"):
        make(tmp_path / name / "run")
    (tmp_path / "logs").mkdir()
    with pytest.raises(UnreadableTraceError) as caught:
        find(tmp_path)
    assert str(caught.value).endswith(f"; traces are in: {tmp_path / 'fault'}, {tmp_path / 'healthy'}")
    for number in range(9):
        make(tmp_path / f"more{number}" / "run")
    with pytest.raises(UnreadableTraceError, match=r"more5 and 3 more$"):
        find(tmp_path)


def test_a_link_to_a_run_is_no_second_run(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (tmp_path / "latest").symlink_to("run")
    files = find(tmp_path)
    assert (files.directory, files.others) == (run, [])
    assert judged(tmp_path / "latest").word == CLEAN


def test_a_link_may_lead_to_a_run_elsewhere(tmp_path: Path) -> None:
    run = make(tmp_path / "elsewhere" / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "latest").symlink_to(run)
    assert find(tmp_path / "out").directory == tmp_path / "out" / "latest"


def test_a_link_that_leads_nowhere_is_a_file_that_is_missing(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (worker,) = run.glob("worker-*")
    worker.unlink()
    worker.symlink_to(tmp_path / "gone")
    assert find(tmp_path).directory == run
    verdict = judged(run)
    assert verdict.word == INCONCLUSIVE
    assert "worker-0-200: 1 file that vanished while being read" in verdict.reasons


@pytest.mark.parametrize("name", ["engine-0-1.0.jsonl", "worker-1-7.0.jsonl"])
def test_a_folder_with_the_name_of_a_file_is_no_file(tmp_path: Path, name: str) -> None:
    run = make(tmp_path / "run")
    (run / name).mkdir()
    assert judged(run).word == CLEAN
    with pytest.raises(UnreadableTraceError, match="no trace in this folder"):
        find(run / name)


def test_what_is_neither_file_nor_folder_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UnreadableTraceError, match="neither a file nor a folder"):
        find(tmp_path / "pipe.jsonl")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UnreadableTraceError, match="no such file or folder"):
        find(tmp_path / "loop")
    with pytest.raises(UnreadableTraceError, match="too long"):
        find(tmp_path / ("x" * 5000))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gzip", "bzip2", "xz"])
def test_a_compressed_trace_is_told_from_garbage(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    (worker,) = make(tmp_path / "run").glob("worker-*")
    packed = tmp_path / "worker.jsonl.packed"
    packed.write_bytes(pack(worker.read_bytes()))
    with pytest.raises(UnreadableTraceError, match="is compressed; unpack it first"):
        Trace.open(packed)


def test_a_trace_with_a_compressed_end_keeps_what_can_be_read(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (worker,) = run.glob("worker-*")
    worker.write_bytes(worker.read_bytes() + gzip.compress(os.urandom(5000)))
    assert judged(run).word == INCONCLUSIVE


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path / "run")
    opened = Path.open

    def forbidden(path: Path, *args: str) -> object:  # the superuser, as whom tests may run, may read everything
        if path.name.startswith("worker"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *args)

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(UnreadableTraceError, match=r"worker-0-200.0.jsonl: Permission denied"):
        Trace.open(run)


def test_a_folder_that_may_not_be_read_could_be_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "run")
    make(tmp_path / "newer")
    monkeypatch.setattr("os.access", lambda path, _mode: Path(path).name != "newer")
    verdict = judged(tmp_path)
    assert verdict.coverage_line.startswith("coverage: 3 of 3 rows")
    assert "folders beside this run that may not be read, and may be newer: newer" in verdict.notes


# Several engines, rotation, growth ------------------------------------------------------------------------------------


def second_engine(run: Path, source: Path, *, missing_rank: bool = False) -> None:
    """Put the files of ``source`` into ``run`` as those of data-parallel rank 1."""
    for path in source.glob("*.jsonl"):
        process, rank, pid = path.name.split(".")[0].split("-")
        if missing_rank and process == "worker":
            continue
        name = f"{process}-{1 if process == 'engine' else rank}-{int(pid) + 1000}.0.jsonl"
        (run / name).write_text(path.read_text().replace('"dp_rank":0', '"dp_rank":1'))


def test_two_engines_of_a_run_are_judged_apart_although_their_steps_have_the_same_numbers(tmp_path: Path) -> None:
    run, other = make(tmp_path / "a" / "run", 4), make(tmp_path / "b" / "run", 9)
    second_engine(run, other)
    verdict = judged(run)
    assert (verdict.word, verdict.reasons) == (CLEAN, [])
    assert verdict.coverage_line == "coverage: 13 of 13 rows audited (100.0 %), 13 steps, 2 ranks"


def test_of_two_engines_the_one_without_workers_is_named(tmp_path: Path) -> None:
    run, other = make(tmp_path / "a" / "run"), make(tmp_path / "b" / "run")
    second_engine(run, other, missing_rank=True)
    assert "no file of engine 1's workers: no plan to look at" in judged(run).reasons


def test_two_runs_thrown_into_one_folder_are_never_one_clean_run(tmp_path: Path) -> None:
    """Their processes claim the same places; steps of one are not held against declarations of the other."""
    run, other = make(tmp_path / "a" / "run", 4), make(tmp_path / "b" / "other", 9)
    for path in other.glob("*.jsonl"):
        shutil.copy(path, run / path.name.replace("-100.", "-101.").replace("-200.", "-201."))
    verdict = judged(run)
    assert (verdict.word, verdict.findings) == (INCONCLUSIVE, [])
    assert any("claim the same place" in reason for reason in verdict.reasons)


@pytest.mark.parametrize("engine_ends_first", [True, False])
def test_a_run_that_grows_while_it_is_read_is_read_to_where_it_was(tmp_path: Path, engine_ends_first: bool) -> None:
    run = make(tmp_path / "run", 40)
    files = {path: path.read_bytes().splitlines(keepends=True) for path in run.glob("*.jsonl")}
    for path, lines in files.items():
        keep = len(lines) // (3 if ("engine" in path.name) is engine_ends_first else 2)
        path.write_bytes(b"".join(lines[:keep]) + lines[keep][:20])
    trace = Trace.open(run)
    size = trace.size_bytes
    for path, lines in files.items():
        path.write_bytes(b"".join(lines))
    replay = Replay(trace).run()
    assert trace.bytes_read <= size + sum(max(map(len, lines)) for lines in files.values())
    assert verdict_of(replay).word == INCONCLUSIVE
    assert not replay.findings.folded()


def test_reading_a_file_that_is_written_faster_than_read_ends(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (worker,) = run.glob("worker-*")
    line = worker.read_bytes().splitlines(keepends=True)[1]
    trace = Trace.open(run)
    count = 0
    with worker.open("ab") as file:
        for _ in trace.records():
            count += 1
            file.write(100 * line)
            file.flush()
    assert count < 30
