"""``kvscope metrics``: every metric with its kind and labels, or one of them in full."""

from __future__ import annotations

import difflib
from enum import Enum
from typing import TYPE_CHECKING

import typer

from kvscope.cli.screen import JSON_OPTION, Line, UnknownNameError, facts, next_command, show, show_json, typed, wrapped

if TYPE_CHECKING:
    from kvscope.metrics.labels import Label
    from kvscope.metrics.metric import Metric

LABEL_WIDTH = 30


class MetricsAction(str, Enum):
    list = "list"
    explain = "explain"


def _complete(incomplete: str) -> list[str]:
    from kvscope.metrics.catalog import METRICS

    return [name for name in METRICS if name.startswith(incomplete)]


ACTION_ARGUMENT = typer.Argument(MetricsAction.list, help="What to do.")
NAME_ARGUMENT = typer.Argument(
    None, metavar="metric", help="A metric, with its prefix or without.", autocompletion=_complete
)


def command(
    action: MetricsAction = ACTION_ARGUMENT, name: str | None = NAME_ARGUMENT, as_json: bool = JSON_OPTION
) -> None:
    """List the metrics of the exporter, or explain one.

    In full: what it counts, what it is not to be read as, its labels, and who feeds it.
    """
    from kvscope.metrics.catalog import METRICS

    if action is MetricsAction.list:
        if name is not None:
            raise UnknownNameError(f"metrics: list takes no name; {typed()} metrics explain {name} tells one in full")
        if as_json:
            show_json([_fields(metric) for metric in METRICS.values()])
        else:
            show([*_overview(), ("", ""), *next_command("metrics", "explain", next(iter(METRICS)))])
        return
    if name is None:
        raise UnknownNameError(f"metrics: explain takes the name of a metric; {typed()} metrics list has them")
    metric = _named(name)
    if as_json:
        show_json(_fields(metric))
    else:
        show([*_in_full(metric), ("", ""), *next_command("assets", "export", "monitoring")])


def _named(name: str) -> Metric:
    """The metric of this name, which may have a prefix, or the suffix of a histogram's series.

    Raises:
        UnknownNameError: with what comes close.
    """
    from kvscope.metrics.assets.series import metric_of
    from kvscope.metrics.catalog import METRICS
    from kvscope.settings import MonitorConfig

    bare = name.removeprefix(MonitorConfig().prefix)
    found = METRICS.get(bare) or metric_of(bare)
    if found is None:
        found = next((metric for metric in METRICS.values() if name.endswith(f"_{metric.name}")), None)
    if found is not None:
        return found
    close = difflib.get_close_matches(bare, METRICS, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else f"{typed()} metrics list has them"
    raise UnknownNameError(f"metrics: {name!r} is no metric of this version; {hint}")


def _fields(metric: Metric) -> dict[str, object]:
    return {
        "name": metric.name,
        "kind": metric.kind,
        "unit": metric.unit,
        "section": metric.section,
        "labels": {"engine": None} | {label.name: list(label.values) for label in metric.labels},
        "unfed": {label.name: list(label.unfed) for label in metric.labels if label.unfed},
        "buckets": list(metric.buckets),
        "combine": metric.combine,
        "required": metric.required,
        "fed_by": metric.feeder,
        "delivered": metric.is_delivered,
        "meaning": {"en": metric.meaning.en, "zh": metric.meaning.zh},
        "not_read_as": {"en": metric.not_read_as.en, "zh": metric.not_read_as.zh},
    }


def _overview() -> list[Line]:
    from kvscope.metrics.catalog import METRICS, SECTIONS
    from kvscope.metrics.metric import INACTIVE
    from kvscope.settings import MonitorConfig

    lines: list[Line] = [] if MonitorConfig.ACTS else wrapped(INACTIVE.en, style="warn", hang=0)
    for section, title in SECTIONS.items():
        lines += [("", "")] if lines else []
        lines += [("label", title.en)]
        lines += facts(
            [(metric.name, _kind(metric)) for metric in METRICS.values() if metric.section == section],
            indent=2,
            label_width=LABEL_WIDTH,
        )
    return lines


def _kind(metric: Metric) -> str:
    labels = f" by {', '.join(metric.label_names)}" if metric.labels else ""
    return f"{metric.kind}, {metric.unit}{labels}{'' if metric.is_delivered else '; not in this version'}"


def _in_full(metric: Metric) -> list[Line]:
    from kvscope.metrics.metric import COMBINED, FEEDERS
    from kvscope.settings import MonitorConfig

    name = f"{MonitorConfig().prefix}{metric.name}"
    pairs = [("means", metric.meaning.en), ("not read as", metric.not_read_as.en), ("unit", metric.unit)]
    pairs += [("labels", "engine: the data-parallel rank, or frontend")]
    pairs += [("", f"{label.name}: {', '.join(label.fed)}{_unfed(label)}") for label in metric.labels]
    if metric.buckets:
        pairs.append(("buckets", " ".join(f"{bound:g}" for bound in metric.buckets)))
    absent = "" if metric.is_delivered else "; not in this version, so that no process emits it"
    pairs += [("per engine", COMBINED[metric.combine].en), ("fed by", f"{FEEDERS[metric.feeder].en}{absent}")]
    return [*wrapped(f"{name} ({metric.kind})", style="label"), ("", ""), *facts(pairs)]


def _unfed(label: Label) -> str:
    return f"; not yet: {', '.join(label.unfed)}" if label.unfed else ""
