"""A small HTTP/1.1 server for GET, in one thread, that no client can hold up.

One event loop serves all connections, so that a client that reads slowly, or never ends its request, costs a socket and
not a thread. What bounds it: the number of connections, the length of a request, a deadline for a request to arrive
and one for an answer to be taken. When all connections are in use, the one that has been idle longest makes room.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast

__all__ = ["Answer", "HttpServer", "Limits", "Request", "listen"]

SERVER_NAME = "kvscope"
PORTS_TRIED = 64
BACKLOG = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`request_s` is the time for a request to arrive, `answer_s` for an answer to be made and taken, `idle_s` how long
    a connection is kept between two requests.
    """

    connections: int = 128
    request_bytes: int = 8192
    request_s: float = 5.0
    answer_s: float = 10.0
    idle_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`path` is without the query; header names are in small letters."""

    method: str
    path: str
    headers: dict[str, str]
    keeps_alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def line(cls, status: HTTPStatus, text: str, **headers: str) -> Answer:
        """One line of text; an underscore in a header's name stands for a dash."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return cls(status=status, body=f"{text}\n".encode(), headers=named)


class _BadRequestError(Exception):
    """The request is none that this server understands; the text is the answer's line."""


Handler = Callable[[Request], Awaitable[Answer]]


class HttpServer:
    """Serves what `handle` answers to GET and HEAD. All methods run in the event loop's thread."""

    def __init__(self, handle: Handler, limits: Limits | None = None) -> None:
        self._handle = handle
        self._limits = limits or Limits()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._idle: dict[asyncio.Task[None], None] = {}  # the one that has been idle longest stands first

    async def start(self, listening: socket.socket) -> None:
        """Begin to accept connections on a socket that is bound and listens."""
        self._server = await asyncio.start_server(self._serve, sock=listening, limit=self._limits.request_bytes)

    async def stop(self) -> None:
        """Accept nothing more, and cut off what is open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        connections = list(self._open)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    @property
    def open_connections(self) -> int:
        return len(self._open)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._has_room():
            busy = Answer.line(HTTPStatus.SERVICE_UNAVAILABLE, "all connections are in use", Retry_After="1")
            writer.write(_encoded(busy, with_body=True, keeps_alive=False))
            writer.close()
            return
        connection = cast("asyncio.Task[None]", asyncio.current_task())
        self._open.add(connection)
        # With no buffer of the stream's own, `drain` returns when the system has taken everything.
        writer.transport.set_write_buffer_limits(high=0)
        try:
            while await self._one(reader, writer, connection):
                pass
            writer.close()
            await asyncio.wait_for(writer.wait_closed(), self._limits.request_s)
        except (OSError, EOFError, asyncio.TimeoutError):  # the client is gone, or too slow
            return
        except (
            asyncio.CancelledError
        ):  # from `stop`, or to make room: it ends here, and the stream's owner may not see it
            return
        finally:
            self._open.discard(connection)
            writer.transport.abort()

    def _has_room(self) -> bool:
        if len(self._open) < self._limits.connections:
            return True
        longest = next(iter(self._idle), None)
        if longest is None:
            return False
        del self._idle[longest]
        self._open.discard(longest)
        longest.cancel()
        return True

    async def _one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: asyncio.Task[None]
    ) -> bool:
        """Read one request and answer it. Whether the connection stays open."""
        self._idle[connection] = None
        try:
            first = await asyncio.wait_for(reader.readexactly(1), self._limits.idle_s)
        finally:
            self._idle.pop(connection, None)
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self._limits.request_s)
            request = _parsed(first + head)
        except asyncio.LimitOverrunError:
            return await self._refuse(writer, "the request is too long")
        except _BadRequestError as error:
            return await self._refuse(writer, str(error))
        await asyncio.wait_for(self._answer(writer, request), self._limits.answer_s)
        return request.keeps_alive

    async def _refuse(self, writer: asyncio.StreamWriter, text: str) -> bool:
        answer = Answer.line(HTTPStatus.BAD_REQUEST, text)
        writer.write(_encoded(answer, with_body=True, keeps_alive=False))
        await asyncio.wait_for(writer.drain(), self._limits.answer_s)
        return False

    async def _answer(self, writer: asyncio.StreamWriter, request: Request) -> None:
        if request.method in {"GET", "HEAD"}:
            try:
                answer = await self._handle(request)
            except Exception as error:  # noqa: BLE001  what is answered is not this server's; the client is told
                answer = Answer.line(HTTPStatus.INTERNAL_SERVER_ERROR, f"a defect of kvscope: {type(error).__name__}")
        else:
            text = f"{request.method} is not answered here; use GET"
            answer = Answer.line(HTTPStatus.METHOD_NOT_ALLOWED, text, Allow="GET, HEAD")
        writer.write(_encoded(answer, with_body=request.method != "HEAD", keeps_alive=request.keeps_alive))
        await writer.drain()


def _parsed(head: bytes) -> Request:
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or not parts[0].isalpha() or not parts[1].startswith("/") or not parts[2].startswith("HTTP/1."):
        raise _BadRequestError("this is no HTTP/1 request")
    headers: dict[str, str] = {}
    for line in lines[1:-2]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise _BadRequestError("a header is damaged")
        known = headers.get(name.lower())
        headers[name.lower()] = value.strip() if known is None else f"{known}, {value.strip()}"
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise _BadRequestError("a request has no body here")
    wish = headers.get("connection", "").lower()
    keeps = "close" not in wish if parts[2] == "HTTP/1.1" else "keep-alive" in wish
    return Request(method=parts[0], path=parts[1].partition("?")[0], headers=headers, keeps_alive=keeps)


def _encoded(answer: Answer, *, with_body: bool, keeps_alive: bool) -> bytes:
    fixed = {
        "Server": SERVER_NAME,
        "Content-Type": answer.content_type,
        "Content-Length": str(len(answer.body)),
        "Cache-Control": "no-store",
        "Connection": "keep-alive" if keeps_alive else "close",
    }
    lines = [f"HTTP/1.1 {answer.status.value} {answer.status.phrase}"]
    lines += [f"{name}: {value}" for name, value in {**fixed, **answer.headers}.items()]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return head + answer.body if with_body else head


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on the port or, where that is taken, on the next one that is free.

    Raises:
        OSError: there is no such address here, or none of the ports is free.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    for number in range(port, min(port + PORTS_TRIED, 65536)) if port else (0,):
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((address[0], number, *address[2:]))
            listening.listen(BACKLOG)
            listening.setblocking(False)
            return listening
        except OSError as error:
            listening.close()
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"ports {port} to {min(port + PORTS_TRIED, 65536) - 1} of {host} are all taken")
