"""Facts to records and back: what the sinks and the offline reader call.

Each ``*_record`` sets the fields of its event, with the step where the fact knows it; :func:`stamp` fills in the rest
of the envelope. Each ``*_from`` gives back a fact that equals the one recorded.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from kvscope import __version__
from kvscope.events.connector import connector_plan_record, connector_result_record, taken_up_record
from kvscope.events.context_parallel import KIND as CP_CONTEXT
from kvscope.events.context_parallel import context_from, context_record
from kvscope.events.context_schema import ContextSizes
from kvscope.events.coverage_schema import CoverageRecord, ErrorRecord
from kvscope.events.envelope import Envelope, or_absent
from kvscope.events.finding_schema import FindingCount
from kvscope.events.findings import finding_from, violation_record
from kvscope.events.names import PLAIN, RequestNames
from kvscope.events.plans import agreed_records, dummy_from, dummy_record, snapshot_from, write_read_records
from kvscope.events.pool import operation_from, operation_record, state_from, state_record
from kvscope.events.requests import (
    admission_from,
    admission_record,
    bind_record,
    declaration_from,
    drafts_from,
    received_from,
    result_from,
    result_record,
    verification_from,
    verification_record,
    work_from,
    work_record,
    worker_input_record,
)
from kvscope.events.schema import AbsentSeam, BoundaryRecord, EnabledRecord, GroupInfo, InactiveCheck, Versions
from kvscope.facts.topology import Ranks, Topology

__all__ = [
    "Identity",
    "admission_from",
    "admission_record",
    "agreed_records",
    "bind_record",
    "boundary_record",
    "context_from",
    "context_record",
    "coverage_record",
    "declaration_from",
    "drafts_from",
    "dummy_from",
    "dummy_record",
    "enabled_record",
    "encode",
    "error_record",
    "finding_from",
    "operation_from",
    "operation_record",
    "received_from",
    "result_from",
    "result_record",
    "snapshot_from",
    "stamp",
    "state_from",
    "state_record",
    "verification_from",
    "verification_record",
    "violation_record",
    "work_from",
    "work_record",
    "worker_input_record",
    "write_read_records",
]

NOT_DELIVERED = "inactive: not in this version"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the envelope that does not change while a process lives."""

    engine_id: str
    ranks: Ranks = Ranks()


def stamp(
    record: Envelope,
    identity: Identity,
    *,
    seq: int,
    component: str,
    boundary: str,
    mono_ns: int,
    wall_ns: int,
    trace_id: str | None = None,
    step: int | None = None,
    after_step: int | None = None,
) -> None:
    """Fill in the envelope, in place. What the record already says about its step stays."""
    ranks = identity.ranks
    record.seq = seq
    record.component = component
    record.boundary = boundary
    record.engine_id = identity.engine_id
    record.dp_rank = ranks.dp
    # A rank that does not apply is absent in a new record.
    if ranks.tp is not None:
        record.tp_rank = ranks.tp
    if ranks.pp is not None:
        record.pp_rank = ranks.pp
    if ranks.pcp is not None:
        record.pcp_rank = ranks.pcp
    if ranks.dcp is not None:
        record.dcp_rank = ranks.dcp
    record.mono_ns = mono_ns
    record.wall_ns = wall_ns
    if record.trace_id is UNSET:
        record.trace_id = or_absent(trace_id)
    if record.step is UNSET and record.after_step is UNSET:
        record.step = or_absent(step)
        record.after_step = UNSET if step is not None else 0 if after_step is None else after_step


def _from_numpy(value: object) -> object:
    """msgspec does not know NumPy's scalars, and a rule may well take a block id out of an array."""
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a record cannot hold {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_from_numpy)


def encode(record: Envelope) -> bytes:
    """One line of JSON, without the line's end."""
    return _encoder.encode(record)


def encode_line(record: Envelope) -> bytes:
    """One line of JSON with the line's end, which costs less than to add it."""
    return _encoder.encode_lines((record,))


