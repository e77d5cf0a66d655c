"""How much may come out in a minute, whatever comes in."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_MINUTE_NS = 60 * 10**9


class MinuteLimit:
    """At most ``most`` within any minute, and beyond them the first of each kind: a storm of one kind does not hide
    another. There are as few kinds as there are reasons of findings.
    """

    def __init__(self, most: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._taken_ns: deque[int] = deque(maxlen=most)
        self._kinds: set[str] = set()

    def is_first(self, kind: str) -> bool:
        """Whether none of this kind has come out."""
        return kind not in self._kinds

    def allows(self, kind: str) -> bool:
        """Whether one more may come out now."""
        taken = self._taken_ns
        return self.is_first(kind) or len(taken) < (taken.maxlen or 0) or self._clock() - taken[0] >= _MINUTE_NS

    def take(self, kind: str) -> None:
        """One has come out."""
        self._kinds.add(kind)
        self._taken_ns.append(self._clock())
