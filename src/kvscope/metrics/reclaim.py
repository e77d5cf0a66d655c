"""Removing the metrics files of runs that are over. The newest of them are kept: a dead run's values stay readable."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from .families import ProcessValues, Run, runs
from .layout import SUFFIX
from .reader import read_runs

KEPT_RUNS = 8
SILENT_SECONDS = 86_400.0
"""Where nobody can tell whether a process is alive it counts as gone after so long without a snapshot."""


def reclaim(directory: Path, *, keep: int = KEPT_RUNS) -> int:
    """Remove the metrics files in an output folder of all runs that are over but the newest ``keep``; how many files.

    Files that cannot be read stay, for they may be another version's, and so does everything else of a run. What
    somebody else removes meanwhile, or nobody may, is left alone.
    """
    over = [run for run in runs(read_runs(directory).processes) if _is_over(run)]
    removed = 0
    for run in over[keep:]:
        for process in (*run.processes, *run.replaced):
            name = f"{process.process}-{process.rank}-{process.pid}{SUFFIX}"
            removed += _unlink(directory / run.run_id / name)
    for unfinished in directory.glob(f"*/.*{SUFFIX}.new"):
        with contextlib.suppress(OSError):
            if time.time() - unfinished.stat().st_mtime > SILENT_SECONDS:
                removed += _unlink(unfinished)
    return removed


def _is_over(run: Run) -> bool:
    return run.is_over or all(map(_is_gone, run.processes))


def _is_gone(process: ProcessValues) -> bool:
    if process.has_ended or process.is_alive is False:
        return True
    return process.is_alive is None and process.age_seconds > SILENT_SECONDS


def _unlink(path: Path) -> int:
    try:
        path.unlink()
    except OSError:
        return 0
    return 1
