"""A real `vllm serve` with KV Monitor on, and those who read it: Prometheus, pages, files, the command."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from kvscope.metrics.catalog import METRICS
from kvscope.metrics.families import ProcessValues
from kvscope.metrics.http import SERVER_NAME
from kvscope.metrics.reader import read_run
from kvscope.testing import engine
from kvscope.testing.load import Load, completions, send
from kvscope.testing.prometheus import Prometheus, scraping

from .test_healthy import switched_on

PREFIX = "vllm_ascend_"
NO_CONNECTOR = "there is no KV connector, which only plans and reports transfers"
UNFED = {
    "pd_transfer_tokens_total": NO_CONNECTOR,
    "pd_transfer_latency_seconds": NO_CONNECTOR,
    "pd_transfer_queue_depth": NO_CONNECTOR,
    "pd_transfer_in_flight": NO_CONNECTOR,
    "pd_transfer_failures_total": NO_CONNECTOR,
    "pd_wait_seconds": NO_CONNECTOR,
    "guard_checks_skipped_total": "every row of full attention is judged, so that no cause has a series",
}
"""What this set-up has no series of, and why. Everything else that this version delivers must be there."""

MINUTE_S = 4.0
"""How long a minute of the alerts lasts here: their windows of five become 20 seconds."""
PROMPTS = 48
"""So many take long enough to be scraped meanwhile."""
INTERVAL_S = 0.25
INFO = {"VLLM_LOGGING_LEVEL": "INFO"}
"""The environment of a server whose log is read."""


def monitored(folder: Path, port: int, **more: Any) -> dict[str, Any]:
    monitor = {"enabled": True, "port": port, "scrape_interval": INTERVAL_S, "log": True}
    return switched_on(folder, "raise") | {"kv_monitor": monitor} | more


@contextmanager
def watched(folder: Path, port: int) -> Iterator[Prometheus]:
    with scraping(folder, f"127.0.0.1:{port}", prefix=PREFIX, path="/metrics", minute_s=MINUTE_S) as prometheus:
        yield prometheus


def until(condition: Callable[[], bool], what: str, *, deadline_s: float = 30) -> None:
    ends = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends, f"after {deadline_s:.0f} s: {what}"
        time.sleep(0.1)


def run_folder(folder: Path, *, besides: Path | None = None) -> Path:
    (found,) = (path for path in folder.iterdir() if path != besides)
    return found


def page(url: str) -> tuple[int, str]:
    """Status and body of what an exporter answers."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return int(answer.status), answer.read().decode()


def series(text: str) -> set[str]:
    """The series of a page, with their labels."""
    return {line.rpartition(" ")[0] for line in text.splitlines() if line and not line.startswith("#")}


def kvscope(*arguments: object) -> Any:
    """What the command says with `--json`, exit code 0."""
    command = [sys.executable, "-m", "kvscope", *map(str, arguments), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


def loaded(server: engine.Server, count: int = PROMPTS, seed: int = 3) -> Load:
    return send(server.url, completions(count, seed), deadline_s=120)


def processes(folder: Path) -> dict[tuple[str, int], ProcessValues]:
    return {(process.process, process.rank): process for process in read_run(folder).processes}


def assert_every_metric_is_there(prometheus: Prometheus, engines: list[str]) -> None:
    """As Prometheus has it of the last minute: a ratio that is only there while requests run counts as well."""
    delivered = {name for name, metric in METRICS.items() if metric.is_delivered}
    assert UNFED.keys() <= delivered, "what is delivered by nobody needs no reason here"
    for name in delivered:
        kind = METRICS[name].kind
        found = prometheus.query(f"last_over_time({PREFIX}{name}{'_count' if kind == 'histogram' else ''}[1m])")
        if name in UNFED:
            assert not found, f"{name} is fed here after all: {found[:3]}"
        else:
            assert {one.labels["engine"] for one in found} >= set(engines), f"{name}: {found[:3]}"
            wanted = {"__name__", "job", "instance", "engine", *METRICS[name].label_names}
            assert all(one.labels.keys() <= wanted for one in found)


def own(text: str, name: str) -> float:
    """What vLLM's own page has under this name, all series together."""
    found = [line for line in text.splitlines() if re.match(rf"{name}[{{ ]", line)]
    assert found, name
    return sum(float(line.rpartition(" ")[2]) for line in found)


def listening(server: engine.Server) -> dict[int, list[str]]:
    """Who of a server's processes listens as an exporter: process id -> what it says of itself on its ports."""
    parent = psutil.Process(server.process.pid)
    found: dict[int, list[str]] = {}
    for process in (parent, *parent.children(recursive=True)):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN and _answers_as(connection.laddr.port) == SERVER_NAME:
                found.setdefault(process.pid, []).append(f"{connection.laddr.ip}:{connection.laddr.port}")
    return found


def _answers_as(port: int) -> str | None:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        client.request("HEAD", "/")
        return client.getresponse().getheader("Server")
    except (OSError, http.client.HTTPException):  # most ports of an engine speak something else
        return None
    finally:
        client.close()
