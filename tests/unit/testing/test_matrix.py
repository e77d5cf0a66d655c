import msgspec
import pytest

from kvscope.testing.environment import Runner
from kvscope.testing.matrix import traffic
from kvscope.testing.matrix.__main__ import line_of
from kvscope.testing.matrix.cell import CellResult, _compared, _complete, _mistakes
from kvscope.testing.matrix.features import RUNNERS, SIZES, Feature, features
from kvscope.testing.matrix.traffic import Call, Outcome
from kvscope.testing.matrix.verdict import TraceVerdict

FEATURE = Feature(name="any", about="", evidence=("preemptions",), known={"read_null_block": "somewhere"})


def prompt_of(call: Call) -> list[int]:
    return list(call.prompt.get("decoder_prompt", call.prompt)["prompt_token_ids"])


def outcome(**changes: object) -> Outcome:
    return msgspec.convert({"answers": {"a": [[1, 2]], "b": [[3]]}} | changes, Outcome)


def verdict(**changes: object) -> TraceVerdict:
    sound = {
        "word": "clean", "coverage": "", "rows_audited": 1, "rows_scheduled": 1, "share": 1.0, "steps": 1, "ranks": 1,
        "findings": {}, "examples": [], "not_judged": {}, "preemptions": 0, "chunked_prompts": 0, "hook_faults": {},
        "complaints": [],
    }  # fmt: skip
    return msgspec.convert(sound | changes, TraceVerdict)


def result(**changes: object) -> CellResult:
    sound = {
        "feature": "any",
        "runner": "v1",
        "word": "ok",
        "outputs": "equal",
        "rows": 7,
        "numbers": {"preemptions": 2},
    }
    return msgspec.convert(sound | changes, CellResult)


def test_equal_answers_are_equal() -> None:
    assert _compared(outcome(), outcome()) == "equal"
    assert _complete(outcome(), outcome(answers={"a": [[9]], "b": [[9]]})) == "complete"


@pytest.mark.parametrize(
    ("on", "said"),
    [
        ({"answers": {"a": [[1, 5]], "b": [[3]]}}, "1 of 2 answers differ, a first"),
        ({"answers": {"a": [[1, 2]]}}, "1 of 2 answers differ, b first"),
        ({"unfinished": ["b"]}, "1 requests did not finish"),
        ({"aborted": ["b"]}, "nothing was answered, or the aborts differ"),
    ],
)
def test_answers_that_differ_are_not(on: dict[str, object], said: str) -> None:
    assert _compared(outcome(), outcome(**on)) == said


def test_no_answer_at_all_is_not_equal() -> None:
    assert _compared(outcome(answers={}), outcome(answers={})) != "equal"
    assert _complete(outcome(answers={}), outcome(answers={})) != "complete"
    assert _complete(outcome(), outcome(unfinished=["a: HTTP 500"])) == "1 requests did not finish, a: HTTP 500 first"


def test_a_sound_cell_has_no_mistake() -> None:
    assert _mistakes(FEATURE, result(), verdict()) == []


@pytest.mark.parametrize(
    ("of_result", "of_trace", "said"),
    [
        ({"outputs": "1 of 2 answers differ, a first"}, {}, "outputs: 1 of 2 answers differ, a first"),
        ({"numbers": {}}, {}, "no evidence of the feature: preemptions is 0"),
        ({}, {"ranks": 2}, "2 ranks in the trace instead of 1"),
        ({}, {"complaints": ["3 records lost"]}, "3 records lost"),
        ({}, {"examples": ["double_free: 4, expected none"]}, "found: double_free: 4, expected none"),
    ],
)
def test_what_makes_a_cell_fail(of_result: dict[str, object], of_trace: dict[str, object], said: str) -> None:
    assert _mistakes(FEATURE, result(**of_result), verdict(**of_trace)) == [said]


def test_a_finding_by_a_known_defect_of_vllm_is_no_mistake() -> None:
    assert _mistakes(FEATURE, result(), verdict(examples=["read_null_block: 0, expected 4"])) == []


def test_the_last_line_counts_cells_rows_and_findings() -> None:
    results = [
        result(),
        result(rows=5),
        result(word="not run", rows=0),
        result(word="failed", rows=3, findings={"double_free": 2, "leak_after_finish": 1}),
    ]
    assert line_of(results) == "cells 2 ok, 1 not run, rows 15, findings 3"


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("feature", features().values(), ids=lambda feature: feature.name)
def test_a_cell_asks_for_about_as_many_rows_as_it_is_told(feature: Feature, runner: Runner) -> None:
    for rows in (10, 20_000):
        calls = feature.requests(runner, rows)
        assert len({call.name for call in calls}) == len(calls) >= SIZES[runner].requests
        tokens = sum(call.sampling["max_tokens"] * call.sampling.get("n", 1) for call in calls)
        longest = max(len(prompt_of(call)) + call.sampling["max_tokens"] for call in calls)
        assert longest <= feature.engine_settings(runner)["max_model_len"]
        assert rows == 10 or 0.8 * rows < tokens * feature.rows_per_token < 1.3 * rows


def test_a_third_of_the_streams_is_given_up_before_its_end() -> None:
    calls = traffic.aborting(30, 20)
    moments = [call.abort_at for call in calls if call.abort_at is not None]
    assert len(moments) == 10
    assert set(moments) == {1, 10, 19}
