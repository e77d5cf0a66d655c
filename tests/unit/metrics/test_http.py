"""The server answers everybody who asks properly, and nobody else can hold it up. Real sockets, short deadlines."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus

import pytest

from kvscope.metrics.http import Answer, HttpServer, Limits, Request, listen

BODY = b"x" * 24_000_000
"""More than the buffers of a connection on the loopback hold, so that a client that does not read is noticed."""


class Serving:
    """A server in a thread of its own."""

    def __init__(self, limits: Limits) -> None:
        self.asked: list[Request] = []
        self.server = HttpServer(self.answer, limits)
        self.loop = asyncio.SelectorEventLoop()
        self.listening = listen("127.0.0.1", 0)
        self.port = self.listening.getsockname()[1]
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        self.loop.run_until_complete(self.server.start(self.listening))
        self.loop.run_forever()
        self.loop.run_until_complete(self.server.stop())
        self.loop.close()

    async def answer(self, request: Request) -> Answer:
        self.asked.append(request)
        if request.path == "/broken":
            raise LookupError("secret")
        return Answer(body=BODY if request.path == "/large" else b"small\n")

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        assert not self.thread.is_alive()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def get(self, path: str = "/", *, head: str = "", method: str = "GET") -> bytes:
        with self.connect() as connection:
            connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{head}\r\n".encode())
            return everything(connection)


def everything(connection: socket.socket) -> bytes:
    """What comes until the other side ends; also where it cuts off."""
    received = bytearray()
    try:
        while data := connection.recv(1 << 20):
            received += data
    except ConnectionResetError:
        return bytes(received)
    return bytes(received)


def one_answer(connection: socket.socket) -> bytes:
    """One answer with a small body, on a connection that stays open."""
    received = b""
    while not received.endswith(b"small\n"):
        data = connection.recv(4096)
        assert data, f"the connection ended after {received!r}"
        received += data
    return received


Serve = Callable[[Limits], Serving]


@pytest.fixture
def serve() -> Iterator[Serve]:
    started: list[Serving] = []

    def begin(limits: Limits) -> Serving:
        started.append(Serving(limits))
        return started[-1]

    yield begin
    for serving in started:
        serving.stop()


def until(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def test_a_request_is_answered_with_its_length_and_the_query_is_no_part_of_the_path(serve: Serve) -> None:
    serving = serve(Limits())
    answer = serving.get("/metrics?name=x", head="Accept: text/plain\r\nACCEPT: */*\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nContent-Length: 6\r\n" in head
    assert body == b"small\n"
    (asked,) = serving.asked
    assert (asked.path, asked.headers["accept"]) == ("/metrics", "text/plain, */*")


def test_a_connection_serves_several_requests(serve: Serve) -> None:
    serving = serve(Limits())
    with serving.connect() as connection:
        for _ in range(3):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"Connection: keep-alive" in one_answer(connection)
    assert len(serving.asked) == 3


def test_head_gives_the_length_without_the_body(serve: Serve) -> None:
    answer = serve(Limits()).get(method="HEAD")
    assert b"Content-Length: 6\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


def test_other_methods_are_told_what_is_allowed(serve: Serve) -> None:
    serving = serve(Limits())
    answer = serving.get(method="POST")
    assert answer.startswith(b"HTTP/1.1 405 Method Not Allowed\r\n")
    assert b"\r\nAllow: GET, HEAD\r\n" in answer
    assert not serving.asked


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00 this is TLS\r\n\r\n",
        b"GET  HTTP/1.1\r\n\r\n",
        b"GET http://elsewhere/ HTTP/1.1\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nName : spaced\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
        b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nLong: " + b"x" * 10_000 + b"\r\n\r\n",
    ],
    ids=["tls", "no-path", "proxy", "http2", "no-colon", "spaced", "body", "chunked", "long"],
)
def test_what_is_no_request_is_refused_and_cut_off(serve: Serve, request_bytes: bytes) -> None:
    serving = serve(Limits())
    with serving.connect() as connection:
        connection.sendall(request_bytes)
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert not serving.asked
    assert serving.get().endswith(b"small\n")


def test_a_defect_behind_it_is_answered_without_what_the_error_said(serve: Serve) -> None:
    serving = serve(Limits())
    answer = serving.get("/broken")
    assert answer.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
    assert b"LookupError" in answer
    assert b"secret" not in answer


def test_a_client_that_does_not_read_is_cut_off_and_keeps_nobody_waiting(serve: Serve) -> None:
    serving = serve(Limits(answer_s=0.3))
    slow = [serving.connect() for _ in range(4)]
    for connection in slow:
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
    assert until(lambda: len(serving.asked) == 4)
    began = time.monotonic()
    assert serving.get().endswith(b"small\n")
    assert time.monotonic() - began < 0.25, "it waited for those who do not read"
    assert until(lambda: serving.server.open_connections == 0)
    for connection in slow:
        assert len(everything(connection)) < len(BODY)
        connection.close()


def test_a_client_that_never_ends_its_request_is_cut_off(serve: Serve) -> None:
    serving = serve(Limits(request_s=0.2))
    with serving.connect() as connection:
        connection.sendall(b"GET / HT")
        began = time.monotonic()
        assert everything(connection) == b""
        assert time.monotonic() - began < 3


def test_one_byte_now_and_then_does_not_extend_the_deadline(serve: Serve) -> None:
    serving = serve(Limits(request_s=0.3))
    with serving.connect() as connection:
        began = time.monotonic()
        cut_off_s = None
        while cut_off_s is None and time.monotonic() - began < 5:
            time.sleep(0.02)
            try:
                connection.sendall(b"G")
            except OSError:
                cut_off_s = time.monotonic() - began
        assert cut_off_s is not None
        assert cut_off_s < 2


def test_whoever_is_idle_longest_makes_room(serve: Serve) -> None:
    serving = serve(Limits(connections=3))
    idle = []
    for _ in range(3):
        connection = serving.connect()
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        one_answer(connection)
        idle.append(connection)
    assert serving.get().endswith(b"small\n")
    assert everything(idle[0]) == b""
    idle[1].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert one_answer(idle[1])
    for connection in idle:
        connection.close()


def test_where_all_connections_are_in_use_it_says_so(serve: Serve) -> None:
    serving = serve(Limits(connections=2, request_s=2))
    busy = [serving.connect() for _ in range(2)]
    for connection in busy:
        connection.sendall(b"GET / HT")
    assert until(lambda: serving.server.open_connections == 2)
    time.sleep(0.1)  # until both have been seen to have begun
    answer = serving.get()
    assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"\r\nRetry-After: 1\r\n" in answer
    for connection in busy:
        connection.close()
    assert until(lambda: serving.server.open_connections == 0)
    assert serving.get().endswith(b"small\n")


def test_an_idle_connection_ends_at_its_time(serve: Serve) -> None:
    serving = serve(Limits(idle_s=0.2))
    with serving.connect() as connection:
        assert everything(connection) == b""


def test_stopping_cuts_off_what_is_open() -> None:
    serving = Serving(Limits())
    with serving.connect() as connection, serving.connect() as unfinished:
        unfinished.sendall(b"GET / HT")
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        one_answer(connection)
        serving.stop()
        assert everything(connection) == b""
    with pytest.raises(ConnectionRefusedError):
        serving.connect()


def test_a_status_has_its_phrase() -> None:
    answer = Answer.line(HTTPStatus.NOT_FOUND, "nothing is here", Retry_After="1")
    assert (answer.body, answer.headers) == (b"nothing is here\n", {"Retry-After": "1"})
