from __future__ import annotations

import json
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope.checks.finding import Finding
from kvscope.events import codec
from kvscope.events.envelope import SCHEMA, Envelope
from kvscope.events.finding_schema import FindingCount, ViolationRecord
from kvscope.events.names import RequestNames
from kvscope.events.plan_schema import ReadRecord, WriteRecord
from kvscope.events.schema import (
    RECORDS,
    BindRecord,
    BoundaryRecord,
    InactiveCheck,
    UnknownRecord,
    decode_record,
    json_schema,
)
from kvscope.facts.allocator import ALLOC, FREE, RECEIVE, PoolOperation
from kvscope.facts.plans import DummyRun, PersistentSlots, PlanSnapshot
from kvscope.facts.requests import Admission, Declaration, Drafts, StepRequests, StepResult
from kvscope.facts.topology import Group, Topology
from kvscope.state.blocks import BlockLedger
from unit.events import samples
from unit.events.wire import IDENTITY, VALIDATOR, through_a_line

SALT = b"0123456789abcdef"


# Lossless for the replay ----------------------------------------------------------------------------------------------


@given(samples.declarations())
def test_a_declaration_comes_back_equal(declaration: Declaration) -> None:
    assert codec.declaration_from(through_a_line(codec.bind_record(declaration))) == declaration


@given(samples.declarations(), st.lists(samples.operations(), max_size=3))
def test_a_kv_bind_says_how_many_operations_of_the_pool_led_to_it(
    declaration: Declaration, operations: list[PoolOperation]
) -> None:
    declaration.operations = operations
    record = through_a_line(codec.bind_record(declaration))
    observed = declaration.operations_before is not None
    assert record.num_operations == (len(operations) if observed else msgspec.UNSET)
    assert codec.declaration_from(record) == msgspec.structs.replace(declaration, operations=[])


@given(samples.snapshots(), st.booleans())
def test_a_plan_comes_back_equal_in_compact_and_in_full(snapshot: PlanSnapshot, full: bool) -> None:
    write, read = codec.write_read_records(snapshot, full=full, block_sizes={0: 16, 1: 8})
    back = codec.snapshot_from(through_a_line(write), through_a_line(read))
    assert samples.same(back, snapshot)


def test_the_comparison_of_facts_can_fail() -> None:
    _, one = samples.decode_batch()
    _, other = samples.decode_batch()
    assert samples.same(one, other)
    other.groups[0].slots[3] += 1
    assert not samples.same(one, other)


def test_a_write_and_a_read_of_different_steps_are_no_pair() -> None:
    _, snapshot = samples.decode_batch()
    write, _ = codec.write_read_records(snapshot)
    snapshot.step += 1
    _, read = codec.write_read_records(snapshot)
    with pytest.raises(ValueError, match="not of the same step"):
        codec.snapshot_from(write, read)


@given(samples.step_requests(), samples.step_requests())
def test_what_the_worker_received_comes_back_equal(received: StepRequests, declared: StepRequests) -> None:
    for declaration in (received, declared, None):
        record = through_a_line(codec.worker_input_record(received, declaration))
        assert codec.received_from(record, declaration) == received


def test_what_arrived_as_declared_is_not_spelled_out_and_needs_the_declaration() -> None:
    declaration, _ = samples.decode_batch()
    record = codec.worker_input_record(declaration.requests, declaration.requests)
    assert len(codec.encode(record)) < 300
    with pytest.raises(ValueError, match=r"needs the kv\.bind"):
        codec.received_from(record, None)


