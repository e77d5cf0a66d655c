"""What a worker's observer is told beside plans: blocks that are cleared or copied, and drafts that are counted."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..checks.finding import Finding
from ..facts.requests import Declaration, Drafts, StepRequests, Verification
from ..sinks.kinds import WorkerInput
from ..state.bindings import Bindings
from .block_work import BlockWorkFollower
from .drafts import DraftFollower
from .run import Run


class BesidePlans(ABC):
    """The part of a :class:`~kvscope.runtime.worker.WorkerJudge` that has no plan to look at.

    ``_current`` is the step that is being launched, ``_result_of`` the one whose result is still to come.
    """

    _current: Declaration | None
    _result_of: Declaration | None
    _bindings: Bindings | None

    def __init__(self, run: Run) -> None:
        self._run = run
        self.drafts = DraftFollower(run)
        self.block_work = BlockWorkFollower(run)

    @abstractmethod
    def _report(self, findings: list[Finding], component: str, boundary: str) -> None:
        """Record findings, and act on them."""

    @property
    def due_result(self) -> str | None:
        """The trace id of the step whose result has not been given back yet, None if it is not known."""
        return self._result_of.trace_id if self._result_of is not None else None

    def _put_input(
        self, declaration: Declaration, received: StepRequests, drafts: Drafts | None, previous_step: int | None
    ) -> None:
        self._run.stream.put(
            "worker_input",
            WorkerInput(received=received, declared=declaration.requests, drafts=drafts, previous_step=previous_step),
            component="worker",
            boundary="worker_input",
            step=declaration.step,
            trace_id=declaration.trace_id,
            approx_bytes=512 + declaration.requests.table_bytes,
        )

    def expect_block_work(self, clears_by: str | None, copies_by: str | None) -> None:
        """The seams through which the runner tells what it clears and copies, None where it cannot."""
        self.block_work.clears_by, self.block_work.copies_by = clears_by, copies_by

    def expect_drafts(self, counts_by: str | None) -> None:
        """The seam through which the runner tells what it counts of drafts, None where it cannot."""
        self.drafts.counts_by = counts_by

    def on_cleared(self, block_ids: list[int]) -> None:
        if self._current is not None and self._bindings is not None:
            self._report(self.block_work.cleared(self._current, self._bindings, block_ids), "worker", "zero")

    def on_copied(self, copies: list[tuple[int, int]]) -> None:
        if self._current is not None and self._bindings is not None:
            self._report(self.block_work.copied(self._current, self._bindings, copies), "worker", "copy")

    def on_verified(self, counted: Verification) -> None:
        if self._result_of is not None:
            self._report(self.drafts.count(self._result_of, counted), "runner", "spec_post")

    def on_rejected(self, rejected: list[int]) -> None:
        if self._result_of is not None:
            self._report(self.drafts.reject(self._result_of, rejected), "runner", "spec_post")

    def on_verification_skipped(self, cause: str, rows: int) -> None:
        self.drafts.skip(cause, rows)

    def on_dummy_skipped(self, cause: str) -> None:
        """A run that serves no request cannot be looked at."""
        self._run.coverage.skipped["dummy", cause] += 1
