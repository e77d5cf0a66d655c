"""A worker's side of the lists of blocks to clear and to copy: what it does of what it was told."""

from __future__ import annotations

from ..checks.finding import Finding
from ..checks.judge import judge_work
from ..facts.requests import BlockWork, Declaration
from ..state.bindings import Bindings
from .run import Run


class BlockWorkFollower:
    """Part of a :class:`~kvscope.runtime.worker.WorkerJudge`. A step without such lists costs a comparison.

    ``clears_by`` and ``copies_by`` name the seams through which it is told, None where nothing is to be expected.
    """

    def __init__(self, run: Run) -> None:
        self.clears_by: str | None = None
        self.copies_by: str | None = None
        self._run = run
        self._done_in: dict[str, int] = {}

    def cleared(self, declaration: Declaration, bindings: Bindings, block_ids: list[int]) -> list[Finding]:
        """The worker has cleared these blocks."""
        work = BlockWork(declared=declaration.zero_blocks, cleared=block_ids)
        return self._judge("zero", declaration, bindings, work)

    def copied(self, declaration: Declaration, bindings: Bindings, copies: list[tuple[int, int]]) -> list[Finding]:
        """The worker has copied these blocks, ``(source, destination)``."""
        work = BlockWork(declared=declaration.copies, copied=copies)
        return self._judge("copy", declaration, bindings, work)

    def end(self, declaration: Declaration, bindings: Bindings) -> list[Finding]:
        """The worker has computed a step with lists: what it did not do by now it will not do."""
        findings: list[Finding] = []
        step, done_in = declaration.step, self._done_in
        if declaration.zero_blocks and done_in.get("zero") != step and self._is_told(self.clears_by):
            findings += self.cleared(declaration, bindings, [])
        if declaration.copies and done_in.get("copy") != step and self._is_told(self.copies_by):
            findings += self.copied(declaration, bindings, [])
        return findings

    def _is_told(self, seam: str | None) -> bool:
        if seam is not None and self._run.works(seam):
            return True
        self._run.coverage.skipped["L", "block_work_not_observed"] += 1
        return False

    def _judge(self, kind: str, declaration: Declaration, bindings: Bindings, work: BlockWork) -> list[Finding]:
        self._done_in[kind] = declaration.step
        self._run.stream.put(
            kind,
            work,
            component="worker",
            boundary=kind,
            step=declaration.step,
            trace_id=declaration.trace_id,
            approx_bytes=128 + 48 * len(work.cleared or work.copied or ()),
        )
        return judge_work(declaration, work, bindings, self._run.parts)
