"""``kvscope monitor`` switches a run's exporters off and on, and says which it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope.cli import main
from kvscope.metrics.collecting import collect_run
from kvscope.metrics.exporter import Exporter, ExporterSettings
from kvscope.metrics.place import Place
from kvscope.metrics.store import MetricsStore
from kvscope.metrics.switch import Switch
from unit.metrics.support import get

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MetricsStore]:
    made = MetricsStore(tmp_path / "out" / "run-1", process="all", rank=0, engine="0", prefix="kv_")
    yield made
    made.close()


@pytest.fixture
def served(store: MetricsStore) -> Iterator[Place]:
    folder = store.path.parent
    settings = ExporterSettings(folder=folder, run_id="run-1", port=0, scrape_interval_s=0.001)
    exporter = Exporter(settings, lambda: collect_run(folder), is_on=Switch(folder).is_on)
    exporter.start()
    place = exporter.wait_until_decided(5)
    assert place is not None
    yield place
    exporter.stop()


def test_off_empties_the_page_and_on_has_what_was_counted_meanwhile(
    store: MetricsStore, served: Place, capsys: Capture
) -> None:
    slab = store.slab()
    allocated = slab.counter("kv_block_alloc_total")
    allocated.add(3)
    slab.publish()
    run = store.path.parent
    assert b'kv_kv_block_alloc_total{engine="0"} 3.0\n' in get(served.port).body
    assert main(["monitor", "off", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("monitor       off: exporters answer with an empty page, and counting goes on\n")
    assert f"exporter      {served.metrics_url}\n" in out
    assert out.splitlines()[-1] == f"next: kvscope monitor on {run}"
    off = get(served.port)
    assert (off.status, off.body) == (200, b"")
    allocated.add(4)
    slab.publish()
    assert main(["monitor", "on", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"next: kvscope top {run}"
    assert b'kv_kv_block_alloc_total{engine="0"} 7.0\n' in get(served.port).body


def test_status_changes_nothing_and_json_says_it(
    store: MetricsStore, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run = store.path.parent
    monkeypatch.setenv("KVSCOPE_DIR", str(run.parent))
    for wanted, said in (("status", True), ("off", False), ("off", False), ("status", False), ("on", True)):
        assert main(["monitor", wanted, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"run": str(run), "is_on": said, "exporters": []}


def test_a_wrong_word_and_a_folder_without_metrics_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    assert main(["monitor", "stop", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(word in said for word in ("'stop'", "'on'", "'off'", "'status'"))
    assert main(["monitor", "off", str(tmp_path)]) == 2
    assert "no metrics here; additional_config.kv_monitor.enabled" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
