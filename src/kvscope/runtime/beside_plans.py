"""What a worker's observer is told beside plans: blocks that are cleared or copied, and drafts that are counted."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..checks.finding import Finding
from ..facts.requests import Declaration, Verification
from ..state.bindings import Bindings
from .block_work import BlockWorkFollower
from .drafts import DraftFollower
from .run import Run


class BesidePlans(ABC):
    """The part of a :class:`~kvscope.runtime.worker.WorkerJudge` that has no plan to look at.

    ``_current`` is the step that is being launched, ``_result_of`` the one whose result is still to come, and
    ``due_result`` its trace id. ``expects_no_plan``: slots and tables made now serve no declared step (warm-up,
    profiling, an empty step). ``awaits_operators``: there is a plan that the arguments of a forward can be held
    against. The boundary asks for these several times a step.
    """

    _current: Declaration | None
    _result_of: Declaration | None
    _bindings: Bindings | None
    _last_step: int

    def __init__(self, run: Run) -> None:
        self._run = run
        self.expects_no_plan, self.awaits_operators = True, False
        self.due_result: str | None = None
        self.drafts = DraftFollower(run)
        self.block_work = BlockWorkFollower(run)

    @abstractmethod
    def _report(self, findings: list[Finding], component: str, boundary: str) -> None:
        """Record findings, and act on them."""

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

    def on_late_error(self, boundary: str, error_type: str) -> None:
        """The host failed when somebody took the result of a step that had been launched long before."""
        self._run.native_error(error_type, component="worker", boundary=boundary, after_step=self._last_step)

    def on_shutdown(self) -> None:
        if "engine" not in self._run.roles:
            self._run.close()

    def on_dummy_skipped(self, cause: str) -> None:
        """A run that serves no request cannot be looked at."""
        self._run.coverage.skipped["dummy", cause] += 1
