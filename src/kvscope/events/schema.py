"""The published record, version ``kvscope.trace/1``: one Struct an event, one JSON object a line.

Absent (UNSET here) means "does not apply", ``null`` (None) "applies, could not be observed", ``[]`` "observed, empty".
Arrays about requests share the index of ``requests``, arrays about groups the index of ``groups``; an array about both
is ``[group][row]``. Times are nanoseconds. ``records = "full"`` writes every field; in ``"compact"`` kv.write and
kv.read leave out a column that follows from others by the rule beside the field here, and only where it does follow.

No token ids, no text and no memory addresses are ever in a record. Readers ignore fields that they do not know.
"""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Union

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvscope.events.connector_schema import ReceiveInfo, TakenUpInfo
from kvscope.events.context_schema import ContextSizes, RankCoordinates
from kvscope.events.coverage_schema import CoverageRecord, ErrorRecord
from kvscope.events.envelope import ENVELOPE_REQUIRED, PROCESSES, SCHEMA, Count, Envelope, Ranges, RequestId, Runs
from kvscope.events.finding_schema import ViolationRecord
from kvscope.events.plan_schema import ReadRecord, WriteRecord
from kvscope.events.pool_schema import POOL_RECORDS, PoolEvent

# kv.enabled -----------------------------------------------------------------------------------------------------------


class Versions(msgspec.Struct, kw_only=True):
    """``vllm`` and ``platform`` are null where the host does not say; ``platform`` is for example ``cpu 0.32.0``."""

    kvscope: str
    vllm: str | None
    platform: str | None
    python: str


class AbsentSeam(msgspec.Struct, kw_only=True):
    seam: str
    reason: str


class InactiveCheck(msgspec.Struct, kw_only=True):
    """A check or a single reason that does not run, for one group or (``group_id`` absent) at all."""

    check: str
    cause: str
    reason: str | UnsetType = UNSET
    group_id: int | UnsetType = UNSET


class GroupInfo(msgspec.Struct, kw_only=True):
    """One KV-cache group. ``visible_tokens`` is absent where attention sees the whole sequence, ``shards`` (over how
    many ranks the tokens of a block are dealt out) where each rank stores them all. Slots are counted by ``block_size``
    over ``shards``.
    """

    group_id: int
    kind: str
    block_size: int
    kernel_block_size: int | None
    layers: int
    visible_tokens: int | UnsetType = UNSET
    shards: Annotated[int, Meta(ge=1)] | UnsetType = UNSET


class EnabledRecord(Envelope, kw_only=True, tag="kv.enabled"):
    """First record of every file: what is on, what is not and why.

    ``parts`` says ``on``, ``off`` or ``inactive: …`` for each of the four parts, ``actions`` what a finding of the part
    does. ``file_index`` is the n of the file's name, ``files_deleted`` how many older files of this process are gone.
    ``ranks_elsewhere`` counts ranks on other hosts, whose findings can only be logged there. ``context_parallel`` is
    absent without context parallelism.
    """

    run_id: str
    process: Annotated[str, Meta(extra_json_schema={"enum": list(PROCESSES)})]
    pid: int
    versions: Versions
    parts: dict[str, str]
    actions: dict[str, str]
    seams_installed: list[str]
    seams_absent: list[AbsentSeam]
    checks_active: list[str]
    checks_inactive: list[InactiveCheck]
    configuration: dict[str, Any]
    runner: str | UnsetType | None = UNSET
    null_block_id: int | UnsetType | None = UNSET
    num_blocks: int | UnsetType | None = UNSET
    groups: list[GroupInfo] | UnsetType | None = UNSET
    context_parallel: ContextSizes | UnsetType = UNSET
    rank: int | UnsetType = UNSET
    ranks_elsewhere: int | UnsetType = UNSET
    device_clone_bytes: int | UnsetType = UNSET
    shared_file: str | UnsetType = UNSET
    file_index: Count = 0
    files_deleted: Count = 0


# kv.bind --------------------------------------------------------------------------------------------------------------


class BoundRequest(msgspec.Struct, kw_only=True):
    """One request of a declaration. ``block_delta`` is ``[group]``: the whole table of a new or resumed request, what
    is appended to a cached one (absent: nothing). ``num_prompt_tokens`` only for new, ``num_output_tokens`` only for
    known requests; ``spec_tokens`` counts draft tokens.
    """

    request_id: RequestId
    kind: Annotated[str, Meta(extra_json_schema={"enum": ["new", "cached", "resumed"]})] | UnsetType = UNSET
    num_computed_tokens: int | UnsetType = UNSET
    num_scheduled_tokens: int | UnsetType = UNSET
    num_prompt_tokens: int | UnsetType = UNSET
    num_output_tokens: int | UnsetType = UNSET
    spec_tokens: int | UnsetType = UNSET
    invalid_spec_tokens: int | UnsetType = UNSET
    block_delta: list[Ranges] | UnsetType = UNSET


