"""Reads what a step gave back. Source: ``vllm/v1/outputs.py``, ``ModelRunnerOutput`` (0.32)."""

from __future__ import annotations

from typing import Any

from ..facts.requests import Declaration, StepResult
from .connector import read_connector_result, read_taken_up, says_something
from .scheduler import DECLARATION, declaration_of

TRACE = "_kvscope_trace"
"""Attribute of a ModelRunnerOutput: the trace id of the step in which it was made. It travels back to EngineCore."""
DUE = "_kvscope_due"
"""Attribute by which an asynchronous result carries who is to be told when it is taken."""


_INNER = ("model_runner_output", "_model_runner_output")
"""Where an asynchronous output has the result that its ``get_output`` will return: V2 ``AsyncOutput`` and
``AsyncPoolingOutput``, V1 ``AsyncGPUModelRunnerOutput`` and ``AsyncGPUPoolingModelRunnerOutput``.
"""


def read_result(output: Any, declaration: Declaration | None = None) -> StepResult | None:
    """Request ids and sampled counts of a result, None where it carries no requests.

    An asynchronous output has its ids at once and its tokens only after a copy; ``get_output`` may be called once, so
    it is left to the host. With the ``declaration`` of the step for which it is given a result is looked at in full.
    """
    request_ids = getattr(output, "req_ids", None)
    if request_ids is None:
        request_ids = getattr(_carrier(output), "req_ids", None)
        if request_ids is None:
            return None
        return StepResult(request_ids=tuple(request_ids), sampled_tokens=(None,) * len(request_ids))
    sampled, number = output.sampled_token_ids, len(request_ids)
    counts: tuple[int | None, ...]
    if not sampled:  # pooling, or nothing to sample in this step: the host reads it so
        counts = (None,) * number
    elif len(sampled) == number:
        counts = tuple(map(len, sampled))
    else:
        counts = (*map(len, sampled[:number]), *(None,) * (number - len(sampled)))
    if declaration is None:
        return StepResult(request_ids=tuple(request_ids), sampled_tokens=counts)
    trace_id, loads = getattr(output, TRACE, ""), output.kv_connector_output
    mapped, pooled = output.req_id_to_index, output.pooler_output
    in_order = len(mapped) == number and list(map(mapped.get, request_ids)) == list(range(number))
    are_whole = (not sampled or len(sampled) == number) and (not pooled or len(pooled) == number)
    return StepResult(
        request_ids=tuple(request_ids),
        sampled_tokens=counts,
        trace_id=trace_id if trace_id != declaration.trace_id and number else None,
        rows=None if in_order else dict(mapped),
        lengths=None if are_whole else _lengths(sampled, pooled),
        load_failed=bool(loads is not None and (loads.invalid_block_ids or loads.failed_recving)),
    )


def mark(output: Any, trace_id: str) -> None:
    """Say in a worker's result in which step it was made. One without requests may be an object that all empty results
    share (``EMPTY_MODEL_RUNNER_OUTPUT``), and is left alone.
    """
    if not hasattr(output, "req_ids"):
        output = _carrier(output)
    if getattr(output, "req_ids", None):
        setattr(output, TRACE, trace_id)


def _carrier(output: Any) -> Any:
    """The result inside an asynchronous output, None if it is none."""
    return next((inner for name in _INNER if (inner := getattr(output, name, None)) is not None), None)


def _lengths(sampled: Any, pooled: Any) -> dict[str, int]:
    lists = {"sampled_token_ids": sampled, "pooler_output": pooled}
    return {name: len(entries) for name, entries in lists.items() if entries}


def after_output(due: Any, output: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Somebody has waited for an asynchronous result: what its step handed to attention is judged before it goes on."""
    due.settle()


def before_update(observer: Any, scheduler: Any, args: Any, kwargs: Any) -> None:
    scheduler_output = args[0] if args else kwargs["scheduler_output"]
    output = args[1] if len(args) > 1 else kwargs["model_runner_output"]
    declaration = getattr(scheduler_output, DECLARATION, None)
    if not isinstance(declaration, Declaration):
        declaration = None
    transfers = getattr(output, "kv_connector_output", None)
    try:
        if transfers is not None and says_something(transfers):
            observer.on_connector_result(declaration, read_connector_result(scheduler, transfers))
    finally:  # a step of whose result nobody hears would pass for one that failed
        observer.on_update(declaration, read_result(output, declaration))


def after_update(observer: Any, scheduler: Any, args: Any, kwargs: Any, result: Any) -> None:
    output = args[1] if len(args) > 1 else kwargs["model_runner_output"]
    if getattr(output, "kv_connector_output", None) is not None and (failed := observer.failed_loads):
        scheduler_output = args[0] if args else kwargs["scheduler_output"]
        observer.on_taken_up(declaration_of(scheduler_output), read_taken_up(scheduler, failed))
    observer.on_updated()


def settle_update(observer: Any, outputs: Any) -> None:
    """Even if the hook is off: requests that were ended before it was have nobody else to answer for them."""
    if observer.answers is not None:
        observer.answers(outputs)
