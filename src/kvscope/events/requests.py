"""kv.bind, and the request side of kv.boundary: facts.requests to records and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET, UnsetType

from kvscope.events.envelope import RequestId, given, or_absent
from kvscope.events.names import PLAIN, RequestNames, known
from kvscope.events.ranges import from_ranges, to_ranges
from kvscope.events.schema import BindRecord, BlockCopy, BoundaryRecord, BoundRequest
from kvscope.facts.requests import (
    CACHED,
    NEW,
    RESUMED,
    Admission,
    BlockIds,
    BlockWork,
    Declaration,
    Drafts,
    StepRequests,
    StepResult,
    Verification,
)


def bind_record(declaration: Declaration, names: RequestNames = PLAIN) -> BindRecord:
    """The kv.bind of a declaration; :func:`declaration_from` is its inverse, but for the operations of the pool: they
    have records of their own, and the kv.bind says how many.
    """
    requests = declaration.requests
    drafts = Drafts(spec_tokens=declaration.spec_tokens, invalid_spec_tokens=declaration.invalid_spec_tokens)
    listed, unlisted = _bound(requests, names, drafts, declaration)
    return BindRecord(
        trace_id=declaration.trace_id,
        step=declaration.step,
        requests=listed,
        unlisted=unlisted or UNSET,
        total_num_scheduled_tokens=declaration.total_num_scheduled_tokens,
        token_budget=or_absent(declaration.token_budget),
        finished=names.of(sorted(requests.finished)),
        preempted=names.of(sorted(requests.preempted)),
        zero_blocks=UNSET if declaration.zero_blocks is None else to_ranges(declaration.zero_blocks),
        copies=UNSET if declaration.copies is None else [BlockCopy(src=s, dst=d) for s, d in declaration.copies],
        connector_plan=or_absent(declaration.connector_plan),
        operations_before=or_absent(declaration.operations_before),
        num_operations=UNSET if declaration.operations_before is None else len(declaration.operations),
        after_unseen=declaration.after_unseen or UNSET,
    )


def declaration_from(record: BindRecord) -> Declaration:
    """The declaration that a kv.bind was made of, without the pool's operations.

    Raises:
        ValueError: the trace was written without request ids.
    """
    requests = _step_requests(record.requests, record.unlisted, record.finished, record.preempted)
    everyone = [*record.requests, *(record.unlisted or [])]
    return Declaration(
        step=given(record.step, 0),
        trace_id=given(record.trace_id, ""),
        requests=requests,
        new_prompt_tokens=[given(entry.num_prompt_tokens, 0) for entry in record.requests if entry.kind == NEW],
        cached_output_tokens=[given(entry.num_output_tokens, 0) for entry in record.requests if entry.kind != NEW],
        spec_tokens={
            known(entry.request_id): entry.spec_tokens
            for entry in everyone
            if not isinstance(entry.spec_tokens, UnsetType)
        },
        invalid_spec_tokens={
            known(entry.request_id): entry.invalid_spec_tokens
            for entry in everyone
            if not isinstance(entry.invalid_spec_tokens, UnsetType)
        },
        total_num_scheduled_tokens=record.total_num_scheduled_tokens,
        token_budget=given(record.token_budget, None),
        zero_blocks=None if isinstance(record.zero_blocks, UnsetType) else from_ranges(record.zero_blocks),
        copies=None if isinstance(record.copies, UnsetType) else [(copy.src, copy.dst) for copy in record.copies],
        connector_plan=given(record.connector_plan, None),
        operations_before=given(record.operations_before, None),
        after_unseen=given(record.after_unseen, False),
    )


def admission_record(admission: Admission, names: RequestNames = PLAIN) -> BoundaryRecord:
    return BoundaryRecord(
        kind="frontend_admit",
        client_request_id=names(admission.client_request_id),
        request_id=names(admission.request_id),
        child_index=admission.child_index,
    )


def admission_from(record: BoundaryRecord) -> Admission:
    return Admission(
        client_request_id=known(given(record.client_request_id, None)),
        request_id=known(given(record.request_id, None)),
        child_index=given(record.child_index, 0),
    )


def worker_input_record(
    received: StepRequests,
    declared: StepRequests | None,
    names: RequestNames = PLAIN,
    *,
    drafts: Drafts | None = None,
    previous_step: int | None = None,
) -> BoundaryRecord:
    """What arrived in the worker. It is spelled out only where it differs from what the scheduler declared."""
    previous = or_absent(previous_step)
    if drafts is None and (received is declared or received == declared):
        return BoundaryRecord(kind="worker_input", as_declared=True, previous_step=previous)
    listed, unlisted = _bound(received, names, drafts)
    if drafts is not None:
        for entry in (*listed, *unlisted):  # 0, so that they are told from those that are as declared
            entry.spec_tokens = given(entry.spec_tokens, 0)
    return BoundaryRecord(
        kind="worker_input",
        as_declared=False if declared is not None else UNSET,
        requests=listed,
        unlisted=unlisted or UNSET,
        finished=names.of(sorted(received.finished)),
        preempted=names.of(sorted(received.preempted)),
        previous_step=previous,
    )


def drafts_from(record: BoundaryRecord) -> Drafts | None:
    """The drafts that arrived in the worker, None where they were as declared."""
    entries = [*given(record.requests, []), *given(record.unlisted, [])]
    if record.as_declared is not False or all(entry.spec_tokens is UNSET for entry in entries):
        return None
    return Drafts(
        spec_tokens={known(entry.request_id): n for entry in entries if (n := given(entry.spec_tokens, 0))},
        invalid_spec_tokens={
            known(entry.request_id): n for entry in entries if (n := given(entry.invalid_spec_tokens, 0))
        },
    )


def received_from(record: BoundaryRecord, declared: StepRequests | None) -> StepRequests:
    """What arrived in the worker; ``declared`` is from the kv.bind of the same step.

    Raises:
        ValueError: the record says "as declared", and there is no declaration.
    """
    if record.as_declared is not True:
        return _step_requests(
            given(record.requests, []), record.unlisted, given(record.finished, []), given(record.preempted, [])
        )
    if declared is None:
        raise ValueError("a worker_input that arrived as declared needs the kv.bind of its step")
    return declared


def result_record(kind: str, result: StepResult, names: RequestNames = PLAIN) -> BoundaryRecord:
    """``kind`` is ``worker_result`` or ``update_input``."""
    record = BoundaryRecord(
        kind=kind,
        result_requests=names.of(result.request_ids),
        sampled_tokens=list(result.sampled_tokens),
    )
    if result.trace_id is not None:
        record.result_trace_id = result.trace_id or None
    if result.rows is not None:
        record.mapped_requests = names.of(list(result.rows))
        record.mapped_rows = list(result.rows.values())
    if result.lengths is not None:
        record.result_lengths = dict(result.lengths)
    if result.load_failed:
        record.load_failed = True
    return record


def result_from(record: BoundaryRecord) -> StepResult:
    trace_id, mapped = record.result_trace_id, record.mapped_requests
    return StepResult(
        request_ids=tuple(known(name) for name in given(record.result_requests, [])),
        sampled_tokens=tuple(given(record.sampled_tokens, [])),
        trace_id=None if isinstance(trace_id, UnsetType) else trace_id or "",
        rows=None
        if isinstance(mapped, UnsetType)
        else dict(zip(map(known, mapped), given(record.mapped_rows, []), strict=True)),
        lengths=given(record.result_lengths, None),
        load_failed=given(record.load_failed, False),
    )


def work_record(kind: str, work: BlockWork) -> BoundaryRecord:
    """``kind`` is ``zero`` or ``copy``. What was done is spelled out only where it differs from what was declared."""
    record = BoundaryRecord(kind=kind, as_declared=work.as_declared)
    if not work.as_declared:
        record.zero_blocks = UNSET if work.cleared is None else to_ranges(work.cleared)
        record.copies = UNSET if work.copied is None else [BlockCopy(src=s, dst=d) for s, d in work.copied]
    return record


def work_from(record: BoundaryRecord, declaration: Declaration) -> BlockWork:
    """``declaration`` is from the kv.bind of the same step."""
    if record.kind == "zero":
        declared = declaration.zero_blocks
        cleared = declared or [] if isinstance(record.zero_blocks, UnsetType) else from_ranges(record.zero_blocks)
        return BlockWork(declared=declared, cleared=cleared)
    pairs = declaration.copies or []
    if not isinstance(record.copies, UnsetType):
        pairs = [(copy.src, copy.dst) for copy in record.copies]
    return BlockWork(declared=declaration.copies, copied=pairs)


def verification_record(counted: Verification, names: RequestNames = PLAIN) -> BoundaryRecord:
    return BoundaryRecord(
        kind="spec_post",
        requests_verified=names.of(counted.request_ids),
        drafted=counted.drafted,
        accepted=counted.accepted,
        rejected=counted.rejected,
        trimmed=counted.trimmed or UNSET,
    )


def verification_from(record: BoundaryRecord) -> Verification:
    """
    Raises:
        ValueError: the trace was written without request ids.
    """
    return Verification(
        request_ids=[known(name) for name in given(record.requests_verified, [])],
        drafted=given(record.drafted, []),
        accepted=given(record.accepted, []),
        rejected=given(record.rejected, []),
        trimmed=given(record.trimmed, False),
    )


def _bound(
    requests: StepRequests, names: RequestNames, drafts: Drafts | None, declaration: Declaration | None = None
) -> tuple[list[BoundRequest], list[BoundRequest]]:
    """The requests that are listed as new or cached, and those that only turn up elsewhere."""
    scheduled, resumed = requests.scheduled, requests.resumed
    prompts: Sequence[int | UnsetType] = [UNSET] * len(requests.new_ids)
    outputs: Sequence[int | UnsetType] = [UNSET] * len(requests.cached_ids)
    if declaration is not None:
        prompts, outputs = declaration.new_prompt_tokens, declaration.cached_output_tokens
    listed = [
        BoundRequest(
            request_id=names(request_id),
            kind=NEW,
            num_computed_tokens=computed,
            num_scheduled_tokens=scheduled.get(request_id, UNSET),
            num_prompt_tokens=prompt_tokens,
            block_delta=[to_ranges(group) for group in blocks],
        )
        for request_id, blocks, computed, prompt_tokens in zip(
            requests.new_ids, requests.new_blocks, requests.new_computed, prompts, strict=True
        )
    ]
    listed += [
        BoundRequest(
            request_id=name,
            kind=RESUMED if request_id in resumed else CACHED,
            num_computed_tokens=computed,
            num_scheduled_tokens=scheduled.get(request_id, UNSET),
            num_output_tokens=output_tokens,
            block_delta=UNSET if blocks is None else [to_ranges(group) for group in blocks],
        )
        for request_id, name, blocks, computed, output_tokens in zip(
            requests.cached_ids,
            names.of(requests.cached_ids),
            requests.cached_blocks,
            requests.cached_computed,
            outputs,
            strict=True,
        )
    ]
    listed_ids = [*requests.new_ids, *requests.cached_ids]
    unlisted_ids = _mentioned_elsewhere(requests, drafts, listed_ids)
    unlisted = [
        BoundRequest(
            request_id=names(request_id),
            kind=RESUMED if request_id in resumed else UNSET,
            num_scheduled_tokens=scheduled.get(request_id, UNSET),
        )
        for request_id in unlisted_ids
    ]
    if drafts is not None and (drafts.spec_tokens or drafts.invalid_spec_tokens):
        for request_id, entry in zip([*listed_ids, *unlisted_ids], [*listed, *unlisted], strict=True):
            entry.spec_tokens = drafts.spec_tokens.get(request_id, UNSET)
            entry.invalid_spec_tokens = drafts.invalid_spec_tokens.get(request_id, UNSET)
    return listed, unlisted


def _mentioned_elsewhere(requests: StepRequests, drafts: Drafts | None, listed_ids: Iterable[str]) -> list[str]:
    """The requests that are named somewhere without being listed as new or cached, sorted."""
    drafted = [] if drafts is None else [*drafts.spec_tokens, *drafts.invalid_spec_tokens]
    mentioned = {*requests.scheduled, *drafted}.difference(listed_ids)
    mentioned |= requests.resumed.difference(requests.cached_ids)
    return sorted(mentioned)


def _step_requests(
    listed: list[BoundRequest],
    unlisted: list[BoundRequest] | UnsetType,
    finished: Iterable[RequestId],
    preempted: Iterable[RequestId],
) -> StepRequests:
    new = [entry for entry in listed if entry.kind == NEW]
    cached = [entry for entry in listed if entry.kind != NEW]
    everyone = [*listed, *(unlisted or [])]
    return StepRequests(
        new_ids=[known(entry.request_id) for entry in new],
        new_blocks=[_block_ids(entry) or () for entry in new],
        new_computed=[given(entry.num_computed_tokens, 0) for entry in new],
        cached_ids=[known(entry.request_id) for entry in cached],
        cached_blocks=[_block_ids(entry) for entry in cached],
        cached_computed=[given(entry.num_computed_tokens, 0) for entry in cached],
        resumed={known(entry.request_id) for entry in everyone if entry.kind == RESUMED},
        scheduled={
            known(entry.request_id): entry.num_scheduled_tokens
            for entry in everyone
            if not isinstance(entry.num_scheduled_tokens, UnsetType)
        },
        finished={known(name) for name in finished},
        preempted={known(name) for name in preempted},
    )


def _block_ids(entry: BoundRequest) -> BlockIds | None:
    if isinstance(entry.block_delta, UnsetType):
        return None
    return tuple(from_ranges(group) for group in entry.block_delta)
