"""``kvscope monitor``: switch the metrics of a run off and on while it runs."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

import msgspec
import typer

from kvscope.cli.exporter import run_folder
from kvscope.cli.exporters import exporters_in
from kvscope.cli.screen import JSON_OPTION, facts, next_command, show, show_json
from kvscope.config import DIR_VARIABLE, OutputConfig


class State(str, Enum):
    """What is asked for."""

    ON = "on"
    OFF = "off"
    STATUS = "status"


STATE_ARGUMENT = typer.Argument(..., metavar="on|off|status", help="What to do, or to tell.")
RUN_ARGUMENT = typer.Argument(
    None, metavar="run", help="A run's folder, or an output folder (its newest run). Default: the output folder here."
)


class Switched(msgspec.Struct, kw_only=True):
    """``exporters`` are the addresses that answer for the run on this host."""

    run: str
    is_on: bool
    exporters: list[str]


def command(state: State = STATE_ARGUMENT, run: Path | None = RUN_ARGUMENT, as_json: bool = JSON_OPTION) -> None:
    """Switch a run's exporters off or on, or tell which it is.

    Off, they answer with an empty page; the run goes on counting, so that totals are right when it is on again.
    """
    from kvscope.metrics.switch import Switch

    folder = run_folder(run if run is not None else Path(os.environ.get(DIR_VARIABLE) or OutputConfig().dir))
    switch = Switch(folder)
    if state is not State.STATUS:
        switch.turn(on=state is State.ON)
    answering = [found.metrics_url for found in exporters_in(folder) if found.answers]
    said = Switched(run=str(folder), is_on=switch.is_on(), exporters=answering)
    if as_json:
        show_json(said)
        return
    lines = facts([
        ("monitor", "on" if said.is_on else "off: exporters answer with an empty page, and counting goes on"),
        ("run", said.run),
        *(("exporter", url) for url in answering),
        *([] if answering else [("exporter", "none answers on this host")]),
    ])  # fmt: skip
    show([*lines, *(next_command("top", folder) if said.is_on else next_command("monitor", "on", folder))])
