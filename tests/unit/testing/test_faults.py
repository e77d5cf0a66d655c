import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope.testing.faults import FAULTS, LOADING, PREEMPTING, SETTINGS, TRAFFIC, arm, injection, occasion, plugin
from kvscope.testing.faults.connector_faults import CONNECTOR_STORIES
from kvscope.testing.faults.draft_faults import DRAFT_FAULTS
from kvscope.testing.faults.group_faults import GROUP_FAULT
from kvscope.testing.faults.hooks import Hook, Undo
from kvscope.testing.faults.message_faults import DECLARATION_FAULTS, HANDOVER_FAULTS, Handover
from kvscope.testing.faults.operator_faults import OPERATOR_FAULTS
from kvscope.testing.faults.padding import DUMMY_FAULTS, PADDING_FAULT
from kvscope.testing.faults.plan_faults import PLAN_FAULTS
from kvscope.testing.faults.result_faults import RESULT_FAULTS
from kvscope.testing.faults.stories import STORIES
from kvscope.testing.faults.untold_faults import LOST_STEP, UNTOLD_FAULTS
from kvscope.testing.faults.workload import prompts


class Host:
    def step(self, number: int) -> int:
        return number + 1


def test_a_hook_puts_the_very_object_back() -> None:
    before = Host.__dict__["step"]
    hook = Hook(Host, "step", lambda original, *args: -original(*args))
    assert Host().step(1) == -2
    hook.remove()
    assert Host.__dict__["step"] is before
    hook.remove()
    assert Host().step(1) == 2


def test_hooks_may_be_removed_in_any_order() -> None:
    before = Host.__dict__["step"]
    lower = Hook(Host, "step", lambda original, *args: original(*args) * 10)
    upper = Hook(Host, "step", lambda original, *args: original(*args) + 5)
    assert Host().step(1) == 25
    lower.remove()
    assert Host().step(1) == 7
    upper.remove()
    assert Host().step(1) == 2
    Host.step = before  # type: ignore[method-assign]  # the class gets back what it had


def test_a_function_that_the_host_lacks_is_named() -> None:
    with pytest.raises(LookupError, match=r"Host\.leap"):
        Hook(Host, "leap", lambda original: original())
    with pytest.raises(LookupError, match=r"kvscope\.testing\.faults\.plugin\.leap"):
        Hook(plugin, "leap", lambda original: original())


def test_undo_restores_the_oldest_value() -> None:
    undo, values = Undo(), [1, 2, 3]
    undo.value(values, 1)
    values[1] = 20
    undo.value(values, 1)
    values[1] = 30
    undo.run()
    assert values == [1, 2, 3]
    undo.run()


def test_every_fault_has_one_place_and_every_place_a_fault() -> None:
    by_point = {
        "plan": {*PLAN_FAULTS, PADDING_FAULT, GROUP_FAULT},
        "operator": set(OPERATOR_FAULTS),
        "declaration": {*DECLARATION_FAULTS, *UNTOLD_FAULTS},
        "handover": {*HANDOVER_FAULTS, LOST_STEP},
        "dummy": set(DUMMY_FAULTS),
        "result": set(RESULT_FAULTS),
        "drafts": DRAFT_FAULTS,
        "allocator": set(STORIES),
        "connector": set(CONNECTOR_STORIES),
    }
    for point, names in by_point.items():
        assert {name for name, fault in FAULTS.items() if fault.point == point} == names


def test_what_must_be_found_is_not_also_a_mere_consequence() -> None:
    for fault in FAULTS.values():
        assert fault.expected not in fault.alternatives
        assert fault.runners <= {"v1", "v2"}


def test_a_fault_says_under_which_engine_and_requests_it_happens() -> None:
    assert occasion(FAULTS["slot_plus_one"]) == (SETTINGS, {})
    assert occasion(FAULTS["stale_row_after_preemption"]) == (PREEMPTING, {})
    assert occasion(FAULTS["received_twice"]) == (LOADING, TRAFFIC["loading"])
    assert occasion(FAULTS["dummy_slot"]) == (SETTINGS, TRAFFIC["dummies"])
    assert {fault.traffic for fault in FAULTS.values()} == set(TRAFFIC)


def test_an_unknown_fault_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="slot_plus_two"):
        arm("slot_plus_two")


