"""Who is scheduled, from where, and whether it adds up; what arrived in a worker, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_bind, judge_handover, judge_lifecycle
from kvscope.facts.requests import Declaration, Drafts, StepResult
from kvscope.state.bindings import Bindings
from kvscope.state.lifecycle import Lifecycle
from unit.checks.cases import fires, silent
from unit.checks.scenes import PARTS, declare, decoding
from unit.checks.worlds import group, pool

STRANGERS = "bind_unknown_request", "bind_finished_scheduled", "bind_preempted_scheduled"
ALL = *STRANGERS, "bind_computed_regressed", "bind_token_total_mismatch"


class Life:
    """One engine's declarations, in which ``a`` and ``b`` have come in with 40 tokens each."""

    def __init__(self) -> None:
        self.lifecycle = Lifecycle()
        self.steps = 0
        self.findings: list[Finding] = []
        self.say(new=[("a", ([1, 2, 3],), 0, 40), ("b", ([4, 5, 6],), 0, 40)])

    def say(self, change: Callable[[Declaration], object] | None = None, **said: Any) -> Declaration:
        self.steps += 1
        declaration = declare(self.steps, **said)
        if change is not None:
            change(declaration)
        if self.lifecycle.take(declaration):
            self.findings += judge_lifecycle(declaration, self.lifecycle, PARTS)
        return declaration

    def decode(self, computed: int, *names: str, **said: Any) -> Declaration:
        return self.say(known=[(name, None, computed, 1) for name in names], **said)

    def drafted(self, computed: int, drafts: int) -> Declaration:
        """``a`` goes on with so many drafts."""
        return self.say(lambda d: d.spec_tokens.update(a=drafts), known=[("a", None, computed, 1 + drafts)])

    def returned(self, declaration: Declaration, **odd: Any) -> None:
        ids = tuple(declaration.requests.scheduled)
        result = StepResult(request_ids=ids, sampled_tokens=(1,) * len(ids), **odd)
        self.lifecycle.confirm(declaration, result)


# Who may be scheduled -------------------------------------------------------------------------------------------------


@silent(*ALL)
def requests_that_come_go_on_and_end() -> list[Finding]:
    life = Life()
    for computed in (40, 41, 42):
        life.decode(computed, "a", "b")
    life.decode(43, "b", finished=["a"])
    life.say(known=[("b", None, 44, 1)], new=[("c", ([7],), 0, 5)])
    life.say(known=[("b", None, 45, 1), ("c", None, 5, 3)])
    life.decode(8, "c")
    life.say(known=[("b", None, 46, 1), ("c", None, 9, 1)])
    life.say(finished=["b", "c"])
    return life.findings


@silent(*ALL)
def a_preempted_request_that_is_resumed() -> list[Finding]:
    life = Life()
    life.decode(40, "a", preempted=["b"])
    life.say(known=[("a", None, 41, 1), ("b", ([4, 5, 6],), 16, 25)], resumed=["b"])
    life.say(known=[("b", None, 41, 1), ("a", None, 42, 1)])
    return life.findings


@silent(*ALL)
def a_request_that_is_preempted_and_resumed_in_one_step() -> list[Finding]:
    life = Life()
    life.say(known=[("a", None, 40, 1), ("b", ([4, 5, 6],), 0, 40)], resumed=["b"], preempted=["b"])
    return life.findings


@silent(*ALL)
def a_preempted_request_that_comes_back_as_new() -> list[Finding]:
    life = Life()
    life.decode(40, "a", preempted=["b"])
    life.say(known=[("a", None, 41, 1)], new=[("b", ([4, 5, 6],), 16, 25)])
    life.say(known=[("a", None, 42, 1), ("b", None, 41, 1)])
    return life.findings


@silent(*ALL)
def the_next_turn_of_a_session() -> list[Finding]:
    life = Life()
    life.say(new=[("a", ([1, 2, 3],), 32, 8)], known=[("b", None, 40, 1)])
    life.say(known=[("b", None, 41, 1), ("a", None, 40, 1)])
    return life.findings


