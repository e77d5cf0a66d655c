"""``kvscope top``: what the KV cache of a run does now, live on the terminal or once."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvscope.cli.screen import JSON_OPTION, Line, UnknownNameError, next_command, show, show_json
from kvscope.config import DIR_VARIABLE, OutputConfig

if TYPE_CHECKING:
    from kvscope.cli.top_sources import Source
    from kvscope.metrics.view import View

SOURCE_ARGUMENT = typer.Argument(
    None,
    metavar="source",
    help="An exporter's address (http://…), a run's folder, an output folder (its newest run), or a trace file. "
    "Default: the exporter of the newest run in the output folder, or that run itself.",
)
ONCE_OPTION = typer.Option(False, "--once", help="Print one view and end.")
EVERY_OPTION = typer.Option(2.0, "--every", min=0.2, max=3600, help="Seconds between two looks of the live screen.")


def command(
    source: str | None = SOURCE_ARGUMENT,
    once: bool = ONCE_OPTION,
    every: float = EVERY_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Show what the KV cache of a run does now, live or once.

    Usage, block states, hits, transfers, requests by blocks held, oldest holds, findings, coverage, own cost. The
    live screen needs textual (the extra kvscope[tui]); --once and --json need nothing more.
    """
    if once or as_json:
        from kvscope.cli.progress import bar

        where, looked_at = _source(source, bar("reading the trace"))
        view = looked_at.look()
        if as_json:
            show_json(view)
        else:
            show(_page(view, where))
        return
    if importlib.util.find_spec("textual") is None:
        raise UnknownNameError("top: the live screen needs textual: pip install 'kvscope[tui]'; --once works without")
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise UnknownNameError("top: the live screen needs a terminal; use --once, or --once --json")
    _, looked_at = _source(source, lambda _done, _all: None)
    from kvscope.cli.top_screen import TopScreen

    TopScreen(looked_at, every_s=every).run()


def _source(given: str | None, progress: Callable[[int, int], None]) -> tuple[str, Source]:
    """Where to look, as text and to look with. Raises KvscopeError where there is nothing."""
    from kvscope.cli.top_sources import ExporterSource, RunSource

    if given is None:
        given = _default()
    if given.startswith(("http://", "https://")):
        return given, ExporterSource(given)
    return given, RunSource(Path(given), progress)


def _default() -> str:
    from kvscope.cli.exporters import exporters_in

    folder = Path(os.environ.get(DIR_VARIABLE) or OutputConfig().dir)
    answering = next((found.metrics_url for found in exporters_in(folder) if found.answers), None)
    if answering is None and not folder.is_dir():
        said = f"top: no exporter answers and there is no output folder {folder}; give an address, a run or a trace"
        raise UnknownNameError(said)
    return answering or str(folder)


def _page(view: View, where: str) -> list[Line]:
    from kvscope.reports.live import headline, sections

    lines: list[Line] = [("label", headline(view))]
    for section in sections(view):
        lines += [("", ""), ("label", section.heading), *section.lines]
    is_run = not where.startswith("http")
    follow_up = next_command("check" if view.findings else "info", where) if is_run else next_command("doctor")
    return [*lines, ("", ""), *follow_up]
