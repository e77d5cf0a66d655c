"""A device whose copies arrive when a test says so, and how long each was waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvscope.boundary.device import HostDevice


class SlowDevice(HostDevice):
    """What is cloned is there at once, what goes to the host only with :meth:`arrive`, in order. ``log`` has what the
    device was asked, and ``fails`` makes every question an error, as after a fault of the device.
    """

    def __init__(self) -> None:
        self.on_their_way: list[tuple[Any, Any, dict[str, bool]]] = []
        self.log: list[str] = []
        self.capturing = False
        self.fails = False

    def events(self) -> dict[str, bool]:
        return {"arrived": False}

    def clone(self, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        self.log.append("clone")
        super().clone(sources, targets)

    def to_host(self, source: Any, target: Any, events: dict[str, bool]) -> None:
        self.log.append("to_host")
        events["arrived"] = False
        self.on_their_way.append((source, target, events))

    def arrive(self, copies: int = 1) -> None:
        """So many copies reach the host."""
        for _ in range(copies):
            source, target, events = self.on_their_way.pop(0)
            target.copy_(source)
            events["arrived"] = True

    def ready(self, events: dict[str, bool]) -> bool:
        if self.fails:
            raise RuntimeError("the device is gone")
        return events["arrived"]

    def wait(self, events: dict[str, bool]) -> None:
        self.log.append("wait")
        if self.fails:
            raise RuntimeError("the device is gone")
        while not events["arrived"]:
            self.arrive()

    def is_capturing(self) -> bool:
        return self.capturing
