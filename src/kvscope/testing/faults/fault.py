"""What is said about a fault: where it goes in, when it finds its occasion, and which finding it must cause."""

from dataclasses import dataclass
from typing import Literal

Point = Literal["plan", "operator", "declaration", "handover", "dummy", "drafts", "result", "allocator", "connector"]
"""`plan`: the runner's final objects alone. `operator`: what becomes of them on the way to attention. `declaration`:
the scheduler's output before it is declared, so that declaration and plan agree on the error. `handover`: the output on
its way to a worker. `dummy`: a run without work. `drafts`: what the runner counts of drafts. `result`: what comes back
for a step.
`allocator`: the block pool and what the scheduler keeps beside it, through the host's own functions or by hand.
`connector`: what a KV connector reports with a result, and what the scheduler makes of that."""

Traffic = Literal[
    "steady",
    "finishing",
    "twins",
    "again",
    "twins_again",
    "long",
    "dummies",
    "preempting",
    "drafting",
    "loading",
    "loading_twins",
]
"""The requests under which a fault finds its occasion; `workload.TRAFFIC` says what each is."""

BOTH = frozenset({"v1", "v2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way to corrupt a step.

    `expected` is the reason that must be found, or one of `alternatives` where the host's state at that moment decides
    (`Injection.what["expected"]` then says which). `allowed_also` are true consequences of the same injection, in its
    step or later ones. A fault that `crashes` makes attention touch unmapped memory, or the host fail, unless the
    launch is refused. One that is `in_process` has a part in the scheduler and one in the worker, or ends an engine
    that has processes. After one that `blinds` a worker does not know what the pool did, until its process is started
    anew.
    """

    name: str
    summary: str
    expected: str
    point: Point = "plan"
    traffic: Traffic = "steady"
    alternatives: frozenset[str] = frozenset()
    allowed_also: frozenset[str] = frozenset()
    runners: frozenset[str] = BOTH
    crashes: bool = False
    in_process: bool = False
    blinds: bool = False