def test_drafts_that_arrived_otherwise_come_back_equal_and_others_are_as_declared() -> None:
    declaration, _ = samples.decode_batch()
    requests = declaration.requests
    first = requests.cached_ids[0]
    for drafts in (
        Drafts(spec_tokens={first: 2}, invalid_spec_tokens={first: 1}),
        Drafts(spec_tokens={}, invalid_spec_tokens={}),
        Drafts(spec_tokens={"nobody": 1}, invalid_spec_tokens={}),
    ):
        record = through_a_line(codec.worker_input_record(requests, requests, drafts=drafts))
        assert codec.drafts_from(record) == drafts
        assert codec.received_from(record, None) == requests
    other = requests.copy()
    other.scheduled[first] += 1
    assert codec.drafts_from(through_a_line(codec.worker_input_record(other, requests))) is None
    assert codec.drafts_from(through_a_line(codec.worker_input_record(other, None))) is None


@given(samples.findings)
def test_a_finding_comes_back_equal(finding: Finding) -> None:
    record = through_a_line(codec.violation_record(finding, samples.RULE, "log", 3))
    assert codec.finding_from(record) == finding
    assert (record.check, record.severity, record.action, record.repeats) == ("C1", "error", "log", 3)
    assert record.evidence == "the declaration against the slots"


def test_the_boundary_facts_come_back_equal() -> None:
    admission = Admission(client_request_id="cmpl-1", request_id="cmpl-1-0", child_index=2)
    assert codec.admission_from(through_a_line(codec.admission_record(admission))) == admission
    result = StepResult(request_ids=("a", "b"), sampled_tokens=(1, None))
    for kind in ("worker_result", "update_input"):
        record = through_a_line(codec.result_record(kind, result))
        assert (record.kind, codec.result_from(record)) == (kind, result)
    odd = msgspec.structs.replace(result, load_failed=True, rows={"b": 0, "x": 4}, lengths={"pooler_output": 3})
    for trace_id in ("e.7", ""):
        record = through_a_line(codec.result_record("update_input", msgspec.structs.replace(odd, trace_id=trace_id)))
        assert codec.result_from(record) == msgspec.structs.replace(odd, trace_id=trace_id)
        assert record.result_trace_id == (trace_id or None)
    dummy = DummyRun(slots={1: np.array([-1, -1, 5, -1]), 0: np.full(8192, -1)}, num_tokens=8192)
    line = through_a_line(codec.dummy_record(dummy))
    assert samples.same(codec.dummy_from(line), dummy)
    assert len(codec.encode(line)) < 400
    rest = {
        0: PersistentSlots(checked=8192, indexes=np.array([9, 10, 8191]), slots=np.array([80, 81, 17])),
        1: PersistentSlots(checked=8192, indexes=np.zeros(0, np.int64), slots=np.zeros(0, np.int64)),
    }
    for changes in ({"persistent": rest}, {"persistent": {0: rest[1], 1: rest[1]}}, {"warm_up": True}):
        changed = msgspec.structs.replace(dummy, **changes)
        assert samples.same(codec.dummy_from(through_a_line(codec.dummy_record(changed))), changed)


def test_a_rule_may_take_its_numbers_out_of_an_array() -> None:
    numbers: Any = np.array([7, 8], dtype=np.int32)
    finding = Finding(reason="x", step=1, trace_id="t", slot=numbers[0], expected=numbers[1])
    assert codec.finding_from(through_a_line(codec.violation_record(finding, samples.RULE, "log", 0))).slot == 7
    with pytest.raises(NotImplementedError, match="ndarray"):
        codec.encode(
            codec.violation_record(Finding(reason="x", step=1, trace_id="t", slot=numbers), samples.RULE, "", 0)
        )


# What is written, and what is not -------------------------------------------------------------------------------------


def members(record: Envelope) -> set[str]:
    return set(json.loads(codec.encode(record)))


