"""The one line of a finding that never changes its form: operators grep for it, and build alerts on it."""

from __future__ import annotations

from kvscope.checks.finding import Finding
from kvscope.checks.rule import Rule
from kvscope.events.names import PLAIN, RequestNames


def frozen_line(
    finding: Finding, rule: Rule, action: str, *, tag: str = "KV_GUARD", names: RequestNames = PLAIN
) -> str:
    """``KV_GUARD reason= check= action= request= group= block= slot= step= trace_id=``, ``-`` where none applies."""
    request = None if finding.request_id is None else names(finding.request_id)
    fields = {
        "reason": finding.reason,
        "check": rule.check,
        "action": action,
        "request": request,
        "group": finding.group_id,
        "block": finding.block_id,
        "slot": finding.slot,
        "step": finding.step,
        "trace_id": finding.trace_id,
    }
    return " ".join([tag, *(f"{name}={_word(value)}" for name, value in fields.items())])


def _word(value: object) -> str:
    """A value without spaces or line ends: a client chooses the request id, and must not be able to forge fields."""
    if value is None or value == "":
        return "-"
    text = str(value)
    if text.isprintable() and " " not in text and "=" not in text:
        return text
    return "".join(c if c.isprintable() and c not in " =%" else _percent(c) for c in text)


def _percent(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))
