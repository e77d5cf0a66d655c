"""Draws a prepared finding as text. A line carries a style's name; who prints it decides about colour."""

from __future__ import annotations

import textwrap

from kvscope.reports.prepare import PreparedFinding
from kvscope.reports.strip import Strip
from kvscope.reports.wording import Fact

WIDTH = 80
LABEL_WIDTH = 16
_GLUE = "\x00"  # stands for a space while lines are wrapped; no prepared text has one
Line = tuple[str, str]
"""Style (``frozen``, ``title``, ``bad``, ``label``, ``dim`` or empty) and text."""


def draw(finding: PreparedFinding, width: int = WIDTH) -> list[Line]:
    """The report, at most ``width`` columns, but for the frozen line: that one stays whole for grep."""
    lines: list[Line] = [("frozen", finding.frozen), ("dim", "=" * width)]
    lines += [("title", line) for line in textwrap.wrap(finding.title, width)]
    lines += [("dim", "=" * width)]
    lines += _facts(finding.access, width, first="bad")
    if finding.owners:
        lines += [("", ""), *_facts(finding.owners, width)]
    if finding.strip is not None:
        lines += [("", ""), *_draw_strip(finding.strip, width)]
    lines += [("", ""), *_facts(finding.comparison, width)]
    if finding.doubts:
        lines += [("", ""), ("label", "Why it could be wrong"), *_facts(finding.doubts, width, indent=2)]
    lines += [("", ""), *(("dim", line) for line in textwrap.wrap(finding.repeats, width))]
    lines += [("label", "Next")]
    for step in finding.next_steps:
        lines += [("", line) for line in textwrap.wrap(step, width, initial_indent="  ", subsequent_indent="    ")]
    return lines


def plain(lines: list[Line]) -> str:
    """The lines without their styles."""
    return "".join(f"{text.rstrip()}\n" for _, text in lines)


def _facts(facts: list[Fact], width: int, *, indent: int = 0, first: str = "") -> list[Line]:
    lines: list[Line] = []
    for index, (label, text) in enumerate(facts):
        head = f"{' ' * indent}{label}".ljust(LABEL_WIDTH)
        wrapped = textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * LABEL_WIDTH)
        lines += [(first if index == 0 else "", line) for line in wrapped or [head.rstrip()]]
    return lines


def _draw_strip(strip: Strip, width: int) -> list[Line]:
    indent = " " * LABEL_WIDTH
    arrow = f"{indent}{'  ' * strip.marked}^ block {strip.block}"
    # A symbol and what it means stay on one line.
    legend = "   ".join(f"{symbol} {text}".replace(" ", _GLUE) for symbol, text in strip.legend)
    wrapped = textwrap.wrap(legend, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return [
        ("", f"{'neighbours':{LABEL_WIDTH}}{' '.join(strip.symbols)}   {strip.first_block}..{strip.last_block}"),
        ("bad", arrow),
        *(("dim", line.replace(_GLUE, " ")) for line in wrapped),
    ]
