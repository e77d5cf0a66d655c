"""The exporter: one a run and host, with a page for people and a body for Prometheus.

It runs in a daemon thread of whichever process asks for it. Of several that ask for the same run on one host, the one
that gets the lock serves; the others try again every two seconds, so that the next takes over when it dies. Nothing
that goes wrong here reaches the caller: it is logged, and the run goes on without an exporter.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import msgspec

from kvscope.logs import say
from kvscope.metrics.bodies import Bodies, CollectionError
from kvscope.metrics.families import Family
from kvscope.metrics.http import Answer, HttpServer, Limits, Request, listen
from kvscope.metrics.page import HTML, PAGE_HEADERS, VIEW_PATH, page
from kvscope.metrics.place import ExportLock, Place
from kvscope.metrics.rendering import negotiated
from kvscope.metrics.viewing import MONITOR_OFF, Viewer, readout_of

__all__ = ["Exporter", "ExporterSettings"]

TAKE_OVER_S = 2.0
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
"""What file systems say that know no locks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterSettings:
    """`port` already has the data-parallel rank added; 0 lets the system choose. `folder` is the run's. `patience_s` is
    for how long others, who would rather have it, are given the chance to take the lock first.
    """

    folder: Path
    run_id: str
    host: str = "127.0.0.1"
    port: int = 9460
    metrics_path: str = "/metrics"
    scrape_interval_s: float = 1.0
    take_over_s: float = TAKE_OVER_S
    patience_s: float = 0.0


