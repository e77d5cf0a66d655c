"""The metrics of one process: what is counted anyway gets into its file, and nothing of it is in the way of anybody."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvscope.checks.catalog import RULES
from kvscope.checks.finding import Finding
from kvscope.facts.topology import Ranks
from kvscope.metrics.families import ProcessValues
from kvscope.metrics.reader import read_process
from kvscope.runtime import process_monitor
from kvscope.runtime.process_monitor import MAX_FAULTS, ProcessMonitor
from kvscope.runtime.run import Run
from kvscope.sinks.stream import QuietStream
from kvscope.state.reuse import HitRatio, Reuse
from kvscope.state.tails import STATES
from unit.runtime.support import Hooks, make_run, records


def monitored(folder: Path, *roles: Any, **given: Any) -> Run:
    return make_run(folder, *roles, monitor={"prefix": "p_"}, **given)


def values(run: Run) -> ProcessValues:
    """What a reader finds, once the process has published what it has now."""
    assert run.monitor is not None
    run.monitor.publish()
    return read_process(run.monitor.store.path)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = monitored(tmp_path)
    run.open()
    assert run.monitor is not None
    run.monitor._ending.set()  # the thread ends, and the test publishes
    run.monitor._thread.join()
    return run


def finding(reason: str = "write_target_mismatch", **fields: Any) -> Finding:
    return Finding(**{"reason": reason, "step": 1, "trace_id": "t", "request_id": "a", "group_id": 0, **fields})


def test_the_file_stands_beside_the_trace_and_says_whose_it_is(tmp_path: Path) -> None:
    run = monitored(tmp_path, "worker", ranks=Ranks(dp=1, tp=0, world=3))
    run.open()
    found = values(run)
    assert (found.process, found.rank, found.engine, found.prefix) == ("worker", 3, "1", "p_")
    assert run.monitor is not None
    assert run.monitor.store.path == run.stream.folder / f"{run.stream.stem}.metrics"
    run.close()
    assert read_process(run.monitor.store.path).has_ended


def test_without_the_part_there_is_no_file(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.open()
    assert run.monitor is None
    run.close()
    assert not list(tmp_path.rglob("*.metrics"))


def test_findings_are_counted_by_reason_over_all_groups_and_begin_at_zero(run: Run) -> None:
    found = values(run).values["guard_violations_total"]
    assert found == {(reason,): 0.0 for reason in RULES if RULES[reason].part in run.parts}
    for group in (0, 0, 1):
        run.report([finding(group_id=group)], "runner", "plan")
    assert values(run).values["guard_violations_total"]["write_target_mismatch",] == 3
    run.forget_findings()
    assert values(run).values["guard_violations_total"]["write_target_mismatch",] == 3
    run.report([finding()], "runner", "plan")
    assert values(run).values["guard_violations_total"]["write_target_mismatch",] == 4


@pytest.mark.parametrize(("action", "fields"), [("raise", {}), ("log", {"launch_fatal": True})])
def test_a_finding_that_may_end_the_process_is_published_before_it_does(
    tmp_path: Path, action: str, fields: dict[str, Any]
) -> None:
    run = monitored(tmp_path, guard=action, trace=action)
    run.open()
    assert run.monitor is not None
    run.monitor._ending.set()  # nobody else publishes
    run.monitor._thread.join()
    run.report([finding(**fields)], "runner", "plan")
    found = read_process(run.monitor.store.path).values["guard_violations_total"]
    assert found["write_target_mismatch",] == 1


def test_a_finding_that_is_only_logged_waits_for_the_next_round(run: Run) -> None:
    run.report([finding()], "runner", "plan")
    assert run.monitor is not None
    assert read_process(run.monitor.store.path).values["guard_violations_total"]["write_target_mismatch",] == 0


def test_a_part_that_is_off_has_no_findings(tmp_path: Path) -> None:
    run = monitored(tmp_path, guard=None)
    run.open()
    reasons = {reason for (reason,) in values(run).values["guard_violations_total"]}
    assert reasons == {reason for reason, rule in RULES.items() if rule.part == "kv_trace"}


def test_what_was_looked_at_and_what_was_not_is_said(run: Run) -> None:
    coverage = run.coverage
    coverage.rows, coverage.handovers, coverage.pool_operations = 7, 5, 3
    coverage.skipped["plan", "semantics:mamba"] = 2
    coverage.skipped["plan", "semantics:ring"] = 3
    coverage.skipped["A", "allocator_hook_fault"] = 1
    coverage.tail_entries["own"] = 4
    found = values(run).values
    assert found["guard_checks_total"] == {(check,): 7 for check in ("C1", "C2", "C3", "C4", "C5", "C6")} | {
        ("L",): 5,
        ("A",): 3,
    }
    assert found["guard_checks_skipped_total"] == {("plan", "semantics"): 5, ("A", "other"): 1}
    assert found["guard_rows_audited_total"] == {(): 7}
    assert found["tail_entries"] == {(state,): 4.0 if state == "own" else 0.0 for state in STATES}
    assert set(found["guard_checks_stalled"].values()) == {0}


def test_a_check_that_stands_still_is_said(run: Run) -> None:
    run.coverage.handovers = 5
    run.coverage.steps = 200
    assert values(run).values["guard_checks_stalled"]["L",] == 1
    run.coverage.steps_answered = run.coverage.steps
    assert values(run).values["guard_checks_stalled"]["L",] == 0


def test_an_engine_without_a_worker_judges_no_rows(tmp_path: Path) -> None:
    run = monitored(tmp_path, "engine")
    run.open()
    found = values(run).values
    assert "guard_rows_audited_total" not in found
    assert "tail_entries" not in found


def test_a_front_end_says_what_is_its_own(tmp_path: Path) -> None:
    run = monitored(tmp_path, "frontend")
    run.open()
    found = values(run)
    assert found.engine == "frontend"
    assert set(found.values) <= {"records_dropped_total", "hook_faults_total", "hook_seconds_total"}


def test_hooks_are_said_by_name_and_those_of_a_connector_by_its_interface(tmp_path: Path) -> None:
    hooks = Hooks()
    run = monitored(tmp_path, hooks=hooks)
    run.open()
    hooks.numbers = {
        "scheduler.schedule": (9, 1, 2_000_000_050),
        "connector.alloc.NixlConnector": (1, 2, 1_000_000_000),
        "connector.alloc.MultiConnector": (1, 0, 500_000_000),
        "subscribers": (1, 3, 250_000_000),
        "collectors": (5, 2, 0),
        "made.up": (1, 4, 0),
        "scheduler.drain": (4, 0, 0),
    }
    found = values(run).values
    assert found["hook_seconds_total"] == {
        ("scheduler.schedule",): 2.0,
        ("connector.alloc",): 1.5,
        ("subscribers",): 0.25,
    }
    assert found["hook_faults_total"] == {
        ("scheduler.schedule",): 1,
        ("connector.alloc",): 2,
        ("subscribers",): 3,
        ("collectors",): 2,
        ("other",): 4,
        ("scheduler.drain",): 0,
    }


def test_dropped_records_are_said_by_cause(tmp_path: Path) -> None:
    run = monitored(tmp_path, queue_records=1)
    for _ in range(3):
        run.stream.put("state", object(), component="scheduler", boundary="b")
    run.open()
    found = values(run).values["records_dropped_total"]
    assert found["queue_records",] == 2
    assert found["closed",] == 0


def test_the_engine_says_its_connector_and_how_much_of_late_was_found(run: Run) -> None:
    assert run.monitor is not None
    totals = [Reuse()]
    run.monitor.observe_scheduler("NixlConnector", lambda: totals[0])
    assert "prefix_cache_hit_ratio" not in values(run).values
    totals[0] = totals[0].admitted(40, 32, 16)
    found = values(run).values
    assert found["prefix_cache_hit_ratio"] == {("token",): 0.8, ("block",): pytest.approx(2 / 3)}
    assert found["kvscope_info"] == {("NixlConnector",): 1}


def test_a_ratio_is_that_of_its_window_and_ends_with_it() -> None:
    ratio = HitRatio(10.0)
    assert ratio.take(0.0, Reuse()) == (None, None)
    first = Reuse().admitted(20, 10, 16)
    assert ratio.take(1.0, first) == (0.5, 0.5)
    assert ratio.take(6.0, first) == (0.5, 0.5)
    second = first.admitted(20, 20, 16)
    assert ratio.take(7.0, second) == (0.75, 0.75)
    assert ratio.take(11.5, second) == (1.0, 1.0)
    assert ratio.take(17.5, second) == (None, None)
    for moment in range(100_000):
        ratio.take(18 + moment / 1000, second)
    assert len(ratio._samples) < 130


def test_a_run_begins_with_what_was_found_before_the_first_look() -> None:
    assert HitRatio(1.0).take(0.0, Reuse().admitted(10, 5, 16)) == (0.5, 1.0)


def test_a_thread_publishes_by_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path, monitor={"window": 0.5})
    run.open()
    assert run.monitor is not None
    run.coverage.rows = 11
    for _ in range(100):
        found = read_process(run.monitor.store.path).values
        if found.get("guard_rows_audited_total") == {(): 11}:
            break
        time.sleep(0.05)
    else:
        pytest.fail("nothing was published")
    run.close()
    assert not run.monitor._thread.is_alive()


def test_a_thread_that_cannot_publish_says_so_and_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(process_monitor, "say", lambda _, text, *given: told.append(text % given))
    monkeypatch.setattr(process_monitor, "SHORTEST_INTERVAL_S", 0.001)
    run = make_run(tmp_path, monitor={"window": 0.001})

    def broken(_: object) -> None:
        raise ValueError

    monkeypatch.setattr(ProcessMonitor, "publish", broken)
    run.open()
    assert run.monitor is not None
    run.monitor._thread.join(10)
    assert not run.monitor._thread.is_alive()
    assert run.monitor._faults == MAX_FAULTS
    assert [text.rpartition("; ")[2] for text in told] == ["it is tried again", "it is not tried again"]


def test_a_file_that_cannot_be_had_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    run = monitored(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f".{run.stream.stem}.metrics.new").mkdir()
    run.open()
    assert run.monitor is not None
    assert run.monitor.store.reason is not None
    assert run.enabled().parts["kv_monitor"] == f"on; {run.monitor.store.reason}"
    run.monitor.publish()
    run.close()


def test_what_is_counted_by_others_is_published_before_the_end(run: Run) -> None:
    assert run.monitor is not None
    run.monitor._ending.clear()
    slab = run.monitor.store.slab()
    slab.gauge("kv_cache_usage_percent").set(12.5)
    run.monitor.before_close.append(slab.publish)
    run.close()
    assert read_process(run.monitor.store.path).values["kv_cache_usage_percent"] == {(): 12.5}
    run.monitor.close()


def test_metrics_alone_leave_no_record_of_a_step(tmp_path: Path) -> None:
    run = monitored(tmp_path, "engine", trace=None, guard=None)
    run.open()
    assert isinstance(run.stream, QuietStream)
    run.stream.put("update_input", object(), component="scheduler", boundary="b")
    run.native_error("OSError", component="scheduler", boundary="b")
    said = records(run)
    assert [record["event"] for record in said] == ["kv.enabled", "kv.error", "kv.coverage"]
    assert said[0]["parts"] == {"kv_trace": "off", "kv_guard_config": "off", "kv_monitor": "on", "kv_transfer": "off"}
    assert run.stream.balance().dropped == {}
