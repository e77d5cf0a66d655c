"""What is read from vLLM's own SchedulerOutput, and that it is a copy which travels."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope.boundary import scheduler as adapter
from kvscope.boundary.ledger import Hook
from kvscope.boundary.scheduler import DECLARATION, UNOBSERVED, declaration_of, declare, received_requests
from kvscope.boundary.wrapping import around
from kvscope.facts.requests import StepRequests
from unit.boundary.fakes import Told, observed

messages = pytest.importorskip("unit.boundary.messages")

REQUESTS = StepRequests(
    new_ids=["n"],
    new_blocks=[([1, 2], [3])],
    new_computed=[4],
    cached_ids=["c", "r", "k"],
    cached_blocks=[([4], []), ([5], [6]), None],
    cached_computed=[32, 0, 9],
    resumed={"r"},
    scheduled={"n": 16, "c": 3, "r": 16, "k": 1},
    finished={"f"},
    preempted={"p"},
)


def declared(output: Any = None, **scheduler: Any) -> Any:
    return declare(SimpleNamespace(**scheduler), output or messages.scheduler_output(), 7, "run.7")


def test_a_message_is_read_as_vllm_means_it() -> None:
    assert received_requests(messages.scheduler_output()) == REQUESTS


def test_a_declaration_has_numbers_and_no_tokens() -> None:
    declaration = declared(max_num_scheduled_tokens=64)
    assert (declaration.step, declaration.trace_id, declaration.requests) == (7, "run.7", REQUESTS)
    assert (declaration.new_prompt_tokens, declaration.cached_output_tokens) == ([20], [12, 3, 0])
    assert (declaration.spec_tokens, declaration.invalid_spec_tokens) == ({"c": 2}, {})
    assert (declaration.total_num_scheduled_tokens, declaration.token_budget) == (36, 64)
    assert (declaration.zero_blocks, declaration.copies, declaration.connector_plan) == (None, None, None)


def test_what_else_a_step_does_is_declared_too() -> None:
    class SomeConnectorMetadata:
        pass

    copy = SimpleNamespace(src_block_id=3, dst_block_id=9)
    declaration = declared(
        messages.scheduler_output(
            num_invalid_spec_tokens={"c": 1},
            new_block_ids_to_zero=[1, 2],
            kv_cache_block_copies=[copy],
            kv_connector_metadata=SomeConnectorMetadata(),
        )
    )
    assert declaration.invalid_spec_tokens == {"c": 1}
    assert declaration.zero_blocks == [1, 2]
    assert declaration.copies == [(3, 9)]
    assert declaration.connector_plan == "SomeConnectorMetadata"
    assert declaration.token_budget is None


def test_the_copies_of_a_step_are_named_as_the_host_names_them() -> None:
    """``KVCacheBlockCopy`` itself, so that a renamed field would show."""
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

    made = KVCacheBlockCopy(3, 9)
    assert declared(messages.scheduler_output(kv_cache_block_copies=[made])).copies == [(3, 9)]


def test_a_host_that_names_no_preempted_requests_has_none() -> None:
    assert received_requests(messages.scheduler_output(preempted_req_ids=None)).preempted == set()


def test_an_empty_step_is_declared_as_empty() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput

    declaration = declared(SchedulerOutput.make_empty())
    assert declaration.is_empty
    assert declaration.requests.scheduled == {}


def test_a_declaration_does_not_follow_what_the_worker_does_to_the_message() -> None:
    """In one process the runner extends these very lists."""
    output = messages.scheduler_output()
    declaration = declared(output)
    output.scheduled_new_reqs[0].block_ids[0].append(99)
    output.scheduled_cached_reqs.new_block_ids[0][0].append(99)
    output.scheduled_cached_reqs.new_block_ids[2] = ([99],)
    output.scheduled_cached_reqs.req_ids.append("x")
    output.scheduled_cached_reqs.num_computed_tokens[0] = 99
    output.scheduled_cached_reqs.resumed_req_ids.add("x")
    output.num_scheduled_tokens["n"] = 99
    output.finished_req_ids.add("x")
    output.preempted_req_ids.add("x")
    assert declaration.requests == REQUESTS


def test_a_received_message_is_looked_at_in_place() -> None:
    output = messages.scheduler_output()
    received = received_requests(output)
    output.num_scheduled_tokens["n"] = 99
    assert received.scheduled["n"] == 99


def test_a_declaration_travels_with_its_message() -> None:
    output = messages.scheduler_output()
    setattr(output, DECLARATION, declared(output))
    arrived = pickle.loads(pickle.dumps(output))
    assert declaration_of(arrived) == declared()
    assert declaration_of(arrived) is not declaration_of(output)
    assert received_requests(arrived) == REQUESTS


def test_a_message_without_a_declaration_has_none() -> None:
    output = messages.scheduler_output()
    assert declaration_of(output) is None
    setattr(output, DECLARATION, UNOBSERVED)
    assert declaration_of(pickle.loads(pickle.dumps(output))) is None
    assert getattr(pickle.loads(pickle.dumps(output)), DECLARATION) == UNOBSERVED


# The seam around Scheduler.schedule -----------------------------------------------------------------------------------


def scheduled(observer: Told, hook: Hook, times: int = 1) -> list[Any]:
    """What a scheduler behind our wrapper hands out."""

    class Scheduler:
        max_num_scheduled_tokens = 64

        def schedule(self) -> Any:
            return messages.scheduler_output()

    wrap = around(before=adapter.before_schedule, after=adapter.after_schedule, settle=adapter.mark_unobserved)
    Scheduler.schedule = wrap(Scheduler.schedule, hook)  # type: ignore[method-assign]  # what a seam does
    scheduler = observed(Scheduler(), observer)
    return [scheduler.schedule() for _ in range(times)]


def test_each_step_is_numbered_declared_and_told_in_order() -> None:
    steps = iter([(1, "r.1"), (2, "r.2")])
    observer = Told(next_step=lambda: next(steps))
    outputs = scheduled(observer, Hook("schedule"), 2)
    assert [declaration_of(output).step for output in outputs] == [1, 2]
    assert observer.names == ["on_schedule_begin", "next_step", "on_schedule"] * 2
    assert observer.calls[2][1][0] is declaration_of(outputs[0])


def test_a_step_that_our_hook_missed_says_so_to_the_worker() -> None:
    hook = Hook("schedule")
    outputs = scheduled(Told(next_step=lambda: 1 // 0), hook, 20)
    assert [getattr(output, DECLARATION) for output in outputs] == [UNOBSERVED] * 20
    assert hook.disabled


def test_a_step_whose_judge_failed_keeps_its_declaration() -> None:
    """The declaration is right, whatever happened to the one who looked at it."""
    observer = Told(next_step=lambda: (3, "r.3"), on_schedule=lambda _: 1 // 0)
    (output,) = scheduled(observer, Hook("schedule"))
    assert declaration_of(output).step == 3
