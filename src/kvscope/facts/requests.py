"""What the scheduler said about requests in one step, and what the worker was told.

Source: ``vllm/v1/core/sched/output.py``, ``SchedulerOutput``, ``NewRequestData``, ``CachedRequestData`` (0.32).
"""

from __future__ import annotations

import msgspec

from .allocator import PoolOperation

BlockIds = tuple[list[int], ...]
"""Block ids of one request, one list a KV-cache group."""

NEW = "new"
CACHED = "cached"
RESUMED = "resumed"


class StepRequests(msgspec.Struct, kw_only=True, gc=False):
    """The request side of one ``SchedulerOutput``, in its own order: new entries first, then known ones.

    ``new_*`` and ``cached_*`` are parallel lists. ``new_blocks[i]`` is the whole table of a request,
    ``cached_blocks[i]`` what is appended to it (None: nothing), or the whole table where ``cached_ids[i]`` is in
    ``resumed``. Two values compare equal exactly when the scheduler's word arrived as it was given.
    """

    new_ids: list[str]
    new_blocks: list[BlockIds]
    new_computed: list[int]
    cached_ids: list[str]
    cached_blocks: list[BlockIds | None]
    cached_computed: list[int]
    resumed: set[str]
    scheduled: dict[str, int]
    finished: set[str]
    preempted: set[str]

    def computed(self) -> dict[str, int]:
        """Tokens before the step, of every listed request."""
        computed = dict(zip(self.cached_ids, self.cached_computed, strict=True))
        if self.new_ids:
            computed.update(zip(self.new_ids, self.new_computed, strict=True))
        return computed

    @property
    def table_bytes(self) -> int:
        """About what the tables that came whole occupy; what is appended to others is little."""
        if not (self.new_blocks or self.resumed):
            return 0
        blocks = sum(len(ids) for table in self.new_blocks for ids in table)
        if self.resumed:
            blocks += sum(len(ids) for table in self.cached_blocks if table is not None for ids in table)
        return 40 * blocks

    def copy(self) -> StepRequests:
        """The same with lists of its own, all the way down."""
        return StepRequests(
            new_ids=list(self.new_ids),
            new_blocks=[tuple(map(list, blocks)) for blocks in self.new_blocks],
            new_computed=list(self.new_computed),
            cached_ids=list(self.cached_ids),
            cached_blocks=[None if blocks is None else tuple(map(list, blocks)) for blocks in self.cached_blocks],
            cached_computed=list(self.cached_computed),
            resumed=set(self.resumed),
            scheduled=dict(self.scheduled),
            finished=set(self.finished),
            preempted=set(self.preempted),
        )


class Drafts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How many draft tokens each request was given, and how many of them are invalid; only of requests that have some.
    ``SchedulerOutput.scheduled_spec_decode_tokens`` and ``num_invalid_spec_tokens``: counts, never token ids.
    """

    spec_tokens: dict[str, int]
    invalid_spec_tokens: dict[str, int]


class Declaration(msgspec.Struct, kw_only=True, gc=False):
    """What the scheduler declared for one step: a deep copy, taken as ``Scheduler.schedule()`` returned.

    The host mutates its own lists afterwards when scheduler and worker share a process (``gpu_model_runner``,
    ``_update_states`` extends them in place), so nothing in here may alias a host object.

    ``step`` counts every ``schedule()`` result from 1, empty ones included. ``new_prompt_tokens`` runs beside
    ``requests.new_ids``, ``cached_output_tokens`` beside ``requests.cached_ids``. ``spec_tokens`` has only requests
    that were given draft tokens. Token counts, never token ids.

    ``operations`` is what the block pool did since the declaration before, in order, and ``operations_before`` how many
    operations there were until then, so that who misses some knows it. None: the pool is not observed.
    ``after_unseen``: before this step there was one that was not observed, and nobody was told what it declared.
    """

    step: int
    trace_id: str
    requests: StepRequests
    new_prompt_tokens: list[int]
    cached_output_tokens: list[int]
    spec_tokens: dict[str, int]
    invalid_spec_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    token_budget: int | None
    zero_blocks: list[int] | None
    copies: list[tuple[int, int]] | None
    connector_plan: str | None
    operations: list[PoolOperation] = []
    operations_before: int | None = None
    after_unseen: bool = False

    @property
    def is_empty(self) -> bool:
        return self.total_num_scheduled_tokens == 0


class Admission(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The front end turned the id that a client sees into the id that the engine uses.

    Source: ``InputProcessor.assign_request_id`` and ``OutputProcessor.add_request`` (``vllm/v1/engine``).
    ``child_index`` tells the samples of one ``n > 1`` request apart.
    """

    client_request_id: str
    request_id: str
    child_index: int


class StepResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What came back for one step: ids in result order, and how many tokens were sampled for each.

    ``sampled_tokens[i]`` is None where the result does not say (an asynchronous output before its copy is done).

    The rest is None in a result that is as it should be. ``trace_id`` is that of the step in which the worker made the
    result, if it is not the step for which the result is given (empty: the result does not say). ``rows`` is the
    result's own map from request to row, if it does not lead to the order of ``request_ids``. ``lengths`` are those of
    the result's lists that should have one entry a request, by their names, if one of them has not. ``load_failed``: it
    says that blocks or requests could not be loaded, so that the scheduler may let tokens be computed again.
    """

    request_ids: tuple[str, ...]
    sampled_tokens: tuple[int | None, ...]
    trace_id: str | None = None
    rows: dict[str, int] | None = None
    lengths: dict[str, int] | None = None
    load_failed: bool = False


class Verification(msgspec.Struct, kw_only=True, gc=False):
    """How many drafts a runner accepted and rejected in one step, in the order of its batch, without padding.

    ``drafted[i]`` is how many drafts the runner verified of ``request_ids[i]``. ``accepted[i]`` is None where nothing
    was sampled that counts (a row in the middle of its prompt), ``rejected[i]`` where this runner does not count them;
    both may be anything where the runner is wrong, and shorter than the batch. ``trimmed``: the runner may verify fewer
    drafts than it was given (adaptive verification, vLLM 0.32).
    """

    request_ids: list[str]
    drafted: list[int]
    accepted: list[int | None]
    rejected: list[int | None]
    trimmed: bool = False


class BlockWork(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Blocks that a worker cleared, or pairs ``(source, destination)`` that it copied; the other is None.

    ``declared`` is what the scheduler said of it, None for nothing.
    """

    declared: list[int] | list[tuple[int, int]] | None
    cleared: list[int] | None = None
    copied: list[tuple[int, int]] | None = None

    @property
    def as_declared(self) -> bool:
        return (self.copied if self.cleared is None else self.cleared) == (self.declared or [])
