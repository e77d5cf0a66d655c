"""A worker holds what its operators get against the plan that it has judged, and accounts for what it could not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvscope.errors import ViolationError
from kvscope.facts.operators import OperatorArguments
from kvscope.facts.plans import Plan
from kvscope.runtime.inactive import inactive_checks
from unit.checks.operator_world import operators
from unit.checks.worlds import group, pool
from unit.runtime.support import Live, last_coverage, of_event

REASON = "operator_argument_mismatch"
Change = Callable[[OperatorArguments], object]


def unchanged(_: OperatorArguments) -> None:
    pass


def live(folder: Path, **more: Any) -> Live:
    made = Live(folder, **more)
    made.worker.reads_operators = True
    return made


def forward(
    engine: Live, change: Change = unchanged, plan_change: Callable[[Plan], object] | None = None, **said: Any
) -> OperatorArguments:
    """A step whose operators get the plan, but for ``change``."""
    declaration = engine.declare(**said)
    engine.worker.on_input(declaration, declaration.requests.copy())
    plan = engine.scene.plan(declaration)
    if plan_change is not None:
        plan_change(plan)
    engine.worker.on_plan(plan)
    assert engine.worker.awaits_operators
    assert engine.worker.planned_tokens == plan.num_tokens
    arguments = operators(plan)
    change(arguments)
    engine.worker.on_operators(arguments)
    engine.worker.on_launched()
    return arguments


def warm(engine: Live) -> None:
    forward(engine, new=[("a", ([1, 2, 3],), 0, 40), ("b", ([4, 5, 6],), 0, 40)])


def decode(engine: Live, change: Change = unchanged, computed: int = 40, **more: Any) -> OperatorArguments:
    return forward(engine, change, known=[(name, None, computed, 1) for name in ("a", "b")], **more)


def unseen(engine: Live) -> dict[str, int]:
    return engine.run.coverage.skipped_by_check().get("C1", {})


def other_slot(arguments: OperatorArguments) -> None:
    arguments.groups[0].slots[1].slots[0] = 57


def test_sound_arguments_are_counted_and_silent(tmp_path: Path) -> None:
    engine = live(tmp_path)
    warm(engine)
    for computed in range(40, 44):
        decode(engine, computed=computed)
    assert of_event(engine.run, "kv.violation") == []
    last = last_coverage(engine.run)
    assert last["checks_run"]["operators"] == last["rows"] == 10
    assert unseen(engine) == {}


@pytest.mark.parametrize("records", ["compact", "full"])
def test_other_arguments_are_reported_in_their_step(tmp_path: Path, records: str) -> None:
    engine = live(tmp_path, records=records)
    warm(engine)
    decode(engine, other_slot)
    decode(engine, computed=41)
    (said,) = of_event(engine.run, "kv.violation")
    assert (said["reason"], said["step"], said["request_id"], said["row"]) == (REASON, 2, "a", 0)
    assert (said["slot"], said["block_id"], said["component"], said["boundary"]) == (57, 3, "runner", "operators")


def test_a_plan_that_is_wrong_itself_is_reported_once(tmp_path: Path) -> None:
    engine = live(tmp_path)
    warm(engine)
    decode(engine, plan_change=lambda plan: plan.groups[0].slots.__setitem__(0, 57))
    (said,) = of_event(engine.run, "kv.violation")
    assert said["reason"] == "write_target_mismatch"


def test_what_is_seen_in_two_places_is_counted_once(tmp_path: Path) -> None:
    engine = live(tmp_path)
    declaration = engine.declare(new=[("a", ([1, 2, 3],), 0, 40)])
    engine.worker.on_input(declaration, declaration.requests)
    plan = engine.scene.plan(declaration)
    engine.worker.on_plan(plan)
    engine.worker.on_operators(operators(plan))
    engine.worker.on_operators(operators(plan))
    assert engine.run.coverage.operator_rows == 1


def test_without_the_trace_nothing_is_waited_for(tmp_path: Path) -> None:
    engine = live(tmp_path, trace=None)
    engine.warm()
    assert not engine.worker.awaits_operators
    engine.worker.on_operators(OperatorArguments(groups=[]))
    assert engine.run.coverage.operator_rows == 0


def test_where_arguments_cannot_be_read_nothing_is_waited_for_or_counted(tmp_path: Path) -> None:
    engine = Live(tmp_path)
    engine.warm()
    assert not engine.worker.awaits_operators
    assert unseen(engine) == {}


def test_a_forward_whose_arguments_were_never_seen_is_counted(tmp_path: Path) -> None:
    engine = live(tmp_path)
    engine.warm()
    assert not engine.worker.awaits_operators
    assert unseen(engine) == {"no_operator_arguments": 2}


def test_a_forward_that_failed_before_its_arguments_were_seen_is_counted_once(tmp_path: Path) -> None:
    engine = live(tmp_path)
    declaration = engine.declare(new=[("a", ([1, 2, 3],), 0, 40)])
    engine.worker.on_input(declaration, declaration.requests)
    engine.worker.on_plan(engine.scene.plan(declaration))
    engine.worker.on_native_error("worker.execute", "RuntimeError")
    engine.worker.on_launched()
    assert unseen(engine) == {"no_operator_arguments": 1}


def test_a_forward_whose_end_nobody_saw_is_over_with_the_next_message(tmp_path: Path) -> None:
    """Else the next one would be held against its plan, if no other came."""
    engine = live(tmp_path)
    for computed in (0, 40):
        said: dict[str, Any] = {"known": [("a", None, 40, 1)]} if computed else {"new": [("a", ([1, 2, 3],), 0, 40)]}
        declaration = engine.declare(**said)
        engine.worker.on_input(declaration, declaration.requests)
        assert not engine.worker.awaits_operators
        plan = engine.scene.plan(declaration)
        if not computed:
            engine.worker.on_plan(plan)
            assert engine.worker.awaits_operators
    engine.worker.on_operators(operators(plan))
    engine.worker.on_launched()
    assert of_event(engine.run, "kv.violation") == []
    assert unseen(engine) == {"no_operator_arguments": 1}


def test_when_the_cache_is_laid_out_anew_no_forward_is_waited_for_any_more(tmp_path: Path) -> None:
    engine = live(tmp_path)
    declaration = engine.declare(new=[("a", ([1, 2, 3],), 0, 40)])
    engine.worker.on_input(declaration, declaration.requests)
    plan = engine.scene.plan(declaration)
    engine.worker.on_plan(plan)
    engine.worker.bind_topology(engine.scene.topology)
    assert not engine.worker.awaits_operators
    engine.worker.on_operators(operators(plan))
    engine.worker.on_launched()
    assert unseen(engine) == {}


def test_groups_whose_metadata_is_not_known_are_counted_by_cause(tmp_path: Path) -> None:
    engine = live(tmp_path, topology=pool(group(0), group(1)))

    def unread(arguments: OperatorArguments) -> None:
        arguments.groups.pop()
        arguments.unread[1] = "metadata of OddBuilder"

    forward(engine, unread, new=[("a", ([1, 2, 3], [4, 5, 6]), 0, 40)])
    last = last_coverage(engine.run)
    assert last["checks_run"]["operators"] == 1
    assert unseen(engine) == {"operator_arguments: metadata of OddBuilder": 1}


def outside(arguments: OperatorArguments) -> None:
    arguments.groups[0].slots[0].slots[0] = 5000
    arguments.groups[0].parts[0].tables[1, 0] = -7


def test_an_access_outside_the_cache_is_refused_before_it_is_launched(tmp_path: Path) -> None:
    engine = live(tmp_path, trace="raise")
    warm(engine)
    with pytest.raises(ViolationError, match=REASON):
        decode(engine, outside)


def test_on_a_rank_whose_exception_nobody_sees_it_is_made_harmless(tmp_path: Path) -> None:
    engine = live(tmp_path, trace="raise", returns_results=False)
    warm(engine)
    given = decode(engine, outside).groups[0]
    assert given.slots[0].slots[0] == -1
    assert given.parts[0].tables[1, 0] == 0
    assert [said["launch_fatal"] for said in of_event(engine.run, "kv.violation")] == [True, True]


def test_under_log_nothing_is_changed(tmp_path: Path) -> None:
    engine = live(tmp_path)
    warm(engine)
    given = decode(engine, outside).groups[0]
    assert given.slots[0].slots[0] == 5000


def test_groups_that_cannot_be_read_are_announced(tmp_path: Path) -> None:
    engine = Live(tmp_path)
    engine.run.unread_operators = {0: "metadata of OddBuilder"}
    inactive = [said for said in inactive_checks(engine.run) if said.check == "C1"]
    assert [(said.reason, said.cause, said.group_id) for said in inactive] == [(REASON, "metadata of OddBuilder", 0)]
