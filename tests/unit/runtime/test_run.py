"""One process of a run: what it is called, what it announces, and how findings and numbers get out."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvscope.checks.catalog import RULES
from kvscope.checks.finding import Finding
from kvscope.events.codec import NOT_DELIVERED
from kvscope.facts.allocator import PoolOperation
from kvscope.facts.requests import Admission
from kvscope.facts.topology import Ranks
from kvscope.runtime import run as module
from kvscope.runtime.concerned import MOST_BLOCKS, concerned_blocks
from kvscope.runtime.frontend import FrontendRecorder
from kvscope.runtime.run import COVERAGE_INTERVAL_SECONDS
from kvscope.runtime.salt import SALT_VARIABLE
from kvscope.state.blocks import BlockLedger
from unit.checks.worlds import group, pool
from unit.runtime.support import Hooks, last_coverage, make_run, of_event, records


def finding(reason: str = "write_target_mismatch", step: int = 1, **fields: Any) -> Finding:
    return Finding(reason=reason, step=step, trace_id=f"t{step}", request_id="a", group_id=0, **fields)


@pytest.mark.parametrize(
    ("roles", "name"),
    [
        (("engine", "frontend"), "engine"),
        (("engine", "frontend", "worker"), "all"),
        (("engine",), "engine"),
        (("engine", "worker"), "all"),
        (("worker",), "worker"),
        (("frontend",), "frontend"),
    ],
)
def test_a_process_is_named_after_what_it_does(tmp_path: Path, roles: Any, name: str) -> None:
    run = make_run(tmp_path, *roles)
    assert run.process == name
    run.open()
    assert run.stream.stem == f"{name}-0-{os.getpid()}"
    assert [said["process"] for said in of_event(run, "kv.enabled")] == [name]


@pytest.mark.parametrize(
    ("role", "ranks", "rank"),
    [
        ("engine", Ranks(dp=2), 2),
        ("worker", Ranks(dp=2, tp=1, pp=0, world=5), 5),
        ("frontend", Ranks(), 0),
    ],
)
def test_a_file_carries_the_rank_of_its_process(tmp_path: Path, role: Any, ranks: Ranks, rank: int) -> None:
    run = make_run(tmp_path, role, ranks=ranks)
    assert run.stream.stem == f"{role}-{rank}-{os.getpid()}"
    assert run.engine_id == f"run.{ranks.dp}"
    run.close()


def test_a_process_that_has_nothing_to_say_makes_no_file(tmp_path: Path) -> None:
    run = make_run(tmp_path, "frontend")
    run.close()
    assert list(tmp_path.iterdir()) == []


# kv.enabled -----------------------------------------------------------------------------------------------------------


def test_the_first_record_says_what_is_on_and_what_is_not(tmp_path: Path) -> None:
    topology = pool(group(0), group(1, "mamba"))
    run = make_run(tmp_path, "engine", "worker", guard=None, trace="raise", topology=topology)
    run.runner, run.unjudged_cause = "V2", "context_parallel"
    run.open()
    run.open()
    (enabled,) = of_event(run, "kv.enabled")
    assert enabled == records(run)[0]
    assert (enabled["process"], enabled["pid"], enabled["runner"]) == ("all", os.getpid(), "V2")
    assert (enabled["versions"]["vllm"], enabled["versions"]["platform"]) == ("0.32.0", "cpu")
    assert enabled["seams_installed"] == ["scheduler.schedule"]
    assert "worker.sample" in json.dumps(enabled["seams_absent"])
    assert enabled["actions"] == {"kv_trace": "raise", "kv_guard_config": "log", "kv_transfer": "log"}
    assert enabled["parts"]["kv_trace"] == "on"
    assert enabled["parts"]["kv_guard_config"] == "off"
    assert set(enabled["checks_active"]) == {rule.reason for rule in RULES.values() if rule.part == "kv_trace"}
    inactive = [(said["check"], said["cause"], said.get("group_id")) for said in enabled["checks_inactive"]]
    assert ("C3", "kv_guard_config is off", None) in inactive
    assert ("plan", "context_parallel", None) in inactive
    assert ("plan", "semantics:mamba", 1) in inactive
    assert {check for check, cause, _ in inactive if cause == NOT_DELIVERED} == {"T"}
    assert [said["kind"] for said in enabled["groups"]] == ["full_attention", "mamba"]
    assert enabled["configuration"]["kv_trace"]["action"] == "raise"


def test_a_part_of_a_later_version_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.config = replace(run.config, transfer=replace(run.config.transfer, enabled=True))
    assert run.enabled().parts["kv_transfer"] == NOT_DELIVERED
    run.close()


def test_what_is_more_than_logged_is_kept_for_the_engine(tmp_path: Path) -> None:
    run = make_run(tmp_path, trace="isolate", guard="raise")
    run.open()
    run.report([finding()], "runner", "plan")
    run.report([finding("write_foreign_block")], "runner", "plan")
    (enabled,) = of_event(run, "kv.enabled")
    assert enabled["parts"]["kv_trace"] == enabled["parts"]["kv_guard_config"] == "on"
    assert (enabled["actions"]["kv_trace"], enabled["actions"]["kv_guard_config"]) == ("isolate", "raise")
    assert [said["action"] for said in of_event(run, "kv.violation")] == ["isolate", "raise"]
    assert [(f.reason, run.acts_on(f), run.stops(f)) for f in run.pending] == [
        ("write_target_mismatch", True, False),
        ("write_foreign_block", True, True),
    ]


# Findings -------------------------------------------------------------------------------------------------------------


def test_a_finding_is_recorded_with_its_rule_and_ranks(tmp_path: Path) -> None:
    run = make_run(tmp_path, "worker", ranks=Ranks(dp=0, tp=1, pp=2, world=5))
    run.open()
    run.report([finding(step=3, block_id=4, slot=70, expected=56, actual=70)], "runner", "plan")
    (said,) = of_event(run, "kv.violation")
    assert (said["reason"], said["check"], said["severity"]) == ("write_target_mismatch", "C1", "error")
    assert (said["step"], said["trace_id"], said["component"], said["boundary"]) == (3, "t3", "runner", "plan")
    assert (said["tp_rank"], said["pp_rank"]) == (1, 2)
    assert said["evidence"] == RULES["write_target_mismatch"].evidence
    assert run.pending == []
    assert list(run.stream.folder.glob("incident-*.jsonl"))


def test_with_a_ledger_a_finding_is_recorded_with_what_became_of_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was when the finding was made, and with request ids as they may be written."""
    monkeypatch.setenv(SALT_VARIABLE, "5a" * 32)
    run = make_run(tmp_path, request_ids="hashed")
    run.open()
    ledger = BlockLedger(16, 0)
    ledger.apply(PoolOperation(kind="alloc", block_ids=[4], request_id="req-a", group_id=0, first_index=0), 2)
    ledger.apply(PoolOperation(kind="free", block_ids=[4], request_id="req-a", group_id=0, cause="preempt"), 3)
    run.report([finding("write_foreign_block", block_id=4), finding()], "runner", "plan", ledger=ledger)
    run.report([finding("write_target_mismatch", block_id=4)], "runner", "plan")
    ledger.apply(PoolOperation(kind="alloc", block_ids=[4], request_id="req-b", group_id=0, first_index=0), 4)
    said, without_block, without_ledger = of_event(run, "kv.violation")
    history = said["history"]
    assert (history["status"], history["generation"], history["freed_generation"]) == ("free", 1, 1)
    assert (history["freed_by"], history["freed_step"], history["freed_cause"]) == (run.names("req-a"), 3, "preempt")
    assert "req-a" not in json.dumps(said)
    assert "history" not in without_block
    assert "history" not in without_ledger


