"""What an alert says about itself, and two small histories by which its rule is tested."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from ..metric import Text


class History(msgspec.Struct, frozen=True):
    """Series as ``promtool test rules`` writes them, one value a minute, with ``@`` for the prefix."""

    series: Mapping[str, str]
    minutes: int = 30
    """When the alert is looked at."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One alert rule. ``labels`` are those of the alert that ``fires`` makes, apart from its severity; in ``summary``
    and ``description`` ``{engine}`` stands for the value of that label.

    The runbook has ``means`` (what it is about, and what it does not say), ``look`` and ``then``.
    """

    name: str
    severity: str
    expr: str
    wait: str
    summary: str
    description: str
    means: Text
    look: Text
    then: Text
    labels: Mapping[str, str]
    fires: History
    silent: History

    @property
    def anchor(self) -> str:
        """As a heading of the runbook is linked."""
        return self.name.lower()

    def said(self, text: str, *, is_template: bool) -> str:
        """The text as Prometheus has it, or as it comes out for ``labels``."""
        if is_template:
            return re.sub(r"\{(\w+)\}", r"{{ $labels.\1 }}", text)
        return re.sub(r"\{(\w+)\}", lambda match: self.labels.get(match[1], ""), text)
