"""What is generated, as Prometheus' own tool and a reader of the dashboard see it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from kvscope.metrics.assets.export import assets, differences, unknown_series
from kvscope.metrics.assets.rules import ALERT_FILE, ALERTS, RECORDING_FILE, TEST_FILE
from kvscope.metrics.catalog import METRICS

PREFIX = "vllm_ascend_"


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    return found


def export(directory: Path, prefix: str = PREFIX) -> Path:
    for name, text in assets(prefix).items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    return directory


def run(promtool: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [promtool, *arguments], cwd=directory / "prometheus", capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("prefix", [PREFIX, "vllm:kvscope_"])
def test_rules_are_valid(tmp_path: Path, promtool: str, prefix: str) -> None:
    checked = run(promtool, export(tmp_path, prefix), "check", "rules", RECORDING_FILE, ALERT_FILE)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(ALERTS)} rules found" in checked.stdout


def test_each_alert_fires_and_stays_silent(tmp_path: Path, promtool: str) -> None:
    tested = run(promtool, export(tmp_path), "test", "rules", TEST_FILE)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_the_test_of_an_alert_fails_where_its_histories_are_changed_over(
    tmp_path: Path, promtool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = tuple(msgspec.structs.replace(alert, fires=alert.silent, silent=alert.fires) for alert in ALERTS)
    monkeypatch.setattr("kvscope.metrics.assets.rules.ALERTS", changed)
    tested = run(promtool, export(tmp_path), "test", "rules", TEST_FILE)
    assert tested.returncode != 0
    failed = re.findall(r"alertname: (\w+)", tested.stdout + tested.stderr)
    assert sorted(failed) == sorted(2 * [alert.name for alert in ALERTS]), "both histories say the opposite"


def test_every_alert_has_its_entry_in_both_runbooks() -> None:
    files = assets(PREFIX)
    links = re.findall(r'runbook_url: "(.*)"', files[f"prometheus/{ALERT_FILE}"])
    assert links == [f"../runbook.md#{alert.name.lower()}" for alert in ALERTS]
    for page in ("runbook.md", "runbook.zh-CN.md"):
        assert re.findall(r"^## (\w+)$", files[page], re.MULTILINE) == [alert.name for alert in ALERTS]
    elsewhere = assets(PREFIX, pages="https://example.org/kv")[f"prometheus/{ALERT_FILE}"]
    assert "https://example.org/kv/runbook.md#kvscopeviolation" in elsewhere


def test_every_metric_has_its_entry_in_both_dictionaries() -> None:
    files = assets(PREFIX)
    for page in ("metrics.md", "metrics.zh-CN.md"):
        assert re.findall(r"^### (\w+)$", files[page], re.MULTILINE) == list(METRICS)
    assert not re.search(r"[\u4e00-\u9fff]", files["metrics.md"] + files["runbook.md"])
    assert re.search(r"[\u4e00-\u9fff]", files["runbook.zh-CN.md"])


def test_every_metric_that_can_be_emitted_has_a_panel_that_says_what_it_means() -> None:
    dashboard = json.loads(assets(PREFIX)["grafana/kvscope-dashboard.json"])
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    exprs = "\n".join(target["expr"] for panel in panels for target in panel["targets"])
    for metric in METRICS.values():
        if metric.name in {"kvscope_info", "prefix_cache_hit_ratio"}:
            continue
        assert (f"{PREFIX}{metric.name}" in exprs) == metric.is_delivered, metric.name
    described = {panel["description"] for panel in panels}
    assert METRICS["kv_blocks"].help in described
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_panels_do_not_overlap() -> None:
    dashboard = json.loads(assets(PREFIX)["grafana/kvscope-dashboard.json"])
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_no_file_keeps_the_placeholder_of_the_prefix() -> None:
    for name, text in assets("zz_").items():
        assert "@" not in text.replace("@register_collector(", ""), name
        assert PREFIX not in text, name


def test_a_series_with_a_label_that_nothing_gives_it_yet_is_named() -> None:
    asked = 'vllm_ascend_pd_transfer_failures_total{cause="submit_failed"}'
    for text in (asked, asked.replace('"', '\\"')):
        others = f"rate({text}[5m]) / vllm_ascend_kv_blocks{{state='used'}} + vllm_ascend_pd_transfer_failures_total"
        assert list(unknown_series(others, PREFIX)) == [asked]


def test_differences_are_named(tmp_path: Path) -> None:
    export(tmp_path)
    assert differences(tmp_path, PREFIX) == []
    (tmp_path / "runbook.md").unlink()
    dashboard = tmp_path / "grafana" / "kvscope-dashboard.json"
    dashboard.write_text(dashboard.read_text().replace("kv_token_fill_ratio{", "kv_fill_ratio{"))
    page = tmp_path / "metrics.md"
    page.write_text(page.read_text() + "vllm_ascend_made_up\n")
    found = {difference.name: (difference.what, difference.unknown) for difference in differences(tmp_path, PREFIX)}
    assert found == {
        "runbook.md": ("missing", ()),
        "grafana/kvscope-dashboard.json": ("stale", ("vllm_ascend_kv_fill_ratio",)),
        "metrics.md": ("stale", ()),
    }
    assert len(differences(tmp_path, "other_")) == 8
