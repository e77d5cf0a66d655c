"""Reads a SchedulerOutput into facts, on the side that made it and on the side that received it.

Source: ``vllm/v1/core/sched/output.py`` and ``vllm/v1/core/sched/scheduler.py`` (0.32).
"""

from __future__ import annotations

from typing import Any

from ..facts.requests import Declaration, Drafts, StepRequests

DECLARATION = "_kvscope_declaration"
"""Attribute of a SchedulerOutput; plain attributes survive the trip to the workers."""

UNOBSERVED = "unobserved"
"""Stands in the attribute when the scheduler's hook missed this step, so that the worker does not call it lost."""


def received_requests(scheduler_output: Any) -> StepRequests:
    """The request side of a SchedulerOutput, aliasing the host's own lists: compare at once, keep nothing."""
    new = scheduler_output.scheduled_new_reqs
    cached = scheduler_output.scheduled_cached_reqs
    return StepRequests(
        new_ids=[request.req_id for request in new],
        new_blocks=[request.block_ids for request in new],
        new_computed=[request.num_computed_tokens for request in new],
        cached_ids=cached.req_ids,
        cached_blocks=cached.new_block_ids,
        cached_computed=cached.num_computed_tokens,
        resumed=cached.resumed_req_ids,
        scheduled=scheduler_output.num_scheduled_tokens,
        finished=scheduler_output.finished_req_ids,
        preempted=scheduler_output.preempted_req_ids or set(),
    )


def arrived_as_declared(scheduler_output: Any, declared: StepRequests) -> bool:
    """Whether ``received_requests(scheduler_output) == declared``, at the price of the comparison alone."""
    cached = scheduler_output.scheduled_cached_reqs
    new = scheduler_output.scheduled_new_reqs
    return (
        (_new_as_declared(new, declared) if new else not declared.new_ids)
        and scheduler_output.num_scheduled_tokens == declared.scheduled
        and cached.req_ids == declared.cached_ids
        and cached.num_computed_tokens == declared.cached_computed
        and cached.new_block_ids == declared.cached_blocks
        and cached.resumed_req_ids == declared.resumed
        and scheduler_output.finished_req_ids == declared.finished
        and (scheduler_output.preempted_req_ids or set()) == declared.preempted
    )


def _new_as_declared(new: Any, declared: StepRequests) -> bool:
    return (
        [request.req_id for request in new] == declared.new_ids
        and [request.block_ids for request in new] == declared.new_blocks
        and [request.num_computed_tokens for request in new] == declared.new_computed
    )


def drafts_otherwise(scheduler_output: Any, declaration: Declaration) -> Drafts | None:
    """The draft tokens of a SchedulerOutput as it arrived, None where they are as declared. How many of them are
    invalid is filled in only where the scheduler has the output back from the worker
    (``update_draft_token_ids_in_output``).
    """
    drafts, invalid = scheduler_output.scheduled_spec_decode_tokens, scheduler_output.num_invalid_spec_tokens
    received = Drafts(
        spec_tokens={request_id: len(tokens) for request_id, tokens in drafts.items()},
        invalid_spec_tokens=dict(invalid or ()),
    )
    declared = Drafts(spec_tokens=declaration.spec_tokens, invalid_spec_tokens=declaration.invalid_spec_tokens)
    return None if received == declared else received


def declared_requests(scheduler_output: Any) -> StepRequests:
    """The same as own copies, made in one go on the step path (``StepRequests.copy`` says it in two)."""
    new = scheduler_output.scheduled_new_reqs
    cached = scheduler_output.scheduled_cached_reqs
    blocks = cached.new_block_ids
    return StepRequests(
        new_ids=[request.req_id for request in new] if new else [],
        new_blocks=[tuple(map(list, request.block_ids)) for request in new] if new else [],
        new_computed=[request.num_computed_tokens for request in new] if new else [],
        cached_ids=cached.req_ids.copy(),
        cached_blocks=blocks.copy()
        if blocks.count(None) == len(blocks)
        else [None if of_one is None else tuple(map(list, of_one)) for of_one in blocks],
        cached_computed=cached.num_computed_tokens.copy(),
        resumed=set(cached.resumed_req_ids),
        scheduled=dict(scheduler_output.num_scheduled_tokens),
        finished=set(scheduler_output.finished_req_ids),
        preempted=set(scheduler_output.preempted_req_ids or ()),
    )


def declare(scheduler: Any, scheduler_output: Any, step: int, trace_id: str) -> Declaration:
    """What ``Scheduler.schedule()`` has just returned, as own copies: with scheduler and worker in one process the
    worker extends these very lists. Lengths only: no token ids are read.
    """
    # What a diffusion model is given in their place is a canvas that it rewrites: nothing is accepted or rejected.
    samples = getattr(scheduler, "num_sampled_tokens_per_step", 1)
    drafts = scheduler_output.scheduled_spec_decode_tokens if samples else None
    invalid = scheduler_output.num_invalid_spec_tokens
    copies = scheduler_output.kv_cache_block_copies
    zero = scheduler_output.new_block_ids_to_zero
    plan = scheduler_output.kv_connector_metadata
    new = scheduler_output.scheduled_new_reqs
    return Declaration(
        step=step,
        trace_id=trace_id,
        requests=declared_requests(scheduler_output),
        new_prompt_tokens=[request.prompt_len for request in new] if new else [],
        cached_output_tokens=list(scheduler_output.scheduled_cached_reqs.num_output_tokens),
        spec_tokens={request_id: len(tokens) for request_id, tokens in drafts.items()} if drafts else {},
        invalid_spec_tokens=dict(invalid) if invalid else {},
        total_num_scheduled_tokens=scheduler_output.total_num_scheduled_tokens,
        token_budget=getattr(scheduler, "max_num_scheduled_tokens", None),
        zero_blocks=list(zero) if zero else None,
        copies=[(copy.src_block_id, copy.dst_block_id) for copy in copies] if copies else None,
        connector_plan=type(plan).__name__ if plan is not None else None,
    )


def declaration_of(scheduler_output: Any) -> Declaration | None:
    """The declaration attached to a SchedulerOutput, None if there is none or it was not observed."""
    attached = getattr(scheduler_output, DECLARATION, None)
    return attached if isinstance(attached, Declaration) else None


def before_schedule(observer: Any, scheduler: Any, args: Any, kwargs: Any) -> None:
    observer.on_schedule_begin()


def after_schedule(observer: Any, scheduler: Any, args: Any, kwargs: Any, scheduler_output: Any) -> None:
    declaration = declare(scheduler, scheduler_output, *observer.next_step())
    setattr(scheduler_output, DECLARATION, declaration)
    observer.on_schedule(declaration)


def mark_unobserved(observer: Any, scheduler_output: Any) -> None:
    if not hasattr(scheduler_output, DECLARATION):
        setattr(scheduler_output, DECLARATION, UNOBSERVED)
