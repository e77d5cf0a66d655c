"""A worker that clears and copies blocks: what it does is held against what it was told, and so is what it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unit.runtime.support import Hooks, Live, of_event

RECORDED = [("zero", True), ("copy", True)]


class Working(Live):
    """``a`` and ``b`` have computed 40 tokens; then ``c`` comes in, whose blocks are cleared and copied to."""

    def __init__(self, folder: Path, **said: Any) -> None:
        super().__init__(folder, guard=None, **said)
        self.worker.expect_block_work("runner.zero", "runner.copy")
        self.warm()

    def work(self, *done: Any, zero: Any = (7, 8), copies: Any = ((1, 7),)) -> None:
        """``done``: each list that the worker clears (of blocks) or copies (of pairs)."""
        self.engine.on_schedule_begin()
        self.engine.next_step()
        declaration = self.scene.say(new=[("c", ([7, 8],), 16, 4)])
        declaration.zero_blocks, declaration.copies = list(zero) or None, list(copies) or None
        self.engine.on_schedule(declaration)
        self.worker.on_input(declaration, declaration.requests.copy())
        for each in done:
            if each and isinstance(each[0], tuple):
                self.worker.on_copied(each)
            else:
                self.worker.on_cleared(each)
        self.worker.on_plan(self.scene.plan(declaration))
        self.worker.on_launched()

    def found(self) -> list[tuple[str, Any, Any, str, str]]:
        return [
            (r["reason"], r.get("request_id"), r["block_id"], r["expected"], r["actual"])
            for r in of_event(self.run, "kv.violation")
        ]

    def recorded(self) -> list[tuple[str, bool]]:
        boundaries = of_event(self.run, "kv.boundary")
        return [(r["kind"], r["as_declared"]) for r in boundaries if r["kind"] in {"zero", "copy"}]


def test_what_is_done_as_it_was_declared_is_recorded_in_short(tmp_path: Path) -> None:
    live = Working(tmp_path)
    live.work([7, 8], [(1, 7)])
    assert live.found() == []
    assert live.recorded() == RECORDED
    assert "zero_blocks" not in of_event(live.run, "kv.boundary", "zero")[0]


@pytest.mark.parametrize(
    ("done", "finding"),
    [
        (([7], [(1, 7)]), ("c", 8, "cleared", "not cleared")),
        (([7, 8, 4], [(1, 7)]), ("b", 4, "not cleared", "cleared")),
        (([7, 8],), ("c", 7, "copied", "not copied from block 1")),
        (([(1, 7)],), ("c", 7, "cleared", "not cleared")),
        (([7, 8], [(1, 7), (4, 8)]), ("c", 8, "not copied", "copied from block 4")),
    ],
)
def test_a_worker_that_does_something_else(tmp_path: Path, done: Any, finding: tuple[Any, ...]) -> None:
    live = Working(tmp_path)
    live.work(*done)
    assert live.found()[0] == ("handover_delta_mismatch", *finding)
    assert (False in dict(live.recorded()).values()) is True


def test_the_order_of_blocks_and_repetitions_do_not_matter(tmp_path: Path) -> None:
    live = Working(tmp_path)
    live.work([8, 7, 8], [(1, 7)])
    assert live.found() == []


def test_blocks_that_are_cleared_without_a_word(tmp_path: Path) -> None:
    live = Working(tmp_path)
    live.work([5], zero=(), copies=())
    assert live.found() == [("handover_delta_mismatch", "b", 5, "not cleared", "cleared")]


def test_what_was_done_without_a_word_does_not_count_for_a_later_step(tmp_path: Path) -> None:
    live = Working(tmp_path)
    live.work([7, 8], zero=(), copies=())
    live.work([(1, 7)])
    assert ("handover_delta_mismatch", "c", 8, "cleared", "not cleared") in live.found()


def test_what_cannot_be_seen_is_not_missed(tmp_path: Path) -> None:
    for name in ("failed", "none"):
        hooks = Hooks()
        live = Working(tmp_path / name, hooks=hooks)
        if name == "failed":
            hooks.failed = {"runner.zero", "runner.copy"}
        if name == "none":
            live.worker.expect_block_work(None, None)
        live.work()
        assert live.found() == []
        assert live.run.coverage.skipped["L", "block_work_not_observed"] == 2


def test_a_warm_up_that_clears_and_copies_is_nobodys(tmp_path: Path) -> None:
    live = Working(tmp_path)
    live.worker.on_cleared([0])
    live.worker.on_copied([(1, 2)])
    assert (live.found(), live.recorded()) == ([], [])
