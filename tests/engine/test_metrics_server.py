"""KV Monitor on a real `vllm serve`, read as operators read it: by a real Prometheus, with our rules and alerts."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvscope.metrics.collecting import collect_run
from kvscope.testing import engine
from kvscope.testing.faults import FAULTS
from kvscope.testing.load import completions
from kvscope.testing.prometheus import MISSING, Prometheus
from kvscope.testing.server import free_port

from .served import (
    INFO,
    INTERVAL_S,
    PREFIX,
    PROMPTS,
    assert_every_metric_is_there,
    kvscope,
    loaded,
    monitored,
    own,
    page,
    processes,
    run_folder,
    series,
    until,
    watched,
)

pytestmark = [pytest.mark.server, pytest.mark.once, pytest.mark.timeout(600)]

FAULT = "slot_plus_one"
AFTER_STEPS = 250
"""The first load takes about a hundred."""
REASON = FAULTS[FAULT].expected
STAYS = {"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}
"""vLLM's front end lives on after its engine, and with it the exporter: else for at most five seconds."""


@pytest.fixture(autouse=True)
def prometheus_is_installed() -> None:
    if shutil.which("prometheus") is None:
        pytest.skip(MISSING)


def load_until_it_stops(server: engine.Server) -> None:
    """Goes on sending until the server answers no more."""
    for seed in range(100, 130):
        if any(answer.error for answer in loaded(server, 24, seed).answers):
            return
    raise AssertionError("the fault did not stop the engine")


def assert_numbers_belong_together(prometheus: Prometheus, host: str, blocks: int) -> None:
    """Of an engine at rest: Prometheus' numbers are vLLM's own, where it has them, and belong together."""

    def total(name: str, selector: str = "") -> float:
        found = prometheus.total(f"{PREFIX}{name}{selector}")
        assert found is not None, name
        return found

    assert total("kv_blocks") == blocks
    assert total("kv_cache_usage_percent") == total("kv_blocks", '{state="used"}') == 0
    assert total("kv_block_alloc_total") == total("kv_block_free_total") > 0
    for name in ("prefix_cache_hits_total", "prefix_cache_queries_total"):
        assert total(name, '{unit="token"}') == own(host, f"vllm:{name}") > 0
    assert total("prefix_cache_hits_total", '{unit="block"}') > 0
    assert total("guard_violations_total") == total("hook_faults_total") == total("records_dropped_total") == 0
    assert total("guard_rows_audited_total") > PROMPTS
    ratio = f"all:{PREFIX}guard_coverage_ratio:rate5m"
    assert {one.value for one in prometheus.query(f"last_over_time({ratio}[1m])")} == {1.0}
    assert set(prometheus.rules().values()) == {"ok"}


@contextmanager
def stopped_by_a_finding(
    runner: engine.Runner, folder: Path, port: int, prometheus: Prometheus, variables: dict[str, str]
) -> Iterator[tuple[engine.Server, Path]]:
    """A server of two ranks, of which the second hands attention a wrong slot in some step after the first ones.
    When the block ends it is driven there, and the alert fires while nobody serves.
    """
    fault = {"name": FAULT, "rank": 1, "after_steps": AFTER_STEPS, "report": str(folder / "injected.json")}
    with engine.serving(
        folder / "server.log",
        runner=runner,
        additional_config=monitored(folder / "out", port, kvscope_fault=fault),
        arguments=["--tensor-parallel-size", "2"],
        variables=INFO | variables,
        deadline_s=300,
    ) as server:
        run = run_folder(folder / "out")
        yield server, run
        load_until_it_stops(server)
        until(lambda: bool(prometheus.firing("KvscopeViolation")), "the alert does not fire")
        (alert,) = prometheus.firing("KvscopeViolation")
        assert (alert["reason"], alert["engine"], alert["severity"]) == (REASON, "0", "critical")
        assert json.loads((folder / "injected.json").read_text())["rank"] == 1
        if not variables:
            server.process.wait(60)
        with pytest.raises(OSError):  # refused, or answered with an error
            server.complete([*range(5, 75)], 1)
    # Who has found it may have been killed within a second, and has said so before.
    dead = processes(run)["worker", 1]
    assert dead.is_alive is False
    assert dead.values["guard_violations_total"][REASON,] == 1


