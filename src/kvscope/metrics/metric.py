"""What one metric says about itself. ``catalog`` collects them; everything that is published about metrics is generated
from there: dictionary, dashboard, recording rules, alerts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal

import msgspec

from .labels import Label

Kind = Literal["gauge", "counter", "histogram"]
Section = Literal["pool", "reuse", "transfer", "offload", "recovery", "guard", "own"]
Combine = Literal["one", "sum", "max"]
"""How the values of an engine's processes become its value: there is only one, they are added, the largest counts."""

Feeder = Literal["pool", "admission", "connector", "transfer", "checks", "process", "hooks", "reader"]


class Text(msgspec.Struct, frozen=True):
    """The same sentence in English and in Simplified Chinese."""

    en: str
    zh: str


FEEDERS: Mapping[Feeder, Text] = {
    "pool": Text("KV Monitor, at the block pool in EngineCore", "KV Monitor，在 EngineCore 的块池处"),
    "admission": Text("KV Monitor, where the scheduler admits a request", "KV Monitor，在调度器接纳请求处"),
    "connector": Text("KV Monitor, at the base class of KV connectors", "KV Monitor，在 KV 连接器的基类处"),
    "transfer": Text("KV Transfer", "KV Transfer"),
    "checks": Text("KV Trace and KV Guard, whichever is on", "KV Trace 与 KV Guard（已启用者）"),
    "process": Text("every process, about itself", "每个进程，关于其自身"),
    "hooks": Text("the hooks of every process", "每个进程的钩子"),
    "reader": Text("whoever reads the metrics files", "读取指标文件的一方"),
}

COMBINED: Mapping[Combine, Text] = {
    "one": Text("one process of the engine observes it", "由引擎的一个进程观察"),
    "sum": Text("added over the processes of the engine", "对引擎的各进程求和"),
    "max": Text("the largest value of the engine's processes", "取引擎各进程的最大值"),
}

INACTIVE = Text(
    "In this version kv_monitor is validated and does nothing yet: no process emits any of these.",
    "本版本只校验 kv_monitor 而不执行任何操作：目前没有进程输出这些指标。",
)
"""What is said beside the catalog as long as ``settings.MonitorConfig.ACTS`` is False."""

NOT_DELIVERED: frozenset[Feeder] = frozenset({"transfer"})
"""Feeders that this version does not have: their metrics are in the dictionary, and in nothing that draws or alerts."""


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric. ``name`` has no prefix. Beside ``labels`` every series has the label ``engine``.

    ``series`` are the combinations of label values that exist, where these are not all; a value that is ``""`` stands
    for a label that the series does not have. ``buckets`` are the upper bounds of a histogram, without infinity.
    ``required`` metrics are those of the monitoring design.
    """

    name: str
    kind: Kind
    unit: str
    section: Section
    feeder: Feeder
    combine: Combine
    meaning: Text
    not_read_as: Text
    labels: tuple[Label, ...] = ()
    series: tuple[tuple[str, ...], ...] = ()
    buckets: tuple[float, ...] = ()
    required: bool = False

    @property
    def is_delivered(self) -> bool:
        """Whether a process of this version can emit it."""
        return self.feeder not in NOT_DELIVERED

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    def combinations(self) -> tuple[tuple[str, ...], ...]:
        """The values of the labels of each series, in a fixed order."""
        return self.series or tuple(itertools.product(*(label.values for label in self.labels)))

    def fed(self) -> tuple[tuple[str, ...], ...]:
        """Those of ``combinations`` that some process of this version can emit."""
        if not self.is_delivered:
            return ()
        return tuple(
            values
            for values in self.combinations()
            if not any(value in label.unfed for label, value in zip(self.labels, values, strict=True))
        )

    def key(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """The label values of one series, brought into the closed sets.

        Raises:
            KeyError: a label is missing, unknown, or has a value that is none of its own; or there is no such series.
        """
        if unknown := labels.keys() - set(self.label_names):
            raise KeyError(f"{self.name} has no label {', '.join(sorted(unknown))}")
        values = tuple(
            label.closed(labels[label.name]) if labels.get(label.name, "") or not self.series else ""
            for label in self.labels
        )
        if self.series and values not in self.series:
            raise KeyError(f"{self.name} has no series {dict(zip(self.label_names, values, strict=True))}")
        return values

    @property
    def help(self) -> str:
        """One line for the exposition: meaning, then what it is not to be read as."""
        return f"{self.meaning.en} Not to be read as: {self.not_read_as.en}"
