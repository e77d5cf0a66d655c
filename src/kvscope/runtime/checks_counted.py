"""What each check has judged in a process, and which of them stand still."""

from __future__ import annotations

from collections.abc import Collection

from ..checks.rule import PART_OF_CHECK, Part
from ..state.coverage import Coverage

PLAN_CHECKS = ("C1", "C2", "C3", "C4", "C5", "C6")
"""Checks that every judged row of a plan goes through."""


def checks_run(coverage: Coverage, parts: Collection[Part]) -> dict[str, int]:
    """By check: rows of plans, requests handed over, operations of the pool; then of how many rows the arguments of the
    operators were compared, how many blocks were held against the pool itself, and how many dummy runs were looked at.
    """
    run = {check: coverage.rows for check in PLAN_CHECKS if PART_OF_CHECK[check] in parts and coverage.rows}
    run |= {"L": coverage.handovers} if coverage.handovers and "kv_trace" in parts else {}
    run |= {"operators": coverage.operator_rows} if coverage.operator_rows else {}
    run |= {"A": coverage.pool_operations} if coverage.pool_operations else {}
    run |= {"audit": coverage.audited_blocks} if coverage.audited_blocks else {}
    return run | ({"dummy": coverage.dummy_runs} if coverage.dummy_runs else {})


def checks_stalled(coverage: Coverage, parts: Collection[Part]) -> dict[str, int]:
    """By check: the step at which its seam last fired, of those that stand still."""
    no_plan, no_result = coverage.stalled()
    mine = [check for check in PLAN_CHECKS if PART_OF_CHECK[check] in parts]
    stalled = {} if no_plan is None else dict.fromkeys(mine, no_plan)
    if no_result is not None and "kv_trace" in parts:
        stalled["L"] = no_result
    return stalled
