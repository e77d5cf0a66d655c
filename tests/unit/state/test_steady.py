"""A batch that decodes: that it goes on is found out once, and whoever relies on it misses nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvscope.facts.requests import Declaration, StepResult
from kvscope.state.bindings import Bindings
from kvscope.state.lifecycle import Lifecycle
from unit.checks.scenes import ONE_GROUP, declare

NAMES = "abc"
SIZE = 16
ODD_STEPS = ["nobody comes", "two tokens", "fewer rows", "order", "back", "new", "resumed", "finished", "preempted"]


class Decoding:
    """Declarations of a scheduler: mostly one token more for each, now and then something else."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.ends: dict[str, int] = {}
        self.blocks: dict[str, int] = {}
        self.step = 0

    def next(self) -> Declaration:
        self.step += 1
        odd = "new" if not self.ends else self.data.draw(st.sampled_from(["", "", "", "", "", *ODD_STEPS]))
        rows = list(self.ends)
        name = self.data.draw(st.sampled_from(rows)) if rows else ""
        gone = [name] if odd in {"finished", "preempted"} else []
        for request_id in gone:
            del self.ends[request_id]
        rows = [row for row in rows if row not in gone and not (odd == "fewer rows" and row == name)]
        if odd == "order":
            rows.reverse()
        if odd == "nobody comes":
            rows = []
        absent = [other for other in NAMES if other not in self.ends and other not in gone]
        fresh = absent[:1] if odd == "new" else []
        known = []
        for row in rows:
            start = self.ends[row] - (odd == "back" and row == name)
            tokens = 2 if odd == "two tokens" and row == name else 1
            blocks = self._delta(row, start + tokens, whole=odd == "resumed" and row == name)
            known.append((row, blocks, start, tokens))
            self.ends[row] = start + tokens
        new = []
        for row in fresh:
            tokens = self.data.draw(st.integers(1, 3))
            new.append((row, self._delta(row, tokens, whole=True), 0, tokens))
            self.ends[row] = tokens
        declaration = declare(
            self.step,
            new=new,
            known=known,
            resumed=[name] if odd == "resumed" else [],
            finished=gone if odd == "finished" else [],
            preempted=gone if odd == "preempted" else [],
        )
        declaration.total_num_scheduled_tokens += self.data.draw(st.sampled_from([0] * 9 + [1]))
        declaration.token_budget = self.data.draw(st.sampled_from([None] * 4 + [2, 9]))
        if self.data.draw(st.sampled_from([False] * 5 + [True])):
            declaration.spec_tokens = {name: 1} if name in declaration.requests.scheduled else {}
        return declaration

    def _delta(self, row: str, tokens: int, *, whole: bool) -> tuple[list[int]] | None:
        """What the request needs for so many tokens, or now and then one block less."""
        had = 0 if whole else self.blocks[row]
        needed = max(-(-tokens // SIZE) - self.data.draw(st.sampled_from([0] * 9 + [1])), had)
        self.blocks[row] = needed
        first = 2 + 10 * NAMES.index(row)
        return ([*range(first + had, first + needed)],) if needed > had or whole else None


def short(declaration: Declaration, bindings: Bindings) -> bool:
    """Whether a request of the step has fewer blocks than tokens."""
    requests = declaration.requests
    return any(
        computed + requests.scheduled[name] > SIZE * len(bindings.table(name, 0))
        for name, computed in requests.computed().items()
    )


def is_one_further(before: Declaration, declaration: Declaration) -> bool:
    first, second = before.requests, declaration.requests
    return (
        not (first.new_ids or second.new_ids or second.resumed or second.finished or second.preempted)
        and first.cached_ids == second.cached_ids
        and set(first.scheduled.values()) | set(second.scheduled.values()) <= {1}
        and second.cached_computed == [start + 1 for start in first.cached_computed]
    )


@given(st.data())
def test_a_steady_step_is_the_one_before_with_one_token_more_for_each(data: st.DataObject) -> None:
    decoding, bindings = Decoding(data), Bindings(ONE_GROUP, doubts=True)
    before = decoding.next()
    bindings.apply(before.requests)
    for applied in range(2, 40):
        had_gone_on, declaration = bindings.went_on, decoding.next()
        bindings.apply(declaration.requests)
        assert bindings.applied == applied
        assert bindings.doubtful is short(declaration, bindings)
        if bindings.is_steady:
            assert is_one_further(before, declaration)
        if had_gone_on and is_one_further(before, declaration):
            assert bindings.is_steady
        has_one_each = set(declaration.requests.scheduled.values()) <= {1}
        assert (bindings.ones is not None) is (bindings.went_on and has_one_each)
        if bindings.went_on:
            assert bindings.ends == [decoding.ends[name] for name in declaration.requests.cached_ids]
        before = declaration


@given(st.data())
def test_steady_steps_may_be_passed_over(data: st.DataObject) -> None:
    decoding, bindings = Decoding(data), Bindings(ONE_GROUP)
    short_cut, in_full = Lifecycle(), Lifecycle()
    asked: list[Declaration] = []
    for _ in range(40):
        declaration = decoding.next()
        asked.append(declaration)
        ends_before = bindings.ends if bindings.is_steady else None
        bindings.apply(declaration.requests)
        total, budget = declaration.total_num_scheduled_tokens, declaration.token_budget
        if bindings.is_steady and short_cut.is_settled:
            is_doubtful = total != len(bindings.ends) or (budget is not None and total > budget)
        else:
            is_doubtful = short_cut.take(declaration, ends_before)
        assert is_doubtful is in_full.take(declaration)
        assert (short_cut.strangers, short_cut.regressed) == (in_full.strangers, in_full.regressed)
        if data.draw(st.sampled_from([False, False, True])):
            back = data.draw(st.sampled_from(asked[-3:]))
            result = StepResult(request_ids=(), sampled_tokens=(), load_failed=data.draw(st.booleans()))
            for lifecycle in (short_cut, in_full):
                lifecycle.confirm(back, result)


def test_after_a_step_that_nobody_saw_nothing_is_settled() -> None:
    lifecycle = Lifecycle()
    lifecycle.take(declare(1, new=[("a", ([2],), 0, 4)]))
    assert lifecycle.is_settled
    lifecycle.forgive()
    assert not lifecycle.is_settled
    assert not lifecycle.take(declare(3, known=[("a", None, 5, 1)]), [5])
    assert lifecycle.adopted == 1
