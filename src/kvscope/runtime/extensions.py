"""Imports the modules named in ``kv_output.extensions``: once in every process that observes an engine.

An extension registers what it has as it is imported (``kvscope.monitor``), and registrations do not survive a fork. So
a module that a forked process has inherited is imported anew there.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterable
from time import perf_counter_ns

from ..errors import ConfigurationError, RegistrationError
from ..logs import say
from ..metrics.collecting import DEFAULT_PREFIX
from ..metrics.collectors import COLLECTORS

PATH = "additional_config.kv_output.extensions"


class Extensions:
    """What one process has imported. ``EXTENSIONS`` is the one that serves."""

    def __init__(self) -> None:
        self._tried: dict[str, str | None] = {}  # module -> why it could not be imported, None if it could
        self._inherited: frozenset[str] = frozenset()
        self._time_ns = 0

    def load(self, names: Iterable[str], *, refuse: bool, prefix: str = DEFAULT_PREFIX) -> None:
        """Import what this process has not tried yet, for a run whose metrics have this prefix.

        Raises:
            ConfigurationError: one cannot be imported and ``refuse`` is set; without it that is logged and counted.
        """
        COLLECTORS.expect(prefix)
        for index, name in enumerate(names):
            if name in self._tried:
                continue
            error = self._import(name)
            if error is None:
                self._tried[name] = None
                continue
            reason = str(error) if isinstance(error, RegistrationError) else type(error).__name__
            if refuse:
                raise ConfigurationError(f"{PATH}[{index}]", f"{name!r} cannot be imported ({reason})") from error
            self._tried[name] = reason
            say(logging.ERROR, "kvscope: extension %s cannot be imported (%s); it is left out", name, reason)
            say(logging.DEBUG, "kvscope: extension %s", name, error=error)

    def numbers(self) -> tuple[int, int, int] | None:
        """``(modules, of them not importable, time spent importing in ns)``; None if there is none."""
        failed = sum(reason is not None for reason in self._tried.values())
        return (len(self._tried), failed, self._time_ns) if self._tried else None

    def forget(self) -> None:
        """In a forked child: what is imported has registered its callbacks with the parent."""
        self._tried = {}
        self._inherited = frozenset(sys.modules)
        self._time_ns = 0

    def _import(self, name: str) -> BaseException | None:
        began_ns = perf_counter_ns()
        try:
            if name in self._inherited and name in sys.modules:
                importlib.reload(sys.modules[name])
            else:
                importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code: a worker must not end with its extension
            return error
        finally:
            self._time_ns += perf_counter_ns() - began_ns
        return None


EXTENSIONS = Extensions()
"""Module state: a process imports a module once, however many engines it starts."""

os.register_at_fork(after_in_child=EXTENSIONS.forget)
