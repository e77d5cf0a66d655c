"""Of several processes of a host one exports a run, and the system itself says when it no longer does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvscope.metrics.place import ExportLock, Place, is_exported, places_in

HOLDER = """
import sys, time
from pathlib import Path
from kvscope.metrics.place import ExportLock
assert ExportLock(Path(sys.argv[1])).try_to_take()
print("held", flush=True)
time.sleep(60)
"""


def place(**changed: object) -> Place:
    fields: dict[str, object] = {
        "run_id": "run",
        "url": "http://127.0.0.1:9461/",
        "metrics_url": "http://127.0.0.1:9461/metrics",
        "host_name": "here",
        "wanted_port": 9460,
        "port": 9461,
        "pid": 7,
        "start_wall_ns": 1,
    }
    return Place(**{**fields, **changed})  # type: ignore[arg-type]  # each has the type of its field


def test_only_one_has_the_lock_until_it_lets_go(tmp_path: Path) -> None:
    first, second = ExportLock(tmp_path), ExportLock(tmp_path)
    assert not is_exported(tmp_path)
    assert first.try_to_take()
    assert first.try_to_take()
    assert not second.try_to_take()
    assert is_exported(tmp_path)
    first.release()
    assert not is_exported(tmp_path)
    assert second.try_to_take()


def test_hosts_that_share_a_folder_do_not_share_the_lock(tmp_path: Path) -> None:
    assert ExportLock(tmp_path, "one").try_to_take()
    assert ExportLock(tmp_path, "other/../host").try_to_take()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exporter-one.lock", "exporter-other_.._host.lock"]


def test_death_lets_go_of_the_lock(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    lock = ExportLock(tmp_path)
    assert not lock.try_to_take()
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    holder.stdout.close()
    assert lock.try_to_take()


def test_a_forked_child_neither_keeps_nor_opens_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock = ExportLock(tmp_path)
    assert lock.try_to_take()
    child = os.fork()
    if child == 0:
        lock.abandon()
        os._exit(0 if is_exported(tmp_path) else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, "the child's end of it let go for the parent"
    assert is_exported(tmp_path)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ExportLock(tmp_path / "gone").try_to_take()


def test_a_place_is_read_back_and_removed_by_its_own_process_alone(tmp_path: Path) -> None:
    place().write(tmp_path)
    assert places_in(tmp_path) == [place()]
    place(pid=8).remove(tmp_path)
    assert places_in(tmp_path) == [place()]
    place().remove(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_passed_over(tmp_path: Path) -> None:
    place().write(tmp_path)
    (tmp_path / "exporter-cut.json").write_bytes(b'{"run_id": "r')
    (tmp_path / "exporter-other.json").write_bytes(b"[]")
    assert places_in(tmp_path) == [place()]
