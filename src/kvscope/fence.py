"""Foreign code that is called in threads of its own: what it raises, and how long it takes, is counted and goes no
further. After 16 faults it is not called any more.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from time import monotonic_ns

from .logs import say

MAX_FAULTS = 16
"""Faults after which it is not called any more."""
SLOW_NS = 5 * 10**9
"""Every so much time in one call is one fault; who never returns is thus removed as well."""


class Fence:
    """Around one callback, which one thread at a time calls. ``kind`` says in the log what it is: a subscriber."""

    __slots__ = ("_faults", "_is_said", "_kind", "_since_ns", "_slow_ns", "name")

    def __init__(self, kind: str, callback: object, slow_ns: int = SLOW_NS) -> None:
        self.name = _name_of(callback)
        self._kind = kind
        self._slow_ns = slow_ns
        self._faults = 0
        self._since_ns = 0  # when the call that is running began; 0: none is
        self._is_said = False

    @property
    def faults(self) -> int:
        """How often the callback raised, and how often 5 seconds passed in one call of it."""
        since_ns = self._since_ns
        return self._faults + ((monotonic_ns() - since_ns) // self._slow_ns if since_ns else 0)

    @property
    def is_down(self) -> bool:
        """Whether it has had its last chance."""
        return self.faults >= MAX_FAULTS

    @property
    def is_running(self) -> bool:
        return self._since_ns > 0

    def passes(self, call: Callable[[], object]) -> bool:
        """Call it; whether it came back without raising. The first fault is logged."""
        self._since_ns = began_ns = monotonic_ns()
        raised: BaseException | None = None
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - foreign code, and nothing but this thread is there to end
            raised = error
        self._since_ns = 0
        self._count((raised is not None) + (monotonic_ns() - began_ns) // self._slow_ns, raised)
        return raised is None

    def say_removed(self) -> None:
        """Log that it is not called any more. A second call does nothing."""
        if not self._is_said:
            self._is_said = True
            say(logging.WARNING, "kvscope: %s %s is removed after %d faults", self._kind, self.name, MAX_FAULTS)

    def _count(self, faults: int, raised: BaseException | None) -> None:
        if faults:
            is_first, self._faults = self._faults == 0, self._faults + faults
            if is_first and self._faults < MAX_FAULTS:
                what = type(raised).__name__ if raised is not None else "slow"
                text = "kvscope: %s %s failed (%s); it is removed after %d faults"
                say(logging.WARNING, text, self._kind, self.name, what, MAX_FAULTS)
                if raised is not None:
                    say(logging.DEBUG, "kvscope: %s %s", self._kind, self.name, error=raised)


def require_callable(kind: str, callback: object) -> None:
    """Refuse what could not be called, or would only make a coroutine.

    Raises:
        TypeError: it is such a thing.
    """
    if not callable(callback):
        raise TypeError(f"a {kind} must be callable, and {type(callback).__name__} is not")
    if inspect.iscoroutinefunction(callback):
        raise TypeError(f"{_name_of(callback)} is a coroutine function, and nobody would await it")


def _name_of(callback: object) -> str:
    function = callback if hasattr(callback, "__qualname__") else type(callback)
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}"
