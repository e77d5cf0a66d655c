"""A worker's door: the SchedulerOutput as it arrives, what goes back, and the end of the process.

Source: ``WorkerWrapperBase.execute_model`` is what the executor's RPC calls on every rank
(``vllm/v1/worker/worker_base.py``); warm-up and profiling call the runner directly and never pass here.
"""

from __future__ import annotations

from typing import Any

from ..facts.requests import Declaration
from .context_parallel import read_local_lengths
from .results import DUE, mark, read_result
from .scheduler import DECLARATION, arrived_as_declared, drafts_otherwise, received_requests


def before_execute(observer: Any, wrapper: Any, args: Any, kwargs: Any) -> None:
    scheduler_output = args[0] if args else kwargs["scheduler_output"]
    declaration = getattr(scheduler_output, DECLARATION, None)
    if isinstance(declaration, Declaration):
        as_declared = arrived_as_declared(scheduler_output, declaration.requests)
        received = declaration.requests if as_declared else received_requests(scheduler_output)
        has_drafts = scheduler_output.scheduled_spec_decode_tokens or scheduler_output.num_invalid_spec_tokens
        drafts = None
        if has_drafts or declaration.spec_tokens or declaration.invalid_spec_tokens:
            drafts = drafts_otherwise(scheduler_output, declaration)
        observer.on_input(declaration, received, drafts)
        return
    received = received_requests(scheduler_output)
    if declaration is None:
        observer.on_input_without_declaration(received)
    else:
        observer.on_input_unobserved(received)


def after_execute(observer: Any, wrapper: Any, args: Any, kwargs: Any, result: Any) -> None:
    try:
        if observer.reads_local_lengths:
            observer.on_local_lengths(read_local_lengths(wrapper.worker.model_runner))
    finally:
        observer.on_launched()
    if result is not None:
        after_sample(observer, wrapper, args, kwargs, result)


def after_sample(observer: Any, worker: Any, args: Any, kwargs: Any, result: Any) -> None:
    """A step's result leaves the worker: that of sampling, or of the forward where there is nothing to sample."""
    if result is None:
        return
    trace_id = observer.due_result
    if trace_id is not None:
        mark(result, trace_id)
    observer.on_result(read_result(result))
    if observer.reads_host_tensors:
        return
    if getattr(result, "req_ids", None):
        observer.settle()  # the host has waited for the device itself
    elif hasattr(result, "get_output"):
        setattr(result, DUE, observer.due())


def before_shutdown(observer: Any, host: Any, args: Any, kwargs: Any) -> None:
    observer.on_shutdown()
