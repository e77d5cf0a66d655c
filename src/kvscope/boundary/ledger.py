"""The book of what is wrapped: install and uninstall are twins over one table, and every hook's cost is known.

A hook never hurts the host: whatever it raises is counted and swallowed here, and after 16 faults the hook is off for
good. The two exceptions that kvscope means to raise pass through.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from time import perf_counter_ns
from types import ModuleType
from typing import Any, ClassVar, Literal

from ..errors import ConfigurationError, ViolationError
from ..logs import say

MAX_FAULTS = 16
OBSERVER = "_kvscope_observer"
"""Attribute by which a host object (scheduler, worker, runner) carries its observer; absent: pass through."""

Role = Literal[
    "bootstrap",
    "frontend",
    "engine",
    "allocator",
    "connector",
    "monitor",
    "worker",
    "worker_v1",
    "worker_v2",
    "drafts_v1",
    "drafts_v2",
    "deferred_v1",
    "deferred_v2",
    "graphs_v1",
    "graphs_v2",
]
Original = Callable[..., Any]
Wrap = Callable[[Original, "Hook"], Original]


class Hook:
    """Calls, faults and own time of one seam in this process. ``role`` is that of the seam."""

    __slots__ = ("calls", "disabled", "faults", "name", "role", "time_ns")

    allocator_faults: ClassVar[list[int]] = [0]
    """Faults of all hooks of the block pool in this process: one is enough for its books to be wrong from then on. A
    list of the one number, so that who asks in every step keeps hold of it.
    """
    connector_faults = 0
    """Faults of all hooks of what is planned with a connector: from the first on a plan may be missing."""

    def __init__(self, name: str, role: Role = "engine") -> None:
        self.name = name
        self.role = role
        self.calls = 0
        self.faults = 0
        self.time_ns = 0
        self.disabled = False

    def run(self, action: Callable[..., None], *arguments: object) -> None:
        """Call ``action`` on behalf of this hook: timed, counted, fenced."""
        if self.disabled:
            return
        start = perf_counter_ns()
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001 - fenced: `caught` raises only what is meant to reach vLLM
            self.caught(error)
        finally:
            self.spent(start)

    def spent(self, start_ns: int) -> None:
        """Count a call that began at ``start_ns`` of ``perf_counter_ns``."""
        self.calls += 1
        self.time_ns += perf_counter_ns() - start_ns

    def caught(self, error: Exception) -> None:
        """Raise what kvscope means to raise; count and swallow every other fault of ours."""
        if isinstance(error, (ViolationError, ConfigurationError)):
            raise error
        self._fault(error)

    def native_error(self, observer: Any, error: BaseException) -> None:
        """The host itself raised across this seam; it is told and goes on unchanged."""
        if not isinstance(error, (ViolationError, ConfigurationError)):
            self.run(observer.on_native_error, self.name, type(error).__name__)

    def _fault(self, error: Exception) -> None:
        self.faults += 1
        if self.role == "allocator":
            Hook.allocator_faults[0] += 1
        elif self.role == "connector":
            Hook.connector_faults += 1
        self.disabled = self.faults >= MAX_FAULTS
        if self.faults == 1 or self.disabled:
            consequence = "it is switched off" if self.disabled else f"it is switched off after {MAX_FAULTS} faults"
            say(logging.WARNING, "kvscope: hook %s failed (%s); %s", self.name, type(error).__name__, consequence)
            say(logging.DEBUG, "kvscope: hook %s", self.name, error=error)


class Seam:
    """One point of vLLM that is touched.

    ``fact`` is what it yields, ``lost`` what cannot be judged without it. ``needs`` are parameters of the target that
    the adapter relies on: where they are missing the host has another shape and the seam is refused. ``when_loaded``
    wraps the target only if its module is already imported (bootstrap seams must not import the host). ``interface``:
    whoever implements the target's class has a method of its own, and that is wrapped (:meth:`on`).
    """

    __slots__ = (
        *("attribute", "fact", "interface", "lost", "module", "name", "needs", "of", "owner", "role"),
        *("when_loaded", "wrap"),
    )

    def __init__(
        self,
        name: str,
        target: str,
        role: Role,
        wrap: Wrap,
        *,
        fact: str,
        lost: str,
        needs: tuple[str, ...] = (),
        when_loaded: bool = False,
        interface: bool = False,
    ) -> None:
        self.name = name
        self.module, _, qualified = target.partition(":")
        self.owner, _, self.attribute = qualified.rpartition(".")
        self.role = role
        self.wrap = wrap
        self.fact = fact
        self.lost = lost
        self.needs = needs
        self.when_loaded = when_loaded
        self.interface = interface
        self.of: type | None = None

    def on(self, kind: type) -> Seam:
        """The seam of an interface in a class that implements it, or in that of its bases which has the method. What
        its parameters are called is its own affair. Raises LookupError if none has it.
        """
        owner = next((base for base in kind.__mro__ if self.attribute in vars(base)), None)
        if owner is None:
            raise LookupError(f"{kind.__name__} has no {self.attribute}")
        target = f"{owner.__module__}:{owner.__name__}.{self.attribute}"
        seam = Seam(f"{self.name}.{owner.__name__}", target, self.role, self.wrap, fact=self.fact, lost=self.lost)
        seam.of = owner
        return seam

    @property
    def target(self) -> str:
        """``module:Class.method``, or ``module:function`` where a module has imported one."""
        return f"{self.module}:{self.owner}.{self.attribute}" if self.owner else f"{self.module}:{self.attribute}"

    def resolve(self, *, load: bool) -> tuple[type | ModuleType, Original]:
        """The owning class, or module, and its own attribute.

        Raises LookupError with the reason where this host has no such target or it has another shape.
        """
        module = sys.modules.get(self.module)
        if self.of is None and module is None:
            if not load:
                raise LookupError("its module is not loaded")
            try:
                module = importlib.import_module(self.module)
            except Exception as error:  # importing the host can fail in as many ways as there are platforms
                raise LookupError(f"its module cannot be imported ({type(error).__name__})") from error
        owner = self.of or (getattr(module, self.owner, None) if self.owner else module)
        if not isinstance(owner, (type, ModuleType)):
            raise LookupError(f"{self.module} has no class {self.owner}")
        original = owner.__dict__.get(self.attribute)
        if original is None or not callable(original):
            kind = "method" if self.owner else "function"
            raise LookupError(f"{self.owner or self.module} has no {kind} {self.attribute} of its own")
        missing = [name for name in self.needs if name not in inspect.signature(original).parameters]
        if missing:
            raise LookupError(f"{self.owner or self.module}.{self.attribute} has no parameter {', '.join(missing)}")
        return owner, original


class Installed:
    """A wrapped seam: what stood there before and what stands there now."""

    __slots__ = ("original", "owner", "seam", "wrapper")

    def __init__(self, seam: Seam, owner: type | ModuleType, original: Original, wrapper: Original) -> None:
        self.seam = seam
        self.owner = owner
        self.original = original
        self.wrapper = wrapper


class Ledger:
    """What this process has wrapped. One instance a process, inherited over fork like the wrapped classes are."""

    def __init__(self) -> None:
        self.hooks: dict[str, Hook] = {}
        self.installed: dict[str, Installed] = {}
        self.absent: dict[str, str] = {}

    def install(self, seam: Seam, *, load: bool = False) -> bool:
        """Wrap one seam; doing so again changes nothing. False, with the reason in ``absent``, if it is refused.

        ``load`` imports the host's module even for a seam that otherwise waits until it is loaded.
        """
        if seam.name in self.installed:
            return True
        try:
            owner, original = seam.resolve(load=load or not seam.when_loaded)
        except LookupError as reason:
            # A bootstrap seam whose module is not loaded belongs to another kind of process: nothing is lost here.
            if load or not seam.when_loaded:
                self.absent[seam.name] = str(reason)
            return False
        hook = self.hooks.setdefault(seam.name, Hook(seam.name, seam.role))
        wrapper = seam.wrap(original, hook)
        setattr(owner, seam.attribute, wrapper)
        self.installed[seam.name] = Installed(seam, owner, original, wrapper)
        self.absent.pop(seam.name, None)
        return True

    def uninstall(self, name: str) -> None:
        """Put back what stood there.

        Where somebody else has wrapped over us the wrapper stays: taking it out would drop theirs. It passes through
        for every object without an observer.
        """
        entry = self.installed.get(name)
        if entry is None:
            return
        if entry.owner.__dict__.get(entry.seam.attribute) is entry.wrapper:
            setattr(entry.owner, entry.seam.attribute, entry.original)
            del self.installed[name]
        else:
            self.absent[name] = "wrapped over by another tool; it stays in place and passes through"

    def uninstall_all(self) -> None:
        """Leave vLLM as it was found."""
        for name in list(self.installed):
            self.uninstall(name)
