"""What is said about a real Prometheus without one: rules that are made quick, and who is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.metrics.assets.export import assets
from kvscope.metrics.assets.rules import ALERT_FILE, RECORDING_FILE
from kvscope.testing.prometheus import MISSING, PrometheusFailedError, quickened, scraping


def test_a_quick_minute_changes_windows_and_waits_and_no_name() -> None:
    rules = "record: all:x:rate5m\nexpr: rate(x_total[5m]) / (x offset 10m)\nfor: 1m\n"
    assert quickened(rules, 4) == "record: all:x:rate5m\nexpr: rate(x_total[20s]) / (x offset 40s)\nfor: 4s\n"
    assert quickened("for: 0m\n", 4) == "for: 0s\n"


@pytest.mark.parametrize("name", [ALERT_FILE, RECORDING_FILE])
def test_no_minute_is_left_in_our_rules(name: str) -> None:
    text = assets("vllm_ascend_")[f"prometheus/{name}"]
    rules = [line for line in text.splitlines() if line.lstrip().startswith(("expr:", "for:"))]
    assert any("5m" in line for line in rules)
    left = [line for line in quickened("\n".join(rules), 4).splitlines() if "m]" in line or line.rstrip().endswith("m")]
    assert left == []


def test_without_prometheus_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(PrometheusFailedError, match="Debian package prometheus") as failed,
        scraping(tmp_path, "127.0.0.1:1", prefix="p_", path="/metrics"),
    ):
        pass
    assert str(failed.value) == MISSING