def test_an_injection_waits_and_then_happens_once() -> None:
    notes: list[dict[str, Any]] = []
    armed = arm("slot_plus_one", after_steps=2, on_fire=notes.append)
    due = []
    for _ in range(5):
        armed.steps += 1
        due.append(armed.due)
        if armed.due:
            armed.fire(None)
            armed.fire({"slot": 7}, rank=0, runner="v1")
    assert due == [False, False, True, False, False]
    assert armed.times == 1
    assert notes == [armed.what]
    expected = {"fault": "slot_plus_one", "rank": 0, "step": 3, "group_id": 0, "runner": "v1", "slot": 7}
    assert armed.what == expected | {"expected": "write_target_mismatch"}


def test_what_may_be_found_before_is_announced_and_replaced() -> None:
    notes: list[dict[str, Any]] = []
    armed = arm("stale_reference_read", on_fire=notes.append)
    armed.announce({"block_id": 3, "expected": "alias_owner_mismatch"})
    assert (armed.fired, notes) == (False, [])
    assert armed.what is not None
    assert (armed.what["block_id"], armed.what["expected"]) == (3, "alias_owner_mismatch")
    armed.fire({"block_id": 4})
    assert (armed.what["block_id"], armed.what["expected"]) == (4, "read_after_release")
    assert notes == [armed.what]


@dataclass
class Cached:
    req_ids: list[str] = field(default_factory=lambda: ["a", "b", "c"])
    resumed_req_ids: set[str] = field(default_factory=lambda: {"a"})
    new_block_ids: list[Any] = field(default_factory=lambda: [([4, 5],), None, ([9],)])
    num_computed_tokens: list[int] = field(default_factory=lambda: [0, 15, 32])
    num_output_tokens: list[int] = field(default_factory=lambda: [2, 3, 1])


def new_request(request_id: str, blocks: list[int], prompt: int) -> SimpleNamespace:
    return SimpleNamespace(req_id=request_id, block_ids=(blocks,), num_computed_tokens=0, prompt_token_ids=[1] * prompt)


def output(*, new: bool = True) -> SimpleNamespace:
    numbers = {"a": 40, "b": 1, "c": 1}
    news = [new_request("d", [6, 7], 100)] if new else []
    return SimpleNamespace(
        scheduled_cached_reqs=Cached(),
        scheduled_new_reqs=news,
        num_scheduled_tokens=numbers | ({"d": 64} if new else {}),
        total_num_scheduled_tokens=106 if new else 42,
        finished_req_ids={"y", "x"},
        _kvscope_declaration={"step": 3},
    )


def scheduler() -> SimpleNamespace:
    held = {"a": [4, 5], "b": [1], "c": [8, 9], "d": [6, 7]}
    computed = {"a": 0, "b": 15, "c": 32, "d": 0}
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(
            num_blocks=16, kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=32))]
        ),
        kv_cache_manager=SimpleNamespace(get_block_ids=lambda request_id: (list(held[request_id]),)),
        requests={name: SimpleNamespace(num_computed_tokens=number) for name, number in computed.items()},
    )


@pytest.mark.parametrize("name", sorted(HANDOVER_FAULTS))
def test_a_handover_fault_leaves_the_senders_output_alone(name: str) -> None:
    sent = output(new=name != "request_dropped_in_handover")
    before = copy.deepcopy(sent)
    handover = Handover(sent, 0, "_kvscope_declaration")
    what = HANDOVER_FAULTS[name](handover)
    assert what is not None
    assert sent == before
    assert handover.output != before
    if name != "declaration_lost":
        assert handover.output._kvscope_declaration is sent._kvscope_declaration


def test_handover_faults_spare_resumed_requests_whose_blocks_are_replaced() -> None:
    handover = Handover(output(), 0, "_kvscope_declaration")
    assert HANDOVER_FAULTS["delta_dropped"](handover) == {"request_id": "c", "expected_block_id": 9}
    handover = Handover(output(), 0, "_kvscope_declaration")
    shifted = HANDOVER_FAULTS["computed_shifted_in_handover"](handover)
    # 15 + 1 would be the next block.
    assert shifted == {"request_id": "c", "num_computed": 33, "expected_num_computed": 32}


