"""A host of a few lines, in a module of its own, and observers that remember what they were told."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from kvscope.boundary.ledger import OBSERVER, Hook, Seam
from kvscope.boundary.wrapping import Wrap

MODULE = "a_host_of_a_few_lines"


class HostError(Exception):
    """The host's own."""


def make_host(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """A fresh class ``Engine`` in ``sys.modules``, and a subclass that has nothing of its own."""

    class Engine:
        size = 3

        def __init__(self, config: object = None) -> None:
            self.config = config

        def step(self, tokens: int, *, budget: int = 7) -> tuple[int, int]:
            """Run one step."""
            if tokens < 0:
                raise HostError("negative")
            return tokens, budget

    class Child(Engine):
        pass

    Engine.__module__ = Child.__module__ = MODULE
    module = types.ModuleType(MODULE)
    module.Engine, module.Child, module.NOT_A_CLASS = Engine, Child, 3  # type: ignore[attr-defined]  # made right here
    monkeypatch.setitem(sys.modules, MODULE, module)
    return Engine


def seam(wrap: Wrap, target: str = "Engine.step", *, module: str = MODULE, name: str = "a seam", **more: Any) -> Seam:
    return Seam(name, f"{module}:{target}", "engine", wrap, fact="a fact", lost="a check", **more)


class Told:
    """An observer that notes every call as ``(name, arguments)``."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._answers and not callable(self._answers[name]):
            return self._answers[name]

        def note(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            answer = self._answers.get(name)
            return answer(*arguments) if answer is not None else None

        return note

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def observed(host: Any, observer: Any) -> Any:
    setattr(host, OBSERVER, observer)
    return host


def hook() -> Hook:
    return Hook("a hook")
