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
