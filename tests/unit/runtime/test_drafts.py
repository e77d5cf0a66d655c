"""A worker that verifies drafts: what is judged and recorded of its counts, and what is not expected of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvscope.facts.requests import Declaration, StepResult, Verification
from unit.runtime.support import Hooks, Live, of_event

RESULT = StepResult(request_ids=("a", "b"), sampled_tokens=(3, 1))


class Drafting(Live):
    """``a`` is given two drafts in every step, both of which are accepted, and ``b`` none."""

    def __init__(self, folder: Path, **said: Any) -> None:
        super().__init__(folder, **said)
        self.worker.expect_drafts("runner_v1.verify")
        self.warm()

    def verify(self, computed: tuple[int, int], *, result: bool = True, **counts: Any) -> Declaration:
        self.engine.on_schedule_begin()
        self.engine.next_step()
        declaration = self.scene.say(known=[("a", None, computed[0], 3), ("b", None, computed[1], 1)])
        declaration.spec_tokens = {"a": 2}
        self.engine.on_schedule(declaration)
        self.worker.on_input(declaration, declaration.requests.copy())
        self.worker.on_plan(self.scene.plan(declaration))
        self.worker.on_launched()
        said = {"request_ids": ["a", "b"], "drafted": [2, 0], "accepted": [2, 0], "rejected": [None, None]}
        if counts.get("drafted", True):
            self.worker.on_verified(Verification(**{**said, **counts}))
        if result:
            self.worker.on_result(RESULT)
            self.engine.on_update(declaration, RESULT)
        return declaration

    def found(self) -> list[tuple[str, int, str]]:
        return [(r["reason"], r["step"], r["component"]) for r in of_event(self.run, "kv.violation")]


def test_counts_are_recorded_and_steps_follow_from_them(tmp_path: Path) -> None:
    live = Drafting(tmp_path)
    live.verify((40, 40))
    live.verify((43, 41))
    assert live.found() == []
    first, second = of_event(live.run, "kv.boundary", "spec_post")
    assert (first["step"], first["requests_verified"], first["drafted"]) == (2, ["a", "b"], [2, 0])
    assert (second["accepted"], second["rejected"]) == ([2, 0], [None, None])


def test_what_the_drafter_counts_as_rejected_is_judged_beside_what_was_accepted(tmp_path: Path) -> None:
    live = Drafting(tmp_path)
    live.verify((40, 40), result=False)
    live.worker.on_rejected([1, 0])
    live.worker.on_result(RESULT)
    assert live.found() == [("spec_rejected_out_of_range", 2, "runner")]
    (recorded,) = of_event(live.run, "kv.boundary", "spec_post")
    assert recorded["rejected"] == [1, 0]


def test_what_the_drafter_counts_of_a_row_that_samples_nothing_says_nothing(tmp_path: Path) -> None:
    live = Drafting(tmp_path)
    live.verify((40, 40), result=False, accepted=[2, None])
    live.worker.on_rejected([0, 1])
    live.worker.on_result(RESULT)
    assert live.found() == []


def test_a_request_that_goes_on_elsewhere_is_found_by_the_scheduler_and_in_the_batch(tmp_path: Path) -> None:
    live = Drafting(tmp_path)
    live.verify((40, 40))
    live.verify((42, 41))
    assert live.found() == [("spec_advance_mismatch", 3, "scheduler"), ("spec_advance_mismatch", 3, "runner")]


def test_a_step_whose_plan_was_not_seen_says_nothing_about_the_next_one(tmp_path: Path) -> None:
    live = Drafting(tmp_path)
    live.verify((40, 40))
    declaration = live.declare(known=[("a", None, 43, 1), ("b", None, 41, 1)])
    live.worker.on_input(declaration, declaration.requests.copy())
    live.worker.on_launched()
    live.worker.on_result(RESULT)
    live.verify((44, 42))
    assert live.found() == []


def test_drafts_that_nobody_counts_are_a_finding_where_the_runner_tells(tmp_path: Path) -> None:
    live = Drafting(tmp_path)
    live.verify((40, 40), drafted=())
    assert live.found() == [("spec_row_count_mismatch", 2, "runner")]


def test_no_counts_are_expected_of_a_hook_that_failed_or_of_a_stage_that_does_not_sample(tmp_path: Path) -> None:
    for name in ("failed", "stage"):
        hooks = Hooks()
        live = Drafting(tmp_path / name, hooks=hooks)
        if name == "failed":
            hooks.failed = {"runner_v1.verify"}
        if name == "stage":
            live.worker.expect_drafts(None)
        live.verify((40, 40), drafted=())
        assert live.found() == []


def test_counts_on_a_device_are_said_to_be_skipped(tmp_path: Path) -> None:
    live = Drafting(tmp_path)
    live.verify((40, 40), drafted=(), result=False)
    live.worker.on_verification_skipped("device_tensors", 2)
    live.worker.on_result(RESULT)
    assert live.found() == []
    assert live.run.coverage.skipped["L", "device_tensors"] == 2


def test_counts_without_a_declared_step_are_passed_over(tmp_path: Path) -> None:
    live = Drafting(tmp_path)
    live.worker.on_result(RESULT)
    live.worker.on_verified(Verification(request_ids=["x"], drafted=[1], accepted=[7], rejected=[9]))
    live.worker.on_rejected([9])
    assert live.found() == []
