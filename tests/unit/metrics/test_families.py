"""Families out of the values of several processes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvscope.metrics.families import Family, Histogram, ProcessValues, Values, families, runs
from kvscope.metrics.transfer_metrics import SECONDS


def process(values: Values | None = None, **given: Any) -> ProcessValues:
    about: dict[str, Any] = {
        "run_id": "run",
        "process": "engine",
        "rank": 0,
        "pid": 10,
        "engine": "0",
        "start_wall_ns": 1_000,
        "snapshot_wall_ns": 2_000,
        "age_seconds": 0.5,
        "is_alive": True,
        "has_ended": False,
    }
    return ProcessValues(values=values or {}, **{**about, **given})


def by_name(found: list[Family]) -> dict[str, Family]:
    return {family.name: family for family in found}


def test_counters_of_the_processes_of_one_engine_are_added_and_engines_are_kept_apart() -> None:
    rows: Values = {"guard_rows_audited_total": {(): 10.0}}
    found = by_name(
        families(
            [
                process(rows, process="worker"),
                process(rows, process="worker", rank=1),
                process(rows, process="worker", engine="1"),
                process(rows, process="worker", engine="10"),
                process(rows, process="worker", engine="2"),
            ],
            prefix="p_",
        )
    )
    family = found["p_guard_rows_audited_total"]
    assert (family.kind, family.unit) == ("counter", "rows")
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"engine": "0"}, 20.0),
        ({"engine": "1"}, 10.0),
        ({"engine": "2"}, 10.0),
        ({"engine": "10"}, 10.0),
    ]


def test_gauges_are_combined_as_the_catalog_says() -> None:
    found = by_name(
        families(
            [
                process({"guard_checks_stalled": {("C1",): 0.0}, "tail_entries": {("own",): 2.0}}, age_seconds=0.1),
                process({"guard_checks_stalled": {("C1",): 1.0}, "tail_entries": {("own",): 3.0}}, age_seconds=7.0),
            ],
            prefix="",
        )
    )
    assert found["guard_checks_stalled"].samples[0].value == 1
    assert found["tail_entries"].samples[0].value == 5
    assert found["snapshot_age_seconds"].samples[0].value == 7


def test_what_nobody_observed_is_absent_and_not_zero() -> None:
    assert [family.name for family in families([process()], prefix="x_")] == ["x_snapshot_age_seconds"]
    assert families([], prefix="x_") == []


def test_a_label_that_a_series_does_not_have_is_left_out() -> None:
    (blocks, _) = families([process({"kv_blocks": {("free", ""): 4.0, ("held", "connector"): 1.0}})], prefix="")
    assert [sample.labels for sample in blocks.samples] == [
        {"engine": "0", "state": "free"},
        {"engine": "0", "state": "held", "cause": "connector"},
    ]


def test_histograms_are_added_and_become_cumulative() -> None:
    size = len(SECONDS) + 1
    one = Histogram((1.0, *[0.0] * (size - 2), 2.0), 60.0)
    other = Histogram((0.0, 3.0, *[0.0] * (size - 2)), 0.02)
    values = [process({"pd_wait_seconds": {(): one}}), process({"pd_wait_seconds": {(): other}}, process="worker")]
    (family, _) = families(values, prefix="")
    (sample,) = family.samples
    assert sample.value == pytest.approx(60.02)
    assert sample.count == 6
    assert sample.buckets[0] == (SECONDS[0], 1)
    assert sample.buckets[1] == (SECONDS[1], 4)
    assert sample.buckets[-1] == (math.inf, 6)


def test_runs_are_kept_apart_and_the_newest_comes_first() -> None:
    old, new = process(run_id="a", is_alive=False), process(run_id="b", start_wall_ns=9_000)
    found = runs([old, new])
    assert [run.run_id for run in found] == ["b", "a"]
    assert [run.is_over for run in found] == [False, True]
    assert found[1].processes == (old,)


def test_a_dead_worker_keeps_its_last_values() -> None:
    engine, worker = process(), process(process="worker", is_alive=False)
    (run,) = runs([engine, worker])
    assert run.processes == (engine, worker)
    assert not run.is_over


def test_a_run_that_is_started_again_under_its_name_starts_from_zero() -> None:
    before = [
        process(is_alive=False, snapshot_wall_ns=5_000),
        process(process="worker", is_alive=False, snapshot_wall_ns=5_000),
        process(process="worker", rank=1, is_alive=False, snapshot_wall_ns=5_000),
    ]
    # Workers come first; of the two there were only one comes back.
    after = [
        process(process="worker", pid=20, start_wall_ns=8_000, snapshot_wall_ns=8_000),
        process(pid=21, start_wall_ns=9_000, snapshot_wall_ns=9_000),
    ]
    (run,) = runs([*before, *after])
    assert set(map(id, run.processes)) == set(map(id, after))
    assert len(run.replaced) == 3
    assert run.start_wall_ns == 9_000


def test_what_cannot_be_told_to_be_dead_is_kept() -> None:
    unknown = process(process="worker", is_alive=None, snapshot_wall_ns=500)
    (run,) = runs([unknown, process()])
    assert unknown in run.processes
    assert not run.is_over


def test_a_histogram_and_a_number_cannot_be_added() -> None:
    wrong = [process({"pd_wait_seconds": {(): 1.0}}), process({"pd_wait_seconds": {(): Histogram((1.0,), 1.0)}})]
    with pytest.raises(TypeError, match="pd_wait_seconds"):
        families(wrong, prefix="")