class BlockCopy(msgspec.Struct, kw_only=True):
    src: int
    dst: int


class BindRecord(Envelope, kw_only=True, tag="kv.bind"):
    """``Scheduler.schedule()`` returned with work.

    ``num_operations`` records of the allocator, of the ``operations_before`` + ``num_operations`` that there were until
    then, led to this step. Both are absent where the pool was not observed. ``after_unseen``, absent for no: before it
    there was a step that was not observed, so that no table and no block from before it is known.

    ``unlisted`` names requests that the declaration mentions somewhere without listing them as new or cached: a sound
    scheduler has none, and the field is absent then.
    """

    requests: list[BoundRequest]
    total_num_scheduled_tokens: int
    finished: list[RequestId]
    preempted: list[RequestId]
    token_budget: int | UnsetType = UNSET
    zero_blocks: Ranges | UnsetType = UNSET
    copies: list[BlockCopy] | UnsetType = UNSET
    connector_plan: str | UnsetType = UNSET
    operations_before: Count | UnsetType = UNSET
    num_operations: Count | UnsetType = UNSET
    after_unseen: bool | UnsetType = UNSET
    unlisted: list[BoundRequest] | UnsetType = UNSET


# kv.boundary ----------------------------------------------------------------------------------------------------------


class BoundaryRecord(Envelope, kw_only=True, tag="kv.boundary"):
    """Something passed a named seam. Which fields there are depends on ``kind``:

    - ``frontend_admit``: ``client_request_id`` (what the client saw), ``request_id`` (the engine's), ``child_index``;
    - ``worker_input``: ``as_declared``; where that is false, what arrived instead, spelled as in kv.bind (draft tokens
      only where they differ, and then of every request); ``previous_step`` came before, if not the one before;
    - ``zero``, ``copy``: ``as_declared``, whether the worker cleared, or copied, what was declared; where that is
      false, what it did instead, in ``zero_blocks`` or ``copies``;
    - ``spec_post``: what the runner counted of the drafts of a step, by row: ``requests_verified`` in batch order,
      ``drafted``, ``accepted`` (null: nothing was sampled that counts) and ``rejected`` (null: this runner does not
      count them); ``trimmed``, absent for no: it may verify fewer drafts than it was given;
    - ``dummy``: ``num_tokens``, ``groups`` and ``dummy_slots[group]`` of a run that serves no request, and how many
      ``persistent_slots[group]`` behind them were looked at. Where any of these is on, ``persistent_indexes[group]``
      are their places in the buffer and ``persistent_enabled[group]`` their slots. ``warm_up``, absent for no: the
      worker made up requests, whose tokens are stored;
    - ``worker_result``, ``update_input``: ``result_requests`` in result order and ``sampled_tokens``, how many tokens
      each got (null: the result does not say yet). Only where an ``update_input`` is not as it should be:
      ``result_trace_id``, the step in which the result was made (null: it does not say); ``mapped_requests`` and
      ``mapped_rows``, where its own map leads; ``result_lengths`` of its lists, by name; ``load_failed``, if blocks or
      requests could not be loaded;
    - ``cp_context``: ``coordinates`` of a rank, with the ``groups`` whose tokens are dealt out; or, where they are not
      what follows from the declaration, of one step the local rows, ``local_requests`` with ``local_lengths`` each, or
      with ``query_len``, ``seq_len``, ``positions`` and the ``writers`` of the gathered keys and values (the token of
      the batch that is stored from each place, -1 for none);
    - ``connector_plan``: ``receives`` is what the step has the connector load, ``sends`` which finished requests it
      keeps the blocks of until they are sent;
    - ``connector_result`` is one of three. What the workers said with a result: ``finished_sending``,
      ``finished_recving``, ``failed_recving``, ``invalid_blocks`` that could not be loaded, and ``unknown_requests``,
      those of the finished that the scheduler does not have. What has become of the requests whose loads failed, when
      that had taken effect: ``taken_up``. Or a load into blocks of ``request_id``, outside of any step, has ended:
      ``block_ids`` (of its table of ``group_id``) are valid for ``filled`` tokens each; ``cause`` and ``pool`` as in
      the allocator's events.
    """

    kind: str
    client_request_id: RequestId | UnsetType = UNSET
    request_id: RequestId | UnsetType = UNSET
    child_index: int | UnsetType = UNSET
    as_declared: bool | UnsetType = UNSET
    requests: list[BoundRequest] | UnsetType = UNSET
    unlisted: list[BoundRequest] | UnsetType = UNSET
    finished: list[RequestId] | UnsetType = UNSET
    preempted: list[RequestId] | UnsetType = UNSET
    num_tokens: int | UnsetType = UNSET
    groups: list[int] | UnsetType = UNSET
    dummy_slots: list[Runs] | UnsetType = UNSET
    zero_blocks: Ranges | UnsetType = UNSET
    copies: list[BlockCopy] | UnsetType = UNSET
    requests_verified: list[RequestId] | UnsetType = UNSET
    drafted: list[int] | UnsetType = UNSET
    accepted: list[int | None] | UnsetType = UNSET
    rejected: list[int | None] | UnsetType = UNSET
    trimmed: bool | UnsetType = UNSET
    persistent_slots: list[Count] | UnsetType = UNSET
    persistent_indexes: list[Runs] | UnsetType = UNSET
    persistent_enabled: list[Runs] | UnsetType = UNSET
    warm_up: bool | UnsetType = UNSET
    result_requests: list[RequestId] | UnsetType = UNSET
    sampled_tokens: list[int | None] | UnsetType = UNSET
    result_trace_id: str | UnsetType | None = UNSET
    mapped_requests: list[RequestId] | UnsetType = UNSET
    mapped_rows: list[int] | UnsetType = UNSET
    result_lengths: dict[str, int] | UnsetType = UNSET
    load_failed: bool | UnsetType = UNSET
    previous_step: Count | UnsetType = UNSET
    coordinates: RankCoordinates | UnsetType = UNSET
    local_requests: list[RequestId] | UnsetType = UNSET
    local_lengths: list[int] | UnsetType = UNSET
    query_len: list[int] | UnsetType = UNSET
    seq_len: list[int] | UnsetType = UNSET
    positions: Runs | UnsetType = UNSET
    writers: Runs | UnsetType = UNSET
    block_ids: Runs | UnsetType = UNSET
    group_id: int | UnsetType = UNSET
    filled: Runs | UnsetType = UNSET
    cause: str | UnsetType = UNSET
    pool: int | UnsetType = UNSET
    receives: list[ReceiveInfo] | UnsetType = UNSET
    sends: list[RequestId] | UnsetType = UNSET
    finished_sending: list[RequestId] | UnsetType = UNSET
    finished_recving: list[RequestId] | UnsetType = UNSET
    failed_recving: list[RequestId] | UnsetType = UNSET
    invalid_blocks: Runs | UnsetType = UNSET
    unknown_requests: list[RequestId] | UnsetType = UNSET
    taken_up: list[TakenUpInfo] | UnsetType = UNSET


