"""What the exporter answers, made at most once in an interval however many ask.

Collecting runs in a thread of its own, one at a time: a collection that hangs keeps nobody but those who ask waiting,
and them only up to a deadline.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Bodies", "Collected", "CollectionError"]

T = TypeVar("T")

FAILURE_S = 1.0
"""How long a failure stands before it is tried again: what `Retry-After` says."""


class CollectionError(Exception):
    """There is nothing to answer with; the text says why, in one line."""


@dataclass(slots=True, kw_only=True)
class Collected(Generic[T]):
    """One collection: its value or why there is none, and the bodies that were made of it, by format."""

    made_s: float
    value: T | None = None
    error: str | None = None
    bodies: dict[str, bytes] = field(default_factory=dict)


class Bodies(Generic[T]):
    """Bodies of the newest collection. Belongs to one event loop; `collect` is called in another thread."""

    def __init__(
        self,
        collect: Callable[[], T],
        *,
        interval_s: float,
        deadline_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._collect = collect
        self._interval_s = interval_s
        self._deadline_s = deadline_s
        self._clock = clock
        self._last: Collected[T] | None = None
        self._running: asyncio.Future[Collected[T]] | None = None

    async def body(self, name: str, render: Callable[[T], bytes]) -> bytes:
        """The body of the format `name`; `render` makes it where the newest collection has none yet.

        Raises:
            CollectionError: the collection failed, or takes longer than the deadline.
        """
        collected = await self._newest()
        if collected.error is None and name not in collected.bodies:
            try:
                collected.bodies[name] = render(collected.value)  # type: ignore[arg-type]  # no error: there is a value
            except Exception as error:  # noqa: BLE001  a collector of somebody else's may have given what has no text
                collected.error = _said(error)
        if collected.error is not None:
            raise CollectionError(collected.error)
        return collected.bodies[name]

    async def _newest(self) -> Collected[T]:
        last = self._last
        if last is not None:
            lasts_s = self._interval_s if last.error is None else min(self._interval_s, FAILURE_S)
            if self._clock() - last.made_s < lasts_s:
                return last
        if self._running is None:
            self._running = self._begin()
        try:
            return await asyncio.wait_for(asyncio.shield(self._running), self._deadline_s)
        except asyncio.TimeoutError:
            raise CollectionError(f"collecting takes longer than {self._deadline_s:g} s") from None

    def _begin(self) -> asyncio.Future[Collected[T]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Collected[T]] = loop.create_future()

        def finish(collected: Collected[T]) -> None:
            self._last = collected
            self._running = None
            if not future.done():
                future.set_result(collected)

        def run() -> None:
            collected = self._collected()
            try:
                loop.call_soon_threadsafe(finish, collected)
            except RuntimeError:  # the loop has ended meanwhile, and with it everybody who waits
                return

        threading.Thread(target=run, name="kvscope-collect", daemon=True).start()
        return future

    def _collected(self) -> Collected[T]:
        began_s = self._clock()
        try:
            return Collected(made_s=began_s, value=self._collect())
        except Exception as error:  # noqa: BLE001  files of a run can be gone or damaged, and collectors are foreign code
            return Collected(made_s=began_s, error=_said(error))


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
