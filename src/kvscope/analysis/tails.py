"""The lines of a process that came since the last look, over all its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvscope.analysis.files import ProcessFiles

CHUNK_BYTES = 1 << 20


class Tail:
    """Where reading stands in the files of one process. ``is_cut``: older files than those read are gone."""

    def __init__(self) -> None:
        self._offsets: dict[Path, int] = {}
        self.is_cut = False

    def lines(self, files: ProcessFiles) -> Iterator[bytes]:
        """Complete lines that were not read yet; one that is still being written comes with a later look."""
        if files.first_index > 0 and not self._offsets:
            self.is_cut = True
        for path in files.paths:
            yield from self._of_file(path)

    def _of_file(self, path: Path) -> Iterator[bytes]:
        try:
            file = path.open("rb")
        except FileNotFoundError:  # the process has deleted its oldest file just now
            self.is_cut |= path not in self._offsets
            return
        with file:
            file.seek(self._offsets.setdefault(path, 0))
            rest = b""
            while chunk := file.read(CHUNK_BYTES):
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    self._offsets[path] += len(line) + 1
                    yield line
