"""The public extension API. What stands in ``__all__`` is kept compatible; nothing else of kvscope is.

An extension is a module named in ``kv_output.extensions``. It is imported in the front end, in EngineCore and in every
worker, and registers what it has as it is imported: callbacks for findings, and metrics of its own.

    from kvscope.monitor import GuardViolationEvent, subscribe_guard_events

    def tell(event: GuardViolationEvent) -> None:
        print(event.reason, event.request_ids, event.block_id)

    handle = subscribe_guard_events(tell)

Everything here may be called at any time, in any thread, whether or not kvscope is switched on.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import wraps
from typing import Protocol, cast

from .errors import RegistrationError
from .metrics.collectors import COLLECTORS, CollectorContext, CollectorProcess
from .metrics.metric import Kind
from .metrics.readout import Readout
from .sinks.subscribers import SUBSCRIBERS, GuardViolationEvent, Subscription

__all__ = [
    "CollectorContext",
    "GuardViolationEvent",
    "Readout",
    "RegisteredCollector",
    "RegistrationError",
    "Subscription",
    "register_collector",
    "subscribe_guard_events",
]


class RegisteredCollector(Protocol):
    """What ``register_collector`` makes of a function: the function, with a way to end the registration."""

    def __call__(self, ctx: CollectorContext, /) -> float: ...

    def close(self) -> None:
        """Let it be called no more, and its series end. A second call does nothing."""


def register_collector(
    *, name: str, metric_type: Kind, process: CollectorProcess = "exporter"
) -> Callable[[Callable[[CollectorContext], float]], RegisteredCollector]:
    """Have a function's value exported as a metric beside kvscope's own, as long as ``kv_monitor`` is on:

        @register_collector(name="vllm_ascend_my_metric", metric_type="gauge", process="exporter")
        def my_metric(ctx: CollectorContext) -> float:
            return ctx.metrics.total("kv_blocks", state="used") or 0.0

    It is called once in every ``kv_monitor.scrape_interval``, in a thread of its own, and its series has the label
    ``engine`` and no other. Register in an extension (``kv_output.extensions``) to be in every process.

    Args:
        name: the whole name; it begins with the configured ``kv_monitor.prefix`` (before any is known, with its
            default). Of a counter ``_total`` is appended where it is missing, as Prometheus has it. The first paragraph
            of the function's docstring is the help text.
        metric_type: ``gauge``: the value as it is now; NaN says that there is none. ``counter``: a total, which never
            goes down as long as the process lives. ``histogram``: one sample of each interval, in fixed buckets
            whose upper bounds are the powers of ten from 0.001 to 100000.
        process: where it is called. ``exporter``: in the process that exports the run, once for each engine of it; that
            is the front end, or EngineCore where there is no front end on the host, and never an exporter that was
            started by hand (``kvscope exporter``). ``engine``: in EngineCore; the value travels in the process' metrics
            file, and outlives it. ``worker``: so in every worker; of an engine's workers counters and histograms are
            added, and of gauges the largest counts.

    Returns:
        A decorator. It returns the function with a ``close()``, which may be called twice; what is no plain function,
        or has a ``close`` already, is wrapped in one. A registration does not survive a fork: the child has to register
        anew, and an extension does so, because it is imported anew there.

    A collector that raises, returns what it must not, or takes longer than 5 seconds has a fault for it (for every 5
    seconds of them), and is removed after 16 faults: ``hook_faults_total{hook="collectors"}`` counts them. Meanwhile a
    gauge that has failed has no value, totals stand still, and everybody else's metrics go on. Only time in Python code
    that never lets go of the interpreter is shared with inference.

    Raises:
        RegistrationError: (a ValueError) the name has not the configured prefix, cannot be a metric's, is one of
            kvscope's own or registered already; or type or process is none of the above.
        TypeError: from the decorator: what it is given cannot be called, or is a coroutine function.
    """
    COLLECTORS.require(name, metric_type, process)

    def register(function: Callable[[CollectorContext], float]) -> RegisteredCollector:
        collector = COLLECTORS.register(function, name=name, kind=metric_type, process=process)
        if isinstance(function, types.FunctionType) and not hasattr(function, "close"):
            registered = function
        else:

            @wraps(function)
            def registered(ctx: CollectorContext, /) -> float:
                return function(ctx)

        registered.close = collector.close  # type: ignore[attr-defined]  # what makes the function a RegisteredCollector
        return cast("RegisteredCollector", registered)

    return register


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
