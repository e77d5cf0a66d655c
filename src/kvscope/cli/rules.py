"""``kvscope rules``: every reason of a finding, or one of them in full."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import typer

from kvscope.cli.screen import JSON_OPTION, Line, facts, next_command, show, show_json, wrapped

if TYPE_CHECKING:
    from kvscope.checks.rule import Rule


def _complete(incomplete: str) -> list[str]:
    from kvscope.checks.catalog import RULES

    return [reason for reason in RULES if reason.startswith(incomplete)]


def command(
    reason: str | None = typer.Argument(None, help="A reason, as a finding names it.", autocompletion=_complete),
    as_json: bool = JSON_OPTION,
) -> None:
    """List what a finding can say: when it fires, when it stays silent, and what it does not prove."""
    from kvscope.checks.catalog import RULES

    if reason is not None and reason not in RULES:
        close = difflib.get_close_matches(reason, RULES, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "kvscope rules lists them"
        raise typer.BadParameter(f"{reason!r} is no reason of this version; {hint}")
    chosen = [RULES[reason]] if reason is not None else list(RULES.values())
    if as_json:
        show_json([{"id": rule.reason, "part": rule.part, **_fields(rule)} for rule in chosen])
    elif reason is not None:
        show([*_in_full(chosen[0]), ("", ""), *next_command("check", "kvscope-out")])
    else:
        show([*_overview(chosen), ("", ""), *next_command("rules", chosen[0].reason)])


def _fields(rule: Rule) -> dict[str, object]:
    import msgspec

    return {name: value for name, value in msgspec.to_builtins(rule).items() if name not in {"rank", "reason"}}


def _overview(rules: list[Rule]) -> list[Line]:
    from kvscope.checks.rule import CHECKS

    lines: list[Line] = []
    for check, meaning in CHECKS.items():
        mine = [rule for rule in rules if rule.check == check]
        if mine:
            lines += [("", "")] if lines else []
            lines += wrapped(f"{check}  {meaning}", style="label")
            lines += facts([(rule.reason, rule.title) for rule in mine], indent=2, label_width=34)
    return lines


def _in_full(rule: Rule) -> list[Line]:
    kind = "one object against a rule that it must satisfy" if rule.invariant else "two independent objects"
    return [
        *wrapped(f"{rule.reason} ({rule.check}, {rule.severity}): {rule.title}", style="label"),
        ("", ""),
        *facts([
            ("fires", rule.fires),
            ("silent", rule.silent),
            ("compares", f"{rule.sources[0]}"),
            ("with", f"{rule.sources[1]} ({kind})"),
            ("not proved", rule.proves_not),
            ("part", f"{rule.part}: its switch, and its action"),
        ]),
    ]  # fmt: skip
