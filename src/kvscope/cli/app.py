"""Puts the verbs together, and turns everything that can go wrong into one line and an exit code."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

import typer

from kvscope import __version__
from kvscope.cli import INTERRUPTED
from kvscope.cli.screen import ReaderGoneError, typed
from kvscope.errors import KvscopeError
from kvscope.reports.printable import clean

VERBS = (
    "demo",
    "doctor",
    "selftest",
    "top",
    "info",
    "check",
    "exporter",
    "monitor",
    "rules",
    "schema",
    "metrics",
    "assets",
)
"""In the order in which a stranger needs them. Each is a module here with a function ``command``."""

UNUSABLE = 2
BROKEN_PIPE = 141


def build() -> typer.Typer:
    """The command with all verbs that this version has."""
    app = typer.Typer(
        name="kvscope",
        help="Observe and check the KV cache of a running vLLM engine. Exit codes: 0 clean or done, 1 findings, "
        "2 usage or unreadable, 3 inconclusive.",
        no_args_is_help=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for verb in VERBS:
        name = f"kvscope.cli.{verb}"
        if importlib.util.find_spec(name) is not None:
            app.command(name=verb)(importlib.import_module(name).command)
    return app


def _options(
    version: bool = typer.Option(False, "--version", help="Print the version and end.", is_eager=True),
) -> None:
    if version:
        typer.echo(f"kvscope {__version__}")
        raise typer.Exit


def run(arguments: list[str]) -> int:
    """Run one command line. Never raises, never shows a traceback."""
    if sys.stdout is None:  # closed by who started us: there is an exit code all the same
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123  it stays open until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123  it stays open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that is not UTF-8 must not end the report
            stream.reconfigure(errors="backslashreplace")
    try:
        code = build()(args=arguments or ["--help"], prog_name="kvscope", standalone_mode=False)
        sys.stdout.flush()
    except (ReaderGoneError, BrokenPipeError):
        return _reader_gone()
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except SystemExit as end:  # completion ends this way, and the parser's help where nobody reads it
        if isinstance(end.__context__, BrokenPipeError):
            return _reader_gone()
        return end.code if isinstance(end.code, int) else 0
    except KvscopeError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename or 'output'}: {error.strerror or type(error).__name__}")
    except Exception as error:  # noqa: BLE001  a usage error of the argument parser, or a defect: one line either way
        return _fail(_usage_text(error) or _defect_text(error))
    return code if isinstance(code, int) else 0


def _reader_gone() -> int:
    """What is still buffered must not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return BROKEN_PIPE


def _fail(message: str) -> int:
    line = clean(" ".join(message.split()))
    sys.stderr.write(f"kvscope: {line}\n")
    return UNUSABLE


def _usage_text(error: Any) -> str | None:
    """The text of the argument parser's own errors, which come from click or from typer's copy of it."""
    if not hasattr(error, "format_message"):
        return None
    context = getattr(error, "ctx", None)
    verb = context.command_path.removeprefix("kvscope") if context is not None else ""
    said = error.format_message().replace("Value error, ", "")  # the parser of values names its kind of error
    return f"{said.rstrip('.')}; see {typed()}{verb} --help"


def _defect_text(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else "?"  # noqa: PTH119  a name in a message, not a path to open
    return f"a defect of kvscope: {type(error).__name__} at {where}: {error}"
