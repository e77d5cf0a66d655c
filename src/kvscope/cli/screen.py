"""Where a verb's output goes: styled lines on a terminal, plain text in a pipe, or one JSON document."""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import msgspec
import typer

WIDTH = 80
Line = tuple[str, str]
"""A style's name and text."""

_STYLES = {
    "frozen": "dim",
    "title": "bold red",
    "bad": "red",
    "label": "bold",
    "good": "bold green",
    "warn": "bold yellow",
    "dim": "dim",
}

TRACE_ARGUMENT = typer.Argument(..., help="A run's folder, an output folder (its newest run), or one trace file.")
JSON_OPTION = typer.Option(False, "--json", help="One JSON document instead of text.")


def show(lines: Iterable[Line]) -> None:
    """Print styled lines; styles only where a terminal shows them."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        sys.stdout.writelines(f"{text.rstrip()}\n" for _, text in lines)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for style, text in lines:
        console.print(Text(text, style=_STYLES.get(style, "")))


def show_json(document: object) -> None:
    """Print one JSON document, indented."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")


def facts(pairs: Iterable[tuple[str, str]], *, indent: int = 0, label_width: int = 14) -> list[Line]:
    """``label  text``, wrapped behind the label."""
    lines: list[Line] = []
    for label, text in pairs:
        head = f"{' ' * indent}{label}".ljust(label_width - 1) + " "
        wrapped = textwrap.wrap(
            text, WIDTH, initial_indent=head, subsequent_indent=" " * label_width, break_on_hyphens=False
        )
        lines += [("", line) for line in wrapped or [head]]
    return lines


def wrapped(text: str, *, style: str = "", indent: int = 0) -> list[Line]:
    """A paragraph."""
    hang = " " * (indent + 2)
    return [
        (style, line)
        for line in textwrap.wrap(
            text, WIDTH, initial_indent=" " * indent, subsequent_indent=hang, break_on_hyphens=False
        )
    ]


def next_command(*command: str | Path) -> list[Line]:
    """The line that every verb ends with."""
    return [("dim", f"next: {shlex.join(str(part) for part in command)}")]
