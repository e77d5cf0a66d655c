"""Where the next step of a request must begin: behind what was scheduled, less the drafts that were rejected since.

One of them follows the declarations and the results that the scheduler saw, another, in a worker, the batches and what
its runner counted. With asynchronous scheduling a step is declared before the rejections of the one before are known:
each takes effect on whatever is declared after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import repeat
from operator import add

import msgspec

from ..facts.requests import Declaration, StepResult, Verification


class Advance(msgspec.Struct, frozen=True, kw_only=True):
    """A request that begins its step elsewhere than its last steps lead to. Tokens; ``row`` is that of a batch."""

    request_id: str
    expected: int
    actual: int
    row: int | None = None


class Advances:
    """See the module. What is not known (a request that came in before, a step whose rejections nobody counted) is
    expected to be right.
    """

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._since: dict[str, int] = {}
        self._uncounted: dict[str, int] = {}

    def follow(
        self, step: int, ids: Sequence[str], starts: list[int], scheduled: Mapping[str, int], fresh: Collection[str]
    ) -> list[Advance]:
        """Take over a step: the requests ``ids`` begin at ``starts``. ``fresh`` come in, or come back, with it."""
        for request_id in fresh:
            self._since[request_id] = step
            self._next.pop(request_id, None)
        for request_id in self._uncounted:
            self._next.pop(request_id, None)
        self._uncounted.clear()
        expected = list(map(self._next.get, ids, starts))
        wrong: list[Advance] = []
        if expected != starts:
            wrong = [
                Advance(request_id=request_id, expected=there, actual=here, row=row)
                for row, (request_id, there, here) in enumerate(zip(ids, expected, starts, strict=True))
                if there != here
            ]
        self._next.update(zip(ids, map(add, starts, map(scheduled.get, ids, repeat(0))), strict=True))
        return wrong

    def expect(self, step: int, drafted: Iterable[str]) -> None:
        """The rejections of these are going to be counted before the next step begins, or are not known."""
        self._uncounted.update(zip(drafted, repeat(step)))

    def reject(self, step: int, request_id: str, rejected: int) -> None:
        """So many tokens of a step do not count. One that was declared before the request came back says nothing."""
        self._uncounted.pop(request_id, None)
        if request_id in self._next and step >= self._since.get(request_id, 0):
            self._next[request_id] -= rejected

    def forget(self, request_ids: Iterable[str]) -> None:
        """These are gone, or will come back from elsewhere."""
        for request_id in request_ids:
            self._next.pop(request_id, None)
            self._since.pop(request_id, None)
            self._uncounted.pop(request_id, None)


class DeclaredAdvances:
    """Follows what a scheduler declares, from the first draft on: without drafts it costs nothing. ``is_following``
    says whether there has been one.
    """

    def __init__(self) -> None:
        self.is_following = False
        self._advances: Advances | None = None

    def declare(self, declaration: Declaration) -> list[Advance]:
        """Take over a declaration; the requests that do not begin where they must.

        Behind a load that failed a request begins earlier, and only the connector knows: that is let pass.
        """
        advances, requests = self._advances, declaration.requests
        if advances is None:
            if not declaration.spec_tokens:
                return []
            advances = self._advances = Advances()
            self.is_following = True
        if requests.finished or requests.preempted:
            advances.forget((*requests.finished, *requests.preempted))
        ids, starts, fresh = requests.cached_ids, requests.cached_computed, requests.resumed
        if requests.new_ids:
            ids, starts = [*ids, *requests.new_ids], [*starts, *requests.new_computed]
            fresh = {*fresh, *requests.new_ids}
        wrong = advances.follow(declaration.step, ids, starts, requests.scheduled, fresh)
        return [
            msgspec.structs.replace(one, row=None)
            for one in wrong
            if declaration.connector_plan is None or one.actual > one.expected
        ]

    def returned(self, declaration: Declaration, result: StepResult | None) -> None:
        """The result of a step has taken effect in the scheduler (``Scheduler.update_from_output``)."""
        if self._advances is None or not declaration.spec_tokens:
            return
        sampled = dict(zip(result.request_ids, result.sampled_tokens, strict=True)) if result is not None else {}
        for request_id, drafts in declaration.spec_tokens.items():
            tokens = sampled.get(request_id)
            if tokens is None:
                self._advances.forget((request_id,))
            elif tokens:
                self._advances.reject(declaration.step, request_id, drafts - max(tokens - 1, 0))


class RunnerAdvances:
    """Follows the batches of one runner, from the first one with drafts on. ``step`` is the last one."""

    def __init__(self) -> None:
        self.step = 0
        self._advances = Advances()

    def compute(self, declaration: Declaration, request_ids: Sequence[str], starts: list[int]) -> list[Advance]:
        """A batch begins at these positions; the rows that do not begin where they must."""
        advances, requests, self.step = self._advances, declaration.requests, declaration.step
        if requests.finished or requests.preempted:
            advances.forget((*requests.finished, *requests.preempted))
        fresh = {*requests.resumed, *requests.new_ids} if requests.new_ids else requests.resumed
        wrong = advances.follow(declaration.step, request_ids, starts, requests.scheduled, fresh)
        advances.expect(declaration.step, declaration.spec_tokens)
        return wrong

    def count(self, declaration: Declaration, counted: Verification) -> None:
        """The runner has counted the drafts of that batch. Where it does not say what it rejects it is the rest."""
        for request_id, drafted, accepted, rejected in zip(
            counted.request_ids, counted.drafted, counted.accepted, counted.rejected, strict=False
        ):
            rest = 0 if accepted is None else drafted - accepted
            self._advances.reject(declaration.step, request_id, rest if rejected is None else rejected)
