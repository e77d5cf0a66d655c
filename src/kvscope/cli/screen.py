"""Where a verb's output goes: styled lines on a terminal, plain text in a pipe, or one JSON document."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer

from kvscope.errors import KvscopeError
from kvscope.reports.printable import clean, clean_json

WIDTH = 80
Line = tuple[str, str]
"""A style's name and text."""

STYLES = {
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


class UnknownNameError(KvscopeError):
    """An argument is the name of nothing that this version has; the text says what to do instead."""


class ReaderGoneError(Exception):
    """Whoever read the output has seen enough. (The argument parser would take a BrokenPipeError for its own.)"""


def show(lines: Iterable[Line]) -> None:
    """Print styled lines; styles only where a terminal shows them. No text can draw on the terminal by itself."""
    lines = [(style, clean(text)) for style, text in lines]
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
        console.print(Text(text, style=STYLES.get(style, "")))


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
    """Print one JSON document, indented: valid JSON whatever the terminal's encoding, and readable where it can be."""
    try:
        encoded = msgspec.json.encode(document)
    except UnicodeEncodeError:  # a path that is not UTF-8
        encoded = msgspec.json.encode(_encodable(msgspec.to_builtins(document)))
    only_ascii = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "") != "utf8"
    _write(clean_json(msgspec.json.format(encoded, indent=2).decode(), only_ascii=only_ascii) + "\n")


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return value


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


def run_text(run_id: str, started: str | None, num_processes: int) -> str:
    """Which run it is, so that an old one is not taken for a new one."""
    when = f"started {started[:19].replace('T', ' ')}" if started else "start not recorded"
    return f"{run_id}, {when}, {num_processes} {'process' if num_processes == 1 else 'processes'}"


def next_command(*arguments: str | Path) -> list[Line]:
    """The line that every verb ends with. Whoever follows these lines comes to no verb twice in the same way."""
    return [("dim", f"next: {typed()} {shlex.join(str(part) for part in arguments)}")]


def typed(program: str = "kvscope") -> str:
    """How this command, or one that is installed beside it, is typed here: as it was called, without the folder where
    the shell finds it by its name.
    """
    called = Path(sys.argv[0]).absolute()
    if called.name == "__main__.py" and called.parent.name == "kvscope":
        python = Path(sys.executable)
        return f"{_found(python)} -m kvscope" if program == "kvscope" else _found(python.with_name(program))
    return _found(called.with_name(program)) if called.name == "kvscope" else program


def _found(program: Path) -> str:
    found = shutil.which(program.name)
    if not program.exists() or (found is not None and Path(found).absolute() == program):
        return program.name
    relative = shown(program)
    return shlex.quote(relative if os.sep in relative else f"./{relative}")


def shown(path: Path) -> str:
    """The path as a person here would type it."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
