"""The live page in a real headless Chromium: it draws what there is, says why there is nothing, and fetches only from
the exporter that it comes from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from kvscope.metrics.exporter import Exporter, ExporterSettings
from kvscope.metrics.families import Family
from kvscope.metrics.page import page
from kvscope.testing.browser import Page, chromium
from unit.metrics.support import collected, get, histogram, process


class Engine:
    """What the page's exporter collects: an engine that works, unless a test says otherwise."""

    def __init__(self) -> None:
        self.turn = 0
        self.families: list[Family] | None = None
        self.error: Exception | None = None
        self.is_on = True

    def collect(self) -> list[Family]:
        self.turn += 1
        if self.error is not None:
            raise self.error
        return self.working(self.turn) if self.families is None else self.families

    @staticmethod
    def working(turn: int) -> list[Family]:
        of_pool = process(
            "0",
            kv_cache_usage_percent={(): 43.2},
            kv_blocks={
                ("used", ""): 434.0,
                ("held", "deferred"): 12.0,
                ("cached", ""): 210.0,
                ("free", ""): 343.0,
                ("null", ""): 1.0,
            },
            prefix_cache_queries_total={("token",): 1000.0},
            prefix_cache_hits_total={("token",): 550.0},
            prefix_cache_hit_ratio={("token",): 0.631},
            kvscope_info={("none",): 1.0},
            guard_rows_audited_total={(): 64.0 * turn},
            guard_checks_total={("C1",): 64.0 * turn},
            guard_checks_skipped_total={("C2", "warm_up"): 3.0},
            guard_violations_total={("write_foreign_block",): 2.0},
            hook_seconds_total={("scheduler.schedule",): 0.01 * turn},
        )
        decodes = process(
            "1",
            kv_cache_usage_percent={(): 10.0},
            kvscope_info={("NixlConnector",): 1.0},
            pd_transfer_tokens_total={("received",): 100.0 * turn},
            pd_transfer_queue_depth={(): 3.0},
            pd_transfer_in_flight={(): 2.0},
            pd_transfer_latency_seconds={(): histogram("pd_transfer_latency_seconds", 3, 4)},
        )
        return collected(of_pool, decodes)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def url(engine: Engine, tmp_path: Path) -> Iterator[str]:
    settings = ExporterSettings(folder=tmp_path, run_id="run-7", port=0, scrape_interval_s=0.05)
    exporter = Exporter(settings, engine.collect, is_on=lambda: engine.is_on)
    exporter.start()
    place = exporter.wait_until_decided(20)
    assert place is not None
    yield place.url
    exporter.stop()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Page]:
    program = chromium()
    if program is None:
        pytest.skip("not run: no Chromium here (Debian: chromium-headless-shell)")
    with Page(program, tmp_path / "profile") as opened:
        yield opened


def test_it_is_one_document_with_the_library_and_its_licence_in_it() -> None:
    document = page().decode()
    assets = resources.files("kvscope.metrics") / "assets"
    for name in ("uplot/uPlot.iife.min.js", "uplot/uPlot.min.css", "uplot/LICENSE", "live.js", "live.css"):
        assert (assets / name).read_text(encoding="utf-8").strip() in document
    assert "/*live" not in document
    assert " src=" not in document
    assert "<link" not in document


def test_it_may_fetch_from_its_own_exporter_alone(url: str) -> None:
    port = int(url.rsplit(":", 1)[1].strip("/"))
    served = get(port, "/")
    assert (served.status, served.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert served.body == page()
    policy = served.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    view = get(port, "/view.json")
    assert view.headers["content-type"] == "application/json"
    assert json.loads(view.body)["run_id"] == "run-7"


def test_it_draws_what_there_is(url: str, browser: Page, tmp_path: Path) -> None:
    browser.open(url)
    browser.wait_for("document.body.dataset.state === 'live'")
    first = browser.text('[data-engine="0"]')
    assert "43.2 %" in first
    assert "1,000 blocks" in first
    assert "63.1 %" in first
    assert "since the start: 55.0 % of 1,000 tokens" in first
    assert "no data: this engine has no KV connector" in first
    second = browser.text('[data-engine="1"]')
    assert "NixlConnector" in second
    assert "no data: no request was admitted yet" in second
    assert browser.text("#findings").split() == ["Findings", "write_foreign_block", "2"]
    assert "skipped: warm_up\t3" in browser.text("#coverage")
    assert "engine 0, deferred: 12 blocks\tat least " in browser.text("#holds")
    assert "scheduler.schedule" in browser.text("#cost")
    browser.wait_for("document.querySelectorAll('canvas').length === 5")
    browser.wait_for("engines.get('0')[0].times.length >= 2")
    assert set(browser.requested()) == {url, f"{url}view.json"}
    assert browser.complaints() == []
    light = browser.picture(tmp_path / "light.png")
    browser.prefer("dark")
    browser.wait_for("getComputedStyle(document.body).backgroundColor === 'rgb(15, 19, 23)'")
    assert browser.picture(tmp_path / "dark.png") != light


def test_a_stack_of_states_ends_at_all_blocks(url: str, browser: Page) -> None:
    browser.open(url)
    browser.wait_for("document.body.dataset.state === 'live'")
    chart = "engines.get('0')[1]"
    assert browser.value(f"{chart}.data().slice(1).map((line) => line[0])") == [1000, 657, 656, 446, 434]
    assert browser.value(f"{chart}.plot.series.slice(1).map((line) => line.label)") == [
        "free",
        "null",
        "cached",
        "held",
        "used",
    ]


def test_nothing_is_drawn_as_zero_where_nothing_was_counted(engine: Engine, url: str, browser: Page) -> None:
    engine.families = collected(process("0", kvscope_info={("none",): 1.0}))
    browser.open(url)
    browser.wait_for("document.body.dataset.state === 'live'")
    assert browser.text('[data-engine="0"]').count("no data: ") == 4
    for panel in ("holds", "findings", "coverage", "cost"):
        assert "no data: " in browser.text(f"#{panel}")
    assert browser.value("document.querySelectorAll('canvas').length") == 0


def test_before_any_process_has_published_it_says_so(engine: Engine, url: str, browser: Page) -> None:
    engine.families = []
    browser.open(url)
    browser.wait_for("document.body.dataset.state === 'empty'")
    assert "no data: no process of this run has published anything yet" in browser.text("#engines")


def test_it_tells_monitoring_that_is_off_from_an_exporter_that_fails_or_is_gone(
    engine: Engine, url: str, browser: Page
) -> None:
    browser.open(url)
    browser.wait_for("document.body.dataset.state === 'live'")
    engine.is_on = False
    browser.wait_for("document.body.dataset.state === 'empty'")
    assert "KV Monitor is switched off at run time" in browser.text("#state")
    engine.is_on = True
    engine.error = ValueError("torn file")
    browser.wait_for("document.body.dataset.state === 'failed'")
    assert browser.text("#state") == "collection failed: ValueError: torn file"
    engine.error = None
    browser.wait_for("document.body.dataset.state === 'live'")
    gaps = browser.value("engines.get('0')[0].raw[0].filter((value) => value === null).length")
    assert gaps >= 2, "a chart has no value for times at which there was none"


def test_its_picture_stands_in_both_readmes_and_is_light() -> None:
    root = Path(__file__).parents[3]
    picture = root / "docs" / "images" / "live-page.png"
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < 150_000
    for name in ("README.md", "README.zh-CN.md"):
        assert f"]({picture.relative_to(root)})" in (root / name).read_text(encoding="utf-8")
