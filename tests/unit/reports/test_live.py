"""The sections of a view as a person reads them, at 80 columns."""

from __future__ import annotations

import time

import pytest

from kvscope.metrics.view import (
    Cost,
    Coverage,
    EngineView,
    Hold,
    Latency,
    Pool,
    RequestBlocks,
    Reuse,
    Transfers,
    View,
)
from kvscope.metrics.viewing import Viewer
from kvscope.reports.live import headline, sections

FIRST = EngineView(
    engine="0",
    pool=Pool(
        usage=0.446,
        blocks={"free": 343, "used": 434, "cached": 210, "null": 1, "held": 12},
        held={"deferred": 12},
        fill={"0": 0.93, "1": 0.5},
        deferred_blocks=12,
        alloc_per_s=15.2,
        free_per_s=14.0,
        evict_per_s=0.0,
    ),
    reuse=Reuse(
        window={"token": 0.631, "block": 0.58},
        since_start={"token": 0.55, "block": 0.5},
        queries={"token": 12_345, "block": 771},
    ),
    transfers=None,
    no_data={"transfers": "this engine has no KV connector"},
)
SECOND = EngineView(
    engine="1",
    pool=None,
    reuse=None,
    transfers=Transfers(
        connector="NixlConnector",
        tokens={"received": 4096},
        tokens_per_s={"received": 512.0},
        queued=3,
        in_flight=2,
        failures={"aborted": 1},
        latency=Latency(count=12, p50_s=0.008, p95_s=0.0452),
        wait=None,
    ),
    no_data={"pool": "no process reports the block pool", "reuse": "no process reports the block pool"},
)
VIEW = View(
    source="http://127.0.0.1:9460/metrics",
    run_id="run-7",
    at_s=1_700_000_000.0,
    over_s=2.0,
    engines=[FIRST, SECOND],
    holds=[
        Hold(engine="0", cause="deferred", blocks=12, for_s=34.0, since_before=True),
        Hold(engine="0", cause="connector", blocks=3, for_s=0.25, since_before=False),
    ],
    requests=[
        RequestBlocks(engine="0", request_id="cmpl-1", blocks=128, tokens=2041),
        RequestBlocks(engine="0", request_id="cmpl-" + "x" * 80, blocks=3, tokens=40),
    ],
    requests_more=7,
    findings={"write_foreign_block": 2, "read_after_release": 1_000},
    coverage=Coverage(rows_audited=64_000, share=0.998, checks={"C1": 640}, skipped={"warm_up": 3}, stalled=["C5"]),
    cost=Cost(
        hook_s=4.2,
        share=0.0031,
        hooks={"scheduler.schedule": 3.0, "pool.alloc": 1.2},
        faults={"pool.alloc": 1},
        dropped={"queue_records": 9},
        snapshot_age_s=0.4,
    ),
    no_data={},
)

GOLDEN = """\
[engine 0]
usage        44.6 %  [#########################                                ]
blocks        1,000  [#########################!++++++++++++...................]
           used 434 #   held 12 !   cached 210 +   free 343 .   null 1
held       deferred 12
token fill group 0 93.0 %, group 1 50.0 %
rates      15.2 allocated/s, 14.0 freed/s, 0.0 evicted/s, over 2.0 s
hits       tokens 63.1 %, blocks 58.0 % within the window; 55.0 % of 12,345
           tokens, 50.0 % of 771 blocks since the start
transfers  no data: this engine has no KV connector
[engine 1]
pool       no data: no process reports the block pool
hits       no data: no process reports the block pool
transfers  NixlConnector, received 4,096 tokens, received 512.0 tokens/s, queued
           3, in flight 2
           latency: P50 8.0 ms, P95 45.2 ms of 12 since the start
           failed: aborted 1
[requests by blocks held]
  blocks    tokens  engine  request
     128     2,041       0  cmpl-1
       3        40       0  cmpl-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…
and 7 more
[oldest holds]
      12 blocks, deferred, engine 0, for at least 34.0 s
       3 blocks, connector, engine 0, for 250.0 ms
[findings]
   1,000  read_after_release
       2  write_foreign_block
[coverage]
audited    64,000 rows, 99.8 % of the scheduled ones
checks     C1 640
skipped    warm_up 3
stalled    C5
[kvscope's own cost]
in hooks   4.2 s in all processes together, 0.3 % of the time over 2.0 s
dearest    scheduler.schedule 3.0 s, pool.alloc 1.2 s
faults     pool.alloc 1
dropped    records: queue_records 9
last heard 400.0 ms ago, from the process that is silent longest
"""


def drawn(view: View, width: int = 80) -> str:
    lines = []
    for section in sections(view, width):
        lines += [f"[{section.heading}]", *(text for _, text in section.lines)]
    return "".join(f"{line}\n" for line in lines)


def test_everything_that_a_view_can_hold() -> None:
    assert drawn(VIEW) == GOLDEN


@pytest.mark.parametrize("width", [40, 60, 80, 132])
def test_no_line_is_wider_than_the_screen(width: int) -> None:
    assert max(len(line) for line in drawn(VIEW, width).splitlines()) <= width


def test_what_is_wrong_stands_out() -> None:
    styles = {text: style for section in sections(VIEW) for style, text in section.lines}
    assert {text.split()[0] for text, style in styles.items() if style == "bad"} == {
        "failed:",
        "1,000",
        "2",
        "stalled",
        "faults",
        "dropped",
    }


def test_nothing_known_is_no_data_and_why_in_every_section() -> None:
    text = drawn(Viewer("x").empty(1.0, "KV Monitor is switched off at run time"))
    assert text.count("no data: KV Monitor is switched off at run time\n") == 6
    assert "0" not in text


def test_none_and_nothing_known_are_told_apart() -> None:
    none = View(
        source="x", run_id=None, at_s=1.0, over_s=None, engines=[], holds=[], requests=[], requests_more=0,
        findings={}, coverage=None, cost=None, no_data={},
    )  # fmt: skip
    text = drawn(none)
    assert "[requests by blocks held]\nno request holds a block\n" in text
    assert "[oldest holds]\nnone  " in text
    assert "[findings]\nnone\n" in text


def test_the_headline_names_run_time_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        assert headline(VIEW) == "run run-7  2023-11-14 22:13:20  http://127.0.0.1:9460/metrics"
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()
