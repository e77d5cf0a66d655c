"""What is folded into one entry, and what live and replay must agree about."""

from __future__ import annotations

from typing import Any

from kvscope.analysis.scene import Scene
from kvscope.analysis.tally import LIVE, REPLAY, FindingTally
from kvscope.checks.finding import Finding
from kvscope.events.finding_schema import BlockHistory, FindingCount
from kvscope.runtime.folding import SUBJECTS

SCENE = Scene(
    num_blocks=16, null_block_id=0, slots_per_block=16, logical_block=None, declared_block=None, holders=[], tenures=[],
    strip=[],
)  # fmt: skip
HISTORY = BlockHistory(generation=3)


def add(tally: FindingTally, side: str, request_id: str = "a", step: int = 1, **more: Any) -> None:
    finding = Finding(reason="x", step=step, trace_id="t", request_id=request_id, group_id=0, block_id=5)
    tally.add(side, finding, process="p", runner=None, action="log", **more)


def count(number: int, unnamed: int = 0) -> FindingCount:
    return FindingCount(reason="x", group_id=0, count=number, first_step=1, last_step=9, unnamed=unnamed)


def test_a_live_history_stays_with_the_finding_that_it_is_about() -> None:
    """Whichever side is read first."""
    for sides in ((LIVE, REPLAY), (REPLAY, LIVE)):
        tally = FindingTally()
        for side in sides:
            add(tally, side, **({"history": HISTORY} if side == LIVE else {"scene": SCENE}))
        (entry,) = tally.folded()
        assert (entry.history, entry.scene) == (HISTORY, SCENE)


def test_a_history_of_another_finding_is_not_taken_for_that_of_the_first() -> None:
    tally = FindingTally()
    add(tally, LIVE, "b", history=HISTORY)
    add(tally, REPLAY, "a", scene=SCENE)
    (entry,) = tally.folded()
    assert (entry.first.request_id, entry.history) == ("a", None)


def test_live_knows_all_requests_unless_it_says_otherwise() -> None:
    tally = FindingTally()
    for step in range(1, 40):
        add(tally, REPLAY, step=step)
        add(tally, REPLAY, "b", step=step)
    add(tally, LIVE)
    tally.told(count(39), "p")
    assert tally.differences() == ([], [("x", 0, "b")])
    tally.told(count(78, unnamed=39), "q")
    assert tally.differences() == ([], [])
    (entry,) = tally.folded()
    assert (entry.count, entry.live, entry.unnamed) == (117, 117, 39)


def test_a_killed_process_that_wrote_very_many_may_have_left_some_out() -> None:
    tally = FindingTally()
    for number in range(SUBJECTS):
        add(tally, LIVE, f"r{number}")
        add(tally, REPLAY, f"r{number}")
    add(tally, REPLAY, "late")
    assert tally.differences() == ([], [])