@silent(*ALL)
def an_id_that_is_used_again() -> list[Finding]:
    life = Life()
    life.say(new=[("a", ([7],), 0, 5)], finished=["a"], known=[("b", None, 40, 1)])
    life.say(known=[("b", None, 41, 1), ("a", None, 5, 1)])
    life.say(finished=["a"])
    life.say(new=[("a", ([7],), 0, 5)])
    return life.findings


@silent(*ALL)
def a_request_that_ends_before_it_was_ever_scheduled() -> list[Finding]:
    life = Life()
    life.decode(40, "a", "b", finished=["x"], preempted=["y"])
    life.say(known=[("a", None, 41, 1), ("b", None, 41, 1)], new=[("x", ([7],), 0, 5)])
    return life.findings


@fires("bind_unknown_request", request_id="x", expected="new", actual="known")
def a_known_request_that_was_never_new() -> list[Finding]:
    life = Life()
    life.decode(40, "a", "b", "x")
    return life.findings


@fires("bind_unknown_request", request_id="x", expected="new", actual="known")
def a_resumed_request_that_was_never_new() -> list[Finding]:
    life = Life()
    life.say(known=[("a", None, 40, 1), ("x", ([8],), 0, 1)], resumed=["x"])
    return life.findings


@fires("bind_unknown_request", request_id="x", expected="new", actual="scheduled and not listed")
def a_request_with_tokens_that_is_not_listed() -> list[Finding]:
    life = Life()
    life.decode(40, "a", "b")

    def more(declaration: Declaration) -> None:
        declaration.requests.scheduled["x"] = 1
        declaration.total_num_scheduled_tokens += 1

    life.say(more, known=[("a", None, 41, 1), ("b", None, 41, 1)])
    return life.findings


@silent(*STRANGERS)
def a_known_request_after_a_step_that_was_not_observed() -> list[Finding]:
    life = Life()
    life.decode(40, "a", preempted=["b"])
    life.lifecycle.forgive()
    life.decode(9, "x", "b")
    assert life.lifecycle.adopted == 2
    life.decode(10, "x", "b")
    assert life.lifecycle.adopted == 2
    return life.findings


@fires("bind_finished_scheduled", request_id="b", expected="not scheduled after it finished", actual="known")
def a_request_in_the_step_that_ends_it() -> list[Finding]:
    life = Life()
    life.decode(40, "a", "b", finished=["b"])
    return life.findings


@fires("bind_finished_scheduled", request_id="b", expected="not scheduled after it finished", actual="known")
def a_request_long_after_it_ended() -> list[Finding]:
    life = Life()
    life.decode(40, "a", finished=["b"])
    for computed in range(41, 60):
        life.decode(computed, "a")
    life.say(known=[("a", None, 60, 1), ("b", None, 40, 1)])
    life.say(known=[("a", None, 61, 1), ("b", None, 41, 1)])
    return life.findings


@fires("bind_finished_scheduled", request_id="b", expected="not scheduled after it finished", actual="known")
def a_finished_request_after_a_step_that_was_not_observed() -> list[Finding]:
    life = Life()
    life.lifecycle.forgive()
    life.decode(40, "a", "b")
    life.decode(41, "a", finished=["b"])
    life.say(known=[("a", None, 42, 1), ("b", None, 41, 1)])
    return life.findings


@fires("bind_preempted_scheduled", request_id="b", expected="resumed or new", actual="known")
def a_preempted_request_that_goes_on() -> list[Finding]:
    life = Life()
    life.decode(40, "a", preempted=["b"])
    life.decode(41, "a")
    life.say(known=[("a", None, 42, 1), ("b", None, 40, 1)])
    return life.findings


@fires("bind_preempted_scheduled", request_id="b", expected="resumed or new", actual="known")
def a_request_in_the_step_that_preempts_it() -> list[Finding]:
    life = Life()
    life.decode(40, "a", "b", preempted=["b"])
    return life.findings


@silent("bind_preempted_scheduled")
def a_preempted_request_that_ended() -> list[Finding]:
    life = Life()
    life.decode(40, "a", preempted=["b"])
    life.decode(41, "a", finished=["b"])
    life.say(known=[("a", None, 42, 1), ("b", None, 40, 1)])
    return life.findings


# Where it goes on -----------------------------------------------------------------------------------------------------


