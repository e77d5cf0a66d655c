"""The trace files of one process: appending, rotating, and what happens when the disk does not take a line."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path


class TraceFiles:
    """``<folder>/<stem>.<n>.jsonl``, n from 0. All methods are called by one thread at a time, and none raises OSError.

    ``index`` is the n of the open file, or of the next one; ``deleted`` counts files removed because more than
    ``retain`` were there; ``error`` is what the system said last, None after a success.
    """

    def __init__(self, folder: Path, stem: str, *, rotate_bytes: int, retain: int) -> None:
        self._folder = folder
        self._stem = stem
        self._rotate_bytes = rotate_bytes
        self._retain = retain
        self._kept: deque[Path] = deque()
        self._descriptor = -1
        self._size = 0
        self.index = 0
        self.deleted = 0
        self.error: OSError | None = None

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    def is_full(self, pending_bytes: int = 0) -> bool:
        return self.is_open and self._size + pending_bytes >= self._rotate_bytes

    def path(self) -> Path:
        return self._folder / f"{self._stem}.{self.index}.jsonl"

    def open(self) -> bool:
        """Open the next file, and delete the oldest ones to make room for it. False: the system does not let us."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                    self._descriptor = os.open(self.path(), flags, 0o644)
                    break
                except FileExistsError:  # an earlier process with the same rank and pid wrote it
                    self.index += 1
        except OSError as error:
            self.error = error
            return False
        self._size = 0
        self._kept.append(self.path())
        while len(self._kept) > self._retain:
            with contextlib.suppress(OSError):
                self._kept.popleft().unlink()
                self.deleted += 1
        return True

    def append(self, lines: list[bytes]) -> int:
        """Write the lines, each with its line end, and return how many are in the file: less than all on an error.

        A line that got in only in part is cut off again; a file where that fails is given up, so that the next record
        does not continue a damaged line.
        """
        data = memoryview(b"".join(lines))
        done = 0
        try:
            while done < len(data):
                done += os.write(self._descriptor, data[done:])
        except OSError as error:
            self.error = error
            count = bytes(data[:done]).count(b"\n")
            whole = sum(map(len, lines[:count]))
            try:
                os.ftruncate(self._descriptor, self._size + whole)
            except OSError:
                self.close()
            self._size += whole
            return count
        self._size += done
        self.error = None
        return len(lines)

    def close(self) -> None:
        """Close the file; the next :meth:`open` takes the next index."""
        if self.is_open:
            self._close()
            self.index += 1

    def close_if_removed(self) -> bool:
        """Close the open file if its path no longer leads to it, because somebody removed or moved it or its folder.

        True: it was so. The next :meth:`open` takes the next index and makes the folder again.
        """
        if not self.is_open or self._is_in_place():
            return False
        self.close()
        self._kept.pop()  # what stands there now, if anything, is not ours to delete
        return True

    def discard(self) -> None:
        """Remove the file just opened, because its first record did not get in; its index is free again."""
        if self.is_open:
            self._close()
            with contextlib.suppress(OSError):
                self._kept.pop().unlink()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's file."""
        if self.is_open:
            self._close()

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(self.path().stat(), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # it cannot be seen, as in a folder that may no longer be entered: writing on still works
            return True

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        try:
            os.close(descriptor)
        except OSError as error:  # a network file system may report a failed write this late
            self.error = error
