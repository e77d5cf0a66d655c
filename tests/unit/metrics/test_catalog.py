"""The catalog against the contract and against the stations whose names it repeats."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvscope.boundary.seams import seam_table
from kvscope.metrics import labels
from kvscope.metrics.catalog import METRICS, SECTIONS
from kvscope.metrics.metric import FEEDERS, Metric
from kvscope.sinks.shared import DROP_CAUSES

EACH = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)

REQUIRED = {
    "kv_cache_usage_percent": ("gauge", ()),
    "kv_block_alloc_total": ("counter", ()),
    "kv_block_free_total": ("counter", ()),
    "prefix_cache_hits_total": ("counter", ("unit",)),
    "prefix_cache_hit_ratio": ("gauge", ("unit",)),
    "pd_transfer_tokens_total": ("counter", ("direction",)),
    "pd_transfer_latency_seconds": ("histogram", ()),
    "pd_transfer_queue_depth": ("gauge", ()),
    "pd_transfer_in_flight": ("gauge", ()),
}
BEYOND = {
    "kv_blocks": ("state", "cause"),
    "kv_token_fill_ratio": ("group",),
    "kv_block_evict_total": (),
    "kv_block_touch_total": (),
    "kv_refs_released_total": (),
    "kv_deferred_free_blocks": (),
    "prefix_cache_queries_total": ("unit",),
    "pd_transfer_bytes_total": ("direction",),
    "pd_transfer_failures_total": ("cause",),
    "pd_wait_seconds": (),
    "pd_lease_expired_total": (),
    "offload_jobs_in_flight": ("direction",),
    "offload_receipts_missing": (),
    "recovery_seconds": (),
    "recovery_total": ("outcome",),
    "guard_violations_total": ("reason",),
    "guard_checks_total": ("check",),
    "guard_checks_skipped_total": ("check", "cause"),
    "guard_checks_stalled": ("check",),
    "tail_entries": ("state",),
    "guard_rows_audited_total": (),
    "records_dropped_total": ("cause",),
    "hook_faults_total": ("hook",),
    "hook_seconds_total": ("hook",),
    "snapshot_age_seconds": (),
    "kvscope_info": ("connector",),
}
CLOSED = {"engine", "group", "reason", "check", "unit", "state", "direction", "connector", "cause", "outcome", "hook"}


def test_names_kinds_and_labels_are_those_of_the_contract() -> None:
    required = {m.name: (m.kind, m.label_names) for m in METRICS.values() if m.required}
    assert required == REQUIRED
    assert {m.name: m.label_names for m in METRICS.values() if not m.required} == BEYOND


def test_what_needs_a_part_that_does_not_exist_says_so() -> None:
    assert [m.name for m in METRICS.values() if not m.is_delivered] == [
        "pd_transfer_bytes_total",
        "pd_lease_expired_total",
        "offload_jobs_in_flight",
        "offload_receipts_missing",
        "recovery_seconds",
        "recovery_total",
    ]


@EACH
def test_a_metric_follows_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert set(metric.label_names) <= CLOSED
    assert metric.section in SECTIONS
    assert metric.feeder in FEEDERS
    assert metric.combine == "sum" or metric.kind == "gauge"
    if metric.kind == "histogram":
        assert 8 <= len(metric.buckets) + 1 <= 10
        assert list(metric.buckets) == sorted(set(metric.buckets))
    else:
        assert metric.buckets == ()
    combinations = metric.combinations()
    assert len(set(combinations)) == len(combinations)


@EACH
def test_both_languages_say_it_in_whole_sentences(metric: Metric) -> None:
    for text in (metric.meaning, metric.not_read_as):
        assert "\n" not in text.en + text.zh
        assert text.en.endswith(".")
        assert text.zh.endswith("。")
        assert re.search(r"[\u4e00-\u9fff]", text.zh)
        assert not re.search(r"[\u4e00-\u9fff][,:;(]", text.zh), "half-width punctuation after a Chinese character"


def test_hooks_and_drop_causes_are_those_of_the_stations_that_have_them() -> None:
    hub: Any = MagicMock()
    assert set(labels.HOOK.values) == {seam.name for seam in seam_table(hub)} | {*labels.FOREIGN, labels.OTHER}
    assert labels.DROP_CAUSE.values == DROP_CAUSES


def test_a_value_outside_a_closed_set_becomes_other_or_is_refused() -> None:
    assert labels.SKIP_CAUSE.closed("semantics:mamba") == "semantics"
    assert labels.SKIP_CAUSE.closed("made up") == "other"
    assert labels.GROUP.closed("400") == "other"
    with pytest.raises(KeyError):
        labels.REASON.closed("made_up")


def test_the_key_of_a_series() -> None:
    blocks = METRICS["kv_blocks"]
    assert blocks.key({"state": "used"}) == ("used", "")
    assert blocks.key({"state": "held", "cause": "connector"}) == ("held", "connector")
    for wrong in ({"state": "held"}, {"state": "used", "cause": "connector"}, {"state": "used", "block": "1"}):
        with pytest.raises(KeyError):
            blocks.key(wrong)
    with pytest.raises(KeyError):
        METRICS["tail_entries"].key({})


def test_there_are_few_series() -> None:
    cells = sum(len(m.combinations()) * max(1, len(m.buckets) + 1) for m in METRICS.values())
    assert cells < 1000, "every process has memory for all of them, and a scrape may return them all"
