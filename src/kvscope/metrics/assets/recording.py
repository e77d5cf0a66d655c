"""Recording rules: every ratio, every quantile and every rate of tokens or bytes, so that nobody writes the division.

An ``@`` in an expression stands for the prefix. ``engine:`` rules are about one engine of one scrape target, ``all:``
rules about all of them together: sums are divided, ratios are never averaged.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..catalog import METRICS
from ..metric import Metric, Section, Text
from .series import emittable_in

WINDOW = "5m"
ENGINE_BY = "job, instance, engine"
"""What makes one engine: two deployments that one Prometheus scrapes both have an engine 0."""
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def summed_up(series: str, by: str) -> str:
    """The sum over all labels that ``by`` does not name."""
    return f"sum by ({by}) ({series})" if by else f"sum ({series})"


class RecordingRule(msgspec.Struct, frozen=True):
    """``record`` is the name of the series that Prometheus makes of ``expr``, both with ``@`` for the prefix."""

    record: str
    expr: str
    meaning: Text


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """``part`` divided by the sum of ``whole``, each summed up; ``by`` names the label that is kept beside the level's.

    A term counts as zero where it has no series, if ``anchor``, another term, has some: failures exist only once one
    has happened.
    """

    name: str
    section: Section
    part: str
    whole: tuple[str, ...]
    meaning: Text
    by: str = ""
    anchor: str = ""
    suffix: str = f"rate{WINDOW}"

    def record(self, level: str) -> str:
        return f"{level}:@{self.name}:{self.suffix}"

    def expr(self, by: str) -> str:
        def term(series: str) -> str:
            summed = summed_up(series, by)
            is_sure = self.anchor in {"", series}
            return summed if is_sure else f"({summed} or 0 * {summed_up(self.anchor, by)})"

        return f"{term(self.part)} / ({' + '.join(map(term, self.whole))} > 0)"


def _rate(series: str) -> str:
    return f"rate({series}[{WINDOW}])"


_AUDITED = _rate("@guard_rows_audited_total")
_UNAUDITED = _rate('@guard_checks_skipped_total{check="plan"}')
_FAILED = _rate("@pd_transfer_failures_total")
_DONE = _rate("@pd_transfer_latency_seconds_count")

RATIOS = (
    Ratio(
        name="prefix_cache_hit_ratio",
        section="reuse",
        part=_rate("@prefix_cache_hits_total"),
        whole=(_rate("@prefix_cache_queries_total"),),
        by="unit",
        meaning=Text("Prefix cache hits divided by queries, by unit.", "前缀缓存命中数除以查询数，按 unit 区分。"),
    ),
    Ratio(
        name="kv_block_evict_ratio",
        section="pool",
        part=_rate("@kv_block_evict_total"),
        whole=(_rate("@kv_block_alloc_total"),),
        meaning=Text(
            "Blocks whose cached content was given up, divided by blocks that got their first reference.",
            "放弃缓存内容的块数除以获得首个引用的块数。",
        ),
    ),
    Ratio(
        name="kv_blocks_used_ratio",
        section="pool",
        part='@kv_blocks{state="used"}',
        whole=('@kv_blocks{state!="null"}',),
        suffix="now",
        meaning=Text("Used blocks divided by all blocks but the null block.", "used 块数除以除空块外的全部块数。"),
    ),
    Ratio(
        name="guard_coverage_ratio",
        section="guard",
        part=_AUDITED,
        whole=(_AUDITED, _UNAUDITED),
        anchor=_AUDITED,
        meaning=Text(
            "Rows whose plan was judged, divided by those and the rows of which no plan was judged.",
            "计划已被判断的行数，除以它与计划未被判断的行数之和。",
        ),
    ),
    Ratio(
        name="pd_transfer_failure_ratio",
        section="transfer",
        part=_FAILED,
        whole=(_FAILED, _DONE),
        anchor=_DONE,
        meaning=Text("Transfers that failed, divided by all that ended.", "失败的传输数除以全部已结束的传输数。"),
    ),
)


def recording_rules() -> list[RecordingRule]:
    """All rules whose series some process of this version can emit."""
    rules = [*_ratios(), *_quantiles(), *_rates(), *_own_cost()]
    return [rule for rule in rules if emittable_in(rule.expr)]


def _levels(kept: str = "") -> list[tuple[str, str]]:
    """``(level, labels that are kept)``."""
    return [("engine", f"{ENGINE_BY}, {kept}" if kept else ENGINE_BY), ("all", kept)]


def _ratios() -> Iterator[RecordingRule]:
    for ratio in RATIOS:
        for level, by in _levels(ratio.by):
            yield RecordingRule(ratio.record(level), ratio.expr(by), ratio.meaning)


def _quantiles() -> Iterator[RecordingRule]:
    for metric in METRICS.values():
        if metric.kind != "histogram":
            continue
        for name, quantile in QUANTILES.items():
            for level, by in _levels("le"):
                buckets = summed_up(_rate(f"@{metric.name}_bucket"), by)
                expr = f"histogram_quantile({quantile}, {buckets})"
                record = f"{level}:@{metric.name}:{name}_{WINDOW}"
                yield RecordingRule(record, expr, _quantile_text(metric, name.upper()))


def _quantile_text(metric: Metric, name: str) -> Text:
    return Text(
        f"{name} of {metric.name} over {WINDOW}, as exact as its buckets.",
        f"{metric.name} 在 {WINDOW} 内的 {name}，精度取决于分桶。",
    )


def _rates() -> Iterator[RecordingRule]:
    for metric in METRICS.values():
        if metric.kind == "counter" and metric.unit in {"tokens", "bytes"}:
            for level, by in _levels(", ".join(metric.label_names)):
                name = metric.name.removesuffix("_total")
                yield RecordingRule(
                    f"{level}:@{name}:rate{WINDOW}",
                    summed_up(_rate(f"@{metric.name}"), by),
                    Text(f"{metric.name} a second.", f"每秒 {metric.name}。"),
                )


def _own_cost() -> Iterator[RecordingRule]:
    for level, by in _levels():
        yield RecordingRule(
            f"{level}:@hook_seconds:rate{WINDOW}",
            summed_up(_rate("@hook_seconds_total"), by),
            Text("Seconds a second that kvscope spends in its hooks.", "kvscope 每秒在钩子中花费的秒数。"),
        )
