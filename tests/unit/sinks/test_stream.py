from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from kvscope.events.codec import error_record
from kvscope.events.schema import EnabledRecord, decode_record
from kvscope.facts.allocator import ALLOC, RESET, PoolOperation
from kvscope.sinks.shared import read_status
from kvscope.sinks.stream import Stream
from kvscope.state.blocks import BlockLedger
from unit.events.samples import say
from unit.sinks.conftest import Logged
from unit.sinks.support import (
    DECLARATION,
    enabled,
    files,
    lines,
    make_stream,
    put_bind,
    put_coverage,
    put_plan,
    violation,
    written,
)


def balanced(stream: Stream) -> bool:
    balance = stream.balance()
    return balance.produced == balance.written + sum(balance.dropped.values()) + balance.queued


# Writing --------------------------------------------------------------------------------------------------------------


def test_every_record_is_written_in_order_with_a_gapless_seq_behind_kv_enabled(tmp_path: Path) -> None:
    stream = make_stream(tmp_path)
    put_bind(stream)  # before the stream is opened
    stream.open(enabled)
    put_plan(stream)
    stream.put("error", error_record(ValueError("secret")), component="worker", boundary="b")
    stream.close()
    records = written(stream)
    assert [record["event"] for record in records] == ["kv.enabled", "kv.bind", "kv.write", "kv.read", "kv.error"]
    assert [record["seq"] for record in records] == [1, 2, 3, 4, 5]
    assert records[2]["component"] == "runner"
    assert records[2]["boundary"] == "GPUModelRunner"
    assert (records[2]["dp_rank"], records[2]["tp_rank"]) == (0, 1)
    assert "pp_rank" not in records[2]
    assert [record.get("after_step") for record in records] == [0, None, None, None, 1]
    assert records[1]["mono_ns"] <= records[2]["mono_ns"]
    assert files(stream)[0].name == f"worker-3-{os.getpid()}.0.jsonl"
    assert balanced(stream)


