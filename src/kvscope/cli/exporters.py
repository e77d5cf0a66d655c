"""Exporters that runs have left word of in an output folder, and whether they answer."""

from __future__ import annotations

import contextlib
import http.client
import socket
from pathlib import Path

import msgspec

from kvscope.metrics.http import SERVER_NAME
from kvscope.metrics.place import Place, places_in

MOST_TRIED = 16
ANSWER_S = 1.0


class FoundExporter(msgspec.Struct, kw_only=True):
    """``answers`` is None for one of another host, which is not asked."""

    run: str
    url: str
    metrics_url: str
    wanted_port: int
    port: int
    pid: int
    answers: bool | None


def exporters_in(output_dir: Path) -> list[FoundExporter]:
    """Those of the folder's runs, the one that was started last first; also of the folder itself, if it is a run's."""
    folders = [output_dir, *(child for child in _children(output_dir) if child.is_dir())]
    found = [(place, folder) for folder in folders for place in places_in(folder)]
    newest = sorted(found, key=lambda item: -item[0].start_wall_ns)[:MOST_TRIED]
    return [
        FoundExporter(
            run=str(folder),
            url=place.url,
            metrics_url=place.metrics_url,
            wanted_port=place.wanted_port,
            port=place.port,
            pid=place.pid,
            answers=_answers(place) if place.host_name == socket.gethostname() else None,
        )
        for place, folder in newest
    ]


def _children(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(folder.iterdir())
    return []


def _answers(place: Place) -> bool:
    """Whether one of ours is there; the port may have passed to somebody else since."""
    host = place.url.removeprefix("http://").rpartition(":")[0].strip("[]")
    connection = http.client.HTTPConnection(host, place.port, timeout=ANSWER_S)
    try:
        connection.request("HEAD", "/")
        return connection.getresponse().getheader("Server") == SERVER_NAME
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