@fires("bind_computed_regressed", request_id="b", expected="41 tokens computed", actual=40)
def a_request_that_goes_back() -> list[Finding]:
    life = Life()
    life.decode(40, "a", "b")
    life.say(known=[("a", None, 41, 1), ("b", None, 40, 1)])
    return life.findings


@fires("bind_computed_regressed", request_id="b", expected="41 tokens computed", actual=39)
def a_request_that_goes_back_after_it_had_to_wait() -> list[Finding]:
    life = Life()
    life.decode(40, "a", "b")
    for computed in (41, 42):
        life.decode(computed, "a")
    life.say(known=[("a", None, 43, 1), ("b", None, 39, 1)])
    return life.findings


@fires("bind_computed_regressed", request_id="a", expected="44 tokens computed", actual=40)
def a_request_that_goes_back_by_more_than_its_drafts() -> list[Finding]:
    life = Life()
    life.returned(life.drafted(40, 3))
    life.drafted(40, 3)
    return life.findings


@fires("bind_computed_regressed", request_id="a", expected="44 tokens computed", actual=43)
def drafts_that_are_taken_back_before_their_result_has_come() -> list[Finding]:
    life = Life()
    life.drafted(40, 3)
    life.drafted(43, 3)
    return life.findings


@fires("bind_computed_regressed", request_id="a", expected="48 tokens computed", actual=47)
def drafts_that_were_accepted_explain_nothing_later() -> list[Finding]:
    life = Life()
    life.returned(life.drafted(40, 3))
    life.drafted(44, 3)
    life.drafted(47, 3)
    return life.findings


@silent("bind_computed_regressed")
def drafts_that_were_rejected() -> list[Finding]:
    life = Life()
    life.returned(life.drafted(40, 3))
    life.returned(life.drafted(41, 3))
    life.returned(life.drafted(45, 2))
    life.drafted(46, 0)
    return life.findings


@silent("bind_computed_regressed")
def drafts_of_two_steps_that_came_back_late() -> list[Finding]:
    life = Life()
    first, second = life.drafted(40, 3), life.drafted(44, 3)
    life.returned(first)
    life.returned(second)
    life.drafted(42, 3)
    return life.findings


@silent("bind_computed_regressed")
def a_request_that_computes_what_could_not_be_loaded() -> list[Finding]:
    life = Life()
    life.returned(life.decode(40, "a", "b"), load_failed=True)
    life.decode(16, "a", "b")
    life.decode(17, "a", "b")
    return life.findings


@fires("bind_computed_regressed", request_id="a", expected="17 tokens computed", actual=0)
def a_load_that_failed_explains_one_step_back() -> list[Finding]:
    life = Life()
    life.returned(life.decode(40, "a"), load_failed=True)
    life.decode(16, "a")
    life.decode(0, "a")
    return life.findings


# Whether it adds up ---------------------------------------------------------------------------------------------------


def total(value: int, budget: int | None = None) -> Callable[[Declaration], None]:
    def change(declaration: Declaration) -> None:
        declaration.total_num_scheduled_tokens, declaration.token_budget = value, budget

    return change


@fires("bind_token_total_mismatch", expected="3 tokens in total", actual=2)
def a_total_that_is_not_the_sum() -> list[Finding]:
    life = Life()
    life.say(total(3), known=[("a", None, 40, 1), ("b", None, 40, 1)])
    return life.findings


@fires("bind_token_total_mismatch", expected="0 tokens in total", actual=1)
def an_empty_step_with_tokens() -> list[Finding]:
    life = Life()
    life.say(total(0), known=[("a", None, 40, 1)])
    return life.findings


@fires("bind_token_total_mismatch", expected="at most 1 tokens", actual=2)
def a_total_beyond_the_budget() -> list[Finding]:
    life = Life()
    life.say(total(2, budget=1), known=[("a", None, 40, 1), ("b", None, 40, 1)])
    return life.findings


@silent("bind_token_total_mismatch")
def a_total_of_the_whole_budget() -> list[Finding]:
    life = Life()
    life.say(total(2, budget=2), known=[("a", None, 40, 1), ("b", None, 40, 1)])
    life.say(total(0, budget=2))
    return life.findings


