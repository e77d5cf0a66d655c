"""Speculative decoding: what fires each rule about drafts, and what it must let pass."""

from __future__ import annotations

from typing import Any

from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_advances, judge_verification
from kvscope.facts.requests import Declaration, StepResult, Verification
from kvscope.state.advances import DeclaredAdvances, RunnerAdvances
from unit.checks.cases import fires, silent
from unit.checks.scenes import PARTS, declare

A, B = {"request_id": "a", "row": 0}, {"request_id": "b", "row": 1}


def drafted(step: int = 2, computed: int = 40, **drafts: int) -> Declaration:
    """``a`` and ``b`` decode one token and verify so many drafts."""
    known = [(name, None, computed, 1 + drafts.get(name, 0)) for name in ("a", "b")]
    declaration = declare(step, known=known)
    declaration.spec_tokens = drafts
    return declaration


def counted(**fields: Any) -> list[Finding]:
    """Of three drafts each, one of ``a`` and all of ``b`` are accepted, unless said otherwise."""
    said = {"request_ids": ["a", "b"], "drafted": [3, 3], "accepted": [1, 3], "rejected": [2, 0]}
    return judge_verification(drafted(a=3, b=3), Verification(**{**said, **fields}), PARTS)


# Rows -----------------------------------------------------------------------------------------------------------------


@fires("spec_row_count_mismatch", expected=2, actual=1)
def counts_of_one_row_in_a_batch_of_two() -> list[Finding]:
    return counted(accepted=[1], rejected=[2])


@fires("spec_row_count_mismatch", request_id="b", expected="3 drafts verified", actual="none")
def a_request_with_drafts_that_is_not_verified() -> list[Finding]:
    return counted(request_ids=["a"], drafted=[3], accepted=[1], rejected=[2])


@fires(
    "spec_row_count_mismatch",
    {"reason": "spec_row_count_mismatch", "request_id": "b", "expected": "3 drafts verified", "actual": "none"},
    request_id="a", expected="3 drafts verified", actual="none",
)  # fmt: skip
def drafts_that_nobody_counts() -> list[Finding]:
    return counted(request_ids=[], drafted=[], accepted=[], rejected=[])


@fires("spec_row_count_mismatch", **A, expected="3 drafts verified", actual="2", also=("spec_rejected_out_of_range",))
def a_draft_that_is_left_out() -> list[Finding]:
    return counted(drafted=[2, 3], rejected=[1, 0])


@silent("spec_row_count_mismatch", "spec_accepted_out_of_range", "spec_rejected_out_of_range")
def some_accepted_and_all_accepted() -> list[Finding]:
    return counted() + counted(accepted=[0, 0], rejected=[3, 3])


@silent("spec_row_count_mismatch", "spec_rejected_out_of_range")
def fewer_drafts_where_the_runner_may_trim() -> list[Finding]:
    return counted(drafted=[2, 1], accepted=[1, 0], rejected=[1, 1], trimmed=True)


@silent("spec_row_count_mismatch", "spec_accepted_out_of_range", "spec_rejected_out_of_range")
def a_batch_in_which_one_has_no_drafts() -> list[Finding]:
    verification = Verification(request_ids=["b", "a"], drafted=[0, 2], accepted=[0, 2], rejected=[0, 0])
    return judge_verification(drafted(a=2), verification, PARTS)


@silent("spec_row_count_mismatch", "spec_accepted_out_of_range", "spec_rejected_out_of_range")
def a_row_in_the_middle_of_its_prompt() -> list[Finding]:
    verification = Verification(request_ids=["a", "b"], drafted=[2, 0], accepted=[2, None], rejected=[0, 0])
    return judge_verification(drafted(a=2), verification, PARTS)


# Accepted and rejected ------------------------------------------------------------------------------------------------


@fires("spec_accepted_out_of_range", **A, expected="0 to 3", actual=4, also=("spec_rejected_out_of_range",))
def more_accepted_than_drafted() -> list[Finding]:
    return counted(accepted=[4, 3], rejected=[-1, 0])


@fires("spec_accepted_out_of_range", **B, expected="0 to 3", actual=-3)
def fewer_accepted_than_none() -> list[Finding]:
    return counted(accepted=[1, -3], rejected=[2, None])


@fires("spec_accepted_out_of_range", **B, expected="0 to 0", actual=1)
def a_draft_accepted_that_was_not_given() -> list[Finding]:
    verification = Verification(request_ids=["a", "b"], drafted=[2, 0], accepted=[2, 1], rejected=[0, None])
    return judge_verification(drafted(a=2), verification, PARTS)


@fires("spec_rejected_out_of_range", **A, expected=2, actual=3)
def one_rejected_that_was_accepted() -> list[Finding]:
    return counted(rejected=[3, 0])


@fires("spec_rejected_out_of_range", **B, expected=0, actual=-1)
def fewer_rejected_than_none() -> list[Finding]:
    return counted(rejected=[2, -1])


@fires("spec_rejected_out_of_range", **A, expected="0 to 2", actual=3)
def more_rejected_than_a_trimming_runner_can() -> list[Finding]:
    return counted(rejected=[3, 0], trimmed=True)


