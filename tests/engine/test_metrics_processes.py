"""KV Monitor in the processes of a real `vllm serve`: who exports, who listens, and what a killed one leaves."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvscope.metrics.collecting import collect_run
from kvscope.testing import engine
from kvscope.testing.load import completions
from kvscope.testing.prometheus import MISSING
from kvscope.testing.server import free_port

from .served import (
    INFO,
    PREFIX,
    PROMPTS,
    assert_every_metric_is_there,
    kvscope,
    listening,
    loaded,
    monitored,
    own,
    processes,
    run_folder,
    series,
    until,
    watched,
)
from .test_healthy import switched_on

pytestmark = [pytest.mark.long, pytest.mark.server, pytest.mark.once, pytest.mark.timeout(600)]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason=MISSING)
def test_two_engines_behind_two_api_servers_have_one_exporter_on_the_next_free_port(
    runner: engine.Runner, tmp_path: Path, cell: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, out = tmp_path / "server.log", tmp_path / "out"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wanted = int(taken.getsockname()[1])
        config = monitored(out, wanted)
        arguments = ["--data-parallel-size", "2", "--api-server-count", "2"]
        two = {"arguments": arguments, "variables": INFO, "deadline_s": 240}  # six processes import vLLM
        with engine.serving(log, runner=runner, additional_config=config, **two) as server:
            assert loaded(server).mistakes(completions(PROMPTS)) == []
            ((pid, (address,)),) = listening(server).items()
            port = int(address.rpartition(":")[2])
            assert port > wanted
            said = [line for line in log.read_text().splitlines() if "kvscope: metrics of this run" in line]
            assert len(said) == 1
            assert f"http://{address}/metrics (port {wanted} was taken)" in said[0]
            monkeypatch.setenv("KVSCOPE_DIR", str(out))
            (found,) = kvscope("doctor")["exporters"]
            assert (found["pid"], found["answers"], found["metrics_url"]) == (pid, True, f"http://{address}/metrics")
            assert "KV_MONITOR" in log.read_text()

            with watched(tmp_path / "prometheus", port) as prometheus:
                until(lambda: prometheus.total("up") == 1, "it is scraped")
                loaded(server, 3 * PROMPTS, seed=4)  # long enough to be scraped while both run
                until(lambda: prometheus.total(f"{PREFIX}kv_cache_usage_percent") == 0, "at rest")
                assert_every_metric_is_there(prometheus, ["0", "1"])
                assert prometheus.total(f"{PREFIX}kv_blocks") == 2 * 128
                rows = prometheus.query(f"{PREFIX}guard_rows_audited_total")
                assert {one.labels["engine"] for one in rows if one.value > 0} == {"0", "1"}
            assert_both_api_servers_count(run_folder(out))
            # vLLM's own page is made of files there, into which nothing of ours can be put.
            of_host = server.get("/metrics")
            assert PREFIX not in of_host
            assert own(of_host, "vllm:prefix_cache_queries_total") > 0
    cell(f"two engines, two API servers, one exporter on the port after {wanted}: {address}")


def assert_both_api_servers_count(folder: Path) -> None:
    """Each in a file of its own, and what they say is added."""
    servers = [process for (kind, _), process in processes(folder).items() if kind == "frontend"]
    assert [process.rank for process in servers] == [0, 1]
    spent = [process.values["hook_seconds_total"]["frontend.admit",] for process in servers]
    assert min(spent) > 0
    shown = {family.name: family for family in collect_run(folder)}[f"{PREFIX}hook_seconds_total"]
    (together,) = (one.value for one in shown.samples if one.labels["hook"] == "frontend.admit")
    assert together == pytest.approx(sum(spent))


def test_a_killed_worker_leaves_its_last_values_and_nothing_is_inherited(
    runner: engine.Runner, tmp_path: Path, cell: Callable[[str], None]
) -> None:
    port, out = free_port(), tmp_path / "out"
    config = monitored(out, port)
    with engine.serving(
        tmp_path / "server.log", runner=runner, additional_config=config, arguments=["--tensor-parallel-size", "2"]
    ) as server:
        folder = run_folder(out)
        assert loaded(server).mistakes(completions(PROMPTS)) == []
        until(lambda: processes(folder)["worker", 1].values["guard_rows_audited_total"][()] > PROMPTS, "it has counted")
        assert list(listening(server)) == [server.process.pid]
        files = held_by_children(server)
        assert any(name.endswith(".metrics") for name in files)  # of their own
        assert not any(re.search(r"exporter-.*\.lock|frontend-.*\.metrics", name) for name in files)
        before = processes(folder)["worker", 1]
        os.kill(before.pid, signal.SIGKILL)
        server.process.wait(60)  # vLLM ends with its worker
    after = processes(folder)["worker", 1]
    assert (after.is_alive, after.has_ended, after.pid) == (False, False, before.pid)
    assert after.values["guard_rows_audited_total"][()] >= before.values["guard_rows_audited_total"][()]
    assert after.age_seconds > before.age_seconds
    # Somebody who comes later finds the same, and that it is old.
    view = kvscope("top", folder, "--once")
    assert view["coverage"]["rows_audited"] >= 2 * before.values["guard_rows_audited_total"][()]
    assert view["cost"]["snapshot_age_s"] >= after.age_seconds
    cell(f"killed worker 1: {after.values['guard_rows_audited_total'][()]:.0f} rows are still there")


def held_by_children(server: engine.Server) -> set[str]:
    """The files that the processes which a server has started have open."""
    return {
        file.path
        for process in psutil.Process(server.process.pid).children(recursive=True)
        for file in process.open_files()
    }


def test_without_the_part_nobody_listens_and_vllms_own_series_are_the_same_as_with_it(
    runner: engine.Runner, tmp_path: Path, cell: Callable[[str], None]
) -> None:
    of_host = {}
    for name, config in (
        ("off", switched_on(tmp_path / "off", "log")),
        ("on", monitored(tmp_path / "on", free_port())),
    ):
        with engine.serving(tmp_path / f"{name}.log", runner=runner, additional_config=config) as server:
            assert server.complete([*range(5, 75)], 4)
            of_host[name] = series(server.get("/metrics"))
            assert len(listening(server)) == (name == "on")
            folder = run_folder(tmp_path / name)
            assert bool([*folder.glob("exporter-*"), *folder.glob("*.metrics")]) == (name == "on")
    ours = {one for one in of_host["on"] if one.startswith(PREFIX)}
    assert ours
    assert not any(one.startswith("vllm:") for one in ours)
    assert of_host["on"] - ours == of_host["off"]
    cell(f"{len(of_host['off'])} series of vLLM's own, and beside them {len(ours)} of ours")
