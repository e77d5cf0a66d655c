"""What can be handed to a stream, and how it becomes records. Runs in the writer thread, never on the step path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvscope.checks.finding import Finding
from kvscope.checks.rule import Rule
from kvscope.config import Records
from kvscope.events import codec
from kvscope.events.codec import Identity
from kvscope.events.envelope import Envelope
from kvscope.events.finding_schema import BlockHistory
from kvscope.events.names import RequestNames
from kvscope.facts.plans import AgreedPlan
from kvscope.facts.requests import Drafts, StepRequests

RECORDS_OF_KIND: Mapping[str, int] = {
    "bind": 1,
    "plan": 2,  # kv.write and kv.read
    "frontend_admit": 1,
    "worker_input": 1,
    "dummy": 1,
    "zero": 1,
    "copy": 1,
    "spec_post": 1,
    "cp_context": 1,
    "worker_result": 1,
    "update_input": 1,
    "connector_plan": 1,
    "connector_result": 1,
    "connector_taken_up": 1,
    "pool": 1,
    "state": 1,
    "violation": 1,
    "error": 1,
    "coverage": 1,
}
"""How many records one fact of the kind becomes."""

ALWAYS_WRITTEN = frozenset({"violation", "error", "coverage"})
"""What a trace with ``records = "findings"`` has; the rest only goes to the flight recorder."""


class WorkerInput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The fact of kind ``worker_input``. ``drafts`` are as received, None where they are as declared;
    ``previous_step`` is the step that came before, None where that is the one before or is not known.
    """

    received: StepRequests
    declared: StepRequests | None
    drafts: Drafts | None = None
    previous_step: int | None = None


class Violation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The fact of kind ``violation``. The history is as it is written: it has request ids as records have them."""

    finding: Finding
    rule: Rule
    action: str
    repeats: int
    history: BlockHistory | None = None


class Entry(NamedTuple):
    """One fact in the queue, where it stands as a plain tuple: naming its parts would cost the step path too much."""

    kind: str
    fact: Any
    component: str
    boundary: str
    step: int | None
    after_step: int | None
    trace_id: str | None
    approx_bytes: int
    mono_ns: int


def records_written(mode: Records) -> dict[str, int]:
    """How many records of each kind get into the files in this mode of ``kv_output.records``."""
    if mode != "findings":
        return dict(RECORDS_OF_KIND)
    return {kind: count if kind in ALWAYS_WRITTEN else 0 for kind, count in RECORDS_OF_KIND.items()}


def make_records(
    kind: str, fact: Any, names: RequestNames, *, full: bool, block_sizes: Mapping[int, int] | None
) -> Sequence[Envelope]:
    """The records of one fact. A fact that is a record already (an error, coverage) is taken as it is.

    Raises:
        Exception: whatever a fact runs into that does not have the shape of its kind.
    """
    if isinstance(fact, Envelope):
        return (fact,)
    if kind == "bind":
        return (codec.bind_record(fact, names),)
    if kind == "pool":
        return (codec.operation_record(fact, names),)
    if kind == "plan":
        if isinstance(fact, AgreedPlan):
            if not full and fact.query_lens is None:
                return codec.agreed_records(fact, names)
            fact = fact.snapshot()
        return codec.write_read_records(fact, names, full=full, block_sizes=block_sizes)
    if kind == "violation":
        history = msgspec.UNSET if fact.history is None else fact.history
        return (codec.violation_record(fact.finding, fact.rule, fact.action, fact.repeats, names, history),)
    if kind == "state":
        return (codec.state_record(fact, names),)
    return (codec.boundary_record(kind, fact, names),)


class RecordMaker:
    """Makes the records of queued facts, each with its envelope. ``block_sizes`` (group to tokens) are known once the
    stream is open.
    """

    def __init__(self, identity: Identity, names: RequestNames, *, full: bool) -> None:
        self._identity = identity
        self._names = names
        self._full = full
        self.block_sizes: Mapping[int, int] | None = None

    def records_of(self, entry: tuple[Any, ...], *, seq: int | None, last_step: int, offset: int) -> Sequence[Envelope]:
        """The records of an :class:`Entry`, numbered from ``seq`` on, or all 0 where they are in no file (None).

        ``last_step`` is the last one before it; ``offset`` is what the wall clock has ahead of the monotonic one, in
        nanoseconds.

        Raises:
            Exception: as :func:`make_records`.
        """
        kind, fact, component, boundary, step, after_step, trace_id, _, mono_ns = entry
        records = make_records(kind, fact, self._names, full=self._full, block_sizes=self.block_sizes)
        if after_step is None:
            after_step = last_step
        for index, record in enumerate(records):
            codec.stamp(
                record,
                self._identity,
                seq=0 if seq is None else seq + index,
                component=component,
                boundary=boundary,
                mono_ns=mono_ns,
                wall_ns=mono_ns + offset,
                trace_id=trace_id,
                step=step,
                after_step=after_step,
            )
        return records
