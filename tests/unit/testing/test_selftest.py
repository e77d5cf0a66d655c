from typing import Any

import pytest

from kvscope.checks.finding import Finding
from kvscope.testing.faults import FAULTS
from kvscope.testing.selftest import mistakes_in

FAULT = FAULTS["slot_plus_one"]
REASON = FAULT.expected
PLACE: dict[str, Any] = {
    "request_id": "a", "group_id": 0, "block_id": 6, "slot": 200, "position": 40, "row": 1, "token_index": 2,
}  # fmt: skip
WHAT = {"expected": REASON, "step": 2, **PLACE}
STEPS = [7, 9]


def finding(reason: str = REASON, **changes: Any) -> Finding:
    return Finding(**{"reason": reason, "step": 9, "trace_id": "t", **PLACE, **changes})


def test_a_finding_that_says_what_was_injected_has_no_mistake() -> None:
    assert mistakes_in(FAULT, WHAT, [finding()], STEPS) == []


@pytest.mark.parametrize(
    ("changes", "mistake"),
    [
        ({"request_id": "b"}, "request is b, injected was a"),
        ({"request_id": None}, "request is None, injected was a"),
        ({"group_id": 1}, "group_id is 1, injected was 0"),
        ({"block_id": 5}, "block_id is 5, injected was 6"),
        ({"block_id": None}, "block is missing, injected was 6"),
        ({"slot": 184}, "slot is 184, injected was 200"),
        ({"position": 41}, "position is 41, injected was 40"),
        ({"row": 0}, "row is 0, injected was 1"),
        ({"token_index": 3}, "token_index is 3, injected was 2"),
        ({"step": 7}, "step is 7, injected was 9"),
    ],
)
def test_a_finding_with_the_right_reason_is_held_against_each_field(changes: dict[str, Any], mistake: str) -> None:
    assert mistakes_in(FAULT, WHAT, [finding(**changes)], STEPS) == [mistake]


def test_the_request_may_be_the_one_whose_block_is_hit() -> None:
    assert mistakes_in(FAULT, WHAT, [finding(request_id="b", other_request_id="a")], STEPS) == []


def test_of_several_findings_with_the_reason_the_best_one_counts() -> None:
    findings = [finding(block_id=5, slot=184), finding(slot=184)]
    assert mistakes_in(FAULT, WHAT, findings, STEPS) == ["slot is 184, injected was 200"]
    assert mistakes_in(FAULT, WHAT, [*findings, finding()], STEPS) == []


def test_what_is_no_consequence_of_the_fault_is_a_false_finding() -> None:
    findings = [finding(), finding("read_null_block"), finding(min(FAULT.allowed_also))]
    assert mistakes_in(FAULT, WHAT, findings, STEPS) == ["false finding read_null_block"]


def test_a_fault_that_was_not_found_says_what_was_found_instead() -> None:
    assert mistakes_in(FAULT, WHAT, [finding("read_null_block")], STEPS) == [
        f"{REASON} was not found, but read_null_block"
    ]
    assert mistakes_in(FAULT, WHAT, [], STEPS) == [f"{REASON} was not found, but nothing"]
    assert mistakes_in(FAULT, None, [], STEPS) == ["the fault found no occasion"]
