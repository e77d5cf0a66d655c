"""Where registered collectors are called, and that what they say gets to whoever scrapes the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvscope.config import parse
from kvscope.facts.topology import Ranks
from kvscope.metrics import sampling
from kvscope.metrics.collecting import collect_run
from kvscope.metrics.collectors import CollectorContext, Collectors
from kvscope.metrics.families import CustomValue, Family
from kvscope.metrics.layout import CUSTOM_BYTES
from kvscope.metrics.reader import read_process
from kvscope.metrics.store import MetricsStore
from kvscope.runtime import collectors_called
from kvscope.runtime.run import Run
from unit.metrics.support import get, until
from unit.runtime.support import RUN, make_run

PROCESSES = ("exporter", "engine", "worker")
FAST = {"prefix": "p_", "scrape_interval": 0.01}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Collectors:
    """Of a process in which nothing is registered yet."""
    made = Collectors()
    made.expect("p_")
    monkeypatch.setattr(collectors_called, "COLLECTORS", made)
    return made


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[MetricsStore]]:
    """Two engines of a run, which have said how full they are."""
    made = [
        MetricsStore(tmp_path / RUN, process="engine", rank=rank, engine=str(rank), prefix="p_", pid=100 + rank)
        for rank in range(2)
    ]
    for rank, store in enumerate(made):
        slab = store.slab()
        slab.gauge("kv_cache_usage_percent").set(10.0 + rank)
        slab.publish()
    yield made
    for store in made:
        store.close()


def register(
    registry: Collectors, process: Any, function: Callable[[CollectorContext], Any], kind: Any = "gauge"
) -> Any:
    return registry.register(function, name=f"p_of_{process}", kind=kind, process=process)


def names(run: Run) -> set[str]:
    """Of what the process' metrics file has of collectors."""
    assert run.monitor is not None
    return {value.name for value in read_process(run.monitor.store.path).custom}


@pytest.mark.parametrize(
    ("roles", "called"),
    [
        (("engine",), {"p_of_engine"}),
        (("worker",), {"p_of_worker"}),
        (("engine", "worker"), {"p_of_engine", "p_of_worker"}),
        (("frontend",), set()),
    ],
)
def test_in_each_process_those_are_called_that_are_registered_for_it(
    roles: tuple[Any, ...], called: set[str], registry: Collectors, tmp_path: Path
) -> None:
    for process in PROCESSES:
        register(registry, process, lambda _: 1.0)
    run = make_run(tmp_path, *roles, monitor=FAST)
    run.open()
    assert until(lambda: names(run) == called)
    run.close()
    assert names(run) == called  # what was said stays readable


def test_with_the_part_off_nobody_is_called(registry: Collectors, tmp_path: Path) -> None:
    made = [register(registry, process, lambda _: 1.0) for process in PROCESSES]
    run = make_run(tmp_path)
    run.open()
    run.export()
    run.close()
    assert [each.calls for each in made] == [0, 0, 0]
    assert [each._thread for each in made] == [None, None, None]


def test_a_collector_is_told_its_engine_the_time_and_what_its_process_has_published(
    registry: Collectors, tmp_path: Path
) -> None:
    told: list[tuple[str, str, int, float | None]] = []

    def tell(ctx: CollectorContext) -> float:
        told.append((ctx.engine, ctx.engine_id, ctx.wall_ns, ctx.metrics.total("kvscope_info", connector="none")))
        return 1.0

    register(registry, "engine", tell)
    run = make_run(tmp_path, "engine", monitor=FAST, ranks=Ranks(dp=2))
    run.open()
    assert run.monitor is not None
    run.monitor.observe_scheduler("none", None)
    run.monitor.publish()
    assert until(lambda: bool(told) and told[-1][3] is not None)
    assert told[-1][:2] == ("2", f"{RUN}.2")
    assert told[-1][2] >= told[0][2] > 10**18
    assert told[-1][3] == 1


def test_where_the_metrics_cannot_be_read_the_snapshot_is_empty(registry: Collectors, tmp_path: Path) -> None:
    seen: list[int] = []
    register(registry, "engine", lambda ctx: seen.append(len(ctx.metrics.engines())) or 1.0)
    run = make_run(tmp_path, "engine", monitor=FAST)
    run.open()
    assert run.monitor is not None
    run.monitor.store.path.unlink()
    assert until(lambda: seen[-3:] == [0, 0, 0])
    assert registry.numbers() is not None
    assert registry.numbers()[1] == 0  # type: ignore[index]  # the line before says so


