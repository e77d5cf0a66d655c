"""The rule files of Prometheus, and the file by which ``promtool test rules`` tries every alert."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from .alert import Alert, History
from .cache_alerts import CACHE_ALERTS
from .guard_alerts import GUARD_ALERTS
from .own_alerts import OWN_ALERTS
from .recording import RecordingRule, recording_rules
from .series import problems_in

ALERTS: tuple[Alert, ...] = (*GUARD_ALERTS, *CACHE_ALERTS, *OWN_ALERTS)

RECORDING_FILE = "kvscope-recording.rules.yml"
ALERT_FILE = "kvscope-alerts.rules.yml"
TEST_FILE = "kvscope-alerts.test.yml"
RUNBOOK = "runbook.md"


def alerts() -> list[Alert]:
    """All alerts that this version can raise.

    Raises:
        ValueError: one of them asks for a series that no process of this version emits.
    """
    recorded = [rule.record for rule in recording_rules()]
    wrong = [f"{alert.name}: {problem}" for alert in ALERTS for problem in problems_in(alert.expr, recorded)]
    if wrong:
        raise ValueError("; ".join(wrong))
    return list(ALERTS)


def recording_file(prefix: str) -> str:
    """All recording rules in one group, as YAML."""
    return _document("recording", (_recorded(rule, prefix) for rule in recording_rules()))


def alert_file(prefix: str, pages: str) -> str:
    """All alerts in one group, as YAML. ``pages`` is the address of the folder that the runbook is in."""
    return _document("alerts", (_alert(alert, prefix, pages) for alert in alerts()))


def alert_test_file(prefix: str, pages: str) -> str:
    """For every alert a history by which it fires, and one by which it stays silent."""
    files = f"rule_files: [{RECORDING_FILE}, {ALERT_FILE}]\nevaluation_interval: 1m\ntests:\n"
    cases = (_case(alert, fires, prefix, pages) for alert in alerts() for fires in (True, False))
    return _HEADER + files + "".join(cases)


_HEADER = "# Made from the metric catalog by `kvscope assets export`. Changes belong there.\n"


def _document(name: str, rules: Iterator[str]) -> str:
    return f"{_HEADER}groups:\n  - name: kvscope-{name}\n    rules:\n{''.join(rules)}"


def _quoted(text: str) -> str:
    """A YAML string; JSON's are among them."""
    return json.dumps(text, ensure_ascii=False)


def _mapping(entries: Mapping[str, str], indent: int) -> str:
    return "".join(f"{' ' * indent}{name}: {_quoted(value)}\n" for name, value in entries.items())


def _recorded(rule: RecordingRule, prefix: str) -> str:
    record, expr = rule.record.replace("@", prefix), rule.expr.replace("@", prefix)
    return f"      # {rule.meaning.en}\n      - record: {record}\n        expr: {_quoted(expr)}\n"


def _annotations(alert: Alert, pages: str, *, is_template: bool) -> dict[str, str]:
    return {
        "summary": alert.said(alert.summary, is_template=is_template),
        "description": alert.said(alert.description, is_template=is_template),
        "runbook_url": f"{pages}/{RUNBOOK}#{alert.anchor}",
    }


def _alert(alert: Alert, prefix: str, pages: str) -> str:
    return (
        f"      - alert: {alert.name}\n"
        f"        expr: {_quoted(alert.expr.replace('@', prefix))}\n"
        f"        for: {alert.wait}\n"
        f"        labels:\n{_mapping({'severity': alert.severity}, 10)}"
        f"        annotations:\n{_mapping(_annotations(alert, pages, is_template=True), 10)}"
    )


def _case(alert: Alert, fires: bool, prefix: str, pages: str) -> str:
    history, how = (alert.fires, "fires") if fires else (alert.silent, "stays silent")
    lines = [
        f"  - name: {alert.name} {how}",
        "    interval: 1m",
        "    input_series:",
        *_input_series(history, prefix),
        "    alert_rule_test:",
        f"      - eval_time: {history.minutes}m",
        f"        alertname: {alert.name}",
    ]
    if not fires:
        return "\n".join([*lines, "        exp_alerts: []"]) + "\n"
    lines += ["        exp_alerts:", "          - exp_labels:"]
    labels = _mapping({"severity": alert.severity, **alert.labels}, 14)
    annotations = _mapping(_annotations(alert, pages, is_template=False), 14)
    return "\n".join(lines) + f"\n{labels}            exp_annotations:\n{annotations}"


def _input_series(history: History, prefix: str) -> Iterable[str]:
    for series, values in history.series.items():
        yield f"      - series: {_quoted(series.replace('@', prefix))}"
        yield f"        values: {_quoted(values)}"
