from __future__ import annotations

from kvscope.state.coverage import Coverage, Tally


def test_findings_are_counted_by_reason_and_group_with_first_and_last_step() -> None:
    coverage = Coverage()
    assert [coverage.count_finding("null_block_write", 0, step) for step in (3, 4, 9)] == [0, 1, 2]
    assert coverage.count_finding("null_block_write", 1, 5) == 0
    assert coverage.count_finding("handover_missing", None, 7) == 0
    assert coverage.findings == {
        ("null_block_write", 0): Tally(count=3, first_step=3, last_step=9),
        ("null_block_write", 1): Tally(count=1, first_step=5, last_step=5),
        ("handover_missing", None): Tally(count=1, first_step=7, last_step=7),
    }


def test_no_number_of_findings_hides_a_later_one() -> None:
    coverage = Coverage()
    for step in range(10_000):
        coverage.count_finding("null_block_write", 0, step)
    assert coverage.count_finding("write_foreign_block", 0, 10_000) == 0
    assert coverage.findings["null_block_write", 0] == Tally(count=10_000, first_step=0, last_step=9_999)


def test_skipped_checks_are_nested_by_check_and_cause() -> None:
    coverage = Coverage()
    coverage.skipped["plan", "device_tensors"] += 4
    coverage.skipped["plan", "table_unknown"] += 1
    coverage.skipped["C1", "estimated_lengths"] += 2
    assert coverage.skipped_by_check() == {
        "plan": {"device_tensors": 4, "table_unknown": 1},
        "C1": {"estimated_lengths": 2},
    }


def test_a_seam_stands_still_after_a_hundred_steps_without_it_and_no_longer_once_it_fires() -> None:
    coverage = Coverage()
    coverage.rows = 40
    for step in range(21, 120):
        coverage.miss_plan(step)
    assert coverage.stalled() == (None, None)
    coverage.miss_plan(120)
    assert coverage.stalled() == (20, None)
    coverage.rows += 2
    assert coverage.stalled() == (None, None)
    coverage.miss_plan(122)
    assert (coverage.without_plan, coverage.last_plan_step) == (1, 121)


def test_results_stand_still_when_a_hundred_steps_are_unanswered() -> None:
    coverage = Coverage()
    coverage.steps = 7
    coverage.steps_answered, coverage.last_answered_step = coverage.steps, 9
    coverage.steps = 106
    assert coverage.stalled() == (None, None)
    coverage.steps = 107
    assert coverage.stalled() == (None, 9)