def test_ahead_of_a_finding_stands_the_state_of_its_blocks_and_of_its_requests(tmp_path: Path) -> None:
    """Once a second at most, and not for what is folded; the incident file has it as well."""
    run = make_run(tmp_path)
    run.open()
    ledger = BlockLedger(64, 0)
    ledger.apply(PoolOperation(kind="alloc", block_ids=[50, 51], request_id="a", group_id=0, first_index=0), 2)
    ledger.apply(PoolOperation(kind="alloc", block_ids=[4, 30], request_id="c", group_id=0, first_index=0), 2)
    for step in (3, 4, 5):
        run.report([finding("write_foreign_block", step=step, block_id=4)], "runner", "plan", ledger=ledger)
    said = [record for record in records(run) if record["event"] in {"kv.state", "kv.violation"}]
    assert [record["event"] for record in said] == ["kv.state", *["kv.violation"] * 3]
    assert said[0]["block_ids"] == [[0, 11], [50, 51]]
    assert (said[0]["step"], said[0]["trace_id"], said[0]["boundary"]) == (3, "t3", "plan")
    (incident,) = run.stream.folder.glob("incident-*.jsonl")
    events = [json.loads(line)["event"] for line in incident.read_bytes().splitlines()]
    assert events == ["kv.enabled", "kv.state", "kv.violation"]


