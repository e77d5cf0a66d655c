"""What a rule declares about itself, beside the function that judges.

``catalog`` collects these; it is the single source of ``kvscope rules``, of the dictionary page and of the severity,
evidence and action of every kv.violation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Literal, TypeVar

import msgspec

from .finding import Finding

Subject = TypeVar("Subject")

Severity = Literal["info", "warning", "error", "fatal"]
Part = Literal["kv_trace", "kv_guard_config", "kv_transfer"]

CHECKS: dict[str, str] = {
    "C1": "token destination: the slot of every scheduled token is where the declaration puts it",
    "C2": "generation: no block is used through a reference from before it was freed",
    "C3": "ownership: the block belongs to the request, alone or by a counted share",
    "C4": "logical order: logical block i is the i-th declared block",
    "C5": "initialized prefix: nothing reads, hits, stores or overwrites what was not written in this generation",
    "C6": "null block: no real token is written to, none inside the visible window read from, the null block",
    "L": "lifecycle and mapping: messages between scheduler, worker and results agree",
    "A": "allocator: the pool's own book-keeping",
    "T": "transfer: every transfer begins once, ends once per rank, and moves what was declared",
}

PART_OF_CHECK: dict[str, Part] = {
    "C1": "kv_trace",
    "C4": "kv_trace",
    "C6": "kv_trace",
    "L": "kv_trace",
    "C2": "kv_guard_config",
    "C3": "kv_guard_config",
    "C5": "kv_guard_config",
    "A": "kv_guard_config",
    "T": "kv_transfer",
}


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One reason. ``sources`` names the two objects it compares, or one object and the invariant it must satisfy
    (``invariant`` True). ``rank`` orders reasons that fit the same access: the lowest is reported, the rest are
    listed as ``also``.
    """

    reason: str
    check: str
    severity: Severity
    title: str
    fires: str
    silent: str
    sources: tuple[str, str]
    invariant: bool = False
    proves_not: str
    rank: int

    @property
    def part(self) -> Part:
        return PART_OF_CHECK[self.check]

    @property
    def evidence(self) -> str:
        """The two sources in one phrase, as the kv.violation record carries them."""
        return f"{self.sources[0]} against {self.sources[1]}"


DECLARATION = "the scheduler's declaration, replayed"
PLAN_SLOTS = "the slots handed to attention"
PLAN_TABLES = "the block tables handed to attention"
PLAN_POSITIONS = "the positions handed to attention"
PLAN_LENGTHS = "the lengths handed to attention"
PLAN_OFFSETS = "the query offsets handed to attention"
RECEIVED = "the SchedulerOutput that the worker received"
HOST_ONLY = "what the device really accessed; kvscope sees the host's plan"

OUTSIDE, NULL, RELEASED, FOREIGN_ROW, FOREIGN, COLLISION, POSITION, TARGET, LENGTH, SHORT, OTHER = range(10, 120, 10)
RESERVED = RELEASED + 1
FOREIGN_OWNER, SHARED, UNDECLARED = FOREIGN + 1, FOREIGN + 2, FOREIGN + 3
OFFSETS = POSITION - 1
ORDER, NEGATIVE, TWICE = TARGET - 3, TARGET - 2, TARGET - 1
COUNT = SHORT + 1
CP_OWNER, CP_ORDER = TARGET - 5, TARGET - 4
UNWRITTEN = SHORT + 5
"""Order of precedence where several reasons fit one access: outside cache, null block, released or reserved, foreign,
target or length. Within a class the more telling reason stands first: a whole foreign row before a foreign block, the
shifted position before the slot that follows from it, the order of a table before its entries. What the order does not
name, such as contents, comes last.
"""


def is_read(reason: str) -> bool:
    """Whether a reason is about what attention reads, and not about where a token is stored."""
    return reason.startswith(("read_", "logical_"))


class RuleFunction(Generic[Subject]):
    """A rule and the function that judges by it; the function's name is the reason."""

    __slots__ = ("judge", "rule")

    def __init__(self, rule: Rule, judge: Callable[[Subject], Iterator[Finding]]) -> None:
        self.rule = rule
        self.judge = judge

    def __call__(self, subject: Subject) -> Iterator[Finding]:
        return self.judge(subject)


def rule(
    *,
    check: str,
    severity: Severity,
    rank: int,
    title: str,
    fires: str,
    silent: str,
    sources: tuple[str, str],
    proves_not: str = HOST_ONLY,
    invariant: bool = False,
) -> Callable[[Callable[[Subject], Iterator[Finding]]], RuleFunction[Subject]]:
    """Declare a rule over the function that judges by it."""

    def declare(judge: Callable[[Subject], Iterator[Finding]]) -> RuleFunction[Subject]:
        return RuleFunction(
            Rule(
                reason=judge.__name__,
                check=check,
                severity=severity,
                title=title,
                fires=fires,
                silent=silent,
                sources=sources,
                invariant=invariant,
                proves_not=proves_not,
                rank=rank,
            ),
            judge,
        )

    return declare
