"""Which files belong to a run: from a file, a run's folder, or an output folder that holds several runs.

Layout: ``<dir>/<run_id>/<process>-<rank>-<pid>.<n>.jsonl``, beside it ``<process>-<rank>-<pid>.shared`` and, where a
finding was made, ``incident-<n>.jsonl``.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from kvscope.errors import UnreadableTraceError

PROCESS_ORDER = ("all", "engine", "frontend", "worker")
"""Who is read first within a step: whoever declares it stands before whoever carries it out."""

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

    ``others`` are the runs that stand beside the one that was chosen, newest first.
    """

    asked: Path
    directory: Path
    processes: list[ProcessFiles]
    incidents: list[Path]
    others: list[Path]
    whole_run: bool

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for process in self.processes for path in process.paths if path.exists())


def find(asked: Path) -> RunFiles:
    """The run at this path; of several, the newest.

    Raises:
        UnreadableTraceError: nothing is there, or nothing that looks like a trace.
    """
    try:
        if asked.is_file():
            return _single(asked)
        if not asked.is_dir():
            raise UnreadableTraceError(str(asked), "no such file or folder; give a run's folder, or one of its files")
        runs = [asked] if _process_files(asked) else _runs_in(asked)
        if not runs:
            message = "no trace in this folder; expected files such as engine-0-<pid>.0.jsonl, or folders of runs"
            raise UnreadableTraceError(str(asked), message)
        chosen = runs[0]
        return RunFiles(
            asked=asked,
            directory=chosen,
            processes=_process_files(chosen),
            incidents=sorted(chosen.glob("incident-*.jsonl")),
            others=runs[1:],
            whole_run=True,
        )
    except OSError as error:
        raise UnreadableTraceError(str(asked), error.strerror or type(error).__name__) from error


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
        asked=path, directory=path.parent, processes=[process], incidents=[], others=[], whole_run=named is None
    )


def _process_files(directory: Path) -> list[ProcessFiles]:
    found: dict[tuple[int, int, int], dict[int, Path]] = {}
    for path in directory.glob("*.jsonl"):
        named = _NAME.fullmatch(path.name)
        if named and path.is_file():
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


def _runs_in(directory: Path) -> list[Path]:
    """The folders in this one that hold a run, the one that was written to last first."""
    runs = [
        (max(path.stat().st_mtime_ns for process in processes for path in process.paths), child)
        for child in sorted(directory.iterdir())
        if child.is_dir() and (processes := _process_files(child))
    ]
    return [child for _, child in sorted(runs, reverse=True)]