def test_the_blocks_that_findings_concern_are_bounded() -> None:
    ledger = BlockLedger(4096, 0)
    ledger.apply(PoolOperation(kind="alloc", block_ids=list(range(1, 2000)), request_id="a", group_id=0), 1)
    assert len(concerned_blocks([finding(block_id=4), finding(block_id=9)], ledger)) == MOST_BLOCKS
    assert concerned_blocks([finding(block_id=1 << 40)], BlockLedger(16, 0)) == []


def test_a_repetition_that_stops_still_stops(tmp_path: Path) -> None:
    run = make_run(tmp_path, trace="raise")
    run.report([finding(step=step) for step in range(1, 19)], "runner", "plan")
    assert len(run.pending) == 18
    run.close()


def test_what_may_crash_the_process_is_on_disk_when_it_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.open()
    run.report([finding("write_outside_cache", launch_fatal=True)], "runner", "plan")
    (path,) = run.stream.folder.glob("all-*.jsonl")
    assert b"write_outside_cache" in path.read_bytes()
    run.close()


def test_a_worker_posts_what_stops_into_its_mailbox(tmp_path: Path) -> None:
    worker = make_run(tmp_path, "worker", trace="raise")
    worker.open()
    engine = make_run(tmp_path, "engine", trace="raise")
    (mailbox,) = engine.mailboxes()
    worker.report([finding(), finding("write_foreign_block")], "runner", "plan")
    assert [f.reason for f in mailbox.poll()] == ["write_target_mismatch"]
    assert worker.pending == []
    mailbox.close()
    worker.close()


def test_a_worker_without_a_shared_file_keeps_what_it_could_not_deliver(tmp_path: Path) -> None:
    worker = make_run(tmp_path, "worker", trace="raise")
    worker.open()
    worker.stream.mailbox = None
    for _ in range(3):
        worker.report([finding()], "runner", "plan")
    assert [f.reason for f in worker.undelivered] == ["write_target_mismatch"]
    assert len(of_event(worker, "kv.violation")) == 3


@pytest.mark.parametrize("role", ["worker", "engine"])
def test_an_engine_reads_the_mailboxes_of_its_own_workers_only(tmp_path: Path, role: Any) -> None:
    other = make_run(tmp_path, role, ranks=Ranks(dp=1, tp=0, pp=0, world=0))
    other.open()
    assert make_run(tmp_path, "engine").mailboxes() == []
    assert len(make_run(tmp_path, "engine", ranks=Ranks(dp=1)).mailboxes()) == (role == "worker")
    other.close()


def test_an_error_of_action_raise_names_what_it_is_about(tmp_path: Path) -> None:
    run = make_run(tmp_path, guard="raise", log_tag="TAG")
    error = run.violation(finding("write_foreign_block", step=9, block_id=4, slot=70))
    assert (error.reason, error.request, error.group, error.block, error.step) == ("write_foreign_block", "a", 0, 4, 9)
    assert error.text.startswith("TAG reason=write_foreign_block check=C3 action=raise request=a group=0 block=4")
    assert error.text.endswith("slot=70 step=9 trace_id=t9")


