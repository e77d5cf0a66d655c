"""``kvscope exporter``: export the metrics of a run from outside of it, also after it has ended."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import typer

from kvscope.cli.screen import JSON_OPTION, Line, facts, next_command, show, show_json
from kvscope.config import MonitorConfig
from kvscope.errors import ConfigurationError, KvscopeError
from kvscope.logs import LOGGER

_DEFAULTS = MonitorConfig()

RUN_ARGUMENT = typer.Argument(..., metavar="run", help="A run's folder, or an output folder (its newest run).")
HOST_OPTION = typer.Option(_DEFAULTS.host, help="Address to listen on.")
PORT_OPTION = typer.Option(_DEFAULTS.port, min=0, max=65535, help="Port; the next free one if it is taken, 0: any.")
PATH_OPTION = typer.Option(_DEFAULTS.metrics_path, "--path", help="Path that Prometheus scrapes.")
INTERVAL_OPTION = typer.Option(
    _DEFAULTS.scrape_interval, "--scrape-interval", min=0.001, help="Seconds for which one body serves everybody."
)


class NoExporterError(KvscopeError):
    """The run cannot be exported from here."""


def command(
    run: Path = RUN_ARGUMENT,
    host: str = HOST_OPTION,
    port: int = PORT_OPTION,
    metrics_path: str = PATH_OPTION,
    scrape_interval: float = INTERVAL_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Serve a run's metrics and its live page until interrupted.

    For a run whose own processes export nothing, or that is over: its last values stay readable. Exit 2 if another
    process exports it already.
    """
    from kvscope.metrics.collecting import collect_run
    from kvscope.metrics.exporter import Exporter, ExporterSettings
    from kvscope.metrics.place import is_exported, places_in
    from kvscope.metrics.switch import Switch

    _require_allowed({"host": host, "metrics_path": metrics_path, "scrape_interval": scrape_interval})
    folder = run_folder(run)
    if is_exported(folder):
        where = next((place.url for place in places_in(folder)), "an address that it did not write down")
        raise NoExporterError(f"{folder}: another process exports this run already, at {where}")
    settings = ExporterSettings(
        folder=folder,
        run_id=folder.name,
        host=host,
        port=port,
        metrics_path=metrics_path,
        scrape_interval_s=scrape_interval,
    )
    exporter = Exporter(settings, lambda: collect_run(folder), is_on=Switch(folder).is_on)
    with _warnings() as warnings:
        exporter.start()
        place = exporter.wait_until_decided(10)
    if place is None:
        exporter.stop()
        raise NoExporterError(f"{folder}: {warnings[-1] if warnings else 'another process was faster'}")
    if as_json:
        show_json(place)
    else:
        show([*facts([("page", place.url), ("metrics", place.metrics_url), ("run", str(folder))]), *_page(place.url)])
    try:
        threading.Event().wait()
    finally:
        exporter.stop()


def run_folder(path: Path) -> Path:
    """The folder of the run at this path; of several the one that started last.

    Raises:
        NoExporterError: no process has left metrics there.
    """
    from kvscope.metrics.collecting import metrics_folder

    if not path.is_dir():
        raise NoExporterError(f"{path}: no such folder; give a run's folder, or an output folder")
    folder = metrics_folder(path)
    if folder is None:
        raise NoExporterError(f"{path}: no metrics here; additional_config.kv_monitor.enabled makes a run write them")
    return folder


def _require_allowed(asked: dict[str, object]) -> None:
    """The same values are allowed as in an engine's configuration."""
    from kvscope.config import parse

    try:
        parse({"kv_monitor": asked})
    except ConfigurationError as error:
        option = error.path.rpartition(".")[2].replace("metrics_path", "path").replace("_", "-")
        raise NoExporterError(f"--{option}: {error.message}") from error


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the exporter's thread logs meanwhile; it never raises."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # a handler that only keeps
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def _page(url: str) -> list[Line]:
    return [("dim", "serving until interrupted"), *next_command("top", url)]
