"""A run is exported by its front end, else by its EngineCore, as its configuration says."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from kvscope.config import MonitorConfig, parse
from kvscope.facts.topology import Ranks
from kvscope.metrics.http import listen
from kvscope.metrics.store import MetricsStore
from kvscope.metrics.switch import Switch
from kvscope.runtime.exporting import RunExporter
from unit.metrics.support import get, until
from unit.runtime.support import make_run


def free_port() -> int:
    with listen("127.0.0.1", 0) as listening:
        return int(listening.getsockname()[1])


class Runs:
    """Processes of one run, each with its exporter."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.begun: list[RunExporter] = []

    def begin(self, process: str, engine: int = 0, **monitor: Any) -> RunExporter:
        settings = {"enabled": True, "port": self.port, "scrape_interval": 0.01, **monitor}
        config = parse({"kv_monitor": settings, "kv_output": {"dir": str(self.folder)}}, {})
        run: Any = SimpleNamespace(run_id="run", config=config, process=process, ranks=Ranks(dp=engine))
        self.begun.append(RunExporter(run, engine_patience_s=1.5))
        self.begun[-1].start()
        return self.begun[-1]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path, free_port())
    yield made
    for exporter in made.begun:
        exporter.stop()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MetricsStore]:
    made = MetricsStore(tmp_path / "run", process="engine", rank=0, engine="0", prefix="kv_")
    slab = made.slab()
    slab.gauge("kv_cache_usage_percent").set(43.21)
    slab.counter("kv_block_alloc_total").add(7)
    slab.publish()
    yield made
    made.close()


def port_of(exporter: RunExporter) -> int:
    assert until(lambda: exporter.place is not None)
    assert exporter.place is not None
    return exporter.place.port


def test_the_front_end_exports_although_the_engine_was_there_before(runs: Runs, store: MetricsStore) -> None:
    engine = runs.begin("engine")
    frontend = runs.begin("frontend", metrics_path="/kv")
    assert port_of(frontend) == runs.port
    assert b'kv_kv_block_alloc_total{engine="0"} 7.0\n' in get(runs.port, "/kv").body
    assert engine.place is None
    frontend.stop()
    assert port_of(engine) == runs.port


def test_without_a_front_end_the_engine_exports_at_its_own_port(runs: Runs, store: MetricsStore) -> None:
    assert port_of(runs.begin("engine", engine=3)) == runs.port + 3


def test_one_process_for_all_does_not_wait(runs: Runs, store: MetricsStore) -> None:
    assert port_of(runs.begin("all")) == runs.port


def test_the_switch_in_the_folder_counts(runs: Runs, store: MetricsStore, tmp_path: Path) -> None:
    port = port_of(runs.begin("frontend"))
    Switch(tmp_path / "run").turn(on=False)
    assert get(port).body == b""


def test_a_front_end_has_its_series_in_the_hosts_registry_too(
    runs: Runs, store: MetricsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    exporter = runs.begin("frontend", prefix="kv_")
    assert REGISTRY.get_sample_value("kv_kv_block_alloc_total", {"engine": "0"}) == 7
    exporter.stop()
    assert REGISTRY.get_sample_value("kv_kv_block_alloc_total", {"engine": "0"}) is None
    runs.begin("engine", prefix="kv_")
    assert REGISTRY.get_sample_value("kv_kv_block_alloc_total", {"engine": "0"}) is None


def lines(caplog: pytest.LogCaptureFixture) -> list[Any]:
    said = [record.getMessage() for record in caplog.records if record.name == "vllm.kvscope"]
    return [json.loads(line.removeprefix("KV_MONITOR ")) for line in said if line.startswith("KV_MONITOR ")]


def test_the_log_has_one_line_of_aggregates_an_interval_from_whoever_exports(
    runs: Runs, store: MetricsStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.kvscope"):
        port_of(runs.begin("frontend", log=True))
        runs.begin("frontend", log=True)
        assert until(lambda: len(lines(caplog)) >= 3)
        (said, *_) = lines(caplog)
        assert said["run_id"] == "run"
        assert said["engines"][0]["pool"]["usage"] == 0.4321
        assert "no_data" not in json.dumps(said)
        Switch(tmp_path / "run").turn(on=False)
        time.sleep(0.1)  # a line may be on its way
        stood = len(lines(caplog))
        time.sleep(0.1)
        assert len(lines(caplog)) == stood


def test_nothing_is_logged_unless_asked_for(runs: Runs, store: MetricsStore, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.kvscope"):
        port = port_of(runs.begin("frontend"))
        get(port)
    assert lines(caplog) == []


# In a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
def test_an_engine_exports_from_its_first_record_to_its_end_if_the_monitor_is_on(tmp_path: Path, enabled: bool) -> None:
    run = make_run(tmp_path)
    port = free_port()
    run.config = replace(run.config, monitor=MonitorConfig(enabled=enabled, port=port))
    run.open()
    run.export()
    assert (run.exporter is not None) is enabled
    if run.exporter is not None:
        assert port_of(run.exporter) == port
    run.close()
    with pytest.raises(ConnectionRefusedError):
        get(port)


def test_a_front_end_exports_before_any_request_has_come(tmp_path: Path) -> None:
    run = make_run(tmp_path, "frontend")
    port = free_port()
    run.config = replace(run.config, monitor=MonitorConfig(enabled=True, port=port))
    run.export()
    assert run.exporter is not None
    assert port_of(run.exporter) == port
    run.close()
    with pytest.raises(ConnectionRefusedError):
        get(port)
