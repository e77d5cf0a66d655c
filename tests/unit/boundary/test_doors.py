"""The front end's admission, a worker's door, and what a step gives back."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvscope.boundary import frontend, results, worker
from kvscope.boundary.results import read_result
from kvscope.boundary.scheduler import DECLARATION, UNOBSERVED, received_requests
from kvscope.facts.requests import Admission, Drafts, StepResult
from unit.boundary.fakes import Told
from unit.checks.scenes import declare

messages = pytest.importorskip("unit.boundary.messages")


# Admission ------------------------------------------------------------------------------------------------------------


def admitted(*args: Any, **kwargs: Any) -> Admission:
    observer = Told()
    frontend.after_add_request(observer, None, args, kwargs, None)
    ((name, (admission,)),) = observer.calls
    assert name == "on_admission"
    return admission  # type: ignore[no-any-return]  # the observer notes what it is told


def test_an_admission_joins_the_clients_id_with_the_engines() -> None:
    request = SimpleNamespace(request_id="chat-1-a8", external_req_id="chat-1")
    expected = Admission(client_request_id="chat-1", request_id="chat-1-a8", child_index=0)
    assert admitted(request, None, None, 0, None) == expected
    assert admitted(request=request, prompt=None) == expected
    assert admitted(request, None) == expected


def test_the_samples_of_one_request_are_told_apart() -> None:
    request = SimpleNamespace(request_id="2_chat-1", external_req_id="chat-1")
    assert admitted(request, None, object(), 2, None).child_index == 2
    assert admitted(request, None, request_index=2).child_index == 2


def test_a_request_without_a_clients_id_is_known_by_its_own() -> None:
    request = SimpleNamespace(request_id="r", external_req_id=None)
    assert admitted(request, None).client_request_id == "r"


# The worker's door ----------------------------------------------------------------------------------------------------


def entered(output: Any, *, by_name: bool = False) -> Told:
    observer = Told()
    args, kwargs = ((), {"scheduler_output": output}) if by_name else ((output,), {})
    worker.before_execute(observer, None, args, kwargs)
    return observer


@pytest.mark.parametrize("by_name", [False, True])
def test_a_message_with_its_declaration_comes_in(by_name: bool) -> None:
    output, declaration = messages.scheduler_output(), declare(1)
    setattr(output, DECLARATION, declaration)
    observer = entered(output, by_name=by_name)
    drafts = Drafts(spec_tokens={"c": 2}, invalid_spec_tokens={})
    assert observer.calls == [("on_input", (declaration, received_requests(output), drafts))]


@pytest.mark.parametrize(
    ("sent", "declared", "arrived"),
    [
        ({"scheduled_spec_decode_tokens": {}}, {}, None),
        ({}, {"spec_tokens": {"c": 2}}, None),
        ({}, {"spec_tokens": {"c": 3}}, Drafts(spec_tokens={"c": 2}, invalid_spec_tokens={})),
        ({}, {"spec_tokens": {"c": 2, "k": 1}}, Drafts(spec_tokens={"c": 2}, invalid_spec_tokens={})),
        (
            {"scheduled_spec_decode_tokens": {}},
            {"spec_tokens": {"c": 2}},
            Drafts(spec_tokens={}, invalid_spec_tokens={}),
        ),
        (
            {"num_invalid_spec_tokens": {"c": 1}},
            {"spec_tokens": {"c": 2}},
            Drafts(spec_tokens={"c": 2}, invalid_spec_tokens={"c": 1}),
        ),
        ({"num_invalid_spec_tokens": {}}, {"spec_tokens": {"c": 2}}, None),
    ],
)
def test_drafts_are_told_where_they_are_not_as_declared(
    sent: dict[str, Any], declared: dict[str, Any], arrived: Drafts | None
) -> None:
    output = messages.scheduler_output(**sent)
    declaration = msgspec.structs.replace(declare(1), **declared)
    setattr(output, DECLARATION, declaration)
    ((_, (_, _, drafts)),) = entered(output).calls
    assert drafts == arrived


def test_a_message_without_a_declaration_is_told_apart_from_one_that_our_hook_missed() -> None:
    output = messages.scheduler_output()
    assert entered(output).names == ["on_input_without_declaration"]
    setattr(output, DECLARATION, UNOBSERVED)
    assert entered(output).names == ["on_input_unobserved"]


def test_a_launch_is_told_with_its_result_if_there_is_one() -> None:
    observer = Told(due_result=None, reads_local_lengths=False)
    worker.after_execute(observer, None, (), {}, None)
    assert observer.names == ["on_launched"]
    worker.after_execute(observer, None, (), {}, SimpleNamespace(req_ids=["a"], sampled_token_ids=[[1]]))
    assert observer.calls[1:] == [
        ("on_launched", ()),
        ("on_result", (StepResult(request_ids=("a",), sampled_tokens=(1,)),)),
    ]


def test_a_launch_is_told_even_where_its_local_lengths_cannot_be_read() -> None:
    """Else the worker would go on waiting for the plan of a step that is over."""
    observer, wrapper = Told(due_result=None, reads_local_lengths=True), SimpleNamespace(worker=SimpleNamespace())
    with pytest.raises(AttributeError):  # which the hook swallows and counts
        worker.after_execute(observer, wrapper, (), {}, None)
    assert observer.names == ["on_launched"]


def test_what_was_sampled_is_told_if_there_is_something() -> None:
    observer = Told(due_result=None)
    worker.after_sample(observer, None, (), {}, None)
    assert observer.calls == []
    worker.after_sample(observer, None, (), {}, SimpleNamespace(req_ids=["a"], sampled_token_ids=[]))
    assert observer.calls == [("on_result", (StepResult(request_ids=("a",), sampled_tokens=(None,)),))]


def test_the_end_is_told() -> None:
    observer = Told()
    worker.before_shutdown(observer, None, (), {})
    assert observer.names == ["on_shutdown"]


# Results --------------------------------------------------------------------------------------------------------------


def test_a_real_result_has_its_requests_and_how_many_tokens_each_got() -> None:
    from vllm.v1.outputs import ModelRunnerOutput

    output = ModelRunnerOutput(
        req_ids=["a", "b"], req_id_to_index={"a": 0, "b": 1}, sampled_token_ids=[[5], [6, 7]], logprobs=None,
        prompt_logprobs_dict={}, pooler_output=[],
    )  # fmt: skip
    assert read_result(output) == StepResult(request_ids=("a", "b"), sampled_tokens=(1, 2))


@pytest.mark.parametrize("name", ["model_runner_output", "_model_runner_output"])
def test_an_asynchronous_result_has_only_its_requests_yet(name: str) -> None:
    inner = SimpleNamespace(req_ids=["a", "b"], sampled_token_ids=[[5], [6]])
    output = SimpleNamespace(**{name: inner})
    assert read_result(output) == StepResult(request_ids=("a", "b"), sampled_tokens=(None, None))


def model_output(ids: list[str], sampled: list[list[int]], **fields: Any) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput(
        **{"req_ids": ids, "req_id_to_index": {name: row for row, name in enumerate(ids)}, "sampled_token_ids": sampled}
        | fields
    )


@pytest.mark.parametrize("name", [None, "model_runner_output", "_model_runner_output"])
def test_a_result_says_in_which_step_it_was_made_also_in_another_process(name: str | None) -> None:
    inner = model_output(["a"], [[5]])
    output = inner if name is None else SimpleNamespace(**{name: inner})
    observer = Told(due_result="t3")
    worker.after_sample(observer, None, (), {}, output)
    arrived = pickle.loads(pickle.dumps(inner))
    whole = StepResult(request_ids=("a",), sampled_tokens=(1,))
    assert read_result(arrived, declare(3)) == whole
    assert read_result(arrived, declare(4)) == msgspec.structs.replace(whole, trace_id="t3")


def test_a_result_that_all_empty_steps_share_is_not_touched() -> None:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    before = dict(vars(EMPTY_MODEL_RUNNER_OUTPUT))
    worker.after_execute(Told(due_result="t3", reads_local_lengths=False), None, (), {}, EMPTY_MODEL_RUNNER_OUTPUT)
    assert vars(EMPTY_MODEL_RUNNER_OUTPUT) == before
    assert read_result(EMPTY_MODEL_RUNNER_OUTPUT, declare(3)) == StepResult(request_ids=(), sampled_tokens=())


def test_a_result_that_does_not_say_where_it_comes_from_is_told_apart() -> None:
    result = read_result(model_output(["a"], [[5]]), declare(3))
    assert result is not None
    assert result.trace_id == ""


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, {}),
        ({"sampled_token_ids": []}, {"sampled_tokens": (None, None)}),
        ({"sampled_token_ids": [], "pooler_output": [None, None]}, {"sampled_tokens": (None, None)}),
        ({"req_id_to_index": {"b": 1, "a": 0}}, {}),
        ({"req_id_to_index": {"a": 1, "b": 0}}, {"rows": {"a": 1, "b": 0}}),
        ({"req_id_to_index": {"a": 0}}, {"rows": {"a": 0}}),
        ({"req_id_to_index": {"a": 0, "b": 1, "c": 1}}, {"rows": {"a": 0, "b": 1, "c": 1}}),
        ({"sampled_token_ids": [[5]]}, {"sampled_tokens": (1, None), "lengths": {"sampled_token_ids": 1}}),
        ({"sampled_token_ids": [[5], [6], [7]]}, {"lengths": {"sampled_token_ids": 3}}),
        ({"pooler_output": [None]}, {"lengths": {"sampled_token_ids": 2, "pooler_output": 1}}),
    ],
)
def test_what_is_odd_about_a_result_is_told(fields: dict[str, Any], told: dict[str, Any]) -> None:
    output = model_output(["a", "b"], [[5], [6]], **fields)
    results.mark(output, "t3")
    whole = StepResult(request_ids=("a", "b"), sampled_tokens=(1, 1))
    assert read_result(output, declare(3)) == msgspec.structs.replace(whole, **told)


@pytest.mark.parametrize(
    ("loads", "failed"),
    [(None, False), ({}, False), ({"invalid_block_ids": {3}}, True), ({"failed_recving": {"a"}}, True)],
)
def test_a_load_that_failed_is_told_whatever_else_the_result_has(loads: dict[str, Any] | None, failed: bool) -> None:
    from vllm.v1.outputs import KVConnectorOutput

    output = model_output([], [], kv_connector_output=None if loads is None else KVConnectorOutput(**loads))
    result = read_result(output, declare(3))
    assert result is not None
    assert result.load_failed is failed


def test_a_result_of_no_step_has_nothing() -> None:
    assert read_result(SimpleNamespace()) is None


@pytest.mark.parametrize("by_name", [False, True])
def test_a_result_is_told_beside_the_declaration_of_its_step(by_name: bool) -> None:
    scheduled, declaration = messages.scheduler_output(), declare(4)
    output = model_output(["a"], [[1]])
    results.mark(output, declaration.trace_id)
    setattr(scheduled, DECLARATION, declaration)
    observer = Told()
    args = () if by_name else (scheduled, output)
    kwargs = {"scheduler_output": scheduled, "model_runner_output": output} if by_name else {}
    results.before_update(observer, None, args, kwargs)
    expected = StepResult(request_ids=("a",), sampled_tokens=(1,))
    assert observer.calls == [("on_update", (declaration, expected))]


def test_a_result_is_told_even_where_what_it_says_of_transfers_cannot_be_read() -> None:
    observer, scheduled = Told(), messages.scheduler_output()
    output = SimpleNamespace(kv_connector_output=SimpleNamespace(finished_recving=["a", 3]))
    setattr(scheduled, DECLARATION, declare(4))
    with pytest.raises(AttributeError):  # which the hook swallows and counts
        results.before_update(observer, None, (scheduled, output), {})
    assert observer.names == ["on_update"]


def test_a_result_of_a_step_that_was_not_observed_is_told_too() -> None:
    observer = Told()
    results.before_update(observer, None, (messages.scheduler_output(), SimpleNamespace()), {})
    assert observer.calls == [("on_update", (None, None))]
