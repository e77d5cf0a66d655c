"""L on speculative decoding: what was drafted, what the runner accepted and rejected, and where the next step begins.

Three sides: the declaration says how many drafts a request was given, the runner counts how many of them it accepted
and rejected, and the scheduler, or the runner's own state, says where the request goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import ge, sub

import msgspec

from ..facts.requests import Declaration, Verification
from ..state.advances import Advance
from . import rule as r
from .finding import Finding
from .rule import rule

_COUNTED = "the runner's count of accepted and rejected drafts"
_DECLARED = "the drafts that the scheduler declared"


class DraftsView(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner counted in a step, or requests that do not begin where the counts lead to."""

    declaration: Declaration
    verification: Verification | None = None
    advances: Sequence[Advance] = ()

    def rows(self) -> Iterator[tuple[int, str, int]]:
        """Each row of the batch, its request, and how many drafts were declared for it."""
        if self.verification is not None:
            for row, request_id in enumerate(self.verification.request_ids):
                yield row, request_id, self.declaration.spec_tokens.get(request_id, 0)


def verification_agrees(declaration: Declaration, verification: Verification) -> bool:
    """The common case at its lowest price: everything is in range and adds up. A row in a prompt is none of these."""
    drafted, accepted, rejected = verification.drafted, verification.accepted, verification.rejected
    declared = list(map(declaration.spec_tokens.get, verification.request_ids, repeat(0)))
    return (
        drafted == declared
        and len(drafted) == len(declaration.requests.scheduled) == len(accepted)
        and None not in accepted
        and min(accepted, default=0) >= 0  # type: ignore[type-var, operator]  # no None is left
        and all(map(ge, drafted, accepted))  # type: ignore[arg-type]  # no None is left
        and (rejected == list(map(sub, drafted, accepted)) or rejected == [None] * len(drafted))
    )


def _finding(
    view: DraftsView, request_id: str | None, row: int | None, expected: int | str, actual: int | str
) -> Finding:
    return Finding(
        reason="",
        step=view.declaration.step,
        trace_id=view.declaration.trace_id,
        request_id=request_id,
        row=row,
        expected=expected,
        actual=actual,
    )


@rule(
    check="L",
    severity="error",
    rank=r.OTHER,
    title="drafts of other rows are verified than were declared",
    fires="The runner counts for fewer rows than its batch has, for another number of drafts than a request was "
    "given, or not at all for a request with drafts.",
    silent="Padding behind the rows of the batch; fewer drafts than declared where the runner verifies adaptively; a "
    "runner whose counts stand on a device, which is counted.",
    sources=(_COUNTED, _DECLARED),
    proves_not="Which tokens were verified; kvscope reads no token ids.",
)
def spec_row_count_mismatch(view: DraftsView) -> Iterator[Finding]:
    counted = view.verification
    if counted is None:
        return
    rows = dict.fromkeys(counted.request_ids)
    for request_id, drafts in view.declaration.spec_tokens.items():
        if request_id not in rows:
            yield _finding(view, request_id, None, f"{drafts} drafts verified", "none")
    if len(counted.accepted) < len(counted.request_ids):
        yield _finding(view, None, None, len(counted.request_ids), len(counted.accepted))
    for (row, request_id, declared), drafted in zip(view.rows(), counted.drafted, strict=False):
        if drafted > declared or (drafted < declared and not counted.trimmed):
            yield _finding(view, request_id, row, f"{declared} drafts verified", f"{drafted}")


@rule(
    check="L",
    severity="error",
    rank=r.OTHER + 1,
    title="more drafts are accepted than there were",
    fires="The runner accepts fewer drafts of a row than none, or more than the request was given.",
    silent="Rows in the middle of their prompt, which sample nothing; padding behind the rows of the batch.",
    sources=(_COUNTED, _DECLARED),
    proves_not="That the tokens are wrong; kvscope reads no token ids.",
)
def spec_accepted_out_of_range(view: DraftsView) -> Iterator[Finding]:
    counted = view.verification
    for (row, request_id, declared), accepted in zip(view.rows(), counted.accepted if counted else (), strict=False):
        if accepted is not None and not 0 <= accepted <= declared:
            yield _finding(view, request_id, row, f"0 to {declared}", accepted)


@rule(
    check="L",
    severity="error",
    rank=r.OTHER + 2,
    title="drafts are rejected that there were not",
    fires="The runner rejects fewer drafts of a row than none, more than the request was given, or another number than "
    "those that it did not accept.",
    silent="Rows in the middle of their prompt; a runner that does not count them (V1, where the drafter is no model); "
    "fewer where the runner verifies adaptively.",
    sources=(_COUNTED, _DECLARED),
    proves_not="That the next step begins at the wrong place (spec_advance_mismatch).",
)
def spec_rejected_out_of_range(view: DraftsView) -> Iterator[Finding]:
    counted = view.verification
    if counted is None:
        return
    for (row, request_id, declared), accepted, rejected in zip(
        view.rows(), counted.accepted, counted.rejected, strict=False
    ):
        if rejected is None or (accepted is None and 0 <= rejected <= declared):
            continue
        most = declared if accepted is None else declared - accepted
        least = 0 if accepted is None or counted.trimmed else most
        if not max(least, 0) <= rejected <= most:
            yield _finding(view, request_id, row, most if least == most else f"{least} to {most}", rejected)


@rule(
    check="L",
    severity="error",
    rank=r.OTHER + 3,
    title="a request goes on elsewhere than its drafts lead to",
    fires="The computed tokens with which a step is declared, or at which its row of the batch begins, are not those "
    "of the step before, plus what it computed, less the drafts that were rejected.",
    silent="Requests that come in or come back; steps whose counts are not known; a request that goes back where a "
    "connector may have failed to load.",
    sources=("the computed tokens of the declaration, or of the runner's batch", "the declared steps before, and the "
             "drafts that the results, or the runner's counts, say were rejected"),
    proves_not="Which of the two is wrong.",
)  # fmt: skip
def spec_advance_mismatch(view: DraftsView) -> Iterator[Finding]:
    for advance in view.advances:
        yield _finding(view, advance.request_id, advance.row, advance.expected, advance.actual)


DRAFT_RULES = (
    spec_row_count_mismatch,
    spec_accepted_out_of_range,
    spec_rejected_out_of_range,
    spec_advance_mismatch,
)
