"""Fifty clients that scrape an exporter, a fifth of them slowly, and what becomes of their scrapes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

Manner = Literal["whole", "drip", "stuck"]
"""How a client reads: all at once, a few bytes at a time, or only the beginning."""

CLIENTS, SCRAPES_PER_S = 50, 10
PERIOD_S = CLIENTS / SCRAPES_PER_S
PATIENCE_S = 4.0
"""After so long a slow client hangs up."""


def manner_of(client: int) -> Manner:
    """Every fifth client is slow, in one of two ways."""
    return "whole" if client % 5 else "drip" if client % 2 else "stuck"


def scrape(url: str, manner: Manner, stop: threading.Event, *, patience_s: float = PATIENCE_S) -> tuple[bytes, float]:
    """What came of the answer, head and body, and after how many seconds. Raises OSError, also for a silent server."""
    parts = urlsplit(url)
    began = time.monotonic()
    received = bytearray()
    with socket.socket() as client:
        client.settimeout(patience_s)
        if manner != "whole":  # else the system would take the whole body in the client's stead
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect((parts.hostname, parts.port))
        client.sendall(f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
        while part := client.recv(65536 if manner == "whole" else 64):
            received += part
            if manner == "stuck":
                stop.wait(patience_s)
                break
            if manner == "drip" and (stop.wait(0.02) or time.monotonic() - began > patience_s):
                break
    return bytes(received), time.monotonic() - began


def is_whole(answer: bytes) -> bool:
    """Whether it is a 200 with as long a body as its head says."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.startswith(b"HTTP/1.1 200 ") and f"content-length: {len(body)}".encode() in head.lower()


@dataclass(kw_only=True, slots=True)
class Scrapers:
    """50 clients in threads, each with a scrape every five seconds, and what became of these. Lists grow from many
    threads; `list.append` is whole.
    """

    url: str
    answered_s: list[float] = field(default_factory=list)
    slow: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = threading.Event()
        threads = [threading.Thread(target=self._client, args=(client, stop)) for client in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _client(self, client: int, stop: threading.Event) -> None:
        due = time.monotonic() + client / SCRAPES_PER_S
        while not stop.wait(max(0.0, due - time.monotonic())):
            due += PERIOD_S
            manner = manner_of(client)
            try:
                answer, seconds = scrape(self.url, manner, stop)
            except OSError as error:
                self.failed.append(f"{manner}: {type(error).__name__}: {error}")
                continue
            if manner != "whole":
                self.slow.append(seconds)
            elif is_whole(answer):
                self.answered_s.append(seconds)
            else:
                self.failed.append(f"{manner}: {answer[:60]!r}")
