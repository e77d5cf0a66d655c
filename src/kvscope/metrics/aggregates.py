"""A view as one line of JSON for a log: what is not known is left out."""

from __future__ import annotations

from typing import Any

import msgspec

from kvscope.metrics.view import View

__all__ = ["aggregates_line"]

_LEFT_OUT = frozenset({"source", "no_data", "requests", "requests_more", "hooks"})
"""What says where a view comes from, why it lacks something, or more than a line should."""


def aggregates_line(view: View) -> str:
    """The numbers of a view, shortened to four digits behind the point."""
    return msgspec.json.encode(_short(msgspec.to_builtins(view))).decode()


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items() if item is not None and name not in _LEFT_OUT}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value
