"""A progress bar on stderr for what takes longer than half a second; none unless a person watches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from time import monotonic

from kvscope.analysis.reader import Entry, Trace

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
