"""Which of many findings are written one by one: one fault in a long run must not write a record a step.

Findings are folded by reason, group and request (or block, where no request is named). Of each the 1st, 2nd, 4th, 8th
and so on are written, so that a fault that goes on is seen to go on, and none hides that of another request. The last
of each reason and group is kept, and written at the end if it was not yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from ..checks.finding import Finding

SUBJECTS = 64
"""Requests (or blocks) of one reason and group that are told apart at the same time, and of which the first may come
all at once."""
SECONDS_A_SUBJECT = 10.0
"""Later, one more is written in so many seconds: however many there are, a new one is not left out for ever."""

Subject = str | int | None


class Last(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The last finding of a reason and group, and the seam that saw it."""

    finding: Finding
    component: str
    boundary: str


class Fold:
    """All findings of one reason and group. ``written`` of them were written one by one; ``unnamed`` were left out as
    those of one request too many.
    """

    __slots__ = ("_budget", "_filled", "_subjects", "is_last_written", "last", "unnamed", "written")

    def __init__(self, last: Last, now: float) -> None:
        self.last = last
        self.is_last_written = False
        self.written = 0
        self.unnamed = 0
        self._subjects: OrderedDict[Subject, int] = OrderedDict()
        self._budget = float(SUBJECTS)
        self._filled = now

    def take(self, last: Last, now: float) -> bool:
        """Fold one more finding in; whether it is to be written."""
        finding = last.finding
        subject = finding.block_id if finding.request_id is None else finding.request_id
        count = self._subjects.get(subject, 0) + 1
        is_written = count & (count - 1) == 0
        if count == 1 and not self._admits(now):
            is_written = False
            self.unnamed += 1
        else:
            self._subjects[subject] = count
            self._subjects.move_to_end(subject)
            if len(self._subjects) > SUBJECTS:
                self._subjects.popitem(last=False)
        self.last, self.is_last_written = last, is_written
        self.written += is_written
        return is_written

    def _admits(self, now: float) -> bool:
        self._budget = min(self._budget + (now - self._filled) / SECONDS_A_SUBJECT, SUBJECTS)
        self._filled = now
        if self._budget < 1:
            return False
        self._budget -= 1
        return True


class FindingFolds:
    """One :class:`Fold` for each reason and group: as many as there are rules and groups."""

    def __init__(self) -> None:
        self._folds: dict[tuple[str, int | None], Fold] = {}

    def take(self, finding: Finding, component: str, boundary: str, now: float) -> bool:
        """Fold a finding in, at ``now`` seconds of any clock; whether it is to be written."""
        last = Last(finding=finding, component=component, boundary=boundary)
        key = (finding.reason, finding.group_id)
        fold = self._folds.get(key)
        if fold is None:
            fold = self._folds[key] = Fold(last, now)
        return fold.take(last, now)

    def of(self, reason: str, group_id: int | None) -> Fold | None:
        return self._folds.get((reason, group_id))

    def take_unwritten(self) -> Iterator[Last]:
        """The last findings that were not written, each once."""
        for fold in self._folds.values():
            if not fold.is_last_written:
                fold.is_last_written = True
                fold.written += 1
                yield fold.last

    def clear(self) -> None:
        self._folds.clear()
