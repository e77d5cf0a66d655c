"""The public extension API. What stands in ``__all__`` is kept compatible; nothing else of kvscope is.

An extension is a module named in ``kv_output.extensions``. It is imported in the front end, in EngineCore and in every
worker, and registers what it has as it is imported:

    from kvscope.monitor import GuardViolationEvent, subscribe_guard_events

    def tell(event: GuardViolationEvent) -> None:
        print(event.reason, event.request_ids, event.block_id)

    handle = subscribe_guard_events(tell)

Everything here may be called at any time, in any thread, whether or not kvscope is switched on.
"""

from __future__ import annotations

from collections.abc import Callable

from .sinks.subscribers import SUBSCRIBERS, GuardViolationEvent, Subscription

__all__ = ["GuardViolationEvent", "Subscription", "subscribe_guard_events"]


def subscribe_guard_events(callback: Callable[[GuardViolationEvent], object]) -> Subscription:
    """Have ``callback`` called with every finding of this process from now on, in a thread of its own.

    A finding is told where it is found: in EngineCore what concerns the allocator and the scheduler's declarations, in
    a worker what concerns its input and what is handed to attention; an engine within one process finds everything
    there. The front end of an engine that has processes of its own finds nothing. Register in an extension
    (``kv_output.extensions``) to be everywhere. Every finding is told, those that the trace only counts included.

    The call comes after the fact, while the engine goes on. Calls of one callback follow each other in the order of the
    findings. A callback that raises, or that takes longer than 5 seconds, has a fault for it (for every 5 seconds of
    them), and is removed after 16 faults; up to 1024 findings wait for it, and what comes on top is dropped and
    counted. Only time in Python code that never lets go of the interpreter is shared with inference.

    Returns:
        The subscription: ``close()`` ends it and may be called twice; ``faults``, ``dropped``, ``delivered`` and
        ``active`` say how it fares. It does not survive a fork: the child has to subscribe anew, and an extension does
        so, because it is imported anew there.

    Raises:
        TypeError: ``callback`` cannot be called, or is a coroutine function.
    """
    return SUBSCRIBERS.subscribe(callback)