# All of them ----------------------------------------------------------------------------------------------------------

Record = Union[  # noqa: UP007 - `X | Y` of Structs at run time is what msgspec is given; this spells one alias a line
    EnabledRecord,
    BindRecord,
    WriteRecord,
    ReadRecord,
    BoundaryRecord,
    PoolEvent,
    ViolationRecord,
    ErrorRecord,
    CoverageRecord,
]

RECORDS: dict[str, type[Envelope]] = {
    "kv.enabled": EnabledRecord,
    "kv.bind": BindRecord,
    "kv.write": WriteRecord,
    "kv.read": ReadRecord,
    "kv.boundary": BoundaryRecord,
    **POOL_RECORDS,
    "kv.violation": ViolationRecord,
    "kv.error": ErrorRecord,
    "kv.coverage": CoverageRecord,
}


class UnknownRecord(msgspec.Struct, kw_only=True):
    """A record of an event that this version does not know: a reader passes over it, but its ``seq`` counts."""

    schema: str
    event: str
    seq: Count


_record_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
_unknown_decoder = msgspec.json.Decoder(UnknownRecord)


def decode_record(line: bytes | str) -> Record | UnknownRecord:
    """The record in one line.

    Raises:
        msgspec.DecodeError: the line is no JSON, or (ValidationError, a subclass) a known event with a damaged field.
    """
    try:
        return _record_decoder.decode(line)
    except msgspec.ValidationError:
        unknown = _unknown_decoder.decode(line)
        if unknown.event in RECORDS:
            raise
        return unknown


def json_schema(*events: str) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of one line: any event of this version, or one of those named."""
    records = [RECORDS[event] for event in events or RECORDS]
    references, definitions = msgspec.json.schema_components(records, ref_template="#/$defs/{name}")
    for record in records:
        definition = definitions[record.__name__]
        shared = [inspect.getdoc(base) or "" for base in record.__mro__[1:] if base not in Envelope.__mro__]
        definition["description"] = "\n\n".join([definition["description"], *shared])
        definition["required"] = [
            *ENVELOPE_REQUIRED,
            *(n for n in definition["required"] if n not in ENVELOPE_REQUIRED),
        ]
        definition["anyOf"] = [{"required": ["step"]}, {"required": ["after_step"]}]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": SCHEMA,
        "oneOf": list(references),
        "$defs": definitions,
    }