def test_a_real_prometheus_has_every_metric_and_its_alert_fires_when_a_finding_stops_the_engine(
    runner: engine.Runner, tmp_path: Path, cell: Callable[[str], None]
) -> None:
    port, began = free_port(), time.monotonic()
    url = f"http://127.0.0.1:{port}/metrics"
    with (
        watched(tmp_path / "prometheus", port) as prometheus,
        stopped_by_a_finding(runner, tmp_path, port, prometheus, STAYS) as (server, folder),
    ):
        ready = time.monotonic()
        assert loaded(server).mistakes(completions(PROMPTS)) == []
        queries = own(server.get("/metrics"), "vllm:prefix_cache_queries_total")
        until(lambda: prometheus.total(f'{PREFIX}prefix_cache_queries_total{{unit="token"}}') == queries, "all is told")
        until(lambda: prometheus.total(f"{PREFIX}kv_cache_usage_percent") == 0, "at rest")
        busy = prometheus.total(f"max_over_time({PREFIX}kv_cache_usage_percent[1m])")
        assert busy, "the exporter has not answered while the engine was busy"
        slowest_s = prometheus.total("max_over_time(scrape_duration_seconds[1m])")
        assert_every_metric_is_there(prometheus, ["0"])
        assert_numbers_belong_together(prometheus, server.get("/metrics"), blocks=128)
        # One body, made anew, is the same in vLLM's own page, beside vLLM's own.
        ours, all_of_host = page(url)[1], server.get("/metrics")
        assert series(ours) == {one for one in series(all_of_host) if one.startswith(PREFIX)}
        assert_switches_off_and_on(folder, url)
        assert_logs_a_line_an_interval(tmp_path / "server.log")
        rested = time.monotonic()
    stopped = time.monotonic()
    cell(f"up in {ready - began:.0f} s, read in {rested - ready:.0f} s, stopped in {stopped - rested:.0f} s")
    cell(f"{busy:.0f} % full at most, slowest scrape {slowest_s} s")


def assert_switches_off_and_on(folder: Path, url: str) -> None:
    before = page(url)[1]
    assert kvscope("monitor", "off", folder)["is_on"] is False
    assert page(url) == (200, "")
    assert kvscope("monitor", "on", folder)["is_on"] is True
    after = page(url)[1]
    assert series(after) == series(before), "what was counted is there again"
    totals = [line for line in before.splitlines() if line.startswith(f"{PREFIX}kv_block_alloc_total")]
    assert totals[0] in after


def assert_logs_a_line_an_interval(log: Path) -> None:
    lines = [line.partition("KV_MONITOR ")[2] for line in log.read_text().splitlines() if "KV_MONITOR " in line]
    views = [json.loads(line) for line in lines]
    assert len(views) > 10
    times = [view["at_s"] for view in views]
    assert all(later - earlier > INTERVAL_S * 0.9 for earlier, later in itertools.pairwise(times))
    (last,) = views[-1]["engines"]
    assert last["pool"]["blocks"]["null"] == 1
    assert views[-1]["coverage"]["rows_audited"] > 0


@pytest.mark.long
def test_the_drill_ends_with_a_new_run_from_zero_and_the_alert_clears(
    runner: engine.Runner, tmp_path: Path, cell: Callable[[str], None]
) -> None:
    port = free_port()
    audited, found = f"{PREFIX}guard_rows_audited_total", f"{PREFIX}guard_violations_total"
    with watched(tmp_path / "prometheus", port) as prometheus:
        with stopped_by_a_finding(runner, tmp_path, port, prometheus, {}) as (server, folder):
            loaded(server)
        code = server.process.wait(60)
        until(lambda: bool(prometheus.firing("KvscopeEngineGone")), "that it is gone is no alert")
        seen = prometheus.total(f"count_over_time(({found} == 1)[1m:250ms])") or 0
        rows = prometheus.total(f"last_over_time({audited}[5m])")
        assert rows is not None
        # With one rank: it starts sooner.
        config = monitored(tmp_path / "out", port)
        with engine.serving(tmp_path / "again.log", runner=runner, additional_config=config) as server:
            again = run_folder(tmp_path / "out", besides=folder)
            assert loaded(server, 4).mistakes(completions(4)) == []
            until(lambda: 0 < (prometheus.total(audited) or 0) < rows, "a new run begins at zero")
            assert prometheus.total(found) == 0
            until(lambda: not prometheus.firing("KvscopeViolation"), "the alert does not clear", deadline_s=60)
            assert prometheus.total("up") == 1
            until(lambda: not prometheus.firing("KvscopeEngineGone"), "it is said to be gone", deadline_s=60)
        kept = {family.name: family.samples for family in collect_run(folder)}
        assert sum(sample.value for sample in kept[found]) == 1
        assert again != folder
    cell(f"{rows:.0f} rows, a finding seen for {seen / 4} s, exit code {code}; then a new run, and no alert")
