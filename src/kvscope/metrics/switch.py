"""Monitoring of a run can be switched off while it runs: a file in its folder says so, to every process and host.

Processes go on counting, which costs them nothing more, so that totals are right when it is switched on again.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["Switch"]

_NAME = "monitor.off"
_CONTENT = "The exporters of this run answer with an empty page as long as this file is here: kvscope monitor on\n"


class Switch:
    """The switch of the run in a folder. Both raise OSError where the folder cannot be reached."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME

    def is_on(self) -> bool:
        """Asked by an exporter whenever somebody scrapes it."""
        return not self._path.exists()

    def turn(self, *, on: bool) -> None:
        """Switch on or off; what is so already stays so."""
        if on:
            self._path.unlink(missing_ok=True)
        else:
            self._path.write_text(_CONTENT, encoding="utf-8")
