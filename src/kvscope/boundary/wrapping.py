"""The shapes a wrapper can have. Plain closures: a call that is passed through costs one attribute lookup."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .ledger import OBSERVER, Hook, Original, Wrap

Before = Callable[..., None]
After = Callable[..., None]


def _nothing(*_: object) -> None:
    """No action on this side of the call."""


def around(
    *, before: Before = _nothing, after: After = _nothing, settle: Before = _nothing, fails: bool = True
) -> Wrap:
    """Wrap a method of an observed object.

    ``before(observer, self, args, kwargs)`` runs ahead of the host, ``after(observer, self, args, kwargs, result)``
    behind it, ``settle(observer, result)`` last and even if the hook is off (it must not fail). ``fails=False`` leaves
    native exceptions alone, where a caller up the stack sees them too.
    """

    def wrap(original: Original, hook: Hook) -> Original:
        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            observer = getattr(self, OBSERVER, None)
            if observer is None:
                return original(self, *args, **kwargs)
            if before is not _nothing:
                hook.run(before, observer, self, args, kwargs)
            try:
                result = original(self, *args, **kwargs)
            except BaseException as error:
                if fails:
                    hook.native_error(observer, error)
                raise
            if after is not _nothing:
                hook.run(after, observer, self, args, kwargs, result)
            if settle is not _nothing:
                settle(observer, result)
            return result

        return wrapper

    return wrap


def creation(*, before: Callable[..., None] = _nothing, after: Callable[..., None] = _nothing) -> Wrap:
    """Wrap a constructor or a factory, which runs before there is an observer.

    ``before(self, args, kwargs)`` and ``after(self, args, kwargs, result)``.
    """

    def wrap(original: Original, hook: Hook) -> Original:
        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if before is not _nothing:
                hook.run(before, self, args, kwargs)
            result = original(self, *args, **kwargs)
            if after is not _nothing:
                hook.run(after, self, args, kwargs, result)
            return result

        return wrapper

    return wrap
