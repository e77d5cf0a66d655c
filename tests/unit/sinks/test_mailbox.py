from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from tests.budget import examples

from kvscope.checks.finding import Finding
from kvscope.events.names import PLAIN, RequestNames
from kvscope.sinks.mailbox import Mailbox, MailboxReader, find_mailboxes
from kvscope.sinks.shared import C_POSTED, PAGE, SLOT_BYTES, SLOTS, SharedFile, read_status
from unit.events.samples import findings, say


def shared_file(path: Path, *, rank: int = 1, dp_rank: int | None = 0, process: str = "worker") -> SharedFile:
    return SharedFile(path, process=process, rank=rank, dp_rank=dp_rank, pid=os.getpid())


def finding(step: int) -> Finding:
    return Finding(reason="write_target_mismatch", step=step, trace_id="t", request_id="r", also=("null_block_write",))


@pytest.fixture
def shared(tmp_path: Path) -> SharedFile:
    return shared_file(tmp_path / "worker-1-1.shared")


def test_a_reader_gets_each_finding_once_and_in_order(shared: SharedFile) -> None:
    mailbox = Mailbox(shared)
    mailbox.post(finding(1))
    reader = MailboxReader(shared.path)
    mailbox.post(finding(2))
    assert reader.poll() == [finding(1), finding(2)]
    assert reader.poll() == []
    mailbox.post(finding(3))
    assert reader.poll() == [finding(3)]
    assert reader.lost == 0
    reader.close()


@settings(max_examples=examples(30))
@given(value=findings)
def test_any_finding_arrives_equal_but_for_its_texts(tmp_path_factory: pytest.TempPathFactory, value: Finding) -> None:
    """These may name requests, and stand in the record."""
    shared = shared_file(tmp_path_factory.mktemp("mailbox") / "worker-1-1.shared")
    reader = MailboxReader(shared.path)
    Mailbox(shared).post(value)
    texts = {name: None for name in ("expected", "actual") if isinstance(getattr(value, name), str)}
    assert reader.poll() == [msgspec.structs.replace(value, **texts)]
    reader.close()


def test_two_readers_do_not_take_from_each_other(shared: SharedFile) -> None:
    one, other = MailboxReader(shared.path), MailboxReader(shared.path)
    Mailbox(shared).post(finding(1))
    assert one.poll() == other.poll() == [finding(1)]


def test_what_is_overwritten_before_it_is_read_is_counted_as_lost(shared: SharedFile) -> None:
    mailbox, reader = Mailbox(shared), MailboxReader(shared.path)
    for step in range(SLOTS + 5):
        mailbox.post(finding(step))
    assert [found.step for found in reader.poll()] == list(range(5, SLOTS + 5))
    assert reader.lost == 5


def test_a_torn_entry_is_read_when_it_is_whole_and_holds_back_what_follows(shared: SharedFile) -> None:
    mailbox, reader = Mailbox(shared), MailboxReader(shared.path)
    mailbox.post(finding(1))
    mailbox.post(finding(2))
    byte = PAGE + SLOT_BYTES + 20
    whole = shared.memory[byte]
    shared.memory[byte] = whole ^ 1
    assert reader.poll() == []
    shared.memory[byte] = whole
    assert reader.poll() == [finding(1), finding(2)]
    assert reader.lost == 0


def test_an_entry_that_stays_damaged_is_given_up_and_counted(shared: SharedFile) -> None:
    mailbox, reader = Mailbox(shared), MailboxReader(shared.path)
    mailbox.post(finding(1))
    mailbox.post(finding(2))
    shared.memory[PAGE + SLOT_BYTES + 20] ^= 1
    found = []
    for _ in range(100):
        found += reader.poll()
    assert found == [finding(2)]
    assert reader.lost == 1


@pytest.mark.parametrize("character", ["r", "é", "\U0001f600", "\ud800"])
def test_ids_of_any_length_arrive_as_far_as_they_fit(shared: SharedFile, character: str) -> None:
    """A client chooses its ids, and must not switch the stop off with one."""
    mailbox, reader = Mailbox(shared), MailboxReader(shared.path)
    long = character * 5000
    mailbox.post(
        Finding(
            reason="write_foreign_block", step=7, trace_id="t" * 5000, request_id=long, other_request_id=long,
            group_id=3, block_id=1 << 40, slot=1 << 50, expected=long, actual="a" * 5000,
            also=("write_target_mismatch",) * 40,
        )
    )  # fmt: skip
    (found,) = reader.poll()
    assert (found.reason, found.step, found.group_id, found.block_id, found.slot) == (
        "write_foreign_block", 7, 3, 1 << 40, 1 << 50,
    )  # fmt: skip
    assert found.request_id == PLAIN(long)[:224] == found.other_request_id
    assert (found.expected, found.actual, len(found.also)) == (None, None, 16)


