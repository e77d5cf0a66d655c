"""A real Prometheus for a test: on a free port of the loopback interface, with its data in a folder of the test's."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvscope.metrics.assets.export import assets
from kvscope.metrics.assets.rules import ALERT_FILE, RECORDING_FILE
from kvscope.testing.server import free_port

SCRAPE_S = 0.5
MISSING = "prometheus is not installed (Debian package prometheus)"


class PrometheusFailedError(RuntimeError):
    """Prometheus ended, was not ready in time, or refused a query. Carries the end of its log, or what it said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One series of an answer, and its value at the time of the query."""

    labels: dict[str, str]
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prometheus:
    """A server that is ready. `url` has no trailing slash."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def query(self, expression: str) -> list[Series]:
        """The instant vector of a PromQL expression. Raises PrometheusFailedError for one that it cannot read."""
        found = self._get("query", query=expression)
        return [Series(labels=one["metric"], value=float(one["value"][1])) for one in found["result"]]

    def total(self, expression: str) -> float | None:
        """The sum of an expression's series; None where it has none."""
        found = self.query(expression)
        return sum(series.value for series in found) if found else None

    def firing(self, alert: str) -> list[dict[str, str]]:
        """The labels of each firing alert of this name."""
        alerts = self._get("alerts")["alerts"]
        return [one["labels"] for one in alerts if one["labels"]["alertname"] == alert and one["state"] == "firing"]

    def rules(self) -> dict[str, str]:
        """Every rule that was loaded, recording rules and alerts, with its health: `ok`, `err` or `unknown`."""
        groups = self._get("rules")["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    def _get(self, endpoint: str, **parameters: str) -> dict[str, Any]:
        url = f"{self.url}/api/v1/{endpoint}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return dict(json.load(answer)["data"])
        except urllib.error.HTTPError as error:
            raise PrometheusFailedError(f"{endpoint}: {error.read().decode(errors='replace')[:300]}") from None


def quickened(rules: str, minute_s: float) -> str:
    """A rule file in which a minute lasts so long, in the windows of expressions and in how long alerts wait.

    Names stay as they are, a `rate5m` among them. So a test sees an alert clear that takes five minutes to.
    """

    def seconds(found: re.Match[str]) -> str:
        return f"{found[1]}{round(int(found[2]) * minute_s)}s"

    return re.sub(r"(\[|offset |for: )(\d+)m", seconds, rules)


@contextmanager
def scraping(
    folder: Path, address: str, *, prefix: str, path: str, minute_s: float | None = None
) -> Iterator[Prometheus]:
    """Prometheus for the duration of a `with` block, with our recording rules and alerts loaded.

    It scrapes `http://{address}{path}` from about five seconds on, whether anybody answers there or not. `minute_s`
    quickens the rules. Raises PrometheusFailedError where it does not start.
    """
    binary = shutil.which("prometheus")
    if binary is None:
        raise PrometheusFailedError(MISSING)
    folder.mkdir(parents=True, exist_ok=True)
    generated = assets(prefix)
    for name in (RECORDING_FILE, ALERT_FILE):
        text = generated[f"prometheus/{name}"]
        (folder / name).write_text(text if minute_s is None else quickened(text, minute_s), encoding="utf-8")
    configuration = _configuration(address, path, (RECORDING_FILE, ALERT_FILE))
    (folder / "prometheus.yml").write_text(configuration, encoding="utf-8")
    port, log = free_port(), folder / "prometheus.log"
    command = [binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.size=64MB"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "GOMAXPROCS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    prometheus = Prometheus(url=f"http://127.0.0.1:{port}", log=log, process=process)
    try:
        _wait_until_ready(prometheus, time.monotonic() + 30)
        yield prometheus
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _configuration(address: str, path: str, rule_files: Sequence[str]) -> str:
    interval = f"{round(SCRAPE_S * 1000)}ms"
    return f"""\
global: {{scrape_interval: {interval}, scrape_timeout: {interval}, evaluation_interval: 1s}}
rule_files: [{", ".join(rule_files)}]
scrape_configs:
  - job_name: kvscope
    metrics_path: {path}
    static_configs:
      - targets: ["{address}"]
"""


def _wait_until_ready(prometheus: Prometheus, deadline: float) -> None:
    while True:
        if (code := prometheus.process.poll()) is not None:
            raise PrometheusFailedError(f"prometheus ended with exit code {code}\n{_tail(prometheus.log)}")
        try:
            with urllib.request.urlopen(f"{prometheus.url}/-/ready", timeout=2):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise PrometheusFailedError(f"prometheus was not ready in time\n{_tail(prometheus.log)}") from None
            time.sleep(0.1)


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
