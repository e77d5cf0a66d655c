"""Reads what a step gave back. Source: ``vllm/v1/outputs.py``, ``ModelRunnerOutput`` (0.32)."""

from __future__ import annotations

from typing import Any

from ..facts.requests import StepResult
from .connector import read_connector_result, read_taken_up, says_something
from .scheduler import declaration_of

DUE = "_kvscope_due"
"""Attribute by which an asynchronous result carries who is to be told when it is taken."""


def read_result(output: Any) -> StepResult | None:
    """Request ids and sampled counts of a result, None where it carries no requests.

    An asynchronous output (V1 ``AsyncGPUModelRunnerOutput``, V2 ``AsyncOutput``) has its ids at once and its tokens
    only after a copy; ``get_output`` may be called once, so it is left to the host.
    """
    request_ids = getattr(output, "req_ids", None)
    if request_ids is not None:
        sampled = output.sampled_token_ids
        if sampled:
            return StepResult(request_ids=tuple(request_ids), sampled_tokens=tuple(map(len, sampled)))
    else:
        for name in ("model_runner_output", "_model_runner_output"):
            request_ids = getattr(getattr(output, name, None), "req_ids", request_ids)
        if request_ids is None:
            return None
    return StepResult(request_ids=tuple(request_ids), sampled_tokens=(None,) * len(request_ids))


def after_output(due: Any, output: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Somebody has waited for an asynchronous result: what its step handed to attention is judged before it goes on."""
    due.settle()


def before_update(observer: Any, scheduler: Any, args: Any, kwargs: Any) -> None:
    scheduler_output = args[0] if args else kwargs["scheduler_output"]
    output = args[1] if len(args) > 1 else kwargs["model_runner_output"]
    declaration = declaration_of(scheduler_output)
    transfers = getattr(output, "kv_connector_output", None)
    if transfers is not None and says_something(transfers):
        observer.on_connector_result(declaration, read_connector_result(scheduler, transfers))
    observer.on_update(declaration, read_result(output))


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
