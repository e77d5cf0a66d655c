"""``kvscope rules``: every reason of a finding, those of one check, or one of them in full."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import typer

from kvscope.cli.screen import JSON_OPTION, Line, UnknownNameError, facts, next_command, show, show_json, typed, wrapped

if TYPE_CHECKING:
    from kvscope.checks.rule import Rule


def _complete(incomplete: str) -> list[str]:
    from kvscope.checks.catalog import RULES

    checks = dict.fromkeys(rule.check for rule in RULES.values())
    return [name for name in (*RULES, *checks) if name.startswith(incomplete)]


NAME_ARGUMENT = typer.Argument(
    None, metavar="reason", help="A reason, as a finding names it, or a check (C3).", autocompletion=_complete
)


def command(name: str | None = NAME_ARGUMENT, as_json: bool = JSON_OPTION) -> None:
    """List what a finding can say, or tell one reason in full.

    In full: when it fires, when it stays silent, and what it does not prove.
    """
    from kvscope.checks.catalog import RULES

    chosen = list(RULES.values()) if name is None else _named(name)
    if as_json:
        show_json([{"id": rule.reason, "part": rule.part, **_fields(rule)} for rule in chosen])
    elif name in RULES:
        show([*_in_full(chosen[0]), ("", ""), *next_command("schema", "kv.violation")])
    else:
        show([*_overview(chosen), ("", ""), *next_command("rules", chosen[0].reason)])


def _named(name: str) -> list[Rule]:
    """The reason of this name, or all reasons of this check. Raises UnknownNameError, with what comes close."""
    from kvscope.checks.catalog import RULES
    from kvscope.checks.rule import CHECKS

    if name in RULES:
        return [RULES[name]]
    if found := [rule for rule in RULES.values() if rule.check == name.upper()]:
        return found
    if name.upper() in CHECKS:
        raise UnknownNameError(f"rules: no reason of this version belongs to the check {name.upper()}")
    close = difflib.get_close_matches(name, RULES, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else f"{typed()} rules lists both"
    raise UnknownNameError(f"rules: {name!r} is neither a reason nor a check of this version; {hint}")


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
