"""What a rule declares about itself, beside the function that judges.

``catalog`` collects these; it is the single source of ``kvscope rules``, of the dictionary page and of the severity,
evidence and action of every kv.violation.
"""

from __future__ import annotations

from typing import Literal

import msgspec

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
RECEIVED = "the SchedulerOutput that the worker received"
HOST_ONLY = "what the device really accessed; kvscope sees the host's plan"

# Order of precedence (spec section 3): outside cache, null block, released or reserved, foreign, target or length.
OUTSIDE, NULL, RELEASED, FOREIGN, TARGET, LENGTH, OTHER = 10, 20, 30, 40, 50, 60, 70
