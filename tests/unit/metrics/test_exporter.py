"""The exporter as those meet it who scrape it, and as it leaves the process that it runs in."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from kvscope.metrics.exporter import Exporter, ExporterSettings
from kvscope.metrics.families import Family
from kvscope.metrics.http import Limits, listen
from kvscope.metrics.place import is_exported, places_in
from unit.metrics.support import PREFIX, collected, get, process, until


class Run:
    """What an exporter collects, and the exporters that were begun for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.collections = 0
        self.error: Exception | None = None
        self.is_on = True
        self.begun: list[Exporter] = []

    def collect(self) -> list[Family]:
        self.collections += 1
        if self.error is not None:
            raise self.error
        return collected(process(kv_block_alloc_total={(): float(self.collections)}))

    def begin(
        self, *, port: int = 0, interval_s: float = 60.0, path: str = "/metrics", limits: Limits | None = None
    ) -> Exporter:
        settings = ExporterSettings(
            folder=self.folder,
            run_id="run",
            port=port,
            metrics_path=path,
            scrape_interval_s=interval_s,
            take_over_s=0.05,
        )
        self.begun.append(Exporter(settings, self.collect, is_on=lambda: self.is_on, limits=limits))
        self.begun[-1].start()
        self.begun[-1].wait_until_decided(20)
        return self.begun[-1]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    for exporter in made.begun:
        exporter.stop()
    assert not [exporter for exporter in made.begun if exporter._thread is not None and exporter._thread.is_alive()]


def port_of(exporter: Exporter) -> int:
    assert exporter.place is not None
    return exporter.place.port


