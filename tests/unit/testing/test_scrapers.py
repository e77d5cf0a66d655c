"""The measurement of what scrapers cost, as far as it needs no engine: turns, ratios, and clients that are slow."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import typer

from kvscope.testing import scrapers
from kvscope.testing.scraper_clients import CLIENTS, Manner, Scrapers, is_whole, manner_of, scrape
from kvscope.testing.scrapers import NOISE, Phase, compare, cpu_seconds, order, pin

BODY = b"x" * 3_000_000
"""More than the system takes in the stead of a client that does not read."""
HEAD = f"HTTP/1.1 200 OK\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()


def phases(*us_per_step: tuple[bool, float]) -> list[Phase]:
    return [Phase(scraped=scraped, cpu_s=us / 1e3, steps=1000) for scraped, us in us_per_step]


@contextmanager
def answering(answer: bytes) -> Iterator[tuple[str, list[int]]]:
    """A server with a thread for each client, its URL, and how many bytes it got rid of, client by client."""
    sent: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve(client: socket.socket) -> None:
            with client:
                client.recv(1000)
                count = 0
                try:
                    while count < len(answer):
                        count += client.send(answer[count : count + 4096])
                except OSError:  # the client has hung up, which some here are made to do
                    pass
                finally:
                    sent.append(count)

        def accept() -> None:
            while True:
                try:
                    client = listening.accept()[0]
                except OSError:  # closed, at the end of the test
                    return
                threads.append(threading.Thread(target=serve, args=(client,)))
                threads[-1].start()

        threads: list[threading.Thread] = []
        accepting = threading.Thread(target=accept)
        accepting.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/metrics", sent
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join()
        for thread in threads:
            thread.join()


def test_phases_with_and_without_take_turns_and_so_does_who_begins() -> None:
    assert order(3) == [False, True, True, False, False, True]


def test_each_round_is_compared_in_itself() -> None:
    verdict = compare(phases((False, 100), (True, 101), (True, 202), (False, 200), (False, 200), (True, 198)))
    assert verdict.ratios == pytest.approx([1.01, 1.01, 0.99])
    assert verdict.ratio == pytest.approx(1.01)
    assert verdict.noise == pytest.approx(0.5)  # the median of 1.0 and 0.0


@pytest.mark.parametrize(("on", "unchanged"), [(100, True), (102.9, True), (97.1, True), (104, False), (96, False)])
def test_a_difference_beyond_noise_is_one(on: float, unchanged: bool) -> None:
    verdict = compare(phases((False, 100), (True, on), (True, on), (False, 100)))
    assert (verdict.noise, verdict.is_unchanged) == (NOISE, unchanged)


def test_a_fifth_of_the_clients_is_slow_in_either_way() -> None:
    manners = [manner_of(client) for client in range(CLIENTS)]
    assert {manner: manners.count(manner) for manner in manners} == {"whole": 40, "drip": 5, "stuck": 5}


def test_who_reads_all_has_the_whole_answer() -> None:
    with answering(HEAD + BODY) as (url, _):
        answer, _seconds = scrape(url, "whole", threading.Event())
    assert is_whole(answer)
    assert not is_whole(answer[:-1])
    assert not is_whole(answer.replace(b"200 OK", b"503 Busy", 1))


@pytest.mark.parametrize("manner", ["drip", "stuck"])
def test_who_is_slow_keeps_the_server_waiting_until_it_hangs_up(manner: Manner) -> None:
    with answering(HEAD + BODY) as (url, sent):
        answer, seconds = scrape(url, manner, threading.Event(), patience_s=0.3)
    assert 0 < len(answer) < 2000
    assert 0.3 <= seconds < 3
    assert sent[0] < len(BODY)


def test_clients_say_what_became_of_their_scrapes_and_end_when_they_are_told() -> None:
    before = threading.active_count()
    with answering(HEAD + b"x" * len(BODY)) as (url, _):
        clients = Scrapers(url=url)
        with clients.running():
            threading.Event().wait(1)
        assert len(clients.answered_s) >= 6
        assert len(clients.slow) >= 2
        assert not clients.failed
    assert threading.active_count() == before


def test_an_answer_that_is_none_is_said() -> None:
    with answering(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n") as (url, _):
        clients = Scrapers(url=url)
        with clients.running():
            threading.Event().wait(0.5)
    assert clients.failed
    assert not clients.answered_s
    assert all("500" in line for line in clients.failed if line.startswith("whole"))


def test_the_time_and_the_threads_of_a_process_are_found() -> None:
    core = min(os.sched_getaffinity(0))
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        pin(busy.pid, core)
        assert os.sched_getaffinity(busy.pid) == {core}
        while cpu_seconds(busy.pid) < 0.1:
            assert busy.poll() is None
    finally:
        busy.kill()
        busy.wait()


def test_one_core_is_not_enough_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    scrapers.main(rounds=1, seconds=1)
    assert capsys.readouterr().out == "not run: needs two cores and has 1\n"


def test_a_measurement_with_a_difference_or_too_few_scrapes_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for on, answered, code in ((100.0, 8, 0), (120.0, 8, 1), (100.0, 5, 1)):
        seen = Scrapers(url="", answered_s=[0.02] * answered, slow=[4.0] * 2)
        found = phases((False, 100.0), (True, on))
        monkeypatch.setattr(scrapers, "measure", lambda *_, found=found, seen=seen: (found, seen, []))
        with pytest.raises(typer.Exit) as ended:
            scrapers.main(rounds=1, seconds=1)
        assert ended.value.exit_code == code
        said = capsys.readouterr().out
        assert f"on / off: median {on / 100:.3f}" in said
        assert ("wrong: 7 scrapes" in said) is (answered == 5)
