"""``kvscope exporter`` serves a run from outside, dead ones too; ``kvscope doctor`` finds who serves what."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope.cli import main
from kvscope.cli.exporters import exporters_in
from kvscope.metrics.exporter import Exporter, ExporterSettings
from kvscope.metrics.http import listen
from kvscope.metrics.place import Place
from kvscope.metrics.store import MetricsStore
from unit.metrics.support import get

Capture = pytest.CaptureFixture[str]


def write_metrics(folder: Path, allocated: float = 7) -> Path:
    """A run of one process, which is over."""
    store = MetricsStore(folder, process="all", rank=0, engine="0", prefix="kv_")
    assert store.reason is None
    slab = store.slab()
    slab.counter("kv_block_alloc_total").add(allocated)
    slab.publish()
    store.close()
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_metrics(tmp_path / "out" / "run-1")


@pytest.fixture
def served(run: Path) -> Iterator[Place]:
    exporter = Exporter(ExporterSettings(folder=run, run_id="run-1", port=0), list)
    exporter.start()
    place = exporter.wait_until_decided(5)
    assert place is not None
    yield place
    exporter.stop()


def begin(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvscope", "exporter", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_dead_run_is_served_until_interrupted(run: Path) -> None:
    process = begin(run.parent, "--port", "0")
    assert process.stdout is not None
    said: list[str] = []
    while not said or not said[-1].startswith("next: "):
        said.append(process.stdout.readline().strip())
    port = int(said[0].rpartition(":")[2].strip("/"))
    try:
        assert said[0] == f"page          http://127.0.0.1:{port}/"
        assert said[1] == f"metrics       http://127.0.0.1:{port}/metrics"
        assert said[2].startswith("run           ")
        assert said[-1].endswith(f"kvscope top http://127.0.0.1:{port}/")
        assert b'\nkv_kv_block_alloc_total{engine="0"} 7.0\n' in get(port).body
        (found,) = exporters_in(run.parent)
        assert (found.answers, found.pid) == (True, process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (130, "")
    assert exporters_in(run.parent) == []


def test_json_says_where_it_is(run: Path) -> None:
    process = begin(run, "--port", "0", "--path", "/kv", "--json")
    assert process.stdout is not None
    lines = []
    while not lines or lines[-1] != "}\n":
        lines.append(process.stdout.readline())
    place = json.loads("".join(lines))
    try:
        assert get(place["port"], "/kv").status == 200
        assert place["run_id"] == "run-1"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)


def test_a_run_that_is_exported_already_is_left_to_its_exporter(run: Path, served: Place, capsys: Capture) -> None:
    assert main(["exporter", str(run)]) == 2
    said = capsys.readouterr().err
    assert said == f"kvscope: {run}: another process exports this run already, at {served.url}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{tmp}/gone"], "{tmp}/gone: no such folder; give a run's folder, or an output folder"),
        (["{tmp}"], "{tmp}: no metrics here; additional_config.kv_monitor.enabled makes a run write them"),
        (["{run}", "--path", "kv"], "--path: 'kv' is not a path that starts with '/', of at most 255 URL characters"),
        (
            ["{run}", "--host", "a b"],
            "--host: 'a b' is not a host name or address of 1 to 255 visible ASCII characters",
        ),
        (["{run}", "--host", "192.0.2.1"], "{run}: kvscope: no exporter: [Errno 99] Cannot assign requested address"),
    ],
    ids=["gone", "no-metrics", "path", "host", "address"],
)
def test_what_cannot_be_served_is_one_line(
    run: Path, tmp_path: Path, capsys: Capture, arguments: list[str], said: str
) -> None:
    (tmp_path / "empty").mkdir()
    names = {"run": run, "tmp": tmp_path / "empty"}
    assert main(["exporter", *(argument.format(**names) for argument in arguments)]) == 2
    assert capsys.readouterr().err == f"kvscope: {said.format(**names)}\n"


def test_doctor_names_exporters_and_whether_they_answer(
    run: Path, served: Place, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    gone = listen("127.0.0.1", 0)
    free_port = int(gone.getsockname()[1])
    gone.close()
    dead = Place(
        run_id="run-0",
        url=f"http://127.0.0.1:{free_port}/",
        metrics_url=f"http://127.0.0.1:{free_port}/metrics",
        host_name=socket.gethostname(),
        wanted_port=free_port - 1,
        port=free_port,
        pid=os.getpid(),
        start_wall_ns=1,
    )
    (run.parent / "run-0").mkdir()
    dead.write(run.parent / "run-0")
    monkeypatch.setenv("KVSCOPE_DIR", str(run.parent))
    monkeypatch.setattr("kvscope.cli.doctor._version", lambda _name: None)
    main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)["exporters"]
    assert [(entry["metrics_url"], entry["answers"]) for entry in found] == [
        (served.metrics_url, True),
        (dead.metrics_url, False),
    ]
    main(["doctor"])
    page = " ".join(capsys.readouterr().out.split())
    assert f"exporter {served.metrics_url}: answers; of run-1" in page
    assert f"since port {free_port - 1} was taken: does not answer any more; of run-0" in page


def test_an_exporter_of_another_host_is_not_asked(tmp_path: Path) -> None:
    Place(
        run_id="run",
        url="http://127.0.0.1:1/",
        metrics_url="http://127.0.0.1:1/metrics",
        host_name="elsewhere",
        wanted_port=1,
        port=1,
        pid=1,
        start_wall_ns=1,
    ).write(tmp_path)
    (found,) = exporters_in(tmp_path)
    assert found.answers is None
