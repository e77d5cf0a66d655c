"""Who may be scheduled, and from which token on: followed from the declarations alone.

``vllm/v1/core/sched/scheduler.py`` (0.32): a request is listed as new first, and as known from then on. It ends by
being named in ``finished_req_ids`` and is put back by being named in ``preempted_req_ids``; then it comes back as
resumed (runner V1) or as new (V2). A session's next turn is listed as new while it lives. A known request goes on
where its last step ended, and further back only by drafts of it that were rejected, or where a load had failed.
"""

from __future__ import annotations

from itertools import repeat
from operator import add, lt, sub

from ..facts.requests import Declaration, StepRequests, StepResult
from .doubts import Regressed, Stranger

UNKNOWN = "unknown"
FINISHED = "finished"
PREEMPTED = "preempted"

REMEMBERED_FINISHED = 1024
"""Requests that have finished and are still known by name: a finished one that is scheduled again is told from one
that nobody knows.
"""

_ANY = 1 << 62


class Lifecycle:
    """In order: :meth:`take` each declaration, :meth:`confirm` each result, both in the order of EngineCore.

    What is wrong with the declaration taken last stands in ``strangers`` and ``regressed``, for the rules.
    ``adopted`` counts requests that came up without an admission after a step that was not observed: they are not
    judged then, because it may have stood there.
    """

    def __init__(self) -> None:
        self.strangers: list[Stranger] = []
        self.regressed: list[Regressed] = []
        self.adopted = 0
        self.is_settled = False
        self._complete = True
        self._after: dict[str, int] = {}
        self._ids: list[str] = []
        self._ends: list[int] = []
        self._slack: dict[str, int] = {}
        self._finished: dict[str, None] = {}
        self._preempted: set[str] = set()

    def forgive(self) -> None:
        """A step was not observed: whoever it admitted, resumed or put back is not known."""
        self._complete = self.is_settled = False
        self._ids, self._ends = [], []
        for known in (self._after, self._slack, self._finished, self._preempted):
            known.clear()

    def take(self, declaration: Declaration, ends_before: list[int] | None = None) -> bool:
        """Whether the rules have to look at this declaration. A step that has the same requests as the one before, each
        where that one left it, costs a few comparisons of lists.

        While it ``is_settled`` the caller may pass over steps in which every request of the step before goes on by one
        token. The next one is then taken with the tokens that they had in the end, ``ends_before``.
        """
        if ends_before is not None and self._ids:
            self._ends = ends_before
        agrees = self._take(declaration)
        self.is_settled = agrees and bool(self._ids) and not self._slack
        return not agrees

    def _take(self, declaration: Declaration) -> bool:
        requests = declaration.requests
        if self.strangers or self.regressed:
            self.strangers, self.regressed = [], []
        scheduled, ids, computed = requests.scheduled, requests.cached_ids, requests.cached_computed
        goes_on = (
            ids == self._ids
            and len(scheduled) == len(ids)
            and not (requests.new_ids or requests.finished or requests.preempted or requests.resumed)
            and (self._explained(computed) if self._slack else computed == self._ends)
        )
        if goes_on:
            try:
                self._ends = list(map(add, computed, map(scheduled.__getitem__, ids)))
            except KeyError:
                goes_on = False
        agrees = goes_on or self._change(requests)
        total, budget = declaration.total_num_scheduled_tokens, declaration.token_budget
        return agrees and sum(scheduled.values()) == total and (budget is None or total <= budget)

    def confirm(self, declaration: Declaration | None, result: StepResult) -> None:
        """The result of a step is about to take effect: the scheduler takes rejected drafts back, and where a load
        has failed it lets requests compute what was to be loaded. A step without work may be known by its result alone.
        """
        self.is_settled = False
        if result.load_failed:
            self._slack.update(dict.fromkeys(self._after, _ANY))
        for request_id, drafts in declaration.spec_tokens.items() if declaration is not None else ():
            if request_id in self._after:
                self._slack[request_id] = self._slack.get(request_id, 0) + drafts

    def _explained(self, computed: list[int]) -> bool:
        """Whether nobody is further back than what came back since then explains; it explains nothing after that."""
        if len(computed) != len(self._ends):
            return False
        floors = map(sub, self._ends, map(self._slack.get, self._ids, repeat(0)))
        if any(map(lt, computed, floors)):
            return False
        for request_id in self._ids:
            self._slack.pop(request_id, None)
        return True

    def _change(self, requests: StepRequests) -> bool:
        """Other requests than before, or one that has gone back: each is looked at. Whether all of it is legal."""
        after, scheduled = self._after, requests.scheduled
        after.update(zip(self._ids, self._ends, strict=True))
        for request_id in requests.finished:
            self._leave(request_id)
            self._finished[request_id] = None
        while len(self._finished) > REMEMBERED_FINISHED:
            del self._finished[next(iter(self._finished))]
        for request_id in requests.preempted:
            self._leave(request_id)
            self._finished.pop(request_id, None)
            self._preempted.add(request_id)
        for request_id, computed in zip(requests.new_ids, requests.new_computed, strict=True):
            self._come(request_id)
            after[request_id] = computed + scheduled.get(request_id, 0)
        for request_id, computed in zip(requests.cached_ids, requests.cached_computed, strict=True):
            before, resumed = after.get(request_id), request_id in requests.resumed
            if before is None or resumed:
                if before is None and not (resumed and request_id in self._preempted):
                    self._meet(request_id)
                self._come(request_id)
            elif computed < before - self._slack.pop(request_id, 0):
                self.regressed.append(Regressed(request_id=request_id, tokens=before, computed=computed))
            after[request_id] = computed + scheduled.get(request_id, 0)
        self._ids = [*requests.cached_ids, *requests.new_ids]
        self._ends = [after[request_id] for request_id in self._ids]
        listed = set(self._ids)
        for request_id in sorted(scheduled.keys() - listed):
            self._meet(request_id)
        return not (self.strangers or self.regressed) and len(scheduled) == len(listed)

    def _come(self, request_id: str) -> None:
        self._finished.pop(request_id, None)
        self._preempted.discard(request_id)
        self._slack.pop(request_id, None)

    def _leave(self, request_id: str) -> None:
        self._after.pop(request_id, None)
        self._slack.pop(request_id, None)
        self._preempted.discard(request_id)

    def _meet(self, request_id: str) -> None:
        """Somebody is scheduled of whom nobody knows that it may be."""
        cause = FINISHED if request_id in self._finished else PREEMPTED if request_id in self._preempted else UNKNOWN
        if cause == UNKNOWN and not self._complete:
            self.adopted += 1
        else:
            self.strangers.append(Stranger(request_id=request_id, cause=cause))
