"""L: what the scheduler declared is what the worker was told, and what the runner put into its batch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..facts.requests import BlockIds, BlockWork, Declaration, Drafts, StepRequests
from ..state.bindings import Bindings
from . import rule as r
from .finding import Finding
from .past import some_of
from .rule import rule


class HandoverView(msgspec.Struct, frozen=True, kw_only=True):
    """A SchedulerOutput as a worker received it, beside the declaration attached to it.

    ``declaration`` is None where nothing was attached. ``batch`` is None at the worker's door and holds the request
    ids of the batch once the runner has built it. ``drafts`` are as received, None where they are as declared.
    ``previous_step`` is the step whose message came before, None where that is the one before or is not known.
    ``work`` is None but for blocks that were cleared or copied, which ``bindings`` say whose they are.
    """

    step: int
    trace_id: str
    declaration: Declaration | None
    received: StepRequests
    batch: list[str] | None = None
    drafts: Drafts | None = None
    previous_step: int | None = None
    work: BlockWork | None = None
    bindings: Bindings | None = None


def _finding(view: HandoverView, request_id: str | None, expected: str, actual: str) -> Finding:
    return Finding(
        reason="",
        step=view.step,
        trace_id=view.trace_id,
        request_id=request_id,
        expected=expected,
        actual=actual,
    )


@rule(
    check="L",
    severity="error",
    rank=r.OTHER,
    title="a step reached the worker without its declaration",
    fires="A SchedulerOutput came through the executor's RPC without what the scheduler attached to it.",
    silent="Warm-up, profiling and dummy runs, which the worker makes itself; steps that the scheduler's hook missed.",
    sources=(r.RECEIVED, "the declarations of earlier steps"),
    proves_not="That the step itself is wrong; it cannot be judged.",
)
def handover_missing(view: HandoverView) -> Iterator[Finding]:
    if view.declaration is None:
        yield _finding(view, None, "a declaration", "none")


@rule(
    check="L",
    severity="error",
    rank=r.TARGET,
    title="the worker was told of other requests than declared",
    fires="Scheduled, new, resumed, finished or preempted requests, their token counts, or the requests in the "
    "runner's batch differ from the declaration.",
    silent="The order of the batch, which the runner chooses; block lists (handover_delta_mismatch).",
    sources=(
        "the SchedulerOutput that the worker received, or the batch that its runner built",
        "the scheduler's declaration",
    ),
    proves_not="Where between scheduler and worker the message changed.",
)
def handover_request_mismatch(view: HandoverView) -> Iterator[Finding]:
    if view.declaration is None or view.work is not None:
        return
    declared = view.declaration.requests
    if view.batch is not None:
        yield from _batch_mismatch(view, declared, view.batch)
        return
    received = view.received
    tokens = _changed(declared.scheduled, received.scheduled)
    computed = _changed(_computed(declared), _computed(received))
    roles = {
        request_id: (str(sorted(_roles(declared, request_id))), str(sorted(_roles(received, request_id))))
        for request_id in sorted(_everyone(declared) | _everyone(received))
        if _roles(declared, request_id) != _roles(received, request_id)
    }
    for request_id in sorted({*tokens, *computed, *roles}):
        what, (expected, actual) = next(
            (name, table[request_id])
            for name, table in (("role", roles), ("scheduled tokens", tokens), ("computed tokens", computed))
            if request_id in table
        )
        yield _finding(view, request_id, f"{what} {expected}", f"{what} {actual}")


def _batch_mismatch(view: HandoverView, declared: StepRequests, batch: list[str]) -> Iterator[Finding]:
    for request_id in sorted(declared.scheduled.keys() - set(batch)):
        yield _finding(view, request_id, "in the batch", "absent")
    for request_id in sorted(set(batch) - declared.scheduled.keys()):
        yield _finding(view, request_id, "not scheduled", "in the batch")


@rule(
    check="L",
    severity="error",
    rank=r.SHORT,
    title="the worker was given other blocks than declared",
    fires="The block ids that a request was given in this step differ between declaration and SchedulerOutput; or the "
    "worker clears or copies other blocks than were declared, or none.",
    silent="Requests that are missing altogether (handover_request_mismatch); the order in which blocks are cleared, "
    "and how often.",
    sources=(r.RECEIVED + ", or the blocks that it passed on to be cleared or copied", "the scheduler's declaration"),
    proves_not="Where between scheduler and worker the message changed.",
)
def handover_delta_mismatch(view: HandoverView) -> Iterator[Finding]:
    if view.declaration is None or view.batch is not None:
        return
    if view.work is not None:
        yield from _work_mismatch(view, view.work)
        return
    declared, received = _blocks(view.declaration.requests), _blocks(view.received)
    for request_id in sorted(declared.keys() & received.keys()):
        mine, theirs = declared[request_id], received[request_id]
        if mine == theirs:
            continue
        finding = _finding(view, request_id, _counts(mine), _counts(theirs))
        for group_id, expected in enumerate(mine or ()):
            actual = theirs[group_id] if theirs is not None and group_id < len(theirs) else []
            if expected != actual:
                finding.group_id = group_id
                finding.block_id = next((b for b in expected if b not in actual), None)
                break
        yield finding


@rule(
    check="L",
    severity="error",
    rank=r.LENGTH,
    title="the worker was given other draft tokens than declared",
    fires="How many draft tokens a request was given, or how many of them are invalid, differs between declaration and "
    "SchedulerOutput.",
    silent="Which tokens they are; drafts that the worker itself makes up, or leaves out, after it was told.",
    sources=(r.RECEIVED, "the scheduler's declaration"),
    proves_not="Where between scheduler and worker the message changed.",
)
def handover_spec_mismatch(view: HandoverView) -> Iterator[Finding]:
    if view.declaration is None or view.drafts is None:
        return
    declared, received = view.declaration, view.drafts
    invalid = _changed(declared.invalid_spec_tokens, received.invalid_spec_tokens)
    for what, changed in (
        ("draft tokens", _changed(declared.spec_tokens, received.spec_tokens)),
        ("invalid draft tokens", invalid),
    ):
        for request_id in sorted(changed):
            expected, actual = changed[request_id]
            yield _finding(view, request_id, f"{what} {expected}", f"{what} {actual}")


@rule(
    check="L",
    severity="error",
    rank=r.OTHER,
    title="a step reached the worker out of turn",
    fires="The number of the step that arrived is not the one after the highest that had arrived: a step is missing, "
    "comes late, or comes twice.",
    silent="The first step that a worker sees; the one after a step that was not observed or came without declaration.",
    sources=("the step number on the SchedulerOutput that arrived", "the step numbers that had arrived before"),
    proves_not="That the steps before were lost: they may still come.",
)
def handover_out_of_order(view: HandoverView) -> Iterator[Finding]:
    if view.previous_step is not None:
        yield _finding(view, None, f"step {view.previous_step + 1}", f"step {view.step}")


def _work_mismatch(view: HandoverView, work: BlockWork) -> Iterator[Finding]:
    told: dict[int | tuple[int, int], None] = dict.fromkeys(work.declared or ())
    done: dict[int | tuple[int, int], None] = dict.fromkeys(work.cleared or work.copied or ())
    verb = "copied" if work.cleared is None else "cleared"
    for each, more in some_of([each for each in told if each not in done]):
        yield _worked(view, each, verb, f"not {verb}", more)
    for each, more in some_of([each for each in done if each not in told]):
        yield _worked(view, each, f"not {verb}", verb, more)


def _worked(view: HandoverView, each: int | tuple[int, int], expected: str, actual: str, more: str) -> Finding:
    """A copy is told by its destination, whose contents it changes."""
    source, block = each if isinstance(each, tuple) else (None, each)
    finding = _finding(view, None, expected, actual + ("" if source is None else f" from block {source}") + more)
    finding.block_id = block
    groups = view.bindings.topology.groups if view.bindings is not None else ()
    for index, group in enumerate(groups):
        holder = view.bindings.a_holder(index, block) if view.bindings is not None else None
        if holder is not None:
            finding.request_id, finding.group_id = holder, group.group_id
            break
    return finding


def _counts(blocks: BlockIds | None) -> str:
    if blocks is None:
        return "no blocks"
    return "blocks a group: " + " ".join(str(len(group)) for group in blocks)


def _blocks(requests: StepRequests) -> dict[str, BlockIds | None]:
    return {
        **dict(zip(requests.cached_ids, requests.cached_blocks, strict=True)),
        **dict(zip(requests.new_ids, requests.new_blocks, strict=True)),
    }


def _computed(requests: StepRequests) -> dict[str, int]:
    return {
        **dict(zip(requests.cached_ids, requests.cached_computed, strict=True)),
        **dict(zip(requests.new_ids, requests.new_computed, strict=True)),
    }


def _everyone(requests: StepRequests) -> set[str]:
    return {*requests.new_ids, *requests.cached_ids, *requests.finished, *requests.preempted, *requests.scheduled}


def _roles(requests: StepRequests, request_id: str) -> set[str]:
    members = {
        "new": requests.new_ids,
        "cached": requests.cached_ids,
        "resumed": requests.resumed,
        "finished": requests.finished,
        "preempted": requests.preempted,
        "scheduled": requests.scheduled,
    }
    return {role for role, ids in members.items() if request_id in ids}


def _changed(declared: dict[str, int], received: dict[str, int]) -> dict[str, tuple[str, str]]:
    return {
        request_id: (str(declared.get(request_id)), str(received.get(request_id)))
        for request_id in declared.keys() | received.keys()
        if declared.get(request_id) != received.get(request_id)
    }


HANDOVER_RULES = (
    handover_missing,
    handover_out_of_order,
    handover_request_mismatch,
    handover_spec_mismatch,
    handover_delta_mismatch,
)
