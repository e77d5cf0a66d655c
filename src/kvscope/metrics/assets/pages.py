"""The pages about metrics and alerts, in English and in Simplified Chinese: both from the same entries."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Literal

from ...settings import MonitorConfig
from ..catalog import METRICS, SECTIONS
from ..metric import COMBINED, FEEDERS, INACTIVE, Metric, Text
from .recording import recording_rules
from .rules import ALERT_FILE, RECORDING_FILE, alerts

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")
SUFFIX: dict[Language, str] = {"en": ".md", "zh": ".zh-CN.md"}

_WIDTH = 120

_TITLE = Text("Metrics", "指标")
_RUNBOOK_TITLE = Text("Runbook", "告警处理手册")
_INTRODUCTION = Text(
    "Every metric of kvscope (`kv_monitor`): what it counts, and what it is not to be read as. Names are given without "
    "their prefix, which is `{prefix}` unless `kv_monitor.prefix` says otherwise. Every series has the label `engine`: "
    "the data-parallel rank, or `frontend` for what belongs to no engine; the labels of a metric stand beside it. "
    "Requests and blocks never become labels. What nobody observes is absent and not zero. `kvscope metrics explain "
    "NAME` prints the same.",
    "kvscope 的全部指标（`kv_monitor`）：统计什么，以及不应理解为什么。名称不含前缀，前缀默认为 `{prefix}`，可由 "
    "`kv_monitor.prefix` 更改。"
    "每个序列都有标签 `engine`：数据并行的 rank，不属于任何引擎的内容为 `frontend`；指标自身的标签列在其旁。"
    "请求与块不会成为标签。"
    "无人观察的内容不输出，而不是零。`kvscope metrics explain NAME` 显示相同内容。",
)
_KINDS: dict[str, Text] = {
    "gauge": Text("gauge", "瞬时值（gauge）"),
    "counter": Text("counter", "计数器（counter）"),
    "histogram": Text("histogram", "直方图（histogram）"),
}
_LABELS = Text("Labels", "标签")
_UNIT = Text("unit", "单位")
_BUCKETS = Text("Buckets", "分桶")
_NOT = Text("Not to be read as", "不应理解为")
_COLON = Text(": ", "：")
_FEEDER = Text("From", "来源")
_REQUIRED = Text("Required by the monitoring design", "监控设计要求的指标")
_ABSENT = Text("This version has no part that feeds it", "本版本没有提供该指标的部分")
_UNFED = Text("; not yet: ", "；尚无：")
_RECORDED = Text("Recording rules", "记录规则")
_RECORDED_INTRODUCTION = Text(
    "Ratios must not be averaged and quantiles not be added. `{file}` divides sums, for each engine (`engine:`) and "
    "for all (`all:`).",
    "比率不能取平均，分位数不能相加。`{file}` 对总和做除法，分别针对每个引擎（`engine:`）与全部（`all:`）。",
)
_OWN = Text("Metrics of your own", "自定义指标")
_OWN_INTRODUCTION = Text(
    "A module named in `kv_output.extensions` registers functions whose values stand beside these, with the label "
    "`engine` and no other. They are called once a `kv_monitor.scrape_interval`, each in a thread of its own, in the "
    "exporter, in EngineCore or in every worker (`process`); one that raises or is slow is counted in "
    '`hook_faults_total{hook="collectors"}` and removed after 16 faults. `help(kvscope.monitor.register_collector)` '
    "has the rest.",
    "在 `kv_output.extensions` 中列出的模块可以注册函数，其值与上述指标并列输出，只带标签 `engine`。"
    "它们在每个 `kv_monitor.scrape_interval` 内各自在独立线程中调用一次，位置由 `process` 指定：导出器、EngineCore "
    "或每个 worker；抛出异常或过慢的函数计入 "
    '`hook_faults_total{hook="collectors"}`，达到 16 次后被移除。'
    "其余说明见 `help(kvscope.monitor.register_collector)`。",
)
_OWN_EXAMPLE = """```python
from kvscope.monitor import register_collector


@register_collector(name="{prefix}held_ratio", metric_type="gauge", process="exporter")
def held_ratio(ctx):
    held = ctx.metrics.total("kv_blocks", state="held") or 0.0
    return held / (ctx.metrics.total("kv_blocks") or 1.0)
```"""
_RUNBOOK_INTRODUCTION = Text(
    "One entry for every alert of `{file}`: what it means, where to look, what to do.",
    "`{file}` 中每个告警一节：含义、查看何处、如何处理。",
)
_MEANS = Text("Means", "含义")
_LOOK = Text("Look at", "查看")
_THEN = Text("Then", "处理")
_SEVERITY = Text("Severity", "级别")
_AFTER = Text("after", "持续")


def dictionary(language: Language, prefix: str) -> str:
    """The page about all metrics and recording rules."""
    return "\n".join(_dictionary(language, prefix)).rstrip() + "\n"


def runbook(language: Language, prefix: str) -> str:
    """The page that the alerts lead to."""
    return "\n".join(_runbook(language, prefix)).rstrip() + "\n"


def _said(text: Text, language: Language) -> str:
    return text.en if language == "en" else text.zh


def _prose(text: str, language: Language, indent: str = "") -> list[str]:
    """Wrapped where words end; Chinese, which has no such places, stands in one line a paragraph."""
    if language == "zh":
        return [text]
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _fact(label: Text, text: str, language: Language) -> list[str]:
    return _prose(f"- **{_said(label, language)}**{_said(_COLON, language)}{text}", language, "  ")


def _dictionary(language: Language, prefix: str) -> Iterator[str]:
    yield f"# {_said(_TITLE, language)}"
    yield ""
    yield from _prose(_said(_INTRODUCTION, language).replace("{prefix}", prefix), language)
    if not MonitorConfig.ACTS:
        yield ""
        yield from _prose(f"**{_said(INACTIVE, language)}**", language)
    for section, title in SECTIONS.items():
        yield ""
        yield f"## {_said(title, language)}"
        for metric in METRICS.values():
            if metric.section == section:
                yield from _metric(metric, language)
    yield ""
    yield f"## {_said(_RECORDED, language)}"
    yield ""
    yield from _prose(_said(_RECORDED_INTRODUCTION, language).replace("{file}", RECORDING_FILE), language)
    yield ""
    for rule in recording_rules():
        yield f"- `{rule.record.replace('@', prefix)}`{_said(_COLON, language)}{_said(rule.meaning, language)}"
    yield ""
    yield f"## {_said(_OWN, language)}"
    yield ""
    yield from _prose(_said(_OWN_INTRODUCTION, language), language)
    yield ""
    yield _OWN_EXAMPLE.replace("{prefix}", prefix)


def _metric(metric: Metric, language: Language) -> Iterator[str]:
    yield ""
    yield f"### {metric.name}"
    yield ""
    yield from _prose(_said(metric.meaning, language), language)
    yield ""
    kind, how = _said(_KINDS[metric.kind], language), _said(COMBINED[metric.combine], language)
    comma = ", " if language == "en" else "，"
    yield from _prose(f"- {kind}{comma}{_said(_UNIT, language)} {metric.unit}{comma}{how}", language, "  ")
    if metric.labels:
        yield from _fact(_LABELS, _label_text(metric, language), language)
    if metric.buckets:
        bounds = " ".join(f"{bound:g}" for bound in metric.buckets)
        yield from _fact(_BUCKETS, f"{bounds} +Inf", language)
    yield from _fact(_NOT, _said(metric.not_read_as, language), language)
    yield from _fact(_FEEDER, _said(FEEDERS[metric.feeder], language), language)
    if metric.required:
        yield f"- {_said(_REQUIRED, language)}"
    if not metric.is_delivered:
        yield f"- {_said(_ABSENT, language)}"


def _label_text(metric: Metric, language: Language) -> str:
    """Labels with their values; of many values the first and the last. What nothing feeds is said apart."""
    said = []
    for label in metric.labels:
        values = label.fed if len(label.fed) <= 12 else (*label.fed[:3], "…", label.fed[-1])
        later = f"{_said(_UNFED, language)}{', '.join(label.unfed)}" if label.unfed and metric.is_delivered else ""
        said.append(f"`{label.name}` ({', '.join(values)}{later})")
    return "; ".join(said)


def _runbook(language: Language, prefix: str) -> Iterator[str]:
    yield f"# {_said(_RUNBOOK_TITLE, language)}"
    yield ""
    yield from _prose(_said(_RUNBOOK_INTRODUCTION, language).replace("{file}", ALERT_FILE), language)
    for alert in alerts():
        yield ""
        yield f"## {alert.name}"
        yield ""
        wait = "" if alert.wait == "0m" else f" {_said(_AFTER, language)} {alert.wait}"
        yield f"{_said(_SEVERITY, language)} {alert.severity}{wait}: `{alert.expr.replace('@', prefix)}`"
        yield ""
        for label, text in ((_MEANS, alert.means), (_LOOK, alert.look), (_THEN, alert.then)):
            yield from _fact(label, _said(text, language), language)
