"""The shapes a wrapper can have. Plain closures: a call that is passed through costs one attribute lookup."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from .ledger import OBSERVER, Hook, Original, Wrap

Before = Callable[..., None]
After = Callable[..., None]


def around(
    *, before: Before | None = None, after: After | None = None, settle: Before | None = None, carrier: str = OBSERVER
) -> Wrap:
    """Wrap a method of an observed object, which has its observer in the attribute ``carrier``.

    ``before(observer, self, args, kwargs)`` runs ahead of the host, ``after(observer, self, args, kwargs, result)``
    behind it, ``settle(observer, result)`` last and even if the hook is off (it must not fail). This runs several times
    a step: no call is made that can be spared.
    """

    def wrap(original: Original, hook: Hook) -> Original:
        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            observer = getattr(self, carrier, None)
            if observer is None:
                return original(self, *args, **kwargs)
            if before is not None and not hook.disabled:
                start = perf_counter_ns()
                try:
                    before(observer, self, args, kwargs)
                except Exception as error:  # noqa: BLE001 - fenced: Hook.caught raises only what is meant to reach vLLM
                    hook.caught(error)
                hook.calls += 1
                hook.time_ns += perf_counter_ns() - start
            try:
                result = original(self, *args, **kwargs)
            except BaseException as error:
                hook.native_error(observer, error)
                raise
            if after is not None and not hook.disabled:
                start = perf_counter_ns()
                try:
                    after(observer, self, args, kwargs, result)
                except Exception as error:  # noqa: BLE001 - fenced: Hook.caught raises only what is meant to reach vLLM
                    hook.caught(error)
                hook.calls += 1
                hook.time_ns += perf_counter_ns() - start
            if settle is not None:
                settle(observer, result)
            return result

        return wrapper

    return wrap


def scoped(
    enter: Callable[..., Any],
    leave: Callable[[Any, Any], None],
    *,
    carrier: str,
) -> Wrap:
    """Wrap a method that others are called from, so that they know on whose behalf.

    ``enter(reader, self, args, kwargs)`` runs ahead of the host, and ``leave(reader, what enter returned)`` when it is
    through, by whichever way; not if ``enter`` failed. ``carrier`` is the attribute by which the host object has its
    reader. The two set a few words, and are not timed.
    """

    def wrap(original: Original, hook: Hook) -> Original:
        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            reader = getattr(self, carrier, None)
            if reader is None or hook.disabled:
                return original(self, *args, **kwargs)
            hook.calls += 1
            entered, is_inside = None, False
            try:
                entered, is_inside = enter(reader, self, args, kwargs), True
            except Exception as error:  # noqa: BLE001 - fenced: Hook.caught raises only what is meant to reach vLLM
                hook.caught(error)
            try:
                return original(self, *args, **kwargs)
            except BaseException as error:
                hook.native_error(reader, error)
                raise
            finally:
                if is_inside:
                    try:
                        leave(reader, entered)
                    except Exception as error:  # noqa: BLE001 - fenced, as above
                        hook.caught(error)

        return wrapper

    return wrap


def listing(after: After, *, carrier: str) -> Wrap:
    """Wrap a method whose first argument may be an iterator that can be gone through only once: it gets a list.

    ``after(reader, self, items, kwargs)`` runs behind the host with that list.
    """

    def wrap(original: Original, hook: Hook) -> Original:
        name = next(iter(list(inspect.signature(original).parameters)[1:]), "")

        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            reader = getattr(self, carrier, None)
            if reader is None or hook.disabled or not (args or name in kwargs):
                return original(self, *args, **kwargs)
            items = list(args[0] if args else kwargs.pop(name))
            try:
                result = original(self, items, *args[1:], **kwargs)
            except BaseException as error:
                hook.native_error(reader, error)
                raise
            hook.run(after, reader, self, items, kwargs)
            return result

        return wrapper

    return wrap


def function(after: Callable[..., None]) -> Wrap:
    """Wrap a function of a module, which has no ``self`` to find an observer by: ``after(args, kwargs)`` does."""

    def wrap(original: Original, hook: Hook) -> Original:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            hook.run(after, args, kwargs)
            return result

        return wrapper

    return wrap


def creation(*, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None) -> Wrap:
    """Wrap a constructor or a factory, which runs before there is an observer.

    ``before(self, args, kwargs)`` and ``after(self, args, kwargs, result)``.
    """

    def wrap(original: Original, hook: Hook) -> Original:
        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if before is not None:
                hook.run(before, self, args, kwargs)
            result = original(self, *args, **kwargs)
            if after is not None:
                hook.run(after, self, args, kwargs, result)
            return result

        return wrapper

    return wrap
