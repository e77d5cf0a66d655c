"""Both formats say the same, and prometheus_client's own parsers read them back."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from prometheus_client.samples import Sample

from kvscope.metrics.rendering import OPENMETRICS, TEXT, negotiated
from unit.metrics.support import PREFIX, collected, histogram, process

FAMILIES = collected(
    process(
        "0",
        kv_blocks={("free", ""): 5.0, ("held", "deferred"): 2.0},
        kv_block_alloc_total={(): 7.0},
        hook_seconds_total={("pool.alloc",): 0.25},
        pd_wait_seconds={(): histogram("pd_wait_seconds", 1, 2, total=0.75)},
        prefix_cache_hit_ratio={("token",): 0.5},
        kvscope_info={("none",): 1.0},
    ),
    process("1", kv_block_alloc_total={(): 9.0}),
)


def told(samples: Iterable[Sample]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {(sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())): sample.value for sample in samples}


def series(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_text_has_every_series_with_its_value() -> None:
    families = list(read_text(TEXT.render(FAMILIES).decode()))
    said = told(sample for family in families for sample in family.samples)
    assert said[series("kv_blocks", engine="0", state="free")] == 5
    assert said[series("kv_blocks", engine="0", state="held", cause="deferred")] == 2
    assert said[series("kv_block_alloc_total", engine="0")] == 7
    assert said[series("kv_block_alloc_total", engine="1")] == 9
    assert said[series("pd_wait_seconds_count", engine="0")] == 3
    assert said[series("pd_wait_seconds_sum", engine="0")] == 0.75
    assert said[series("pd_wait_seconds_bucket", engine="0", le="+Inf")] == 3
    assert {family.name.removeprefix(PREFIX): family.type for family in families} == {
        "kv_blocks": "gauge",
        "kv_block_alloc": "counter",
        "hook_seconds": "counter",
        "pd_wait_seconds": "histogram",
        "prefix_cache_hit_ratio": "gauge",
        "snapshot_age_seconds": "gauge",
        "kvscope_info": "gauge",
    }


def test_openmetrics_says_the_same_and_names_units() -> None:
    families = list(read_openmetrics(OPENMETRICS.render(FAMILIES).decode()))
    plain = told(sample for family in read_text(TEXT.render(FAMILIES).decode()) for sample in family.samples)
    assert told(sample for family in families for sample in family.samples) == plain
    assert {family.name.removeprefix(PREFIX): family.unit for family in families if family.unit} == {
        "kv_blocks": "blocks",
        "hook_seconds": "seconds",
        "pd_wait_seconds": "seconds",
        "prefix_cache_hit_ratio": "ratio",
        "snapshot_age_seconds": "seconds",
    }


def test_a_value_that_is_no_number_is_still_text() -> None:
    text = TEXT.render(collected(process(kv_cache_usage_percent={(): math.nan}))).decode()
    assert f'\n{PREFIX}kv_cache_usage_percent{{engine="0"}} NaN\n' in text


def test_nothing_is_an_empty_text_and_an_ended_openmetrics() -> None:
    assert TEXT.render([]) == b""
    assert OPENMETRICS.render([]) == b"# EOF\n"


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", TEXT),
        ("application/json", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", OPENMETRICS),
        ("application/openmetrics-text;version=99.0.0", TEXT),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;q=nonsense", TEXT),
        ("text/plain, application/openmetrics-text;q=0.5", TEXT),
        # What Prometheus 2 and 3 send.
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
            "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            OPENMETRICS,
        ),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
            "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
            "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
            OPENMETRICS,
        ),
        ("text/plain;version=0.0.4;q=1,*/*;q=0.1", TEXT),
    ],
)
def test_the_format_is_the_one_that_was_asked_for(accept: str, wanted: object) -> None:
    assert negotiated(accept) is wanted
