"""What comes back for a step: what fires each rule about it, and what it must let pass."""

from __future__ import annotations

from typing import Any

from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_result
from kvscope.facts.requests import StepResult
from unit.checks.cases import fires, silent
from unit.checks.scenes import PARTS, decoding

MANY = "result_trace_mismatch", "result_request_mapping", "result_row_count"


def given(ids: tuple[str, ...] = ("a", "b"), **odd: Any) -> list[Finding]:
    """The result of a step in which ``a`` and ``b`` decode."""
    result = StepResult(request_ids=ids, sampled_tokens=(1,) * len(ids), **odd)
    return judge_result(decoding()[1], result, PARTS)


@silent(*MANY)
def a_result_as_it_should_be() -> list[Finding]:
    return given()


@silent(*MANY)
def a_result_in_the_order_of_the_batch() -> list[Finding]:
    return given(("b", "a"))


@fires("result_trace_mismatch", expected="t2", actual="t1")
def the_result_of_the_step_before() -> list[Finding]:
    return given(trace_id="t1")


@fires("result_trace_mismatch", {"reason": "result_request_mapping", "request_id": "b", "expected": "a row",
    "actual": "none"}, expected="t2", actual="t1")  # fmt: skip
def the_result_of_a_step_with_other_requests() -> list[Finding]:
    return given(("a",), trace_id="t1")


@silent("result_trace_mismatch")
def a_result_that_does_not_say_where_it_comes_from() -> list[Finding]:
    return given(trace_id="")


@fires("result_request_mapping", request_id="b", expected="a row", actual="none")
def a_result_that_lacks_a_request() -> list[Finding]:
    return given(("a",))


@fires("result_request_mapping", {"reason": "result_request_mapping", "request_id": "b", "expected": "a row",
    "actual": "none"}, request_id="a", expected="a row", actual="none")  # fmt: skip
def a_result_without_anybody() -> list[Finding]:
    return given(())


@fires("result_request_mapping", request_id="x", row=2, expected="not scheduled", actual="row 2")
def a_result_with_a_request_that_was_not_scheduled() -> list[Finding]:
    return given(("a", "b", "x"))


@fires("result_request_mapping", request_id="a", row=2, expected="row 0 alone", actual="row 2 too")
def a_result_with_a_request_twice() -> list[Finding]:
    return given(("a", "b", "a"))


@fires("result_request_mapping", {"reason": "result_request_mapping", "request_id": "b", "row": 1, "expected": "row 1",
    "actual": "row 0"}, request_id="a", row=0, expected="row 0", actual="row 1")  # fmt: skip
def a_map_that_exchanges_two_requests() -> list[Finding]:
    return given(rows={"a": 1, "b": 0})


@fires("result_request_mapping", request_id="b", row=1, expected="row 1", actual="no row")
def a_map_that_lacks_a_request() -> list[Finding]:
    return given(rows={"a": 0})


@fires("result_request_mapping", request_id="b", row=1, expected="row 1", actual="row 0")
def a_map_that_leads_two_requests_to_one_row() -> list[Finding]:
    return given(rows={"a": 0, "b": 0})


@fires("result_row_count", expected="2 rows", actual="sampled_token_ids: 3")
def a_row_too_many() -> list[Finding]:
    return given(lengths={"sampled_token_ids": 3})


@fires("result_row_count", expected="2 rows", actual="pooler_output: 1")
def a_pooled_output_too_few() -> list[Finding]:
    return given(lengths={"sampled_token_ids": 2, "pooler_output": 1})