def enabled_record(
    *,
    run_id: str,
    process: str,
    pid: int,
    configuration: dict[str, Any],
    parts: Mapping[str, str],
    actions: Mapping[str, str],
    seams_installed: Sequence[str] = (),
    seams_absent: Mapping[str, str] | None = None,
    checks_active: Sequence[str] = (),
    checks_inactive: Sequence[InactiveCheck] = (),
    topology: Topology | None = None,
    vllm_version: str | None = None,
    platform_version: str | None = None,
    runner: str | UnsetType | None = UNSET,
    rank: int | None = None,
    ranks_elsewhere: int | None = None,
    device_clone_bytes: int | None = None,
    shared_file: str | None = None,
) -> EnabledRecord:
    """``seams_absent`` maps a seam to the reason; ``topology`` is None where there is no pool (the front end)."""
    record = EnabledRecord(
        run_id=run_id,
        process=process,
        pid=pid,
        versions=Versions(
            kvscope=__version__, vllm=vllm_version, platform=platform_version, python=platform.python_version()
        ),
        parts=dict(parts),
        actions=dict(actions),
        seams_installed=list(seams_installed),
        seams_absent=[AbsentSeam(seam=seam, reason=reason) for seam, reason in (seams_absent or {}).items()],
        checks_active=list(checks_active),
        checks_inactive=list(checks_inactive),
        configuration=configuration,
        runner=runner,
        rank=or_absent(rank),
        ranks_elsewhere=or_absent(ranks_elsewhere),
        device_clone_bytes=or_absent(device_clone_bytes),
        shared_file=or_absent(shared_file),
    )
    if topology is not None:
        record.null_block_id = topology.null_block_id
        record.num_blocks = topology.num_blocks
        record.groups = [
            GroupInfo(
                group_id=group.group_id,
                kind=group.kind,
                block_size=group.block_size,
                kernel_block_size=group.kernel_block_size,
                layers=group.layers,
                visible_tokens=or_absent(group.visible_tokens),
                shards=group.shards if group.shards > 1 else UNSET,
            )
            for group in topology.groups
        ]
        if topology.context_parallel:
            record.context_parallel = ContextSizes(pcp_size=topology.pcp_size, dcp_size=topology.dcp_size)
    return record


def coverage_record(
    *,
    steps: int,
    empty_steps: int,
    rows_scheduled: int,
    rows: int,
    tokens: int,
    checks_run: Mapping[str, int],
    checks_skipped: Mapping[str, Mapping[str, int]],
    hook_calls: Mapping[str, int],
    hook_faults: Mapping[str, int],
    hook_time_ns: Mapping[str, int],
    findings: Sequence[FindingCount] = (),
    checks_stalled: Mapping[str, int] | None = None,
    tail_entries: Mapping[str, int] | None = None,
) -> CoverageRecord:
    """``records_written`` and ``records_dropped`` are the stream's to fill in, when it writes the record."""
    return CoverageRecord(
        steps=steps,
        empty_steps=empty_steps,
        rows_scheduled=rows_scheduled,
        rows=rows,
        tokens=tokens,
        checks_run=dict(checks_run),
        checks_skipped={check: dict(causes) for check, causes in checks_skipped.items()},
        records_written=0,
        records_dropped={},
        hook_calls=dict(hook_calls),
        hook_faults=dict(hook_faults),
        hook_time_ns=dict(hook_time_ns),
        findings=list(findings),
        checks_stalled=UNSET if checks_stalled is None else dict(checks_stalled),
        tail_entries=UNSET if tail_entries is None else dict(tail_entries),
    )


def error_record(error: BaseException) -> ErrorRecord:
    """Only the type: an exception's message may quote a prompt."""
    return ErrorRecord(error_type=f"{type(error).__module__}.{type(error).__qualname__}")


def boundary_record(kind: str, fact: Any, names: RequestNames = PLAIN) -> BoundaryRecord:
    """The kv.boundary of a fact.

    ``frontend_admit`` takes an Admission, ``dummy`` a DummyRun, ``cp_context`` a fact of context parallelism,
    ``worker_result`` and ``update_input`` a StepResult, ``zero`` and ``copy`` a BlockWork, ``spec_post`` a
    Verification; ``worker_input`` takes anything with ``received`` and ``declared`` (StepRequests, the latter or None),
    ``drafts`` (Drafts or None) and ``previous_step``; ``connector_plan`` a ConnectorPlan, ``connector_result`` a
    ConnectorResult, and ``connector_taken_up``, which is of that kind as well, a sequence of TakenUp.

    Raises:
        ValueError: there is no such kind.
    """
    if kind == "frontend_admit":
        return admission_record(fact, names)
    if kind == "worker_input":
        return worker_input_record(
            fact.received, fact.declared, names, drafts=fact.drafts, previous_step=fact.previous_step
        )
    if kind == "dummy":
        return dummy_record(fact)
    if kind == CP_CONTEXT:
        return context_record(fact, names)
    if kind in {"worker_result", "update_input"}:
        return result_record(kind, fact, names)
    if kind in {"zero", "copy"}:
        return work_record(kind, fact)
    if kind == "spec_post":
        return verification_record(fact, names)
    if kind == "connector_plan":
        return connector_plan_record(fact, names)
    if kind == "connector_result":
        return connector_result_record(fact, names)
    if kind == "connector_taken_up":
        return taken_up_record(fact, names)
    raise ValueError(f"{kind!r} is no boundary")
