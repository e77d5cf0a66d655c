"""``kvscope assets``: dashboard, rules, alerts with their tests, runbook and dictionary, made from the catalog."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import typer

from kvscope.cli.screen import JSON_OPTION, Line, facts, next_command, show, show_json, shown, wrapped
from kvscope.errors import KvscopeError

STALE = 1


class AssetsAction(str, Enum):
    export = "export"


class AssetsError(KvscopeError):
    """Files are in the way, or a setting cannot be used."""


ACTION_ARGUMENT = typer.Argument(..., help="What to do.")
DIRECTORY_ARGUMENT = typer.Argument(..., help="The folder that gets the files, or has them.")
PREFIX_OPTION = typer.Option(None, "--prefix", help="As kv_monitor.prefix. [default: as its default]")
PAGES_OPTION = typer.Option("..", "--pages", help="Where alerts find the runbook: the address of its folder.")


def command(
    action: AssetsAction = ACTION_ARGUMENT,  # noqa: ARG001  there is one so far
    directory: Path = DIRECTORY_ARGUMENT,
    check: bool = typer.Option(False, "--check", help="Write nothing; exit 1 if a file is missing or stale."),
    force: bool = typer.Option(False, "--force", help="Overwrite files that differ."),
    prefix: str | None = PREFIX_OPTION,
    pages: str = PAGES_OPTION,
    as_json: bool = JSON_OPTION,
) -> int | None:
    """Write what Prometheus and Grafana need for the metrics.

    One dashboard, recording rules, alerts, the file that tests them, and the pages that explain both, in English and in
    Chinese.
    """
    from kvscope.errors import ConfigurationError
    from kvscope.metrics.assets.export import assets
    from kvscope.settings import PREFIX, MonitorConfig

    try:
        named = str(PREFIX.checked(MonitorConfig().prefix if prefix is None else prefix, "--prefix"))
    except ConfigurationError as error:
        raise AssetsError(f"assets: {error}") from None
    if check:
        return _check(directory, named, pages, as_json=as_json)
    files = assets(named, pages=pages)
    in_the_way = [] if force else [name for name, text in files.items() if _differs(directory / name, text)]
    if in_the_way:
        others = f" and {len(in_the_way) - 1} more" if len(in_the_way) > 1 else ""
        where = shown(directory / in_the_way[0])
        raise AssetsError(f"assets: {where}{others} would be overwritten; --force overwrites, --check compares")
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    if as_json:
        show_json({"directory": str(directory), "files": list(files)})
    else:
        following = ("doctor",) if force else ("assets", "export", directory, "--check")
        show([*_written(directory, files), ("", ""), *next_command(*following)])
    return None


def _differs(path: Path, text: str) -> bool:
    return path.exists() and (not path.is_file() or path.read_bytes() != text.encode())


def _written(directory: Path, files: dict[str, str]) -> list[Line]:
    lines: list[Line] = [("label", f"{len(files)} files in {shown(directory)}"), ("", "")]
    return lines + facts([("", name) for name in files], indent=2, label_width=2)


def _check(directory: Path, prefix: str, pages: str, *, as_json: bool) -> int | None:
    from kvscope.metrics.assets.export import differences

    found = differences(directory, prefix, pages=pages)
    if as_json:
        show_json({"directory": str(directory), "differences": found})
    elif found:
        lines: list[Line] = [("bad", f"{len(found)} files in {shown(directory)} are not what this version makes")]
        lines += facts([(difference.what, difference.name) for difference in found], indent=2, label_width=12)
        for difference in found:
            for series in difference.unknown:
                lines += wrapped(f"{difference.name} names {series}, which no process can emit", indent=2)
        show([*lines, ("", ""), *next_command("assets", "export", directory, "--force")])
    else:
        show([("good", f"all files in {shown(directory)} are what this version makes"), ("", "")])
        show(next_command("doctor"))
    return STALE if found else None