def test_a_lost_end_is_owed_to_the_next_step() -> None:
    handover = Handover(output(new=False), 0, "_kvscope_declaration")
    assert HANDOVER_FAULTS["request_dropped_in_handover"](handover) == {"request_id": "x"}
    assert handover.output.finished_req_ids == {"y"}
    assert handover.late_finished == {"x"}
    assert HANDOVER_FAULTS["request_dropped_in_handover"](Handover(output(), 0, "")) is None


def test_nothing_is_lost_where_nothing_was_attached() -> None:
    assert HANDOVER_FAULTS["declaration_lost"](Handover(output(), 0, "_other")) is None


def test_a_declaration_fault_prefers_a_request_that_grows() -> None:
    sent = output()
    what = DECLARATION_FAULTS["bind_duplicate"](scheduler(), sent, 0)
    assert what is not None
    assert what["request_id"] == "c"
    assert (what["logical_index"], what["block_id"], what["expected_block_id"]) == (1, 8, 9)
    assert sent.scheduled_cached_reqs.new_block_ids[2] == ([8],)


def test_an_undeclared_block_leaves_none_behind() -> None:
    sent = output()
    what = DECLARATION_FAULTS["bind_shortfall"](scheduler(), sent, 0)
    assert what is not None
    assert what["expected_block_id"] == 9
    assert sent.scheduled_cached_reqs.new_block_ids == [([4, 5],), None, None]


def test_declaration_faults_take_a_new_request_where_none_grows() -> None:
    sent = output()
    sent.scheduled_cached_reqs = Cached(req_ids=[], new_block_ids=[])
    what = DECLARATION_FAULTS["bind_null_tail"](scheduler(), sent, 0)
    assert what is not None
    assert what["request_id"] == "d"
    assert sent.scheduled_new_reqs[0].block_ids == ([6, 0],)


def test_a_list_too_many_goes_to_a_request_that_gets_blocks() -> None:
    sent = output()
    what = DECLARATION_FAULTS["bind_extra_group"](scheduler(), sent, 0)
    assert what == {"request_id": "c", "group_id": None, "counted": 2, "expected_counted": 1}
    assert sent.scheduled_cached_reqs.new_block_ids == [([4, 5],), None, ([9], [])]


def test_a_decoding_request_goes_back_inside_its_block() -> None:
    sent = output()
    what = DECLARATION_FAULTS["bind_computed_back"](scheduler(), sent, 0)
    assert what is not None
    assert (what["request_id"], what["num_computed"], what["expected_num_computed"]) == ("b", 14, 15)
    assert sent.scheduled_cached_reqs.num_computed_tokens == [0, 14, 32]
    sent.scheduled_cached_reqs.num_computed_tokens = [0, 33, 32]
    assert DECLARATION_FAULTS["bind_computed_back"](scheduler(), sent, 0) is None


@pytest.mark.parametrize("name", sorted(UNTOLD_FAULTS))
def test_what_is_not_to_be_sent_is_taken_out_again(name: str) -> None:
    host, sent = scheduler(), output()
    for request_id, request in host.requests.items():
        request.status = SimpleNamespace(name="RUNNING" if request_id in sent.num_scheduled_tokens else "WAITING")
    host.requests["p"] = SimpleNamespace(status=SimpleNamespace(name="PREEMPTED"))
    before = copy.deepcopy(sent)
    done = UNTOLD_FAULTS[name](host, sent, {"x", "a"})
    assert done is not None
    what, undo = done
    assert sent.total_num_scheduled_tokens == before.total_num_scheduled_tokens + 1
    if name != "total_declared":
        assert sent.scheduled_cached_reqs.req_ids[-1] == what["request_id"]
        assert sent.num_scheduled_tokens[what["request_id"]] == 1
    undo()
    assert sent == before


def test_nobody_is_declared_who_has_not_ended_or_been_preempted() -> None:
    host = scheduler()
    for request in host.requests.values():
        request.status = SimpleNamespace(name="RUNNING")
    assert UNTOLD_FAULTS["finished_declared"](host, output(), {"a"}) is None
    assert UNTOLD_FAULTS["preempted_declared"](host, output(), set()) is None


def result(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"req_ids": ["a", "b", "c"], "req_id_to_index": {"a": 0, "b": 1, "c": 2}, "sampled_token_ids": [[5], [], [6]]}
        | fields
    )


