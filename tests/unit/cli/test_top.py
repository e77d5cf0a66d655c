"""``kvscope top`` on an exporter, a run's folder and a trace: once as text or JSON, and live."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvscope.cli import main
from kvscope.cli.top_sources import ExporterSource, NothingToShowError, RunSource
from kvscope.errors import UnreadableTraceError
from kvscope.metrics.exporter import Exporter, ExporterSettings
from kvscope.metrics.families import Family
from kvscope.metrics.store import MetricsStore
from kvscope.metrics.view import View
from kvscope.metrics.viewing import Viewer, readout_of
from kvscope.testing.trace import TraceBuilder
from unit.metrics.support import collected, histogram, process

Capture = pytest.CaptureFixture[str]


def silent(_done: int, _all: int) -> None:
    pass


class Engine:
    def __init__(self) -> None:
        self.is_on = True
        self.error: Exception | None = None
        self.allocated = 0.0

    def collect(self) -> list[Family]:
        if self.error is not None:
            raise self.error
        self.allocated += 10
        return collected(
            process(
                kv_cache_usage_percent={(): 43.2},
                kv_block_alloc_total={(): self.allocated},
                kvscope_info={("none",): 1.0},
                pd_wait_seconds={(): histogram("pd_wait_seconds", 1)},
            )
        )


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def url(engine: Engine, tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "out" / "run-1"
    folder.mkdir(parents=True)
    settings = ExporterSettings(folder=folder, run_id="run-1", port=0, scrape_interval_s=0.001)
    exporter = Exporter(settings, engine.collect, is_on=lambda: engine.is_on)
    exporter.start()
    place = exporter.wait_until_decided(5)
    assert place is not None
    yield place.url
    exporter.stop()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    builder = TraceBuilder(tmp_path / "traces" / "run-2", observe_pool=True)
    builder.step({"r1": 40, "r2": 20})
    builder.step({"r1": 1, "r2": 1})
    return builder.close()


def write_metrics(folder: Path) -> None:
    store = MetricsStore(folder, process="all", rank=0, engine="0", prefix="kv_")
    slab = store.slab()
    slab.gauge("kv_cache_usage_percent").set(43.2)
    slab.publish()
    store.close()


def test_once_on_an_exporter_is_one_page(url: str, capsys: Capture) -> None:
    assert main(["top", url, "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"  {url}metrics")
    assert lines[2:4] == ["engine 0", f"usage        43.2 %  [{'#' * 25}{' ' * 32}]"]
    assert "transfers  no data: this engine has no KV connector" in lines
    assert "no data: no metric names a request; give the run's folder, whose trace does" in lines
    assert lines[-1] == "next: kvscope doctor"
    assert max(map(len, lines)) <= 80


def test_json_is_the_view(url: str, capsys: Capture) -> None:
    assert main(["top", url, "--once", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["engines"][0]["pool"]["usage"] == pytest.approx(0.432)
    assert said["source"] == f"{url}metrics"
    assert main(["top", url, "--json"]) == 0, "JSON is for once in any case"


def test_two_looks_tell_rates(url: str) -> None:
    source = ExporterSource(url)
    source.look()
    source._viewer._last.at_s -= 5  # type: ignore[union-attr]  # the first look was five seconds ago
    (seen,) = source.look().engines
    assert seen.pool is not None
    assert seen.pool.alloc_per_s == pytest.approx(2, rel=0.2)


def test_the_text_of_an_exporter_says_what_its_collection_says(url: str, engine: Engine) -> None:
    seen = ExporterSource(url).look()
    families = engine.collect()
    straight = Viewer("x").view(readout_of(families, at_s=1))
    assert (seen.engines, seen.no_data) == (straight.engines, straight.no_data)


def test_an_exporter_that_is_switched_off_says_so(url: str, engine: Engine, capsys: Capture) -> None:
    engine.is_on = False
    assert main(["top", url, "--once"]) == 0
    assert "no data: KV Monitor is switched off at run time" in capsys.readouterr().out


def test_what_does_not_answer_is_one_line(url: str, engine: Engine, capsys: Capture) -> None:
    engine.error = ValueError("torn file")
    assert main(["top", url, "--once"]) == 2
    said = f"kvscope: {url}metrics: status 500: collection failed: ValueError: torn file\n"
    assert capsys.readouterr().err == said
    assert main(["top", "http://127.0.0.1:1/metrics", "--once"]) == 2
    assert capsys.readouterr().err == "kvscope: http://127.0.0.1:1/metrics: Connection refused\n"


def test_a_page_without_our_series_is_one_line(url: str) -> None:
    with pytest.raises(NothingToShowError, match="this is no Prometheus text"):
        ExporterSource(f"{url}view.json").look()


def test_an_answer_that_is_cut_off_is_an_error(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    def cut_off(*_: Any, **__: Any) -> None:
        raise http.client.IncompleteRead(b"half")

    monkeypatch.setattr("kvscope.cli.top_sources._opener.open", cut_off)
    with pytest.raises(NothingToShowError):
        ExporterSource(url).look()


def test_a_trace_shows_requests_and_states(trace: Path, capsys: Capture) -> None:
    assert main(["top", str(trace), "--once"]) == 0
    out = capsys.readouterr().out
    assert "       3        41       0  r1\n       2        21       0  r2\n" in out
    assert "used 5 #" in out
    assert "hits       no data: a trace counts no admissions; KV Monitor does\n" in out
    assert out.splitlines()[-1] == f"next: kvscope info {trace}"


def test_a_folder_with_metrics_and_a_trace_shows_both(trace: Path, capsys: Capture) -> None:
    write_metrics(trace)
    main(["top", str(trace.parent), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["engines"][0]["pool"]["usage"] == pytest.approx(0.432)
    assert [request["request_id"] for request in said["requests"]] == ["r1", "r2"]
    assert said["run_id"] == "run-2"


def test_metrics_without_a_trace_say_why_there_are_no_requests(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run")
    view = RunSource(tmp_path, silent).look()
    assert view.engines[0].pool is not None
    assert view.no_data["requests"].startswith("there is no trace beside the metrics: ")


def test_where_there_is_neither_it_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    with pytest.raises(UnreadableTraceError):
        RunSource(tmp_path, silent)
    assert main(["top", str(tmp_path / "gone"), "--once"]) == 2
    assert capsys.readouterr().err.startswith(f"kvscope: {tmp_path}/gone: no such file or folder")


def test_without_a_source_it_is_the_exporter_that_answers_or_the_newest_run(
    url: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("KVSCOPE_DIR", str(tmp_path / "out"))
    assert main(["top", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["source"] == f"{url}metrics"
    monkeypatch.setenv("KVSCOPE_DIR", str(trace.parent))
    assert main(["top", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["source"] == str(trace)
    monkeypatch.setenv("KVSCOPE_DIR", str(tmp_path / "nowhere"))
    assert main(["top", "--json"]) == 2
    assert "no exporter answers and there is no output folder" in capsys.readouterr().err


def test_the_live_screen_says_what_it_needs(url: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "textual" else object())
    assert main(["top", url]) == 2
    assert "the live screen needs textual: pip install 'kvscope[tui]'" in capsys.readouterr().err


def test_once_loads_no_textual(trace: Path) -> None:
    script = f"import sys; from kvscope.cli import main; main(['top', {str(trace)!r}, '--once']); "
    done = subprocess.run(
        [sys.executable, "-c", f"{script} assert not [m for m in sys.modules if m.startswith('textual')]"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


# The live screen ------------------------------------------------------------------------------------------------------


class Watched:
    """A source whose views a test chooses."""

    def __init__(self) -> None:
        self.looks = 0
        self.usage = 43.2
        self.error: Exception | None = None
        self._viewer = Viewer("watched", "run-1")

    def look(self) -> View:
        self.looks += 1
        if self.error is not None:
            raise self.error
        families = collected(process(kv_cache_usage_percent={(): self.usage}))
        return self._viewer.view(readout_of(families, at_s=1_700_000_000 + self.looks))


Story = Callable[[Any, Any, Watched], Coroutine[Any, Any, None]]


def live(story: Story, *, every_s: float = 0.05) -> None:
    pytest.importorskip("textual", reason="not run: textual is not installed")
    from kvscope.cli.top_screen import TopScreen

    async def run() -> None:
        watched = Watched()
        app = TopScreen(watched, every_s=every_s)
        async with app.run_test(size=(100, 50)) as pilot:
            await story(app, pilot, watched)

    asyncio.run(asyncio.wait_for(run(), 30))


async def until(pilot: Any, true: Callable[[], bool]) -> None:
    for _ in range(200):
        if true():
            return
        await pilot.pause(0.02)
    raise AssertionError("it never became true")


def shown(app: Any, name: str) -> str:
    found = list(app.query(f"#{name}"))
    return str(found[0].render()) if found else ""


def test_the_screen_is_drawn_anew_after_each_look() -> None:
    async def story(app: Any, pilot: Any, watched: Watched) -> None:
        await until(pilot, lambda: "43.2 %" in shown(app, "engine-0"))
        assert "run run-1" in shown(app, "status")
        assert "no data: no metric names a request" in shown(app, "requests")
        watched.usage = 90.0
        await until(pilot, lambda: "90.0 %" in shown(app, "engine-0"))

    live(story)


def test_a_look_that_fails_leaves_the_last_one_and_says_so() -> None:
    async def story(app: Any, pilot: Any, watched: Watched) -> None:
        await until(pilot, lambda: "43.2 %" in shown(app, "engine-0"))
        watched.error = NothingToShowError("http://x: Connection refused")
        await until(pilot, lambda: shown(app, "status") == "http://x: Connection refused")
        assert app.query_one("#status").has_class("failed")
        assert "43.2 %" in shown(app, "engine-0")
        watched.error = None
        await until(pilot, lambda: not app.query_one("#status").has_class("failed"))

    live(story)


def test_it_pauses_looks_on_demand_and_quits() -> None:
    async def story(app: Any, pilot: Any, watched: Watched) -> None:
        await until(pilot, lambda: watched.looks > 0)
        await pilot.press("space")
        await pilot.pause(0.1)
        looks = watched.looks
        await pilot.pause(0.3)
        assert watched.looks == looks
        await pilot.press("r")
        await until(pilot, lambda: watched.looks == looks + 1)
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running)

    live(story)


def test_an_engine_that_is_gone_is_no_longer_shown() -> None:
    async def story(app: Any, pilot: Any, watched: Watched) -> None:
        await until(pilot, lambda: "43.2 %" in shown(app, "engine-0"))
        app._draw(watched._viewer.empty(1.0, "switched off"))
        await until(pilot, lambda: shown(app, "engine-0") == "")
        assert "no data: switched off" in shown(app, "engines")

    live(story, every_s=60)
