"""Where a verb's output goes: styled lines on a terminal, plain text in a pipe, or one JSON document."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator
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


class ReaderGoneError(Exception):
    """Whoever read the output has seen enough. (The argument parser would take a BrokenPipeError for its own.)"""


def show(lines: Iterable[Line]) -> None:
    """Print styled lines; styles only where a terminal shows them."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        _show_styled(lines)
        return
    _write("".join(f"{text.rstrip()}\n" for _, text in lines))


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderGoneError from error


def _show_styled(lines: Iterable[Line]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for style, text in lines:
        console.print(Text(text, style=_STYLES.get(style, "")))


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """vLLM logs to stdout while it is imported and runs; that must not stand in a report, so it goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def show_json(document: object) -> None:
    """Print one JSON document, indented."""
    _write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")


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


def wrapped(text: str, *, style: str = "", indent: int = 0, hang: int = 2) -> list[Line]:
    """A paragraph, with all lines but the first ``hang`` columns further in."""
    return [
        (style, line)
        for line in textwrap.wrap(
            text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + hang), break_on_hyphens=False
        )
    ]


def next_command(*command: str | Path) -> list[Line]:
    """The line that every verb ends with."""
    return [("dim", f"next: {shlex.join(str(part) for part in command)}")]