def test_values_for_which_the_file_has_no_room_are_left_out_and_said_once(
    stores: list[MetricsStore], caplog: pytest.LogCaptureFixture
) -> None:
    values = [CustomValue(f"p_{number:03}", "gauge", "x" * 190, 1.0) for number in range(CUSTOM_BYTES // 190)]
    publisher = collectors_called._Publisher(stores[0], "0")
    with caplog.at_level(logging.WARNING, "vllm.kvscope"):
        for _ in range(2):
            publisher.publish({"0": values, "1": [CustomValue("p_others", "gauge", "", 1.0)]})
    found = [value.name for value in read_process(stores[0].path).custom]
    assert 20 < len(found) < len(values)
    assert found == [value.name for value in values[: len(found)]]
    assert [record.getMessage() for record in caplog.records] == [
        f"kvscope: the metrics file has no room for {len(values) - len(found)} of the registered collectors, the first "
        f"of them p_{len(found):03}"
    ]


def test_a_worker_of_metrics_alone_has_a_file_only_if_there_is_a_collector_for_it(
    registry: Collectors, tmp_path: Path
) -> None:
    run = make_run(tmp_path, "worker", monitor=FAST, trace=None, guard=None)
    run.collect()
    assert run.monitor is None
    assert not list(tmp_path.rglob("*.metrics"))
    register(registry, "worker", lambda _: 4.0)
    run.collect()
    assert until(lambda: names(run) == {"p_of_worker"})
    assert not list(tmp_path.rglob("*.jsonl"))
    assert not list(tmp_path.rglob("*.shared"))
    assert run.monitor is not None
    run.monitor.close()


# At the exporter ------------------------------------------------------------------------------------------------------


def exporting(folder: Path, process: str = "frontend") -> Run:
    run = make_run(folder, process, monitor=FAST)  # type: ignore[arg-type]  # a role, too
    run.export()
    assert run.exporter is not None
    return run


def page(run: Run) -> str:
    assert run.exporter is not None
    place = run.exporter.place
    return get(place.port).body.decode() if place is not None else ""


def test_those_of_the_exporter_are_called_for_each_engine_with_what_it_has_said(
    registry: Collectors, stores: list[MetricsStore], tmp_path: Path
) -> None:
    register(registry, "exporter", lambda ctx: (ctx.metrics.total("kv_cache_usage_percent") or 0) * 2)
    run = exporting(tmp_path)
    assert until(lambda: 'p_of_exporter{engine="1"} 22.0' in page(run))
    assert 'p_of_exporter{engine="0"} 20.0' in page(run)


def test_each_type_stands_on_the_page_as_what_it_is(
    registry: Collectors, stores: list[MetricsStore], tmp_path: Path
) -> None:
    """What is shown is what was registered."""
    for kind in ("gauge", "counter", "histogram"):
        registry.register(lambda _: 2.5, name=f"p_my_{kind}", kind=kind, process="exporter")  # type: ignore[arg-type]  # one of the three
    run = exporting(tmp_path)
    lines = (
        "# TYPE p_my_gauge gauge",
        'p_my_gauge{engine="0"} 2.5',
        "# TYPE p_my_counter_total counter",
        'p_my_counter_total{engine="1"} 2.5',
        "# TYPE p_my_histogram histogram",
        'p_my_histogram_bucket{engine="0",le="1.0"} 0.0',
    )
    assert until(lambda: set(lines) <= set(page(run).splitlines()))


def test_without_an_engine_there_is_nothing_to_call_it_for(registry: Collectors, tmp_path: Path) -> None:
    made = register(registry, "exporter", lambda _: 1.0)
    run = exporting(tmp_path)
    assert run.exporter is not None
    run.exporter._sampler.sample()
    assert made.calls == 0


def test_a_process_that_does_not_export_calls_none(
    registry: Collectors, stores: list[MetricsStore], tmp_path: Path
) -> None:
    first = exporting(tmp_path)
    assert until(lambda: first.exporter is not None and first.exporter.place is not None)
    second = exporting(tmp_path, "engine")
    assert second.exporter is not None
    made = register(registry, "exporter", lambda _: 1.0)
    assert until(lambda: made.calls > 2)
    assert first.exporter is not None
    first.exporter._sampler.stop()
    assert until(lambda: not first.exporter._sampler._busy)  # type: ignore[union-attr]  # the line before last says so
    stood = made.calls
    second.exporter._sampler.sample()
    assert made.calls == stood


def test_a_collection_that_hangs_or_raises_takes_nobody_elses_series_away(
    registry: Collectors, stores: list[MetricsStore], tmp_path: Path
) -> None:
    bad = register(registry, "exporter", lambda _: 1 / 0)
    run = exporting(tmp_path)
    assert until(lambda: bad.fence.is_down)
    assert 'p_kv_cache_usage_percent{engine="0"} 10.0' in page(run)
    assert "p_of_exporter" not in page(run)


def test_values_of_a_file_and_of_the_exporter_stand_side_by_side(registry: Collectors, tmp_path: Path) -> None:
    register(registry, "engine", lambda _: 3.0, "counter")
    run = make_run(tmp_path, monitor=FAST)
    run.open()
    assert until(lambda: names(run) == {"p_of_engine_total"})
    register(registry, "exporter", lambda ctx: ctx.metrics.total("of_engine_total") or 0.0)

    def found() -> dict[str, Family]:
        assert run.exporter is not None
        return {family.name: family for family in run.exporter._collect()}

    assert until(lambda: "p_of_exporter" in found() and found()["p_of_exporter"].samples[0].value == 3)
    assert found()["p_of_engine_total"].samples[0].labels == {"engine": "0"}
    assert "p_of_exporter" not in {family.name for family in collect_run(tmp_path / RUN)}


def test_its_interval_is_that_of_scraping() -> None:
    config = parse({"kv_monitor": {"enabled": True, "scrape_interval": 7}}, {})
    sampler = collectors_called.sampler_of_exporter(
        "run", config, Path("nowhere"), is_exporting=lambda: False, publish=lambda _: None
    )
    assert sampler._interval_s == 7
    assert sampling.LONGEST_ANSWER_S < 7