@fires("bind_token_total_mismatch", request_id="b", expected="tokens", actual="none")
def a_listed_request_without_tokens() -> list[Finding]:
    life = Life()
    life.decode(40, "a", "b")

    def less(declaration: Declaration) -> None:
        del declaration.requests.scheduled["b"]
        declaration.total_num_scheduled_tokens -= 1

    life.say(less, known=[("a", None, 41, 1), ("b", None, 41, 1)])
    return life.findings


# How many groups ------------------------------------------------------------------------------------------------------


def bound(groups: int, lists: tuple[list[int], ...], *, known: bool = False) -> list[Finding]:
    bindings = Bindings(pool(*(group(index) for index in range(groups))), doubts=True)
    steps = [declare(1, new=[("a", tuple([1 + index] for index in range(groups)) if known else lists, 0, 5)])]
    if known:
        steps.append(declare(2, known=[("a", lists, 5, 1)]))
    for declaration in steps:
        bindings.apply(declaration.requests)
    return judge_bind(steps[-1], bindings, PARTS) if bindings.doubtful else []


@fires("bind_group_count_mismatch", request_id="a", expected=1, actual=2)
def a_new_request_with_a_list_too_many() -> list[Finding]:
    return bound(1, ([1], [2]))


@fires("bind_group_count_mismatch", request_id="a", expected=2, actual=1)
def a_known_request_with_a_list_too_few() -> list[Finding]:
    return bound(2, ([7],), known=True)


@fires("bind_group_count_mismatch", request_id="a", expected=2, actual=3)
def a_known_request_with_an_empty_list_too_many() -> list[Finding]:
    return bound(2, ([7], [8], []), known=True)


@silent("bind_group_count_mismatch")
def a_group_that_gets_nothing() -> list[Finding]:
    return bound(2, ([7], []), known=True)


# What arrives in a worker, and when -----------------------------------------------------------------------------------


def drafts_arrive(spec: dict[str, int], invalid: dict[str, int] | None = None) -> list[Finding]:
    """Two drafts for ``a`` and three for ``b``, of which one is invalid, were declared."""
    declaration = decoding()[1]
    declaration.spec_tokens, declaration.invalid_spec_tokens = {"a": 2, "b": 3}, {"b": 1}
    drafts = Drafts(spec_tokens=spec, invalid_spec_tokens=invalid or {})
    return judge_handover(declaration, declaration.requests, PARTS, drafts)


@fires("handover_spec_mismatch", request_id="a", expected="draft tokens 2", actual="draft tokens 1")
def a_draft_that_is_lost() -> list[Finding]:
    return drafts_arrive({"a": 1, "b": 3}, {"b": 1})


@fires("handover_spec_mismatch", request_id="b", expected="draft tokens 3", actual="draft tokens None")
def drafts_that_are_lost_altogether() -> list[Finding]:
    return drafts_arrive({"a": 2}, {"b": 1})


@fires("handover_spec_mismatch", request_id="x", expected="draft tokens None", actual="draft tokens 1")
def drafts_of_somebody_else() -> list[Finding]:
    return drafts_arrive({"a": 2, "b": 3, "x": 1}, {"b": 1})


@fires("handover_spec_mismatch", request_id="b", expected="invalid draft tokens 1", actual="invalid draft tokens None")
def a_draft_that_became_valid() -> list[Finding]:
    return drafts_arrive({"a": 2, "b": 3})


@silent("handover_spec_mismatch")
def drafts_in_another_order() -> list[Finding]:
    return drafts_arrive({"b": 3, "a": 2}, {"b": 1})


@silent("handover_spec_mismatch", "handover_out_of_order")
def a_message_as_it_was_declared() -> list[Finding]:
    declaration = decoding()[1]
    return judge_handover(declaration, declaration.requests.copy(), PARTS)


@fires("handover_out_of_order", expected="step 2", actual="step 5")
def a_step_after_two_that_are_missing() -> list[Finding]:
    declaration = declare(5, known=[("a", None, 40, 1)])
    return judge_handover(declaration, declaration.requests, PARTS, previous_step=1)


@fires("handover_out_of_order", expected="step 7", actual="step 5")
def a_step_that_comes_late() -> list[Finding]:
    declaration = declare(5, known=[("a", None, 40, 1)])
    return judge_handover(declaration, declaration.requests, PARTS, previous_step=6)
