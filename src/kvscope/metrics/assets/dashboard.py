"""The Grafana dashboard: one row a section of the catalog, and above all of them what tells whether anything is wrong.

Every metric that this version emits has a panel, whose description is the metric's own; ratios and quantiles come from
the recording rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..catalog import METRICS, SECTIONS
from ..metric import Metric
from .recording import QUANTILES, RATIOS, WINDOW, Ratio, recording_rules
from .series import problems_in

DASHBOARD_FILE = "kvscope-dashboard.json"
_COLUMNS = 24
_PANEL_HEIGHT = 8
_SELECTED = 'job=~"$job", instance=~"$instance", engine=~"$engine"'
_UNITS = {
    "percent": "percent",
    "ratio": "percentunit",
    "seconds": "s",
    "bytes": "bytes",
    "blocks": "short",
}
_LEFT_OUT = {"prefix_cache_hit_ratio", "kvscope_info"}
"""The windowed ratio has its recording rule in its place; the other is there to be joined."""

Panel = dict[str, Any]


def dashboard_file(prefix: str) -> str:
    """The dashboard, as Grafana imports it.

    Raises:
        ValueError: a panel asks for a series that no process of this version emits.
    """
    panels = [*_overview(), *_sections()]
    recorded = [rule.record for rule in recording_rules()]
    exprs = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    wrong = [problem for expr in exprs for problem in problems_in(expr, recorded)]
    if wrong:
        raise ValueError("; ".join(wrong))
    _place(panels)
    document = {
        "uid": "kvscope",
        "title": "kvscope: KV cache",
        "description": "Made from kvscope's metric catalog by `kvscope assets export`.",
        "tags": ["kvscope", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": panels,
    }
    return json.dumps(document, indent=2, ensure_ascii=False).replace("@", prefix) + "\n"


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    chosen = ""
    for name in ("job", "instance", "engine"):
        yield {
            "name": name,
            "label": name,
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": f"label_values(@kvscope_info{{{chosen}}}, {name})",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "current": {"text": "All", "value": "$__all"},
        }
        chosen = f'{chosen}, {name}=~"${name}"' if chosen else f'{name}=~"${name}"'


def _panel(kind: str, title: str, description: str, unit: str, targets: list[tuple[str, str]], width: int) -> Panel:
    """``targets`` are ``(expression, legend)``."""
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": unit, "noValue": "no data"}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(targets)
        ],
        "gridPos": {"h": _PANEL_HEIGHT, "w": width, "x": 0, "y": 0},
    }


def _overview() -> Iterator[Panel]:
    yield _row("Is anything wrong?")
    for title, expr, unit in (
        ("Findings, last hour", f"sum(increase(@guard_violations_total{{{_SELECTED}}}[1h]))", "none"),
        ("Coverage", f"min(engine:@guard_coverage_ratio:rate5m{{{_SELECTED}}})", "percentunit"),
        ("KV cache usage, fullest engine", f"max(@kv_cache_usage_percent{{{_SELECTED}}})", "percent"),
        ("Prefix cache hits, tokens", 'all:@prefix_cache_hit_ratio:rate5m{unit="token"}', "percentunit"),
        ("kvscope's own cost", f"max(engine:@hook_seconds:rate5m{{{_SELECTED}}})", "percentunit"),
        ("Oldest snapshot", f"max(@snapshot_age_seconds{{{_SELECTED}}})", "s"),
    ):
        panel = _panel("stat", title, "", unit, [(expr, "")], 4)
        panel["gridPos"]["h"] = 4
        yield panel


def _sections() -> Iterator[Panel]:
    for section, title in SECTIONS.items():
        metrics = [
            metric
            for metric in METRICS.values()
            if metric.section == section and metric.is_delivered and metric.name not in _LEFT_OUT
        ]
        panels = [panel for metric in metrics for panel in _metric_panels(metric)]
        if metrics:
            panels += [_ratio_panel(ratio) for ratio in RATIOS if ratio.section == section]
        if panels:
            yield _row(title.en)
            yield from panels


def _row(title: str) -> Panel:
    return {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"h": 1, "w": _COLUMNS}}


def _metric_panels(metric: Metric) -> Iterator[Panel]:
    legend = " ".join(["{{engine}}", *(f"{{{{{name}}}}}" for name in metric.label_names)])
    unit = _UNITS.get(metric.unit, "short")
    if metric.kind == "histogram":
        records = [
            (f"engine:@{metric.name}:{name}_{WINDOW}{{{_SELECTED}}}", f"{{{{engine}}}} {name.upper()}")
            for name in QUANTILES
        ]
        yield _panel("timeseries", metric.name, metric.help, unit, records, 8)
    elif metric.kind == "counter":
        by = ", ".join(["engine", *metric.label_names])
        expr = f"sum by ({by}) (rate(@{metric.name}{{{_SELECTED}}}[$__rate_interval]))"
        unit = "percentunit" if metric.unit == "seconds" else unit
        yield _panel("timeseries", f"{metric.name}, a second", metric.help, unit, [(expr, legend)], 8)
    else:
        panel = _panel("timeseries", metric.name, metric.help, unit, [(f"@{metric.name}{{{_SELECTED}}}", legend)], 8)
        if metric.name == "kv_blocks":
            panel["fieldConfig"]["defaults"]["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 40}
        yield panel


def _ratio_panel(ratio: Ratio) -> Panel:
    legend = f"{{{{engine}}}} {{{{{ratio.by}}}}}" if ratio.by else "{{engine}}"
    target = (f"{ratio.record('engine')}{{{_SELECTED}}}", legend)
    return _panel("timeseries", ratio.name, ratio.meaning.en, "percentunit", [target], 8)


def _place(panels: list[Panel]) -> None:
    """From left to right, and in a new line where the width or a row ends."""
    x = y = height = 0
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
        place = panel["gridPos"]
        if panel["type"] == "row" or x + place["w"] > _COLUMNS:
            x, y, height = 0, y + height, 0
        place["x"], place["y"] = x, y
        x += place["w"]
        height = max(height, place["h"])
        if panel["type"] == "row":
            x, y, height = 0, y + 1, 0
