"""An expression that asks for what no process can emit is refused when a file is made of it."""

from __future__ import annotations

import pytest

from kvscope.metrics.assets.recording import RATIOS, recording_rules
from kvscope.metrics.assets.rules import ALERTS, alerts
from kvscope.metrics.assets.series import emittable_in, metric_of, problems_in
from kvscope.metrics.catalog import METRICS


@pytest.mark.parametrize(
    "expr",
    [
        '@kv_blocks{state="used"}',
        '@kv_blocks{engine="0", job="x", instance=~"a.*", state!="null"}',
        '@kv_blocks{state=~"used|held"}',
        '@kv_blocks{state=~"us.*"}',
        '@pd_transfer_failures_total{cause="host_shutdown"}',
        '@pd_transfer_failures_total{cause!="lease_expired"}',
        "rate(@pd_wait_seconds_bucket[5m])",
        "engine:@prefix_cache_hit_ratio:rate5m > 1",
    ],
)
def test_what_can_be_emitted_has_no_problem(expr: str) -> None:
    assert list(problems_in(expr, ["engine:@prefix_cache_hit_ratio:rate5m"])) == []


@pytest.mark.parametrize(
    ("expr", "problem"),
    [
        ("@kv_blokcs", "there is no series kv_blokcs"),
        ("@kv_block_alloc", "there is no series kv_block_alloc"),
        ("@pd_wait_seconds", "there is no series pd_wait_seconds"),
        ("@kv_blocks_bucket", "there is no series kv_blocks_bucket"),
        ("@recovery_seconds_count", "no process of this version emits recovery_seconds_count"),
        ('@kv_blocks{group="0"}', "kv_blocks has no label group"),
        ('@kv_blocks{state="full"}', "label state of kv_blocks is never 'full'"),
        ('@kv_blocks{state=~"used|full"}', "label state of kv_blocks is never 'full'"),
        ('@kv_blocks{state!~"full|used"}', "label state of kv_blocks is never 'full'"),
        (
            '@pd_transfer_failures_total{cause="submit_failed"}',
            "no process of this version emits pd_transfer_failures_total with cause 'submit_failed'",
        ),
        (
            'rate(@pd_transfer_failures_total{cause=~"aborted|lease_expired"}[5m])',
            "no process of this version emits pd_transfer_failures_total with cause 'lease_expired'",
        ),
        (
            '@guard_checks_total{check="T"}',
            "no process of this version emits guard_checks_total with check 'T'",
        ),
        ("all:@prefix_cache_hit_ratio:rate1h", "no rule records all:@prefix_cache_hit_ratio:rate1h"),
    ],
)
def test_what_cannot_be_emitted_is_named(expr: str, problem: str) -> None:
    assert list(problems_in(f"sum({expr}) > 0")) == [problem]


def test_a_rule_over_a_part_that_does_not_exist_is_left_out_and_a_mistake_is_raised() -> None:
    assert not emittable_in("rate(@recovery_seconds_bucket[5m])")
    with pytest.raises(ValueError, match="kv_blokcs"):
        emittable_in("@kv_blokcs")


def test_a_rule_over_a_value_that_nothing_gives_yet_is_left_out() -> None:
    assert not emittable_in('rate(@pd_transfer_failures_total{cause="submit_failed"}[5m])')


def test_every_series_of_every_metric_is_known() -> None:
    for metric in METRICS.values():
        names = [metric.name]
        if metric.kind == "histogram":
            names = [metric.name + suffix for suffix in ("_bucket", "_sum", "_count")]
        assert [metric_of(name) for name in names] == [metric] * len(names)


def test_every_ratio_quantile_and_rate_that_can_be_emitted_is_recorded() -> None:
    recorded = {rule.record for rule in recording_rules()}
    for level in ("engine", "all"):
        assert {ratio.record(level) for ratio in RATIOS} <= recorded
        for name in ("pd_transfer_latency_seconds", "pd_wait_seconds"):
            assert {f"{level}:@{name}:{quantile}_5m" for quantile in ("p50", "p95", "p99")} <= recorded
        assert f"{level}:@pd_transfer_tokens:rate5m" in recorded
    assert not any("recovery" in record or "bytes" in record for record in recorded)
    assert len(recorded) == len(recording_rules())


def test_an_alert_that_nobody_can_raise_fails_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec

    assert alerts() == list(ALERTS)
    wrong = msgspec.structs.replace(ALERTS[0], expr="@offload_receipts_missing > 0")
    monkeypatch.setattr("kvscope.metrics.assets.rules.ALERTS", (wrong,))
    with pytest.raises(ValueError, match="KvscopeViolation: no process of this version emits offload_receipts"):
        alerts()
