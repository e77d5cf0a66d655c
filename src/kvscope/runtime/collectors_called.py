"""Where registered collectors are called: those of an engine and of a worker in its process, from where their values
travel in its metrics file; those of the exporter in whichever process exports the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import time_ns
from typing import Protocol

import msgspec

from ..config import Config
from ..errors import UnreadableMetricsError
from ..logs import say
from ..metrics.collectors import COLLECTORS, CollectorContext, CollectorProcess
from ..metrics.families import CustomValue, ProcessValues, families, runs
from ..metrics.labels import FRONTEND
from ..metrics.layout import CUSTOM_BYTES, HEAD
from ..metrics.reader import read_process, read_run
from ..metrics.readout import Readout
from ..metrics.sampling import Collected, Sampler
from ..metrics.store import MetricsStore
from ..metrics.viewing import readout_of

PROCESSES: dict[str, tuple[CollectorProcess, ...]] = {
    "engine": ("engine",),
    "worker": ("worker",),
    "all": ("engine", "worker"),
    "frontend": (),
}
_LIST_BYTES = 5
"""Of the list around the values, at most."""


class Called(Protocol):
    """What is read of a run in one process."""

    run_id: str
    config: Config

    @property
    def process(self) -> str: ...

    @property
    def engine(self) -> int: ...


def is_wanted(process: str) -> bool:
    """Whether a collector is registered for a process like this one."""
    return bool(COLLECTORS.of(PROCESSES[process]))


def sampler_of_process(run: Called, store: MetricsStore) -> Sampler:
    """Calls the collectors of this process; what they say is published in its metrics file."""
    monitor, engine = run.config.monitor, str(run.engine)

    def contexts() -> Sequence[CollectorContext]:
        read = partial(_own, store.path, monitor.prefix)
        return (_context(run.run_id, engine, time_ns(), read),)

    return Sampler(
        PROCESSES[run.process],
        prefix=monitor.prefix,
        interval_s=monitor.scrape_interval,
        contexts=contexts,
        publish=_Publisher(store, engine).publish,
        collectors=COLLECTORS,
    )


def sampler_of_exporter(
    run_id: str,
    config: Config,
    folder: Path,
    *,
    is_exporting: Callable[[], bool],
    publish: Callable[[Collected], None],
) -> Sampler:
    """Calls the collectors of the exporter, for each engine that has said something, as long as this process exports.

    They are given what all processes of that engine have said.
    """
    prefix = config.monitor.prefix

    def contexts() -> Sequence[CollectorContext]:
        found = runs(read_run(folder).processes) if is_exporting() else []
        if not found:
            return ()
        engines: dict[str, list[ProcessValues]] = {}
        for process in found[0].processes:
            engines.setdefault(process.engine, []).append(process)
        engines.pop(FRONTEND, None)
        now_ns = time_ns()
        return [
            _context(run_id, engine, now_ns, partial(_readout, processes, prefix, now_ns))
            for engine, processes in engines.items()
        ]

    return Sampler(
        ("exporter",),
        prefix=prefix,
        interval_s=config.monitor.scrape_interval,
        contexts=contexts,
        publish=publish,
        collectors=COLLECTORS,
    )


class _Publisher:
    """Puts what has been said into the metrics file, as much of it as there is room for."""

    def __init__(self, store: MetricsStore, engine: str) -> None:
        self._store = store
        self._engine = engine
        self._is_told = False

    def publish(self, collected: Collected) -> None:
        room = CUSTOM_BYTES - HEAD.size - _LIST_BYTES
        fitting: list[CustomValue] = []
        left_out: list[str] = []
        for value in collected.get(self._engine, ()):
            size = len(msgspec.msgpack.encode(value))
            if size > room:
                left_out.append(value.name)
            else:
                room -= size
                fitting.append(value)
        self._store.publish_custom(fitting)
        if left_out and not self._is_told:
            self._is_told = True
            text = "kvscope: the metrics file has no room for %d of the registered collectors, the first of them %s"
            say(logging.WARNING, text, len(left_out), left_out[0])


def _context(run_id: str, engine: str, now_ns: int, read: Callable[[], Readout]) -> CollectorContext:
    return CollectorContext(engine=engine, engine_id=f"{run_id}.{engine}", wall_ns=now_ns, read=read)


def _own(path: Path, prefix: str) -> Readout:
    """What this process has published; nothing where it has no file that can be read."""
    try:
        return _readout([read_process(path)], prefix, time_ns())
    except (OSError, UnreadableMetricsError):
        return Readout((), at_s=time_ns() / 1e9)


def _readout(processes: Sequence[ProcessValues], prefix: str, now_ns: int) -> Readout:
    return readout_of(families(processes, prefix=prefix), at_s=now_ns / 1e9)