def test_records_are_on_disk_soon_without_being_asked_for(tmp_path: Path) -> None:
    stream = make_stream(tmp_path)
    stream.open(enabled)
    put_bind(stream)
    deadline = time.monotonic() + 5
    while not (files(stream) and len(written(stream)) == 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [record["event"] for record in written(stream)] == ["kv.enabled", "kv.bind"]
    stream.close()


def test_flush_waits_for_what_was_put_and_says_when_it_did_not_get_out(tmp_path: Path) -> None:
    stream = make_stream(tmp_path)
    put_bind(stream)
    assert not stream.flush(0.01)
    stream.open(enabled)
    assert stream.flush(5)
    assert written(stream)[-1]["event"] == "kv.bind"
    with stream._writer.paused():
        put_bind(stream)
        assert not stream.flush(0.05)
    assert stream.flush(5)
    stream.close()


def test_rotation_keeps_the_newest_files_and_counts_the_deleted_ones(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, rotate_bytes=2048, retain_files=3)
    stream.open(enabled)
    for step in range(40):
        put_bind(stream, step=step + 1)
    stream.close()
    kept = files(stream)
    assert len(kept) == 3
    index = int(kept[-1].name.split(".")[-2])
    assert [int(path.name.split(".")[-2]) for path in kept] == [index - 2, index - 1, index]
    for path in kept:
        first = lines(path)[0]
        assert first["event"] == "kv.enabled"
        assert first["file_index"] == int(path.name.split(".")[-2])
    assert lines(kept[-1])[0]["files_deleted"] == index - 2
    seqs = [record["seq"] for record in written(stream)]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
    assert seqs[-1] == 40 + index + 1
    assert all(path.stat().st_size < 2048 + 2048 for path in kept)


def test_a_file_of_an_earlier_process_is_not_overwritten(tmp_path: Path) -> None:
    stream = make_stream(tmp_path)
    taken = stream.folder / f"{stream.stem}.0.jsonl"
    taken.write_text("another process wrote this\n")
    stream.open(enabled)
    stream.close()
    assert taken.read_text() == "another process wrote this\n"
    assert lines(stream.folder / f"{stream.stem}.1.jsonl")[0]["file_index"] == 1


def test_findings_mode_writes_findings_only_and_still_balances(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, records="findings")
    stream.open(enabled)
    put_bind(stream)
    put_plan(stream)
    stream.violation(violation(), component="worker", boundary="b")
    stream.close()
    assert [record["event"] for record in written(stream)] == ["kv.enabled", "kv.violation"]
    assert stream.balance().produced == 2
    assert balanced(stream)


def test_coverage_says_what_was_written_and_dropped_before_it(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, queue_records=3)
    for _ in range(5):
        put_bind(stream)
    stream.open(enabled)
    assert stream.flush(5)
    put_coverage(stream)
    stream.close()
    last = written(stream)[-1]
    assert last["records_written"] == last["seq"] - 1 == 4
    assert last["records_dropped"] == {"queue_records": 2}


def test_a_fact_of_a_wrong_shape_is_counted_and_the_next_one_is_written(tmp_path: Path, logged: Logged) -> None:
    stream = make_stream(tmp_path)
    stream.open(enabled)
    stream.put("plan", "no snapshot", component="runner", boundary="b", step=1)
    stream.put("plan", "no snapshot", component="runner", boundary="b", step=1)
    put_bind(stream)
    stream.close()
    assert [record["seq"] for record in written(stream)] == [1, 2]
    assert stream.balance().dropped == {"encode_error": 4}
    assert balanced(stream)
    assert logged.text.count("records are dropped and counted") == 1


# Overload and concurrency ---------------------------------------------------------------------------------------------


def test_beyond_either_limit_records_are_dropped_and_counted_by_cause(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, queue_records=10, queue_bytes=4096)
    for _ in range(12):
        put_bind(stream, approx_bytes=10)
    assert stream.balance().dropped == {"queue_records": 2}
    assert balanced(stream)
    stream.close()

    stream = make_stream(tmp_path / "other", queue_records=10, queue_bytes=4096)
    for _ in range(5):
        put_plan(stream, approx_bytes=1024)
    assert stream.balance().dropped == {"queue_bytes": 2}  # kv.write and kv.read
    stream.open(enabled)
    assert stream.flush(5)
    put_plan(stream, approx_bytes=4096)  # there is room again
    assert stream.flush(5)
    assert stream.balance().dropped == {"queue_bytes": 2}
    assert stream.balance().queued == 0
    assert balanced(stream)
    stream.close()


def test_the_counts_balance_under_concurrent_overload(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, queue_records=64, rotate_bytes=64 * 1024, retain_files=1000)
    assert stream.shared is not None
    path = stream.shared.path
    stream.open(enabled)
    threads, each = 4, 2000
    unbalanced = []

    def produce() -> None:
        for step in range(each):
            (put_bind if step % 2 else put_plan)(stream, step=step + 1)

    producers = [threading.Thread(target=produce) for _ in range(threads)]
    for producer in producers:
        producer.start()
    while any(producer.is_alive() for producer in producers):
        if not balanced(stream):
            unbalanced.append(stream.balance())
        time.sleep(0.005)
    for producer in producers:
        producer.join()
    stream.close()
    assert not unbalanced
    balance = stream.balance()
    records = written(stream)
    assert balance.produced == threads * each * 3 // 2 + len(files(stream))
    assert balance.queued == 0
    assert balance.dropped["queue_records"] > 0
    assert len(records) == balance.written
    assert [record["seq"] for record in records] == list(range(1, len(records) + 1))
    status = read_status(path)
    assert (status.produced, status.written, status.dropped) == (balance.produced, balance.written, balance.dropped)
    assert status.lost(records[-1]["seq"]) == 0
    assert status.closed


def test_a_put_costs_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = make_stream(tmp_path)
    stream.open(enabled)
    medians = []
    for _ in range(20):
        took = []
        for _ in range(500):
            start = time.perf_counter_ns()
            stream.put("bind", DECLARATION, component="scheduler", boundary="b", step=1, trace_id="t", approx_bytes=900)
            took.append(time.perf_counter_ns() - start)
        medians.append(statistics.median(took))
        assert stream.flush(10)
    stream.close()
    say(capsys, f"put: {min(medians):.0f} ns (median of 500, best of 20), clock included")
    assert min(medians) < 6000
    assert balanced(stream)


def test_a_put_does_not_wait_for_a_writer_that_hangs(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, queue_records=100)
    stream.open(enabled)
    assert stream.flush(5)
    with stream._writer.paused():
        start = time.monotonic()
        for _ in range(1000):
            put_bind(stream)
        assert time.monotonic() - start < 1
    stream.close()
    assert stream.balance().dropped["queue_records"] >= 899
    assert balanced(stream)


def test_what_is_put_after_the_end_is_counted(tmp_path: Path) -> None:
    stream = make_stream(tmp_path)
    stream.open(enabled)
    stream.close()
    stream.close()
    put_bind(stream)
    assert stream.balance().dropped == {"closed": 1}
    assert balanced(stream)
    assert len(written(stream)) == 1


def test_the_shared_file_is_given_back_at_the_end_and_says_what_it_said(tmp_path: Path) -> None:
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    stream = make_stream(tmp_path)
    assert stream.shared is not None
    path, mailbox = stream.shared.path, stream.mailbox
    assert mailbox is not None
    stream.open(enabled)
    put_bind(stream)
    stream.close()
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before
    assert (stream.shared, stream.mailbox) == (None, None)
    put_bind(stream)
    mailbox.post(violation().finding)
    status = read_status(path)
    assert (status.closed, status.produced, status.written, status.dropped) == (True, 2, 2, {})
    assert stream.balance().dropped == {"closed": 1}
    assert balanced(stream)


def test_the_shared_file_stays_with_a_writer_that_hangs(tmp_path: Path) -> None:
    stream = make_stream(tmp_path)
    stream.open(enabled)
    assert stream.flush(5.0)
    with stream._writer.paused():
        put_bind(stream)
        stream.close(timeout_s=0.3)
        assert stream.shared is not None
    assert stream._writer._thread is not None
    stream._writer._thread.join(5.0)
    assert read_status(stream.shared.path).written == 2


# A disk that does not take it -----------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_is_counted_announced_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    stream = make_stream(tmp_path)
    stream.open(enabled)
    put_bind(stream)
    assert stream.flush(5)
    real = os.write
    full = True

    def write(descriptor: int, data: memoryview) -> int:
        if not full:
            return real(descriptor, data)
        if len(data) < 700:  # the last bytes of the disk take half a line
            raise OSError(28, "No space left on device")
        return real(descriptor, data[: len(data) // 2 + 1])

    monkeypatch.setattr("kvscope.sinks.files.os.write", write)
    for _ in range(3):
        for step in range(4):
            put_bind(stream, step=step + 2)
        assert stream.flush(5)
        assert balanced(stream)
    full = False
    put_bind(stream, step=9)
    stream.close()
    records = written(stream)  # every line is whole
    assert [record["seq"] for record in records] == list(range(1, len(records) + 1))
    assert stream.balance().dropped["write_error"] == 12 + 3 - len(records)
    assert 0 < stream.balance().dropped["write_error"] < 12
    assert logged.text.count("No space left on device") == 1
    assert balanced(stream)


def test_a_folder_that_cannot_be_made_costs_records_and_nothing_else(tmp_path: Path, logged: Logged) -> None:
    (tmp_path / "file").write_text("")
    stream = make_stream(tmp_path / "file")
    assert stream.shared is None
    assert stream.shared_reason is not None
    stream.open(enabled)
    put_bind(stream)
    put_bind(stream)
    assert stream.flush(5)
    assert stream.balance().dropped == {"write_error": 2}
    (tmp_path / "file").unlink()
    put_bind(stream)
    stream.close()
    assert [record["event"] for record in written(stream)] == ["kv.enabled", "kv.bind"]
    assert logged.text.count("cannot be written") == 1
    assert balanced(stream)


def test_a_file_starts_with_kv_enabled_or_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    stream = make_stream(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("kvscope.sinks.files.os.write", refuse)
        stream.open(enabled)
        put_bind(stream)
        assert stream.flush(5)
        assert files(stream) == []
    put_bind(stream)
    stream.close()
    assert [record["event"] for record in written(stream)] == ["kv.enabled", "kv.bind"]
    assert [record["seq"] for record in written(stream)] == [1, 2]
    assert balanced(stream)


def test_without_a_shared_file_the_stream_works_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvscope.sinks.shared.os.posix_fallocate", refuse)
    stream = make_stream(tmp_path)
    assert stream.shared_reason == "no shared file: No space left on device"
    assert stream.mailbox is None
    stream.open(enabled)
    put_bind(stream)
    stream.close()
    assert len(written(stream)) == 2
    assert balanced(stream)
    assert list(stream.folder.glob("*.shared")) == []


def test_a_failing_enabled_record_is_no_fault_of_vllm(tmp_path: Path, logged: Logged) -> None:
    healthy = False

    def sometimes() -> EnabledRecord:
        if not healthy:
            raise RuntimeError("the host is not ready")
        return enabled()

    stream = make_stream(tmp_path)
    stream.open(sometimes)
    put_bind(stream)
    assert stream.flush(5)
    assert stream.balance().dropped == {"write_error": 1}
    healthy = True
    put_bind(stream)
    stream.close()
    assert [record["event"] for record in written(stream)] == ["kv.enabled", "kv.bind"]
    assert "RuntimeError" in logged.text
    assert "not ready" not in logged.text


# Processes ------------------------------------------------------------------------------------------------------------


def test_a_forked_child_leaves_the_parents_stream_alone(tmp_path: Path) -> None:
    stream = make_stream(tmp_path)
    stream.open(enabled)
    put_bind(stream)
    assert stream.flush(5)
    mailbox, shared = stream.mailbox, stream.shared
    assert mailbox is not None
    assert shared is not None
    with stream._writer.paused(), stream._lock:  # a child inherits held locks from threads that it does not have
        child = os.fork()
        if child == 0:
            ok = False
            try:
                put_bind(stream)
                mailbox.post(violation().finding)
                stream.flush(0.1)
                stream.close()
                own = make_stream(tmp_path)
                own.open(enabled)
                put_bind(own)
                own.close()
                ok = own.stem != stream.stem and balanced(own) and len(written_by(own)) == 2
            finally:
                os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    put_bind(stream)
    stream.close()
    assert [record["seq"] for record in written_by(stream)] == [1, 2, 3]
    assert read_status(shared.path).produced == 3
    assert mailbox._cells[32] == 0
    assert len(list(stream.folder.glob("*.shared"))) == 2


def written_by(stream: Stream) -> list[dict[str, object]]:
    return [record for path in sorted(stream.folder.glob(f"{stream.stem}.*.jsonl")) for record in lines(path)]


CHILD = """
import mmap, sys, pathlib, time
from unit.sinks.support import enabled, make_stream, put_bind, put_plan
stream = make_stream(pathlib.Path(sys.argv[1]), rotate_bytes=200_000, retain_files=1000)
stream.open(enabled)
put_bind(stream)
if sys.argv[2] == "exit":
    sys.exit()
counter = open(sys.argv[1] + "/counter", "w+b")
counter.write(bytes(8))
counter.flush()
steps = memoryview(mmap.mmap(counter.fileno(), 8)).cast("Q")
step = 0
print("ready", flush=True)
while True:
    step += 1
    steps[0] = step
    put_bind(stream, step=step)
    put_plan(stream, step=step)
    time.sleep(0.0001)
"""


def start_child(folder: Path, how: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, "-c", CHILD, str(folder), how], stdout=subprocess.PIPE, env=environment)


def test_after_sigkill_the_reader_states_the_exact_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        child = start_child(folder, "run")
        assert child.stdout is not None
        with child.stdout:
            assert child.stdout.readline() == b"ready\n"
        time.sleep(0.33 + attempt * 0.037)
        child.send_signal(signal.SIGKILL)
        child.wait()
        run = folder / "run-1"
        (shared,) = run.glob("*.shared")
        status = read_status(shared)
        seqs = []
        for path in sorted(run.glob("*.jsonl"), key=lambda path: int(path.name.split(".")[-2])):
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):  # the last line may be cut anywhere
                    seqs.append(decode_record(line).seq)  # noqa: PERF401 - two filters and a comment read better so
        assert seqs == list(range(1, len(seqs) + 1))
        losses.append(status.lost(seqs[-1]))
        assert status.pid == child.pid
        assert not status.closed
        # The child's own account: a first kv.bind, then one kv.bind and one pair a step, the last step begun.
        step = int.from_bytes((folder / "counter").read_bytes(), "little")
        own = len(list(run.glob("*.jsonl")))
        assert 3 * (step - 1) <= status.produced - own - 1 <= 3 * step
        assert losses[-1] == status.produced - sum(status.dropped.values()) - len(seqs) >= 0
        assert losses[-1] < status.produced
    say(capsys, f"lost to SIGKILL: {losses} records")


def test_the_loss_is_what_was_in_the_queue(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, queue_records=5)
    stream.open(enabled)
    put_bind(stream)
    assert stream.flush(5)
    assert stream.shared is not None
    path = stream.shared.path
    with stream._writer.paused():
        for _ in range(4):
            put_plan(stream)
        for _ in range(3):
            put_bind(stream)
        status = read_status(path)
        assert status.produced == 1 + 1 + 8 + 3
        assert status.dropped == {"queue_records": 2}
        assert status.lost(written(stream)[-1]["seq"]) == 9
    stream.close()
    assert read_status(path).lost(written(stream)[-1]["seq"]) == 0


def test_an_ordinary_exit_writes_what_is_queued(tmp_path: Path) -> None:
    child = start_child(tmp_path, "exit")
    assert child.stdout is not None
    child.stdout.close()
    assert child.wait(60) == 0
    (path,) = (tmp_path / "run-1").glob("*.jsonl")
    assert [record["event"] for record in lines(path)] == ["kv.enabled", "kv.bind"]
    (shared,) = (tmp_path / "run-1").glob("*.shared")
    assert read_status(shared).closed


def test_a_thread_exists_only_while_a_stream_is_open(tmp_path: Path) -> None:
    def writers() -> int:
        return sum(thread.name == "kvscope-writer" for thread in threading.enumerate())

    others = writers()
    stream = make_stream(tmp_path)
    put_bind(stream)
    assert writers() == others
    stream.open(enabled)
    stream.open(enabled)
    assert writers() == others + 1
    stream.close()
    assert writers() == others
    assert len(written(stream)) == 2


# Findings -------------------------------------------------------------------------------------------------------------


def test_an_urgent_finding_is_in_trace_log_and_incident_before_the_call_returns(tmp_path: Path, logged: Logged) -> None:
    stream = make_stream(tmp_path, log="findings")
    stream.open(enabled)
    for step in range(1, 4):
        put_bind(stream, step=step)
    assert stream.violation(violation(step=3), component="worker", boundary="b", urgent=True)
    assert written(stream)[-1]["event"] == "kv.violation"
    incident = lines(stream.folder / "incident-0.jsonl")
    assert [record["event"] for record in incident] == ["kv.enabled", "kv.bind", "kv.bind", "kv.bind", "kv.violation"]
    assert logged.text.count("KV_GUARD {") == 1
    stream.close()


def test_an_urgent_finding_does_not_wait_for_a_hanging_disk(tmp_path: Path) -> None:
    stream = make_stream(tmp_path)
    stream.open(enabled)
    with stream._writer.paused():
        start = time.monotonic()
        assert not stream.violation(violation(), component="worker", boundary="b", urgent=True, timeout_s=0.1)
        assert time.monotonic() - start < 5
    stream.close()
    assert written(stream)[-1]["event"] == "kv.violation"


def test_in_findings_mode_the_incident_has_the_steps_that_the_trace_has_not(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, records="findings", ring_steps=2)
    stream.open(enabled)
    for step in range(1, 6):
        put_plan(stream, step=step)
        stream.put("worker_input", "of no shape", component="worker", boundary="b", step=step)
    stream.violation(violation(step=5), component="worker", boundary="b", urgent=True, timeout_s=5)
    stream.close()
    incident = lines(stream.folder / "incident-0.jsonl")
    assert [record["event"] for record in incident] == [
        "kv.enabled", "kv.write", "kv.read", "kv.write", "kv.read", "kv.violation",
    ]  # fmt: skip
    assert [record["event"] for record in written(stream)] == ["kv.enabled", "kv.violation"]


def test_what_the_pool_did_is_a_record_and_in_findings_mode_a_part_of_the_incident(tmp_path: Path) -> None:
    operation = PoolOperation(kind=ALLOC, block_ids=[3], step=5, scheduling=True, request_id="r", group_id=0)
    ledger = BlockLedger(8, 0)
    ledger.apply(operation, 5)
    seen = {}
    for records in ("compact", "findings"):
        stream = make_stream(tmp_path / records, records=records)
        stream.open(enabled)
        put = partial(stream.put, component="allocator", boundary="BlockPool.get_new_blocks")
        put("pool", operation, step=5, trace_id="t")
        put("pool", PoolOperation(kind=RESET, block_ids=[], step=5))
        put("state", ledger.snapshot(), step=5, trace_id="t")
        stream.violation(violation(step=5), component="worker", boundary="b", urgent=True, timeout_s=5)
        stream.close()
        assert balanced(stream)
        seen[records] = [written(stream), lines(stream.folder / "incident-0.jsonl")]
    told = ["kv.enabled", "kv.alloc", "kv.reset", "kv.state", "kv.violation"]
    events = {records: [[line["event"] for line in file] for file in files] for records, files in seen.items()}
    assert events == {"compact": [told, told], "findings": [["kv.enabled", "kv.violation"], told]}
    alloc, reset = seen["compact"][0][1:3]
    assert (alloc["step"], alloc["trace_id"], alloc["component"]) == (5, "t", "allocator")
    assert (reset["after_step"], reset.get("trace_id")) == (5, None)
