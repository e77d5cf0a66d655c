"""Which files belong to a run: from a file, a run's folder, or an output folder that holds several runs.

Layout: ``<dir>/<run_id>/<process>-<rank>-<pid>.<n>.jsonl``, beside it ``<process>-<rank>-<pid>.shared`` and, where a
finding was made, ``incident-<n>.jsonl``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from kvscope.errors import UnreadableTraceError

PROCESS_ORDER = ("all", "engine", "frontend", "worker")
"""Who is read first within a step: whoever declares it stands before whoever carries it out."""

_NAMED_FOLDERS = 8

_NAME = re.compile(r"(?P<process>frontend|engine|worker|all)-(?P<rank>\d+)-(?P<pid>\d+)\.(?P<n>\d+)\.jsonl", re.ASCII)


class ProcessFiles(msgspec.Struct, kw_only=True):
    """All files of one process, oldest first. ``first_index`` is the n of the first one that is still there.

    ``process``, ``rank`` and ``pid`` are None for a file under another name: the records themselves say it then.
    """

    name: str
    process: str | None
    rank: int | None
    pid: int | None
    first_index: int
    paths: list[Path]
    shared: Path | None


class RunFiles(msgspec.Struct, kw_only=True):
    """What was found at ``asked``. ``whole_run`` is False where a single file was asked for.

    ``others`` are the runs that stand beside the one that was chosen, newest first, and ``unreadable`` the folders
    beside it that could be runs for all that can be seen.
    """

    asked: Path
    directory: Path
    processes: list[ProcessFiles]
    incidents: list[Path]
    others: list[Path]
    unreadable: list[Path]
    whole_run: bool


def find(asked: Path) -> RunFiles:
    """The run at this path; of several, the newest.

    Raises:
        UnreadableTraceError: nothing is there, or nothing that looks like a trace.
    """
    try:
        if asked.is_file():
            return _single(asked)
        if not asked.is_dir():
            what = "neither a file nor a folder" if asked.exists() else "no such file or folder"
            raise UnreadableTraceError(str(asked), f"{what}; give a run's folder, or one of its files")
        runs, unreadable = ([asked], []) if _process_files(asked) else _runs_in(asked)
        if not runs:
            raise UnreadableTraceError(str(asked), _why_no_run(asked))
        chosen = runs[0]
        return RunFiles(
            asked=asked,
            directory=chosen,
            processes=_process_files(chosen),
            incidents=sorted(chosen.glob("incident-*.jsonl")),
            others=runs[1:],
            unreadable=unreadable,
            whole_run=True,
        )
    except OSError as error:
        raise UnreadableTraceError(str(asked), error.strerror or type(error).__name__) from error


def _why_no_run(asked: Path) -> str:
    """Names the folders in this one that hold runs, the level that was left out."""
    deeper = sorted({path.parents[1] for path in asked.glob("*/*/*.jsonl") if _NAME.fullmatch(path.name)})
    if not deeper:
        return "no trace in this folder; expected files such as engine-0-<pid>.0.jsonl, or folders of runs"
    more = f" and {len(deeper) - _NAMED_FOLDERS} more" if len(deeper) > _NAMED_FOLDERS else ""
    return f"no trace in this folder itself; traces are in: {', '.join(map(str, deeper[:_NAMED_FOLDERS]))}{more}"


def _single(path: Path) -> RunFiles:
    named = _NAME.fullmatch(path.name)
    shared = path.with_name(f"{path.name.split('.')[0]}.shared")
    process = ProcessFiles(
        name=path.name.removesuffix(".jsonl"),
        process=named["process"] if named else None,
        rank=int(named["rank"]) if named else None,
        pid=int(named["pid"]) if named else None,
        first_index=int(named["n"]) if named else 0,
        paths=[path],
        shared=shared if named and shared.is_file() else None,
    )
    return RunFiles(
        asked=path,
        directory=path.parent,
        processes=[process],
        incidents=[],
        others=[],
        unreadable=[],
        whole_run=named is None,
    )


def _process_files(directory: Path) -> list[ProcessFiles]:
    found: dict[tuple[int, int, int], dict[int, Path]] = {}
    for path in directory.glob("*.jsonl"):
        named = _NAME.fullmatch(path.name)
        if named and (path.is_file() or path.is_symlink()):  # a link that leads nowhere is a file that is missing
            key = (PROCESS_ORDER.index(named["process"]), int(named["rank"]), int(named["pid"]))
            found.setdefault(key, {})[int(named["n"])] = path
    processes: list[ProcessFiles] = []
    for (order, rank, pid), by_index in sorted(found.items()):
        name = f"{PROCESS_ORDER[order]}-{rank}-{pid}"
        shared = directory / f"{name}.shared"
        processes.append(
            ProcessFiles(
                name=name,
                process=PROCESS_ORDER[order],
                rank=rank,
                pid=pid,
                first_index=min(by_index),
                paths=[by_index[index] for index in sorted(by_index)],
                shared=shared if shared.is_file() else None,
            )
        )
    return processes


def _runs_in(directory: Path) -> tuple[list[Path], list[Path]]:
    """The folders in this one that hold a run, the one that was written to last first; and those that cannot be read.

    A folder that a link in this one leads to as well is one run, under its own name.
    """
    runs: dict[Path, tuple[int, Path]] = {}
    unreadable: list[Path] = []
    for child in sorted(directory.iterdir(), key=lambda path: (path.is_symlink(), path)):
        if child.is_dir() and not os.access(child, os.R_OK | os.X_OK):
            unreadable.append(child)
        elif child.is_dir() and child.resolve() not in runs and (processes := _process_files(child)):
            written_ns = max(_written_ns(path) for process in processes for path in process.paths)
            runs[child.resolve()] = (written_ns, child)
    return [child for _, child in sorted(runs.values(), reverse=True)], unreadable


def _written_ns(path: Path) -> int:
    """When the file was written to last; 0 where it is gone by now."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
