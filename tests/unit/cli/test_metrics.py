"""``kvscope metrics`` and ``kvscope assets`` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvscope.cli import main
from kvscope.metrics.assets.export import assets
from kvscope.metrics.catalog import METRICS

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("arguments", [["metrics"], ["metrics", "list"]])
def test_all_metrics_are_listed(arguments: list[str], capsys: Capture) -> None:
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "] == list(METRICS)
    assert lines[-1] == "next: kvscope metrics explain kv_cache_usage_percent"
    assert main([*arguments, "--json"]) == 0
    assert [said["name"] for said in json.loads(capsys.readouterr().out)] == list(METRICS)


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_told_in_full(name: str, capsys: Capture) -> None:
    metric = METRICS[name]
    assert main(["metrics", "explain", name]) == 0
    told = capsys.readouterr().out
    assert all(len(line) <= 80 for line in told.splitlines())
    squeezed = " ".join(told.split())
    for text in (metric.meaning.en, metric.not_read_as.en, metric.unit, metric.kind, *metric.label_names):
        assert text in squeezed
    assert ("not in this version" in squeezed) == (not metric.is_delivered)
    assert main(["metrics", "explain", name, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["meaning"]["zh"], said["delivered"]) == (metric.meaning.zh, metric.is_delivered)
    assert said["labels"].keys() == {"engine", *metric.label_names}


@pytest.mark.parametrize(
    "name", ["vllm_ascend_pd_wait_seconds", "vllm_ascend_pd_wait_seconds_bucket", "x_pd_wait_seconds"]
)
def test_a_name_may_be_spelled_as_prometheus_shows_it(name: str, capsys: Capture) -> None:
    assert main(["metrics", "explain", name]) == 0
    assert capsys.readouterr().out.startswith("vllm_ascend_pd_wait_seconds (histogram)")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["metrics", "explain", "kv_block"], "did you mean kv_blocks"),
        (["metrics", "explain", "zzz"], "'zzz' is no metric of this version; kvscope metrics list has them"),
        (["metrics", "explain"], "explain takes the name of a metric"),
        (["metrics", "list", "kv_blocks"], "kvscope metrics explain kv_blocks"),
        (["metrics", "show"], "'show' is not one of 'list', 'explain'"),
        (["assets", "import", "x"], "'import' is not one of 'export'"),
        (["assets", "export"], "Missing argument"),
        (["assets", "export", "x", "--prefix", "9"], "--prefix: '9' is not 1 to 64 letters"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], said: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert list(tmp_path.iterdir()) == []


def test_assets_are_written_checked_and_never_overwritten_unasked(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "assets"
    assert main(["assets", "export", str(folder), "--check"]) == 1
    assert "missing" in capsys.readouterr().out
    assert not folder.exists()
    assert main(["assets", "export", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"next: kvscope assets export {folder} --check"
    written = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert written == assets("vllm_ascend_")
    assert main(["assets", "export", str(folder)]) == 0, "files that are the same are in nobody's way"
    assert main(["assets", "export", str(folder), "--check"]) == 0
    capsys.readouterr()

    (folder / "runbook.md").write_text("my own\n")
    assert main(["assets", "export", str(folder)]) == 2
    assert "runbook.md would be overwritten; --force overwrites" in capsys.readouterr().err
    assert (folder / "runbook.md").read_text() == "my own\n"
    assert main(["assets", "export", str(folder), "--check", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["differences"] == [{"name": "runbook.md", "what": "stale", "unknown": []}]
    assert main(["assets", "export", str(folder), "--force"]) == 0
    assert main(["assets", "export", str(folder), "--check"]) == 0


def test_a_dashboard_that_asks_for_what_nobody_emits_is_named(tmp_path: Path, capsys: Capture) -> None:
    main(["assets", "export", str(tmp_path)])
    dashboard = tmp_path / "grafana" / "kvscope-dashboard.json"
    dashboard.write_text(dashboard.read_text().replace("vllm_ascend_tail_entries", "vllm_ascend_recovery_total"))
    capsys.readouterr()
    assert main(["assets", "export", str(tmp_path), "--check"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "grafana/kvscope-dashboard.json names vllm_ascend_recovery_total, which no process can emit" in said


def test_assets_can_have_another_prefix(tmp_path: Path, capsys: Capture) -> None:
    assert main(["assets", "export", str(tmp_path), "--prefix", "my_", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["files"]) == 8
    assert "my_kv_blocks" in (tmp_path / "prometheus" / "kvscope-recording.rules.yml").read_text()
    assert main(["assets", "export", str(tmp_path), "--check"]) == 1


def test_whoever_follows_the_next_lines_learns_something_new_each_time(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for start in ("metrics", "assets export other --check"):
        seen = [start]
        while seen[-1] != "doctor":
            main(seen[-1].split())
            seen.append(capsys.readouterr().out.splitlines()[-1].removeprefix("next: kvscope "))
            assert len(set(seen)) == len(seen)