def test_full_spells_every_field_of_the_plan() -> None:
    _, snapshot = samples.decode_batch()
    write, read = codec.write_read_records(snapshot, full=True, block_sizes={0: 16})
    at_fault_only = {"slots_rest", "positions_rest"}
    own_write = set(WriteRecord.__struct_fields__) - set(Envelope.__struct_fields__) - at_fault_only
    own_read = set(ReadRecord.__struct_fields__) - set(Envelope.__struct_fields__)
    assert own_write <= members(write)
    assert own_read <= members(read)
    assert write.target_blocks == [[int(slot) // 16 for slot in snapshot.groups[0].slots]]
    assert write.positions == snapshot.first_positions.tolist()


def test_target_blocks_are_those_of_real_tokens_and_absent_where_the_block_size_is_unknown() -> None:
    _, snapshot = samples.decode_batch(2)
    snapshot.query_lens = np.array([4, 2], dtype=np.int32)
    snapshot.num_tokens = 6
    snapshot.groups[0].slots = np.array([30, 31, 32, 80, -1, 80])
    write, _ = codec.write_read_records(snapshot, full=True, block_sizes={0: 16})
    assert write.target_blocks == [[[[1, 2], 5], 5]]
    write, _ = codec.write_read_records(snapshot, full=True)
    assert "target_blocks" not in members(write)


def test_compact_leaves_out_what_follows_and_nothing_else() -> None:
    _, snapshot = samples.decode_batch()
    write, read = codec.write_read_records(snapshot)
    follows = {"last_position", "computed_before", "seq_len", "positions", "padding_enabled", "exact"}
    assert not follows & members(write)
    assert not {"seq_len", "window_skipped", "tail_ignored", "tables"} & members(read)
    snapshot.seq_lens = snapshot.seq_lens + 1
    snapshot.exact = False
    snapshot.groups[0].table_blocks = snapshot.groups[0].table_blocks + 2
    write, read = codec.write_read_records(snapshot)
    assert members(write) & follows == {"seq_len", "exact"}
    assert read.tail_ignored == [[2] * 8]


def test_no_record_has_a_field_for_tokens_text_or_addresses() -> None:
    names = {name for record in RECORDS.values() for name in record.__struct_fields__}
    assert not names & {"token_ids", "prompt", "prompt_token_ids", "text", "data_ptr", "message"}
    assert codec.error_record(ValueError("the prompt was: secret")).error_type == "builtins.ValueError"
    assert b"secret" not in codec.encode(codec.error_record(ValueError("secret")))


def test_a_decode_row_is_small(capsys: pytest.CaptureFixture[str]) -> None:
    rows = 8
    declaration, snapshot = samples.decode_batch(rows)
    sizes: dict[str, float] = {}
    for full in (False, True):
        records: list[Envelope] = [codec.bind_record(declaration)]
        records += codec.write_read_records(snapshot, full=full, block_sizes={0: 16})
        total = envelopes = 0
        for record in records:
            through_a_line(record)
            record.mono_ns, record.wall_ns, record.seq = 123456789012345, 1764444444444444444, 123456
            record.boundary, record.engine_id = "GPUModelRunner.execute_model", "0"
            total += len(codec.encode(record)) + 1
            head = Envelope(**{name: getattr(record, name) for name in Envelope.__struct_fields__})
            envelopes += len(codec.encode(head)) - len("{}")
        request_ids = 3 * sum(map(len, snapshot.request_ids))
        sizes["full" if full else "compact"] = (total - envelopes - request_ids) / rows
        mode = "full" if full else "compact"
        per_row = f"{sizes[mode]:.0f} bytes a row, envelopes {envelopes / rows:.0f}"
        samples.say(capsys, f"{mode}, batch of {rows}: {per_row}, request ids {request_ids / rows:.0f}")
    assert sizes["compact"] < 240
    assert sizes["compact"] < sizes["full"]


# Request ids ----------------------------------------------------------------------------------------------------------


def all_lines(names: RequestNames) -> bytes:
    declaration, snapshot = samples.decode_batch()
    declaration.requests.finished = {"chatcmpl-finished"}
    declaration.requests.scheduled["chatcmpl-unlisted"] = 1
    finding = Finding(
        reason="read_row_request_mismatch",
        step=1,
        trace_id="t",
        request_id="chatcmpl-1",
        other_request_id="chatcmpl-2",
        expected="chatcmpl-1",
        actual="chatcmpl-2",
    )
    admission = Admission(client_request_id="chatcmpl-c", request_id="chatcmpl-e", child_index=0)
    ledger = BlockLedger(8, 0)
    ledger.apply(PoolOperation(kind=ALLOC, block_ids=[3], request_id="chatcmpl-a", group_id=0), 1)
    ledger.apply(PoolOperation(kind=FREE, block_ids=[3], request_id="chatcmpl-b", group_id=0), 1)
    records: list[Envelope] = [
        codec.bind_record(declaration, names),
        *codec.write_read_records(snapshot, names, full=True),
        codec.violation_record(finding, samples.RULE, "log", 0, names),
        codec.admission_record(admission, names),
        codec.operation_record(PoolOperation(kind=ALLOC, block_ids=[3], request_id="chatcmpl-a"), names),
        codec.operation_record(PoolOperation(kind=RECEIVE, block_ids=[3], request_id="chatcmpl-a"), names),
        codec.state_record(ledger.snapshot(), names),
        codec.worker_input_record(declaration.requests, None, names),
        codec.result_record("worker_result", StepResult(request_ids=("chatcmpl-r",), sampled_tokens=(1,)), names),
    ]
    for record in records:
        through_a_line(record)
    return b"\n".join(codec.encode(record) for record in records)


def test_hashed_and_omitted_ids_leave_no_id_in_any_record() -> None:
    assert all_lines(RequestNames("plain")).count(b"chatcmpl") > 20
    assert b"chatcmpl" not in all_lines(RequestNames("hashed", SALT))
    assert b"chatcmpl" not in all_lines(RequestNames("omitted"))
    assert SALT not in all_lines(RequestNames("hashed", SALT))


def test_hashed_ids_join_across_processes_of_a_run_and_not_across_runs() -> None:
    name = RequestNames("hashed", SALT)("r-1")
    assert name is not None
    assert len(name) == 16
    assert int(name, 16) >= 0
    assert RequestNames("hashed", SALT)("r-1") == name
    assert RequestNames("hashed", SALT[::-1])("r-1") != name
    assert RequestNames("hashed", SALT)("r-2") != name
    with pytest.raises(ValueError, match="salt"):
        RequestNames("hashed")


def test_a_hashed_trace_can_be_replayed_and_one_without_ids_says_why_not() -> None:
    declaration, snapshot = samples.decode_batch()
    hashed = RequestNames("hashed", SALT)
    back = codec.declaration_from(codec.bind_record(declaration, hashed))
    assert back.requests.cached_ids == codec.snapshot_from(*codec.write_read_records(snapshot, hashed)).request_ids
    with pytest.raises(ValueError, match="omitted"):
        codec.declaration_from(codec.bind_record(declaration, RequestNames("omitted")))


# The other records, the schema and later versions ---------------------------------------------------------------------


def test_enabled_says_what_is_on_and_what_is_not() -> None:
    topology = Topology(
        num_blocks=100,
        null_block_id=0,
        groups=(
            Group(group_id=0, kind="full_attention", block_size=16, kernel_block_size=None, layers=2),
            Group(group_id=1, kind="sliding_window", block_size=16, kernel_block_size=8, layers=2, visible_tokens=64),
        ),
    )
    record = codec.enabled_record(
        run_id="run",
        process="engine",
        pid=1,
        configuration={"kv_trace": {"enabled": True}},
        parts={"kv_trace": "on", "kv_monitor": codec.NOT_DELIVERED},
        actions={"kv_trace": "log"},
        seams_absent={"GPUModelRunner.prepare_attn": "this host has no V2 runner"},
        checks_inactive=[InactiveCheck(check="C1", cause="group kind mamba is not judged", group_id=2)],
        topology=topology,
        runner=None,
    )
    back = json.loads(codec.encode(through_a_line(record)))
    assert back["versions"]["vllm"] is None
    assert back["runner"] is None
    assert "visible_tokens" not in back["groups"][0]
    assert back["groups"][0]["kernel_block_size"] is None
    assert back["parts"]["kv_monitor"] == "inactive: not in this version"
    front_end = codec.enabled_record(run_id="r", process="frontend", pid=1, configuration={}, parts={}, actions={})
    assert not {"num_blocks", "null_block_id", "groups", "runner"} & members(through_a_line(front_end))


def test_coverage_goes_through() -> None:
    record = codec.coverage_record(
        steps=1,
        empty_steps=0,
        rows_scheduled=4,
        rows=3,
        tokens=9,
        checks_run={"write_target_mismatch": 3},
        checks_skipped={"C1": {"graph": 1}},
        hook_calls={"schedule": 1},
        hook_faults={},
        hook_time_ns={"schedule": 900},
        findings=[FindingCount(reason="x", group_id=None, count=2, first_step=1, last_step=4)],
    )
    assert through_a_line(record).findings[0].count == 2


def test_the_step_stands_in_one_place() -> None:
    declaration, _ = samples.decode_batch()
    record = codec.bind_record(declaration)
    codec.stamp(
        record, IDENTITY, seq=1, component="scheduler", boundary="b", mono_ns=1, wall_ns=1, step=99, trace_id="x"
    )
    assert (record.step, record.trace_id, record.after_step) == (1234, declaration.trace_id, msgspec.UNSET)
    error = codec.error_record(ValueError())
    codec.stamp(error, IDENTITY, seq=1, component="scheduler", boundary="b", mono_ns=1, wall_ns=1)
    assert (error.step, error.after_step) == (msgspec.UNSET, 0)
    assert (error.dp_rank, error.tp_rank, error.pp_rank) == (0, 1, msgspec.UNSET)


def test_the_schema_covers_every_event_and_refuses_what_it_does_not_know() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert {definition.__struct_config__.tag for definition in RECORDS.values()} == set(RECORDS)
    record = codec.error_record(ValueError())
    through_a_line(record)
    line = json.loads(codec.encode(record))
    VALIDATOR.validate(line)
    for broken in ({**line, "schema": "kvscope.trace/2"}, {**line, "event": "kv.else"}, {**line, "error_type": 1}):
        assert not VALIDATOR.is_valid(broken)
    for name in ("seq", "engine_id", "after_step", "mono_ns"):
        assert not VALIDATOR.is_valid({key: value for key, value in line.items() if key != name})


def test_unknown_events_and_fields_are_passed_over_and_damage_is_not() -> None:
    unknown = decode_record(f'{{"schema":"{SCHEMA}","event":"kv.else","seq":3,"block_ids":[1]}}')
    assert unknown == UnknownRecord(schema=SCHEMA, event="kv.else", seq=3)
    later = decode_record(f'{{"schema":"{SCHEMA}","event":"kv.error","seq":3,"error_type":"E","later":{{"x":1}}}}')
    assert not isinstance(later, UnknownRecord)
    assert later.seq == 3
    with pytest.raises(msgspec.ValidationError):
        decode_record(f'{{"schema":"{SCHEMA}","event":"kv.error","seq":3,"error_type":7}}')
    for cut in (b"", b"{", b'{"schema":"kvscope.trace/1","ev'):
        with pytest.raises(msgspec.DecodeError):
            decode_record(cut)


def test_record_types_are_the_ones_that_codec_makes() -> None:
    declaration, snapshot = samples.decode_batch()
    assert isinstance(codec.bind_record(declaration), BindRecord)
    assert [type(r) for r in codec.write_read_records(snapshot)] == [WriteRecord, ReadRecord]
    finding = Finding(reason="x", step=1, trace_id="t")
    assert isinstance(codec.violation_record(finding, samples.RULE, "log", 0), ViolationRecord)
    assert isinstance(
        codec.admission_record(Admission(client_request_id="", request_id="", child_index=0)), BoundaryRecord
    )