def test_rows_are_exchanged_where_the_scheduler_cannot_notice() -> None:
    given, what = RESULT_FAULTS["result_rows_exchanged"](result(), None)
    assert given.req_id_to_index == {"a": 2, "b": 1, "c": 0}
    assert what == {"request_id": "a", "other_request_id": "c", "row": 0}
    alone = result(sampled_token_ids=[[5], [], []])
    assert RESULT_FAULTS["result_rows_exchanged"](alone, None) == (alone, None)


def test_a_row_is_added_to_a_copy() -> None:
    whole = result()
    given, what = RESULT_FAULTS["result_row_added"](whole, None)
    assert (given.sampled_token_ids, len(whole.sampled_token_ids)) == ([[5], [], [6], [6]], 3)
    assert what == {"counted": 4, "expected_counted": 3}
    pooled = result(sampled_token_ids=[])
    assert RESULT_FAULTS["result_row_added"](pooled, None) == (pooled, None)


def test_a_result_is_repeated_where_both_steps_decode_the_same_requests() -> None:
    tokens = [[1], [2], [3]]
    before, now = result(sampled_token_ids=tokens), result(sampled_token_ids=tokens)
    given, what = RESULT_FAULTS["result_repeated"](now, before)
    assert (given is before, what) == (True, {})
    for other in (None, result(), result(req_ids=["a", "b"], sampled_token_ids=tokens[:2])):
        given, what = RESULT_FAULTS["result_repeated"](now, other)
        assert (given is now, what) == (True, None)


@pytest.mark.parametrize(
    ("name", "rank", "process_rank", "belongs"),
    [
        ("slot_plus_one", None, 0, True),
        ("slot_plus_one", None, None, False),
        ("slot_plus_one", 1, 0, False),
        ("slot_plus_one", 1, 1, True),
        ("bind_duplicate", None, None, True),
        ("bind_duplicate", None, 0, False),
        ("delta_dropped", None, None, True),
        ("delta_dropped", None, 0, False),
        ("delta_dropped", 1, None, False),
        ("delta_dropped", 1, 1, True),
        ("dummy_slot", None, None, False),
        ("premature_free", None, None, True),
        ("premature_free", None, 0, False),
        ("result_repeated", None, None, True),
        ("result_repeated", None, 0, False),
    ],
)
def test_one_kind_of_process_puts_a_fault_in(
    name: str, rank: int | None, process_rank: int | None, belongs: bool
) -> None:
    assert plugin.belongs(arm(name, rank=rank), process_rank) is belongs


def test_the_plugin_is_idle_where_the_engine_shares_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    plugin.register()
    assert plugin._bootstrap == []


@pytest.mark.parametrize("additional", [None, {}, {"kv_trace": {"enabled": True}}])
def test_the_plugin_does_nothing_without_its_key(additional: object) -> None:
    plugin._configured(SimpleNamespace(additional_config=additional), rank=0)
    assert plugin._armed == []


def test_the_plugin_refuses_a_fault_that_needs_one_process() -> None:
    settings = {"name": "block_not_declared"}
    with pytest.raises(ValueError, match="'block_not_declared' needs scheduler and worker in one process"):
        plugin._configured(SimpleNamespace(additional_config={"kvscope_fault": settings}), rank=None)


def test_the_plugin_reports_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_armed", [])
    monkeypatch.setattr(injection.Injection, "install", lambda self: self)
    report = tmp_path / "deep" / "rank{rank}.json"
    settings = {"name": "slot_plus_one", "rank": 1, "after_steps": 8, "report": str(report)}
    plugin._configured(SimpleNamespace(additional_config={"kvscope_fault": settings}), rank=0)
    assert plugin._armed == []
    plugin._configured(SimpleNamespace(additional_config={"kvscope_fault": settings}), rank=1)
    (armed,) = plugin._armed
    armed.fire({"slot": 3}, rank=1, runner="v2")
    assert json.loads((report.parent / "rank1.json").read_text(encoding="utf-8")) == armed.what


def test_prompts_share_a_prefix_and_are_otherwise_distinct() -> None:
    first, second, third, *others = prompts()
    assert first[:64] == second[:64] == third[:64]
    assert len({tuple(prompt[:32]) for prompt in others} | {tuple(first[:32])}) == len(others) + 1
    assert prompts(salt=1) != prompts()
    assert all(5 <= token < 255 for prompt in prompts(salt=3) for token in prompt)
