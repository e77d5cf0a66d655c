"""What an exporter, or whoever looks into a run's folder, collects: the families of all processes of that run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from kvscope.metrics.families import CustomValue, Family, families, runs
from kvscope.metrics.layout import SUFFIX
from kvscope.metrics.reader import read_run, read_runs

__all__ = ["DEFAULT_PREFIX", "collect_run", "metrics_folder"]

DEFAULT_PREFIX = "vllm_ascend_"
"""That of `kv_monitor.prefix`, for a run whose processes say none."""


def collect_run(folder: Path, collected: Mapping[str, Sequence[CustomValue]] = MappingProxyType({})) -> list[Family]:
    """What the processes of the run in this folder said last; [] where none has said anything. The dead are among
    them, unless another process has taken their place. ``collected`` is what collectors have said in this process.

    Raises:
        UnreadableMetricsError: there are metrics files, and none of them can be read.
        OSError: the folder cannot be read.
    """
    reading = read_run(folder)
    found = runs(reading.processes)
    if found:
        said = (process.prefix for process in found[0].processes if process.prefix)
        return families(found[0].processes, prefix=next(said, DEFAULT_PREFIX), collected=collected)
    if reading.unreadable:
        raise reading.unreadable[0]
    return []


def metrics_folder(path: Path) -> Path | None:
    """The folder of the run at this path, which is that folder or an output folder: of several runs with metrics the
    one that started last. None where there is none.
    """
    if any(path.glob(f"*{SUFFIX}")):
        return path
    newest = runs(read_runs(path).processes)
    return path / newest[0].run_id if newest else None
