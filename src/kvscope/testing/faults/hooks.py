"""Wrapping and unwrapping of the host's functions, and the order in which wrappers of others may come and go."""

import functools
from collections.abc import Callable
from typing import Any

Around = Callable[..., Any]
"""Called as `around(original, *args, **kwargs)` in place of the original function."""


class Hook:
    """One wrapped function of a class, or of a module that has imported it.

    Removing puts the very object back that was found. Where somebody else has wrapped on top in the meantime, the
    wrapper stays below as a call to the original, because taking it out would take the other one out as well.
    """

    def __init__(self, owner: Any, name: str, around: Around) -> None:
        found = owner.__dict__.get(name)
        if not callable(found):
            where = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
            raise LookupError(f"this host has no {where}.{name}")
        self._owner, self._name, self._original = owner, name, found
        self._around: Around | None = around

        @functools.wraps(found)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            around = self._around
            return found(*args, **kwargs) if around is None else around(found, *args, **kwargs)

        self._wrapper = wrapper
        setattr(owner, name, wrapper)

    def remove(self) -> None:
        self._around = None
        if self._owner.__dict__.get(self._name) is self._wrapper:
            setattr(self._owner, self._name, self._original)


class Undo:
    """What has to be put back when the corrupted step is over, newest first.

    On a CPU the V1 runner's "device" tables are its host tables (`cpu_model_runner.py`, `_postprocess_tensors`), so a
    corrupted entry would outlive its step and a one-step fault become another fault.
    """

    def __init__(self) -> None:
        self._actions: list[Callable[[], None]] = []

    def later(self, action: Callable[[], None]) -> None:
        self._actions.append(action)

    def value(self, tensor: Any, index: Any) -> None:
        """Remember what stands in a tensor or an array at an index."""
        held = tensor[index]
        held = held.clone() if hasattr(held, "clone") else held
        self.later(lambda: tensor.__setitem__(index, held))

    def run(self) -> None:
        while self._actions:
            self._actions.pop()()