def test_hashed_requests_are_hashed_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SALT_VARIABLE, "5a" * 32)
    run = make_run(tmp_path, guard="raise", request_ids="hashed")
    run.open()
    run.report([finding("write_foreign_block")], "runner", "plan")
    name = run.names("a")
    assert name not in {"a", None}
    assert [said["request_id"] for said in of_event(run, "kv.violation")] == [name]
    assert f"request={name}" in run.violation(finding("write_foreign_block")).text
    assert make_run(tmp_path, request_ids="hashed").names("a") == name


def test_plain_requests_need_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SALT_VARIABLE, raising=False)
    make_run(tmp_path)
    assert SALT_VARIABLE not in os.environ


# Coverage and the end -------------------------------------------------------------------------------------------------


def test_coverage_is_written_when_it_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    run = make_run(tmp_path)
    run.open()
    for seconds in (0.0, COVERAGE_INTERVAL_SECONDS - 1, COVERAGE_INTERVAL_SECONDS, COVERAGE_INTERVAL_SECONDS + 1):
        now = 1000.0 + seconds
        run.cover("scheduler", "update_from_output")
    assert len(of_event(run, "kv.coverage")) == 2  # the one that was due, and the last one


def test_the_end_writes_the_last_coverage(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.open()
    run.coverage.steps = 7
    run.coverage.skipped["plan", "device_tensors"] += 3
    run.close()
    last = records(run)[-1]
    assert (last["event"], last["boundary"], last["component"]) == ("kv.coverage", "shutdown", "scheduler")
    assert (last["steps"], last["checks_skipped"]) == (7, {"plan": {"device_tensors": 3}})


def test_ending_twice_writes_and_loses_nothing_more(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.open()
    run.close()
    before = run.stream.balance()
    run.close()
    assert run.stream.balance() == before
    assert before.dropped == {}
    assert before.produced == before.written


def test_hooks_are_counted_from_the_beginning_of_the_run(tmp_path: Path) -> None:
    """A process that has had another engine before does not count that one's calls."""
    hooks = Hooks()
    run = make_run(tmp_path, hooks=hooks)
    run.open()
    hooks.numbers = {"scheduler.schedule": (9, 2, 80), "worker.execute": (4, 0, 7)}
    last = last_coverage(run)
    assert last["hook_calls"] == {"scheduler.schedule": 4, "worker.execute": 4}
    assert last["hook_faults"] == {"scheduler.schedule": 2}
    assert last["hook_time_ns"] == {"scheduler.schedule": 30, "worker.execute": 7}


def test_a_native_error_is_recorded_by_its_type_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.open()
    run.native_error("KeyError", component="scheduler", boundary="scheduler.schedule", after_step=4)
    (said,) = of_event(run, "kv.error")
    assert (said["error_type"], said["boundary"], said["after_step"]) == ("KeyError", "scheduler.schedule", 4)
    assert said["native"] is True


# The front end --------------------------------------------------------------------------------------------------------


def test_a_front_end_records_admissions_and_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path, "frontend", ranks=Ranks())
    recorder = FrontendRecorder(run)
    for index in range(2):
        recorder.on_admission(Admission(client_request_id="chat", request_id=f"{index}_chat", child_index=index))
    recorder.on_native_error("frontend.admit", "ValueError")
    recorder.on_shutdown()
    assert [r["event"] for r in records(run)] == [
        "kv.enabled", "kv.boundary", "kv.boundary", "kv.error", "kv.coverage",
    ]  # fmt: skip
    assert [said["component"] for said in of_event(run, "kv.boundary", "frontend_admit")] == ["frontend"] * 2


def test_the_log_says_once_that_kvscope_is_on_and_where_its_records_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And says it in the engine's process alone, so that it stands there once."""
    with caplog.at_level("INFO", logger="vllm.kvscope"):
        make_run(tmp_path, "worker").open()
        assert caplog.messages == []
        run = make_run(tmp_path, "engine", trace="raise")
        run.open()
        run.open()
    (said,) = caplog.messages
    assert "on (kv_guard_config log, kv_trace raise)" in said
    assert str(tmp_path / run.run_id) in said
