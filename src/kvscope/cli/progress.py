"""A progress bar on stderr for what takes longer than half a second; none unless a person watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from time import monotonic
from typing import TYPE_CHECKING

from kvscope.analysis.reader import Entry, Trace

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE_S = 0.5
_EVERY = 2048


def watched(trace: Trace) -> Iterator[Entry]:
    """The trace's records, with a bar beside them."""
    if not (sys.stderr.isatty() and sys.stdout.isatty()):
        yield from trace.records()
        return
    start = monotonic()
    records = trace.records()
    for count, entry in enumerate(records, start=1):
        yield entry
        if count % _EVERY == 0 and monotonic() - start > PATIENCE_S:
            break
    yield from _with_bar(trace, records)


def bar(text: str) -> Callable[[int, int], None]:
    """A function to be told how much is done, of how much; it draws once that takes long, and ends when all is done."""
    if not (sys.stderr.isatty() and sys.stdout.isatty()):
        return lambda _done, _all: None
    return _Bar(text).move


class _Bar:
    def __init__(self, text: str) -> None:
        self._text = text
        self._begun_s: float | None = None
        self._calls = 0
        self._progress: Progress | None = None

    def move(self, done: int, total: int) -> None:
        self._calls += 1
        if done >= total:
            self._end()
        elif self._begun_s is None:
            self._begun_s = monotonic()
        elif self._calls % _EVERY == 0 and monotonic() - self._begun_s > PATIENCE_S:
            self._draw(done, total)

    def _draw(self, done: int, total: int) -> None:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._progress.add_task(self._text, total=total)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done, total=total)

    def _end(self) -> None:
        self._begun_s = None
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _with_bar(trace: Trace, records: Iterator[Entry]) -> Iterator[Entry]:
    first = next(records, None)
    if first is None:
        return
    yield first
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"reading {trace.run_id}", total=trace.size_bytes)
        for count, entry in enumerate(records):
            yield entry
            if count % _EVERY == 0:
                progress.update(task, completed=trace.bytes_read)
