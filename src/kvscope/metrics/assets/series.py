"""Which series a process of this version can emit, and whether an expression asks for any other.

This is what keeps dashboards and alerts from rotting: a name, a label or a value that no process can emit is an error
when the file is generated, and not a panel without data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ..catalog import METRICS
from ..labels import ENGINE
from ..metric import Metric

_HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")
_TARGET_LABELS = {"job", "instance"}
"""What Prometheus adds to every series."""

_REFERENCE = re.compile(r"(?P<level>\w+:)?@(?P<name>\w+)(?P<operation>:\w+)?(?:\{(?P<selector>[^}]*)\})?")
_MATCHER = re.compile(r'(?P<label>\w+)\s*(?P<how>=~|!~|!=|=)\s*"(?P<value>[^"]*)"')


def metric_of(name: str) -> Metric | None:
    """The metric that a series without its prefix belongs to."""
    if name in METRICS:
        return None if METRICS[name].kind == "histogram" else METRICS[name]
    for suffix in _HISTOGRAM_SUFFIXES:
        metric = METRICS.get(name.removesuffix(suffix)) if name.endswith(suffix) else None
        if metric is not None and metric.kind == "histogram":
            return metric
    return None


def problems_in(expr: str, recorded: Iterable[str] = ()) -> Iterator[str]:
    """What an expression, with ``@`` for the prefix, asks for that nobody emits; ``recorded`` are the names that
    recording rules make.
    """
    names = set(recorded)
    for found in _REFERENCE.finditer(expr):
        whole = f"{found['level'] or ''}@{found['name']}{found['operation'] or ''}"
        if found["level"] or found["operation"]:
            if whole not in names:
                yield f"no rule records {whole}"
            continue
        metric = metric_of(found["name"])
        if metric is None:
            yield f"there is no series {found['name']}"
        elif not metric.is_delivered:
            yield f"no process of this version emits {found['name']}"
        else:
            yield from _problems_in_selector(metric, found["selector"] or "")


def emittable_in(expr: str) -> bool:
    """Whether all that the expression asks for can be emitted by this version.

    Raises:
        ValueError: it asks for something that no version emits: a mistake in the expression.
    """
    problems = list(problems_in(expr))
    mistakes = [problem for problem in problems if not problem.startswith("no process")]
    if mistakes:
        raise ValueError(f"{expr}: {'; '.join(mistakes)}")
    return not problems


def _problems_in_selector(metric: Metric, selector: str) -> Iterator[str]:
    labels = {label.name: label for label in metric.labels}
    for matcher in _MATCHER.finditer(selector):
        name, value = matcher["label"], matcher["value"]
        if name in {ENGINE, "le"} | _TARGET_LABELS:
            continue
        if name not in labels:
            yield f"{metric.name} has no label {name}"
            continue
        for each in value.split("|") if "~" in matcher["how"] else [value]:
            if not re.fullmatch(r"\w*", each):  # an expression whose values nobody can list
                continue
            if each not in labels[name].values:
                yield f"label {name} of {metric.name} is never {each!r}"
            elif each in labels[name].unfed and not matcher["how"].startswith("!"):
                yield f"no process of this version emits {metric.name} with {name} {each!r}"