def test_text_is_answered_unless_openmetrics_is_asked_for(run: Run) -> None:
    port = port_of(run.begin())
    plain = get(port)
    assert (plain.status, plain.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    (allocated, _age) = read_text(plain.body.decode())
    assert (allocated.name, allocated.samples[0].value) == (f"{PREFIX}kv_block_alloc", 1)
    other = get(port, accept="application/openmetrics-text;version=1.0.0")
    assert other.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert [family.name for family in read_openmetrics(other.body.decode())] == [
        f"{PREFIX}kv_block_alloc",
        f"{PREFIX}snapshot_age_seconds",
    ]
    assert run.collections == 1


def test_fifty_scrapers_cost_one_collection_an_interval(run: Run) -> None:
    port = port_of(run.begin())
    with ThreadPoolExecutor(50) as scrapers:
        got = list(scrapers.map(lambda _: get(port), range(200)))
    assert {answer.status for answer in got} == {200}
    assert len({answer.body for answer in got}) == 1
    assert run.collections == 1


def test_after_the_interval_it_is_collected_anew(run: Run) -> None:
    port = port_of(run.begin(interval_s=0.05))
    assert b"alloc_total{" in get(port).body
    assert until(lambda: b" 2.0\n" in get(port).body)


def test_slow_scrapers_delay_nobody(run: Run) -> None:
    port = port_of(run.begin(limits=Limits(request_s=1.0)))
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    for connection in slow:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
    with ThreadPoolExecutor(10) as scrapers:
        assert {answer.status for answer in scrapers.map(lambda _: get(port), range(20))} == {200}
    for connection in slow:
        connection.close()


def test_while_monitoring_is_switched_off_the_answer_is_empty(run: Run) -> None:
    port = port_of(run.begin(interval_s=0.001))
    run.is_on = False
    off = get(port)
    assert (off.status, off.body) == (200, b"")
    assert run.collections == 0
    run.is_on = True
    assert b"alloc_total{" in get(port).body


def test_a_collection_that_fails_is_said_in_one_line_and_soon_tried_again(run: Run) -> None:
    port = port_of(run.begin(interval_s=0.01))
    run.error = ValueError("torn\nfile")
    failed = get(port)
    assert (failed.status, failed.headers["retry-after"]) == (500, "1")
    assert failed.body == b"collection failed: ValueError: torn file\n"
    run.error = None
    assert until(lambda: get(port).status == 200)


def test_a_switch_that_cannot_be_read_is_a_failed_collection(run: Run) -> None:
    def is_on() -> bool:
        raise OSError(errno.EIO, "no such disk")

    settings = ExporterSettings(folder=run.folder, run_id="run", port=0)
    exporter = Exporter(settings, run.collect, is_on=is_on)
    run.begun.append(exporter)
    exporter.start()
    assert exporter.wait_until_decided(20)
    assert get(port_of(exporter)).status == 500


def test_another_path_is_told_where_the_metrics_are(run: Run) -> None:
    port = port_of(run.begin(path="/kv"))
    assert get(port, "/kv").status == 200
    wrong = get(port, "/metrics")
    assert (wrong.status, wrong.body) == (404, b"nothing is here; the metrics are at /kv\n")


def test_a_taken_port_moves_it_to_the_next_free_one_which_is_logged_and_written_down(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with listen("127.0.0.1", 0) as taken, caplog.at_level(logging.INFO, "vllm.kvscope"):
        wanted = taken.getsockname()[1]
        exporter = run.begin(port=wanted)
    port = port_of(exporter)
    assert wanted < port < wanted + 64
    assert get(port).status == 200
    (place,) = places_in(run.folder)
    assert (place.url, place.metrics_url) == (f"http://127.0.0.1:{port}/", f"http://127.0.0.1:{port}/metrics")
    assert (place.wanted_port, place.pid, place.run_id) == (wanted, os.getpid(), "run")
    said = f"kvscope: metrics of this run: http://127.0.0.1:{port}/metrics (port {wanted} was taken)"
    assert said in [record.getMessage() for record in caplog.records]


def test_where_nothing_can_be_listened_on_it_says_so_and_the_process_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ExporterSettings(folder=tmp_path, run_id="run", host="192.0.2.1", port=9460)
    exporter = Exporter(settings, list)
    with caplog.at_level(logging.WARNING, "vllm.kvscope"):
        exporter.start()
        assert exporter.wait_until_decided(20) is None
        exporter.stop()
    assert any(record.getMessage().startswith("kvscope: no exporter: ") for record in caplog.records)
    assert not is_exported(tmp_path)


def test_a_folder_that_cannot_hold_the_lock_leaves_the_process_without_an_exporter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    exporter = Exporter(ExporterSettings(folder=tmp_path / "file", run_id="run", port=0), list)
    with caplog.at_level(logging.WARNING, "vllm.kvscope"):
        exporter.start()
        assert exporter.wait_until_decided(20) is None
        exporter.stop()
    assert "kvscope: no exporter: [Errno 17] File exists" in caplog.text


def test_the_folder_is_made_where_nobody_has_made_it_yet(tmp_path: Path) -> None:
    exporter = Exporter(ExporterSettings(folder=tmp_path / "out" / "run", run_id="run", port=0), list)
    exporter.start()
    place = exporter.wait_until_decided(20)
    exporter.stop()
    assert place is not None


def test_where_the_file_system_knows_no_locks_it_serves_all_the_same(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("kvscope.metrics.place.fcntl.flock", no_locks)
    with caplog.at_level(logging.WARNING, "vllm.kvscope"):
        assert get(port_of(run.begin())).status == 200
    assert "kvscope: no locks in the run's folder" in caplog.text


def test_of_two_the_second_waits_and_takes_over_when_the_first_ends(run: Run) -> None:
    first, second = run.begin(), run.begin()
    assert second.place is None
    assert get(port_of(first)).status == 200
    first.stop()
    assert until(lambda: second.place is not None)
    assert get(port_of(second)).status == 200
    assert [place.port for place in places_in(run.folder)] == [port_of(second)]


HOLDER = """
import sys, time
from pathlib import Path
from kvscope.metrics.exporter import Exporter, ExporterSettings
exporter = Exporter(ExporterSettings(folder=Path(sys.argv[1]), run_id="run", port=0), list)
exporter.start()
print(exporter.wait_until_decided(10).port, flush=True)
time.sleep(60)
"""


def test_when_the_process_that_exports_is_killed_another_takes_over(run: Run) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, run.folder], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    first_port = int(holder.stdout.readline())
    waiting = run.begin()
    assert (waiting.place, get(first_port).status) == (None, 200)
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    holder.stdout.close()
    # The kill leaves the file behind, until whoever takes over, at once perhaps, puts its own there.
    assert until(lambda: waiting.place is not None)
    assert [place.port for place in places_in(run.folder)] == [port_of(waiting)]
    assert get(port_of(waiting)).status == 200


def test_a_process_that_ends_takes_word_of_its_exporter_back(tmp_path: Path) -> None:
    script = HOLDER.replace("time.sleep(60)", "assert list(Path(sys.argv[1]).glob('*.json'))")
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True, timeout=30, stdout=subprocess.DEVNULL)
    assert places_in(tmp_path) == []


def test_one_that_is_stopped_before_it_serves_never_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(20):
        exporter = Exporter(ExporterSettings(folder=tmp_path, run_id="run", port=0), list)
        exporter.start()
        exporter.stop(5)
        assert (exporter.place, places_in(tmp_path), is_exported(tmp_path)) == (None, [], False)
    assert caplog.records == []


def test_a_forked_child_keeps_neither_port_nor_lock(run: Run) -> None:
    exporter = run.begin()
    port = port_of(exporter)
    wait, release = os.pipe()
    hear, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release)
        os.write(say, b"born")
        os.read(wait, 1)
        os._exit(0)
    assert os.read(hear, 4) == b"born"
    exporter.stop()
    try:
        with pytest.raises(ConnectionRefusedError):
            get(port)
        assert not is_exported(run.folder)
    finally:
        for end in (release, wait, hear, say):
            os.close(end)
        os.waitpid(child, 0)


def test_whoever_is_patient_lets_others_go_first(run: Run) -> None:
    settings = ExporterSettings(folder=run.folder, run_id="run", port=0, take_over_s=0.05, patience_s=1.0)
    patient = Exporter(settings, run.collect)
    run.begun.append(patient)
    patient.start()
    first = run.begin()
    assert first.place is not None
    assert patient.wait_until_decided(20) is None
    first.stop()
    assert until(lambda: patient.place is not None)


def test_stopping_twice_is_no_error_and_leaves_nothing_behind(run: Run) -> None:
    exporter = run.begin()
    exporter.stop()
    exporter.stop()
    assert exporter.place is None
    assert places_in(run.folder) == []
    assert not is_exported(run.folder)


@pytest.mark.skipif(not socket.has_ipv6, reason="not run: this Python knows no IPv6")
def test_an_address_of_version_six_stands_in_brackets(tmp_path: Path) -> None:
    try:
        listen("::1", 0).close()
    except OSError as error:
        pytest.skip(f"not run: this machine has no IPv6 loopback ({error.strerror})")
    exporter = Exporter(ExporterSettings(folder=tmp_path, run_id="run", host="::1", port=0), list)
    exporter.start()
    place = exporter.wait_until_decided(20)
    exporter.stop()
    assert place is not None
    assert place.url == f"http://[::1]:{place.port}/"
