"""A worker's side of speculative decoding: what its runner counts of the drafts, and where its batch goes on after."""

from __future__ import annotations

from ..checks.finding import Finding
from ..checks.judge import judge_advances, judge_verification
from ..facts.plans import Plan
from ..facts.requests import Declaration, Verification
from ..state.advances import RunnerAdvances
from .run import Run


class DraftFollower:
    """Part of a :class:`~kvscope.runtime.worker.WorkerJudge`. Without drafts it is never called but for a comparison.

    ``counts_by`` names the seam through which the runner's counts come, None where none are to be expected.
    ``advances`` follows the batches from the first draft on; None before, and from a batch on that was not seen.
    """

    def __init__(self, run: Run) -> None:
        self.counts_by: str | None = None
        self.advances: RunnerAdvances | None = None
        self._run = run
        self._counted: Verification | None = None

    def count(self, declaration: Declaration, counted: Verification) -> list[Finding]:
        """The runner has verified the drafts of a step."""
        self._counted = counted
        if self.advances is None:
            self.advances = RunnerAdvances()
        self.advances.count(declaration, counted)
        return judge_verification(declaration, counted, self._run.parts)

    def reject(self, declaration: Declaration, rejected: list[int]) -> list[Finding]:
        """A drafter that is a model has counted the rejected drafts of the step by itself."""
        counted = self._counted
        if counted is None:
            return []
        # It counts a row that samples nothing as if all of it were rejected, and makes no use of that.
        known = [None if a is None else r for a, r in zip(counted.accepted, rejected, strict=False)]
        counted.rejected[: len(known)] = known
        return judge_verification(declaration, counted, self._run.parts)

    def plan(self, declaration: Declaration, plan: Plan) -> list[Finding]:
        """A batch is about to be computed, with drafts or after one that had some."""
        if self.advances is None:
            self.advances = RunnerAdvances()
        starts = plan.positions[plan.query_start[: len(plan.request_ids)]].tolist()
        return judge_advances(
            declaration, self.advances.compute(declaration, plan.request_ids, starts), self._run.parts
        )

    def end(self, declaration: Declaration) -> list[Finding]:
        """The result of a step with drafts is there: record what was counted. Nothing at all is a finding, too."""
        counted, self._counted = self._counted, None
        findings: list[Finding] = []
        if counted is None:
            if self.counts_by is None or not self._run.works(self.counts_by):
                return []
            counted = Verification(request_ids=[], drafted=[], accepted=[], rejected=[])
            findings = judge_verification(declaration, counted, self._run.parts)
        self._run.stream.put(
            "spec_post",
            counted,
            component="runner",
            boundary="spec_post",
            step=declaration.step,
            trace_id=declaration.trace_id,
            approx_bytes=128 * len(counted.request_ids),
        )
        return findings

    def skip(self, cause: str, rows: int) -> None:
        """The runner's counts cannot be read."""
        self._run.coverage.skipped["L", cause] += rows
        self.counts_by = self.advances = None

    def lose(self) -> None:
        """A batch passed that was not seen."""
        self.advances = None
