"""The metrics file of a process: what is counted is what is read, and what is wrong with a file is said."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvscope.errors import UnreadableMetricsError
from kvscope.metrics import front, layout
from kvscope.metrics.catalog import METRICS
from kvscope.metrics.families import CustomValue, Histogram, families, runs
from kvscope.metrics.layout import FILE_BYTES, MOST_SLABS, PAGE
from kvscope.metrics.reader import read_process, read_run, read_runs
from kvscope.metrics.reclaim import reclaim
from kvscope.metrics.store import MetricsStore
from kvscope.metrics.transfer_metrics import SECONDS


def make(folder: Path, **given: Any) -> MetricsStore:
    about: dict[str, Any] = {"process": "engine", "rank": 0, "engine": "0", "prefix": "p_"}
    store = MetricsStore(folder, **{**about, **given})
    assert store.reason is None
    return store


@pytest.fixture
def store(tmp_path: Path) -> MetricsStore:
    return make(tmp_path / "run")


def test_what_is_counted_is_what_is_read(store: MetricsStore) -> None:
    slab = store.slab()
    slab.counter("kv_block_alloc_total").add(3)
    slab.counter("kv_block_alloc_total").add()
    slab.counter("prefix_cache_hits_total", unit="token").reach(48)
    slab.gauge("kv_blocks", state="held", cause="connector").set(7)
    slab.histogram("pd_wait_seconds").observe(SECONDS[0])
    slab.histogram("pd_wait_seconds").observe(1000)
    slab.publish()
    process = read_process(store.path)
    assert (process.run_id, process.process, process.rank, process.pid) == ("run", "engine", 0, os.getpid())
    assert (process.engine, process.prefix, process.num_torn_slabs) == ("0", "p_", 0)
    assert (process.is_alive, process.has_ended) == (True, False)
    assert 0 <= process.age_seconds < 60
    assert process.values == {
        "kv_block_alloc_total": {(): 4.0},
        "prefix_cache_hits_total": {("token",): 48.0},
        "kv_blocks": {("held", "connector"): 7.0},
        "pd_wait_seconds": {(): Histogram((1.0, *[0.0] * (len(SECONDS) - 1), 1.0), 1000 + SECONDS[0])},
    }


def test_a_bucket_takes_what_is_at_most_its_bound(store: MetricsStore) -> None:
    slab = store.slab()
    histogram = slab.histogram("pd_wait_seconds")
    for bound in SECONDS:
        histogram.observe(bound)
    slab.publish()
    found = families([read_process(store.path)], prefix="")
    (sample,) = next(family for family in found if family.name == "pd_wait_seconds").samples
    counts = [*range(1, len(SECONDS) + 1), len(SECONDS)]
    assert sample.buckets == tuple(zip((*SECONDS, float("inf")), counts, strict=True))


def test_every_series_has_a_place_of_its_own(store: MetricsStore) -> None:
    slab = store.slab()
    for number, place in enumerate(layout.PLACES.values()):
        for index in range(place.start, place.start + place.width):
            slab.cells[index] = number
    slab.publish()
    values = read_process(store.path).values
    for number, (name, key) in enumerate(layout.PLACES):
        value = values[name][key]
        assert (value.total if isinstance(value, Histogram) else value) == number
    assert values.keys() == METRICS.keys() - {"snapshot_age_seconds"}


def test_what_is_not_published_is_not_seen(store: MetricsStore) -> None:
    slab = store.slab()
    counter = slab.counter("kv_block_alloc_total")
    slab.publish()
    counter.add(5)
    assert read_process(store.path).values == {"kv_block_alloc_total": {(): 0.0}}


def test_a_gauge_without_a_value_is_absent(store: MetricsStore) -> None:
    slab = store.slab()
    gauge = slab.gauge("prefix_cache_hit_ratio", unit="token")
    slab.publish()
    assert read_process(store.path).values == {}
    gauge.set(0.5)
    slab.publish()
    assert read_process(store.path).values == {"prefix_cache_hit_ratio": {("token",): 0.5}}
    gauge.clear()
    slab.publish()
    assert read_process(store.path).values == {}


def test_threads_of_a_process_are_added(store: MetricsStore) -> None:
    for amount in (1, 10, 100):
        slab = store.slab()
        slab.counter("guard_rows_audited_total").add(amount)
        slab.gauge("guard_checks_stalled", check="C1").set(amount == 10)
        slab.publish()
    values = read_process(store.path).values
    assert values == {"guard_rows_audited_total": {(): 111.0}, "guard_checks_stalled": {("C1",): 1.0}}


def test_there_are_no_more_slabs_than_there_are(store: MetricsStore) -> None:
    for _ in range(MOST_SLABS):
        store.slab()
    with pytest.raises(RuntimeError, match="no more than"):
        store.slab()


@pytest.mark.parametrize(
    "ask",
    [
        lambda slab: slab.counter("kv_blocks", state="free"),
        lambda slab: slab.gauge("kv_block_alloc_total"),
        lambda slab: slab.histogram("kv_block_alloc_total"),
        lambda slab: slab.counter("made_up_total"),
        lambda slab: slab.gauge("kv_blocks"),
        lambda slab: slab.gauge("kv_blocks", state="full"),
        lambda slab: slab.counter("kv_block_alloc_total", block="7"),
        lambda slab: slab.gauge("snapshot_age_seconds"),
    ],
)
def test_what_the_catalog_does_not_have_is_refused(store: MetricsStore, ask: Callable[[Any], object]) -> None:
    with pytest.raises(KeyError):
        ask(store.slab())


def test_values_of_collectors_travel_beside_the_slabs(store: MetricsStore) -> None:
    value = CustomValue("p_mine", "gauge", "What I count.", 2.5)
    store.publish_custom([value])
    assert read_process(store.path).custom == (value,)
    with pytest.raises(ValueError, match="do not fit"):
        store.publish_custom([CustomValue("p_mine", "gauge", "x" * layout.CUSTOM_BYTES, 1.0)])
    assert read_process(store.path).custom == (value,)
    assert [f.name for f in families([read_process(store.path)], prefix="p_")] == ["p_snapshot_age_seconds", "p_mine"]


def test_a_full_disk_is_a_reason_and_counting_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvscope.metrics.store.os.posix_fallocate", refuse)
    store = MetricsStore(tmp_path / "run", process="engine", rank=0, engine="0", prefix="p_")
    assert store.reason == "no metrics file: No space left on device"
    assert list((tmp_path / "run").iterdir()) == []
    slab = store.slab()
    slab.counter("kv_block_alloc_total").add()
    slab.publish()
    store.publish_custom([])
    store.close()


def test_the_file_is_fully_allocated_and_private(store: MetricsStore) -> None:
    found = store.path.stat()
    assert found.st_size == FILE_BYTES
    assert found.st_blocks * 512 >= FILE_BYTES
    assert found.st_mode & 0o777 == 0o600
    assert [path.name for path in store.path.parent.iterdir()] == [f"engine-0-{os.getpid()}.metrics"]


def test_an_orderly_end_leaves_the_last_values(store: MetricsStore) -> None:
    slab = store.slab()
    counter = slab.counter("kv_block_alloc_total")
    counter.add(2)
    slab.publish()
    store.close()
    store.close()
    counter.add(40)
    slab.publish()
    process = read_process(store.path)
    assert (process.is_alive, process.has_ended) == (False, True)
    assert process.values == {"kv_block_alloc_total": {(): 2.0}}
    assert store.slab().cells
    assert store.reason == "the metrics of this process have ended"


def test_closing_gives_descriptors_and_memory_back(tmp_path: Path) -> None:
    def held() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())) + Path("/proc/self/maps").read_text().count(".metrics")

    before = held()
    for number in range(20):
        store = make(tmp_path / str(number))
        store.slab().publish()
        store.close()
        del store
    assert held() <= before


def damaged(store: MetricsStore, change: Callable[[bytearray], bytes | bytearray]) -> Path:
    path = store.path.with_name("worker-0-1.metrics")
    path.write_bytes(change(bytearray(store.path.read_bytes())))
    return path


def without_digest(data: bytearray) -> bytes:
    about = front.read_front(Path(), bytes(data))
    page = front.front_page(front.About(**{**{n: getattr(about, n) for n in about.__struct_fields__}, "digest": "00"}))
    return page + bytes(data[len(page) :])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:0], "foreign"),
        (lambda data: b"#!/bin/sh\n" + data, "foreign"),
        (lambda data: bytes(len(data)), "foreign"),
        (lambda data: data[:100], "torn"),
        (lambda data: data[: PAGE - 1], "torn"),
        (lambda data: data[: PAGE + 10], "torn"),
        (lambda data: data[:-1], "torn"),
        (lambda data: data[:30] + b"\xff" + data[31:], "torn"),
        (lambda data: data[:8] + b"\x09" + data[9:], "other_version"),
        (without_digest, "other_version"),
    ],
)
def test_a_file_that_says_nothing_says_why(
    store: MetricsStore, change: Callable[[bytearray], bytes | bytearray], reason: str
) -> None:
    path = damaged(store, change)
    with pytest.raises(UnreadableMetricsError) as caught:
        read_process(path)
    assert caught.value.reason == reason
    assert str(path) in str(caught.value)
    reading = read_run(path.parent)
    assert [process.process for process in reading.processes] == ["engine"]
    assert [error.reason for error in reading.unreadable] == [reason]


def test_a_slab_that_is_torn_is_counted_and_the_others_are_read(store: MetricsStore) -> None:
    for _ in range(2):
        slab = store.slab()
        slab.counter("kv_block_alloc_total").add(5)
        slab.publish()
    start = layout.slab_start(1)

    def tear(data: bytearray) -> bytearray:
        for at in (start, start + layout.SLAB_BYTES):
            data[at + 40] ^= 1
        return data

    process = read_process(damaged(store, tear))
    assert process.num_torn_slabs == 1
    assert process.values == {"kv_block_alloc_total": {(): 5.0}}


def test_a_file_that_is_not_there_is_no_file(tmp_path: Path) -> None:
    assert read_run(tmp_path / "nothing").processes == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "engine-0-1.metrics").symlink_to(tmp_path / "gone")
    reading = read_runs(tmp_path)
    assert (reading.processes, reading.unreadable) == ([], [])


def test_a_leftover_of_an_earlier_process_with_this_pid_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = make(folder, pid=7)
    slab = first.slab()
    slab.counter("kv_block_alloc_total").add(5)
    slab.publish()
    first.close()
    (folder / ".engine-0-7.metrics.new").write_bytes(b"half")
    second = make(folder, pid=7)
    assert read_process(second.path).values == {}
    assert len(list(folder.iterdir())) == 1


def test_files_of_runs_that_are_over_are_removed_but_the_newest(tmp_path: Path) -> None:
    stores = [make(tmp_path / f"run{number}", pid=number + 1) for number in range(5)]
    alive, *ended = stores
    for store in ended:
        store.close()
    (tmp_path / "run0" / "engine-0-1.0.jsonl").write_text("")
    (tmp_path / "run1" / "engine-0-2.0.jsonl").write_text("")
    (tmp_path / "run1" / "worker-0-9.metrics").write_bytes(b"another's")
    assert reclaim(tmp_path, keep=2) == 2
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*"))
    assert left == [
        "run0/engine-0-1.0.jsonl",
        "run0/engine-0-1.metrics",
        "run1/engine-0-2.0.jsonl",
        "run1/worker-0-9.metrics",
        "run3/engine-0-4.metrics",
        "run4/engine-0-5.metrics",
    ]
    assert [run.run_id for run in runs(read_runs(tmp_path).processes)] == ["run4", "run3", "run0"]
    assert alive.reason is None
