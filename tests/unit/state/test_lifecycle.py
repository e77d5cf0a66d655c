"""Who may be scheduled: the short way says what a model says that looks at every request of every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvscope.facts.requests import Declaration, StepResult
from kvscope.state.lifecycle import FINISHED, PREEMPTED, REMEMBERED_FINISHED, UNKNOWN, Lifecycle
from unit.checks.scenes import declare

NAMES = "abcd"


@dataclass
class Model:
    """What was said of each request last, and where it ended."""

    last: dict[str, str] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    back: dict[str, int] = field(default_factory=dict)

    def take(self, declaration: Declaration) -> tuple[set[tuple[str, str]], set[str], bool]:
        """``(strangers with their cause, who has gone back, whether all of it is as it should be)``."""
        requests = declaration.requests
        strangers, regressed = set(), set()
        self.last.update(dict.fromkeys(requests.finished, FINISHED))
        self.last.update(dict.fromkeys(requests.preempted, PREEMPTED))
        entries = [
            *((name, computed, "new") for name, computed in zip(requests.new_ids, requests.new_computed, strict=True)),
            *(
                (name, computed, "resumed" if name in requests.resumed else "known")
                for name, computed in zip(requests.cached_ids, requests.cached_computed, strict=True)
            ),
        ]
        for name, computed, kind in entries:
            before = self.last.get(name, UNKNOWN)
            if kind != "new" and before != "live" and not (kind == "resumed" and before == PREEMPTED):
                strangers.add((name, before))
            elif kind == "known" and computed < self.ends[name] - self.back.get(name, 0):
                regressed.add(name)
            self.last[name] = "live"
            self.back.pop(name, None)
            self.ends[name] = computed + requests.scheduled[name]
        total, budget = declaration.total_num_scheduled_tokens, declaration.token_budget
        adds_up = sum(requests.scheduled.values()) == total and (budget is None or total <= budget)
        return strangers, regressed, adds_up and not strangers and not regressed

    def confirm(self, declaration: Declaration, *, load_failed: bool) -> None:
        for name in NAMES:
            if self.last.get(name) == "live":
                drafts = declaration.spec_tokens.get(name, 0) + load_failed * 10**6
                self.back[name] = self.back.get(name, 0) + drafts


@given(st.data())
def test_it_finds_what_a_model_finds_that_looks_at_everything(data: st.DataObject) -> None:
    lifecycle, model = Lifecycle(), Model()
    ends = dict.fromkeys(NAMES, 0)
    asked: list[Declaration] = []
    for step in range(1, data.draw(st.integers(2, 16)) + 1):
        steady = data.draw(st.booleans()) and step > 1
        kinds = {
            name: "known"
            if steady and asked and name in asked[-1].requests.scheduled
            else "out"
            if steady
            else data.draw(st.sampled_from(["new", "known", "known", "resumed", "finished", "preempted", "out"]))
            for name in NAMES
        }
        listed = {name: kind for name, kind in kinds.items() if kind in {"new", "known", "resumed"}}
        computed = {name: max(ends[name] - data.draw(st.sampled_from([0, 0, 0, 0, 1, 2])), 0) for name in listed}
        tokens = {name: data.draw(st.integers(1, 3)) for name in listed}
        declaration = declare(
            step,
            new=[(n, ([],), computed[n], tokens[n]) for n, kind in listed.items() if kind == "new"],
            known=[(n, None, computed[n], tokens[n]) for n, kind in listed.items() if kind != "new"],
            resumed=[name for name, kind in listed.items() if kind == "resumed"],
            finished=[name for name, kind in kinds.items() if kind == "finished"],
            preempted=[name for name, kind in kinds.items() if kind == "preempted"],
        )
        declaration.spec_tokens = {name: n - 1 for name, n in tokens.items() if n > 1 and data.draw(st.booleans())}
        declaration.total_num_scheduled_tokens += data.draw(st.sampled_from([0, 0, 0, 0, 1]))
        declaration.token_budget = data.draw(st.sampled_from([None, 12, 3]))
        strangers, regressed, agrees = model.take(declaration)
        assert lifecycle.take(declaration) is not agrees
        assert {(stranger.request_id, stranger.cause) for stranger in lifecycle.strangers} == strangers
        assert {found.request_id for found in lifecycle.regressed} == regressed
        ends.update({name: computed[name] + tokens[name] for name in listed})
        asked.append(declaration)
        if data.draw(st.booleans()):
            failed = data.draw(st.sampled_from([False, False, True]))
            back = data.draw(st.sampled_from(asked))
            lifecycle.confirm(back, StepResult(request_ids=(), sampled_tokens=(), load_failed=failed))
            model.confirm(back, load_failed=failed)


def test_of_requests_that_are_over_only_some_names_are_kept() -> None:
    lifecycle = Lifecycle()
    for step in range(1, 3 * REMEMBERED_FINISHED):
        over = [f"r{step - 1}"] if step > 1 else []
        assert not lifecycle.take(declare(step, new=[(f"r{step}", ([1],), 0, 4)], finished=over))
        declaration = declare(step, known=[])
        declaration.spec_tokens = dict.fromkeys(over, 3)  # its result comes after its end
        lifecycle.confirm(declaration, StepResult(request_ids=(), sampled_tokens=()))
    kept = (lifecycle._after, lifecycle._slack, lifecycle._finished, lifecycle._preempted)
    assert [len(known) for known in kept] == [1, 0, REMEMBERED_FINISHED, 0]