@pytest.mark.parametrize("mode", ["hashed", "omitted"])
def test_an_id_that_is_not_to_be_written_is_not_in_the_file(shared: SharedFile, mode: Any) -> None:
    names = RequestNames(mode, b"a salt of 16 byt")
    reader = MailboxReader(shared.path)
    Mailbox(shared, names).post(
        Finding(reason="x", step=1, trace_id="t", request_id="secret-1", other_request_id="secret-2", actual="secret-3")
    )
    (found,) = reader.poll()
    assert (found.request_id, found.other_request_id) == (names("secret-1"), names("secret-2"))
    assert b"secret" not in shared.path.read_bytes()


def test_numbers_from_an_array_arrive(shared: SharedFile) -> None:
    number: Any = np.array([7], dtype=np.int32)[0]
    reader = MailboxReader(shared.path)
    Mailbox(shared).post(Finding(reason="x", step=1, trace_id="t", slot=number))
    assert reader.poll()[0].slot == 7


def test_no_news_costs_little(shared: SharedFile, capsys: pytest.CaptureFixture[str]) -> None:
    reader = MailboxReader(shared.path)
    best = min(_polls(reader, 1000) for _ in range(20)) / 1000
    say(capsys, f"poll without news: {best:.0f} ns")
    assert best < 4000


def _polls(reader: MailboxReader, count: int) -> int:
    start = time.perf_counter_ns()
    for _ in range(count):
        reader.poll()
    return time.perf_counter_ns() - start


WRITER = """
import sys, pathlib, time
from kvscope.sinks.mailbox import Mailbox
from unit.sinks.test_mailbox import finding, shared_file
mailbox = Mailbox(shared_file(pathlib.Path(sys.argv[1])))
sys.stdin.read(1)
for step in range(3000):
    mailbox.post(finding(step))
    if step % 10 == 0:
        time.sleep(0.0005)
"""


def test_findings_cross_from_a_real_process_while_both_run(tmp_path: Path) -> None:
    path = tmp_path / "worker-1-1.shared"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as child:
        assert child.stdin is not None
        deadline = time.monotonic() + 60
        while not find_mailboxes(tmp_path, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        reader = MailboxReader(path)
        child.stdin.write(b"x")
        child.stdin.close()
        steps: list[int] = []
        while time.monotonic() < deadline and (child.poll() is None or reader._cells[C_POSTED] != reader._seen):
            steps += [found.step for found in reader.poll()]
    assert steps == sorted(set(steps))
    assert len(steps) + reader.lost == 3000
    assert steps[-1] == 2999


def test_mailboxes_are_those_of_this_ranks_workers(tmp_path: Path) -> None:
    shared_file(tmp_path / "worker-1-1.shared", rank=1)
    shared_file(tmp_path / "worker-0-1.shared", rank=0)
    shared_file(tmp_path / "worker-5-1.shared", rank=5, dp_rank=1)
    shared_file(tmp_path / "worker-6-1.shared", rank=6, dp_rank=None)
    shared_file(tmp_path / "engine-0-1.shared", process="engine")
    (tmp_path / "worker-7-1.shared").write_bytes(b"")
    (tmp_path / "worker-8-1.shared").write_bytes(b"x" * 300_000)
    assert [path.name for path in find_mailboxes(tmp_path, 0)] == ["worker-0-1.shared", "worker-1-1.shared"]
    assert [path.name for path in find_mailboxes(tmp_path, 1)] == ["worker-5-1.shared"]
    assert [path.name for path in find_mailboxes(tmp_path, None)] == ["worker-6-1.shared"]


def test_a_shared_file_is_allocated_in_full_readable_by_its_owner_only_and_says_whose_it_is(shared: SharedFile) -> None:
    stat = shared.path.stat()
    assert stat.st_size == PAGE + SLOTS * SLOT_BYTES
    assert stat.st_blocks * 512 >= stat.st_size
    assert stat.st_mode & 0o777 == 0o600
    status = read_status(shared.path)
    assert (status.process, status.rank, status.dp_rank, status.pid) == ("worker", 1, 0, os.getpid())
    assert (status.produced, status.written, status.dropped, status.closed) == (0, 0, {}, False)
    assert status.start_wall_ns > 0


@pytest.mark.parametrize("content", [b"", b"KVSCOPE1", b"KVSCOPE2" + bytes(8192)])
def test_what_is_no_shared_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "worker-1-1.shared"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="no shared file"):
        read_status(path)
    with pytest.raises(ValueError, match="no shared file"):
        MailboxReader(path)