@fires("spec_rejected_out_of_range", **B, expected="0 to 3", actual=5)
def more_rejected_of_a_row_that_samples_nothing() -> list[Finding]:
    return counted(accepted=[1, None], rejected=[2, 5])


@silent("spec_accepted_out_of_range", "spec_rejected_out_of_range", "spec_row_count_mismatch")
def a_runner_that_does_not_count_what_it_rejects() -> list[Finding]:
    return counted(rejected=[None, None])


# Where the next step begins -------------------------------------------------------------------------------------------


def returned(accepted: dict[str, int]) -> StepResult:
    return StepResult(request_ids=tuple(accepted), sampled_tokens=tuple(1 + n for n in accepted.values()))


def scheduler(*starts: int, in_flight: bool = False, plan: str | None = None, **second: Any) -> list[Finding]:
    """``a`` is given three drafts in every step, of which two are accepted; its steps begin at ``starts``.

    With ``in_flight`` each step is declared before the result of the one before is there.
    """
    advances, found, waiting = DeclaredAdvances(), list[Finding](), list[Declaration]()
    for step, start in enumerate(starts, 1):
        declaration = declare(step, known=[("a", None, start, 4)], **(second if step == 2 else {}))
        declaration.spec_tokens, declaration.connector_plan = {"a": 3}, plan
        found += judge_advances(declaration, advances.declare(declaration), PARTS)
        waiting.append(declaration)
        if len(waiting) > in_flight:
            advances.returned(waiting.pop(0), returned({"a": 2}))
    return found


@fires("spec_advance_mismatch", request_id="a", expected=43, actual=44)
def a_rejected_draft_that_counts_as_computed() -> list[Finding]:
    return scheduler(40, 44, 47)


@fires("spec_advance_mismatch", request_id="a", expected=43, actual=42)
def an_accepted_draft_that_is_computed_again() -> list[Finding]:
    return scheduler(40, 42, 45)


@fires("spec_advance_mismatch", request_id="a", expected=47, actual=48)
def a_rejection_that_a_step_in_flight_has_lost() -> list[Finding]:
    return scheduler(40, 44, 48, 51, in_flight=True)


@silent("spec_advance_mismatch")
def steps_that_follow_from_each_other() -> list[Finding]:
    return scheduler(40, 43, 46) + scheduler(40, 44, 47, 50, in_flight=True)


@silent("spec_advance_mismatch")
def a_request_that_was_preempted_and_comes_back() -> list[Finding]:
    """It begins anew, and what was rejected before says nothing."""
    again = scheduler(40, 0, 4, 7, in_flight=True, resumed=["a"], preempted=["a"])
    return again + scheduler(40, 0, 3, resumed=["a"], preempted=["a"])


@silent("spec_advance_mismatch")
def a_request_whose_load_failed() -> list[Finding]:
    return scheduler(40, 16, 19, plan="Connector")


@silent("spec_advance_mismatch")
def a_result_that_says_nothing() -> list[Finding]:
    advances = DeclaredAdvances()
    first, second = drafted(1, 40, a=3), drafted(2, 44, a=3)
    found = judge_advances(first, advances.declare(first), PARTS)
    advances.returned(first, StepResult(request_ids=("a", "b"), sampled_tokens=(None, None)))
    second.requests.cached_computed = [44, 41]
    return found + judge_advances(second, advances.declare(second), PARTS)


@silent("spec_advance_mismatch")
def a_server_without_drafts() -> list[Finding]:
    advances, found = DeclaredAdvances(), list[Finding]()
    for step, start in enumerate((40, 45, 41), 1):
        declaration = drafted(step, start)
        found += judge_advances(declaration, advances.declare(declaration), PARTS)
    assert not advances.is_following
    return found


def runner(*starts: int, counts: bool = True, rejected: int | None = None) -> list[Finding]:
    """Batches of a runner that accepts two of three drafts of ``a``; ``b`` has none."""
    advances, found = RunnerAdvances(), list[Finding]()
    for step, start in enumerate(starts, 1):
        declaration = declare(step, known=[("a", None, start, 4), ("b", None, 20 + step, 1)])
        declaration.spec_tokens = {"a": 3}
        found += judge_advances(declaration, advances.compute(declaration, ["b", "a"], [20 + step, start]), PARTS)
        if counts:
            counted = Verification(request_ids=["b", "a"], drafted=[0, 3], accepted=[0, 2], rejected=[0, rejected])
            advances.count(declaration, counted)
    return found


@fires("spec_advance_mismatch", request_id="a", row=1, expected=43, actual=44)
def a_row_that_goes_on_behind_what_was_rejected() -> list[Finding]:
    return runner(40, 44, 47)


@fires("spec_advance_mismatch", request_id="a", row=1, expected=42, actual=43)
def a_row_that_does_not_follow_the_runners_own_count() -> list[Finding]:
    return runner(40, 43, rejected=2)


@silent("spec_advance_mismatch")
def rows_that_go_on_where_the_counts_lead_to() -> list[Finding]:
    return runner(40, 43, 46) + runner(40, 43, 46, rejected=1)


@silent("spec_advance_mismatch")
def rows_whose_drafts_nobody_counts() -> list[Finding]:
    return runner(40, 44, 41, counts=False)
