"""What is shown is what was counted: rates between two looks, why something is missing, how long blocks are held."""

from __future__ import annotations

import math

import pytest

from kvscope.metrics.families import Family, ProcessValues
from kvscope.metrics.readout import Readout
from kvscope.metrics.view import EngineView, RequestBlocks, View
from kvscope.metrics.viewing import Viewer, readout_of
from unit.metrics.support import collected, histogram, process


def at(at_s: float, *processes: ProcessValues) -> Readout:
    return readout_of(collected(*processes), at_s=at_s)


def only(view: View) -> EngineView:
    (engine,) = view.engines
    return engine


def test_states_and_usage_are_those_of_the_engine() -> None:
    values = process("3", kv_cache_usage_percent={(): 25.0}, kv_blocks={("used", ""): 5.0, ("held", "isolated"): 2.0})
    engine = only(Viewer("x").view(at(1, values)))
    assert engine.engine == "3"
    assert engine.pool is not None
    assert (engine.pool.usage, engine.pool.blocks) == (0.25, {"used": 5, "held": 2})
    assert engine.pool.held == {"isolated": 2}


def test_a_rate_needs_two_looks() -> None:
    viewer = Viewer("x")
    first = viewer.view(at(10, process(kv_cache_usage_percent={(): 1.0}, kv_block_alloc_total={(): 100.0})))
    pool = only(first).pool
    assert pool is not None
    assert (first.over_s, pool.alloc_per_s) == (None, None)
    second = viewer.view(at(14, process(kv_cache_usage_percent={(): 1.0}, kv_block_alloc_total={(): 300.0})))
    pool = only(second).pool
    assert pool is not None
    assert (second.over_s, pool.alloc_per_s, pool.free_per_s) == (4, 50, None)


def test_a_counter_that_fell_has_no_rate() -> None:
    viewer = Viewer("x")
    viewer.view(at(10, process(kv_cache_usage_percent={(): 1.0}, kv_block_alloc_total={(): 100.0})))
    pool = only(viewer.view(at(11, process(kv_cache_usage_percent={(): 1.0}, kv_block_alloc_total={(): 3.0})))).pool
    assert pool is not None
    assert pool.alloc_per_s is None


@pytest.mark.parametrize(
    ("values", "section", "why"),
    [
        (process(), "pool", "no process reports the block pool"),
        (process(), "reuse", "no process reports the block pool"),
        (process(kv_cache_usage_percent={(): 0.0}), "reuse", "no request was admitted yet"),
        (process(kvscope_info={("none",): 1.0}), "transfers", "this engine has no KV connector"),
        (process(kvscope_info={("other",): 1.0}), "transfers", "no process reports what its KV connector does"),
    ],
    ids=["pool", "reuse", "nothing-admitted", "no-connector", "unobserved-connector"],
)
def test_what_is_missing_says_why(values: ProcessValues, section: str, why: str) -> None:
    engine = only(Viewer("x").view(at(1, values)))
    assert getattr(engine, section) is None
    assert engine.no_data[section].startswith(why)


def test_of_a_run_that_has_published_nothing_all_is_missing() -> None:
    view = Viewer("x").view(at(1))
    assert (view.engines, view.holds, view.findings, view.coverage, view.cost) == ([], None, None, None, None)
    assert view.no_data.keys() == {"engines", "holds", "requests", "findings", "coverage", "cost"}


def test_no_finding_and_nothing_judged_are_told_apart() -> None:
    judged = process(guard_rows_audited_total={(): 8.0}, guard_violations_total={("write_foreign_block",): 0.0})
    assert Viewer("x").view(at(1, judged)).findings == {}
    assert Viewer("x").view(at(1, process())).findings is None


def test_findings_of_all_engines_are_added_by_reason() -> None:
    found = [process(engine, guard_violations_total={("write_foreign_block",): 2.0}) for engine in "01"]
    assert Viewer("x").view(at(1, *found)).findings == {"write_foreign_block": 4}


def holds(at_s: float, viewer: Viewer, **causes: float) -> list[tuple[str, int, float, bool]]:
    blocks = {("free", ""): 9.0} | {("held", cause): count for cause, count in causes.items()}
    view = viewer.view(at(at_s, process(kv_blocks=blocks)))
    assert view.holds is not None
    return [(hold.cause, hold.blocks, hold.for_s, hold.since_before) for hold in view.holds]


