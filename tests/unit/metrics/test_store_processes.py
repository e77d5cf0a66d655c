"""Metrics files between processes: writers that are killed, forked or read while they write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvscope.metrics.reader import read_process
from kvscope.metrics.store import MetricsStore

MAKE = """
import os, sys, time
from pathlib import Path
from kvscope.metrics.store import MetricsStore
store = MetricsStore(Path(sys.argv[1]), process="worker", rank=0, engine="0", prefix="p_")
assert store.reason is None, store.reason
slab = store.slab()
"""
WRITE = """
names = ("kv_block_alloc_total", "kv_block_free_total", "kv_refs_released_total", "kv_block_touch_total")
counters = [slab.counter(name) for name in names]
waits = slab.histogram("pd_wait_seconds")
print(store.path, flush=True)
while True:
    for counter in counters:
        counter.add()
    waits.observe(0.05)
    slab.publish()
"""


def start(folder: Path, text: str) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(MAKE) + textwrap.dedent(text), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def consistent(path: Path) -> float:
    """The number in the snapshot, in which all must be equal."""
    process = read_process(path)
    assert process.num_torn_slabs == 0
    if not process.values:
        return 0.0
    waits = process.values["pd_wait_seconds"][()]
    numbers = {of[()] for name, of in process.values.items() if name != "pd_wait_seconds"}
    assert numbers == {sum(waits.counts)}  # type: ignore[union-attr]  # it is a histogram
    return float(sum(waits.counts))  # type: ignore[union-attr]  # it is a histogram


def test_a_reader_beside_a_writer_sees_whole_snapshots_that_never_go_back_and_the_last_one_survives_it(
    tmp_path: Path,
) -> None:
    process, path = start(tmp_path / "run", WRITE)
    try:
        last, readings, until = 0.0, 0, time.monotonic() + 1.0
        while time.monotonic() < until:
            number = consistent(path)
            assert number >= last
            last, readings = number, readings + 1
        assert readings > 50
        assert last > 100
        assert read_process(path).is_alive is True
    finally:
        process.kill()
        process.wait()
    survived = read_process(path)
    assert (survived.is_alive, survived.has_ended) == (False, False)
    assert consistent(path) >= last
    assert survived.pid == process.pid


@pytest.mark.parametrize("attempt", range(5))
def test_a_writer_killed_in_the_middle_of_a_store_leaves_a_whole_snapshot(tmp_path: Path, attempt: int) -> None:
    process, path = start(tmp_path / "run", WRITE)
    time.sleep(0.02 + 0.013 * attempt)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert consistent(path) > 0


def test_a_forked_child_never_writes_the_parents_file(tmp_path: Path) -> None:
    store = MetricsStore(tmp_path / "run", process="engine", rank=0, engine="0", prefix="p_")
    slab = store.slab()
    counter = slab.counter("kv_block_alloc_total")
    counter.add()
    slab.publish()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            counter.add(1000)
            slab.publish()
            store.slab().publish()
            store.publish_custom([])
            store.close()
            status = 0 if store.reason is not None and "forked" in store.reason else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    process = read_process(store.path)
    assert process.values == {"kv_block_alloc_total": {(): 1.0}}
    assert process.custom == ()
    assert (process.is_alive, process.has_ended) == (True, False)
    slab.publish()
    store.close()


def test_a_child_that_outlives_its_parent_does_not_make_it_look_alive(tmp_path: Path) -> None:
    fork = """
    slab.publish()
    if os.fork() == 0:
        print(store.path, os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
    time.sleep(60)
    """
    process, line = start(tmp_path / "run", fork)
    path, _, child = str(line).partition(" ")
    try:
        assert read_process(Path(path)).is_alive is True
        process.kill()
        process.wait()
        os.kill(int(child), 0)
        assert read_process(Path(path)).is_alive is False
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_a_child_has_a_file_of_its_own(tmp_path: Path) -> None:
    parent = MetricsStore(tmp_path / "run", process="engine", rank=0, engine="0", prefix="p_")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            own = MetricsStore(tmp_path / "run", process="worker", rank=0, engine="0", prefix="p_")
            slab = own.slab()
            slab.counter("guard_rows_audited_total").add(3)
            slab.publish()
            status = 0 if own.reason is None else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (path,) = (tmp_path / "run").glob("worker-*.metrics")
    process = read_process(path)
    assert (process.pid, process.is_alive) == (child, False)
    assert process.values == {"guard_rows_audited_total": {(): 3.0}}
    assert read_process(parent.path).values == {}
    parent.close()