class Exporter:
    """Begins with :meth:`start`; :meth:`stop` may be called twice.

    `collect` gives the families of the run, in a thread of its own; what it raises is answered with 500. `is_on` says
    whether monitoring is switched on at run time; while it is off the answer is empty.
    """

    def __init__(
        self,
        settings: ExporterSettings,
        collect: Callable[[], Sequence[Family]],
        *,
        is_on: Callable[[], bool] = lambda: True,
        limits: Limits | None = None,
    ) -> None:
        self._settings = settings
        self._is_on = is_on
        self._lock = ExportLock(settings.folder)
        self._limits = limits
        self._bodies = Bodies(collect, interval_s=settings.scrape_interval_s)
        self._viewer = Viewer(f"this exporter's {settings.metrics_path}", settings.run_id)
        self._listening: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._decided = threading.Event()
        self.place: Place | None = None
        """Where it serves; None while another process of this host does, or where it cannot."""

    def start(self) -> None:
        """Begin in a daemon thread. Never raises and never waits: what goes wrong is logged."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, name="kvscope-exporter", daemon=True)
        _begun.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no thread left
            self._thread = None
            say(logging.WARNING, "kvscope: no exporter: %s", error)

    def wait_until_decided(self, timeout_s: float) -> Place | None:
        """Wait until it serves, or knows that it does not yet; for those who have nothing better to do."""
        self._decided.wait(timeout_s)
        return self.place

    def stop(self, timeout_s: float = 2.0) -> None:
        """End, and let another process take over."""
        self._stopping.set()
        thread, loop, end = self._thread, self._loop, self._end
        if loop is not None and end is not None:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(end.set)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def abandon(self) -> None:
        """In a forked child, which has no thread of its parent's: let go of socket and lock, which it was born with.

        Else the port would stay taken, by nobody who answers, after the parent has ended.
        """
        self._thread = None
        self._loop = None
        self.place = None
        self._lock.abandon()
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def _run(self) -> None:
        try:
            if self._stopping.wait(self._settings.patience_s):
                return
            self._settings.folder.mkdir(parents=True, exist_ok=True)
            while not self._may_serve():
                self._decided.set()
                if self._stopping.wait(self._settings.take_over_s):
                    return
            if not self._stopping.is_set():
                self._listen_and_serve()
        except Exception as error:  # noqa: BLE001  nothing of the exporter may reach the process that it observes
            say(logging.WARNING, "kvscope: no exporter: %s", error)
        finally:
            self._decided.set()
            if self.place is not None:
                self.place.remove(self._settings.folder)
                self.place = None
            if self._listening is not None:
                self._listening.close()
            self._lock.release()

    def _may_serve(self) -> bool:
        try:
            return self._lock.try_to_take()
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            say(logging.WARNING, "kvscope: no locks in the run's folder: every process exports on its own (%s)", error)
            return True

    def _listen_and_serve(self) -> None:
        settings = self._settings
        self._listening = listening = listen(settings.host, settings.port)
        port = int(listening.getsockname()[1])
        base = f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{port}"
        place = Place(
            run_id=settings.run_id,
            url=f"{base}/",
            metrics_url=f"{base}{settings.metrics_path}",
            host_name=socket.gethostname(),
            wanted_port=settings.port,
            port=port,
            pid=os.getpid(),
            start_wall_ns=time.time_ns(),
        )
        # A loop of this kind whatever policy the process has set for its own.
        loop = asyncio.SelectorEventLoop()
        try:
            loop.run_until_complete(self._serve(listening, place))
        finally:
            self._loop = None
            loop.close()

    async def _serve(self, listening: socket.socket, place: Place) -> None:
        self._end = end = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        server = HttpServer(self._answer, self._limits)
        await server.start(listening)
        self._announce(place)
        if not self._stopping.is_set():  # asked after the loop is known, so that either here or there it is seen
            await end.wait()
        await server.stop()

    def _announce(self, place: Place) -> None:
        self.place = place
        taken = f" (port {place.wanted_port} was taken)" if place.wanted_port not in {0, place.port} else ""
        say(logging.INFO, "kvscope: metrics of this run: %s%s", place.metrics_url, taken)
        try:
            place.write(self._settings.folder)
        except OSError as error:
            say(logging.WARNING, "kvscope: where the exporter is cannot be written into the run's folder: %s", error)
        self._decided.set()

    async def _answer(self, request: Request) -> Answer:
        if request.path == self._settings.metrics_path:
            return await self._metrics(request.headers.get("accept", ""))
        if request.path == "/":
            return Answer(content_type=HTML, body=page(), headers=PAGE_HEADERS)
        if request.path == VIEW_PATH:
            return await self._view()
        if request.path == "/favicon.ico":
            return Answer(status=HTTPStatus.NO_CONTENT)
        return Answer.line(HTTPStatus.NOT_FOUND, f"nothing is here; the metrics are at {self._settings.metrics_path}")

    async def _metrics(self, accept: str) -> Answer:
        form = negotiated(accept)
        try:
            body = await self._bodies.body(form.name, form.render) if self._is_on() else b""
        except (CollectionError, OSError, ValueError) as error:
            return _failed(error)
        return Answer(content_type=form.content_type, body=body)

    async def _view(self) -> Answer:
        try:
            body = await self._bodies.body("view", self._viewed) if self._is_on() else self._unwatched()
        except (CollectionError, OSError, ValueError) as error:
            return _failed(error)
        return Answer(content_type="application/json", body=body)

    def _viewed(self, families: Sequence[Family]) -> bytes:
        view = self._viewer.view(readout_of(families, at_s=time.time()))
        return msgspec.json.encode(view)

    def _unwatched(self) -> bytes:
        return msgspec.json.encode(self._viewer.empty(time.time(), MONITOR_OFF))


def _failed(error: Exception) -> Answer:
    line = " ".join(f"collection failed: {error}".split())
    return Answer.line(HTTPStatus.INTERNAL_SERVER_ERROR, line, Retry_After="1")


_begun: weakref.WeakSet[Exporter] = weakref.WeakSet()
"""For the hooks below, which there are once a process and not once an object."""


def _stop_all() -> None:
    """At the orderly end of the process, so that nobody is told of an exporter that is gone."""
    for exporter in list(_begun):
        exporter.stop(timeout_s=1.0)


def _abandon_all() -> None:
    for exporter in list(_begun):
        exporter.abandon()
    _begun.clear()


os.register_at_fork(after_in_child=_abandon_all)
atexit.register(_stop_all)