def test_holds_are_timed_from_when_they_are_first_seen_until_there_is_none() -> None:
    viewer = Viewer("x")
    assert holds(10, viewer, deferred=3) == [("deferred", 3, 0, True)]
    assert holds(15, viewer, deferred=1, connector=2) == [("deferred", 1, 5, True), ("connector", 2, 0, False)]
    assert holds(20, viewer, deferred=0, connector=2) == [("connector", 2, 5, False)]
    assert holds(30, viewer, deferred=4) == [("deferred", 4, 0, False)]


def test_hits_are_those_of_the_window_and_since_the_start() -> None:
    values = process(
        prefix_cache_queries_total={("token",): 200.0, ("block",): 0.0},
        prefix_cache_hits_total={("token",): 50.0},
        prefix_cache_hit_ratio={("token",): 0.5},
    )
    reuse = only(Viewer("x").view(at(1, values))).reuse
    assert reuse is not None
    assert (reuse.window, reuse.since_start, reuse.queries) == ({"token": 0.5}, {"token": 0.25}, {"token": 200})


def test_transfers_have_rates_and_quantiles() -> None:
    def values(tokens: float) -> ProcessValues:
        return process(
            kvscope_info={("NixlConnector",): 1.0},
            pd_transfer_tokens_total={("received",): tokens},
            pd_transfer_in_flight={(): 2.0},
            pd_transfer_latency_seconds={(): histogram("pd_transfer_latency_seconds", 10)},
            pd_transfer_failures_total={("aborted",): 1.0},
        )

    viewer = Viewer("x")
    viewer.view(at(1, values(0)))
    transfers = only(viewer.view(at(3, values(50)))).transfers
    assert transfers is not None
    assert (transfers.connector, transfers.in_flight, transfers.queued) == ("NixlConnector", 2, None)
    assert transfers.tokens_per_s == {"received": 25}
    assert transfers.failures == {"aborted": 1}
    assert transfers.wait is None
    assert transfers.latency is not None
    assert transfers.latency.count == 10
    assert transfers.latency.p50_s is not None
    assert 0 < transfers.latency.p50_s < 0.01


def test_own_cost_is_a_share_of_time() -> None:
    viewer = Viewer("x")
    viewer.view(at(1, process(hook_seconds_total={("pool.alloc",): 1.0, ("pool.free",): 0.0})))
    cost = viewer.view(at(2, process(hook_seconds_total={("pool.alloc",): 1.01, ("pool.free",): 0.0}))).cost
    assert cost is not None
    assert cost.share == pytest.approx(0.01)
    assert (cost.hooks, cost.snapshot_age_s) == ({"pool.alloc": 1.01}, 0.25)


def test_the_front_end_is_no_engine() -> None:
    view = Viewer("x").view(at(1, process("frontend", hook_seconds_total={("frontend.admit",): 1.0})))
    assert view.engines == []
    assert view.cost is not None


def test_the_requests_with_the_most_blocks_come_first_and_the_rest_is_counted() -> None:
    requests = [RequestBlocks(engine="0", request_id=f"r{n:02}", blocks=n, tokens=16 * n) for n in range(13)]
    view = Viewer("x").view(at(1, process()), requests=requests)
    assert view.requests is not None
    assert [request.blocks for request in view.requests] == list(range(12, 2, -1))
    assert (view.requests_more, "requests" in view.no_data) == (3, False)


def test_a_value_that_is_no_number_is_none() -> None:
    families: list[Family] = collected(process(kv_cache_usage_percent={(): math.nan}))
    assert readout_of(families, at_s=1).get("kv_cache_usage_percent", engine="0") is None


@pytest.mark.parametrize(
    ("share", "buckets", "wanted"),
    [
        (0.5, {"1": 0, "2": 10, "+Inf": 10}, 1.5),
        (0.5, {"1": 10, "+Inf": 10}, 0.5),
        (0.95, {"1": 1, "+Inf": 10}, 1.0),
        (0.5, {"1": 0, "+Inf": 0}, None),
    ],
    ids=["inside", "first", "above-all", "none"],
)
def test_quantiles_are_those_of_histogram_quantile(share: float, buckets: dict[str, int], wanted: float | None) -> None:
    samples = [("h_bucket", {"engine": "0", "le": bound}, float(count)) for bound, count in buckets.items()]
    assert Readout(samples, at_s=0).quantile(share, "h", engine="0") == wanted
