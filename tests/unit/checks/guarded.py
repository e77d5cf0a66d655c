"""A :class:`Scene` whose pool is told, too: a real ledger and a real :class:`Legality` beside the declarations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_batch, judge_content, judge_plan
from kvscope.checks.plan_view import StepView
from kvscope.checks.rule import Part
from kvscope.facts.allocator import ALLOC, CACHE, FREE, HOLD, TOUCH, PoolOperation
from kvscope.facts.plans import Plan
from kvscope.facts.requests import Declaration
from kvscope.facts.topology import Topology
from kvscope.state.blocks import BlockLedger
from kvscope.state.legality import Legality
from unit.checks.scenes import ONE_GROUP, PARTS, Scene


class Guarded(Scene):
    """Calls of the pool come before the declaration that they lead to, as in ``Scheduler.schedule``."""

    def __init__(self, topology: Topology = ONE_GROUP) -> None:
        super().__init__(topology)
        self.ledger = BlockLedger(topology.num_blocks, topology.null_block_id)
        self.legality = Legality(topology, self.ledger, self.bindings)
        self.declaration: Declaration | None = None

    def pool(self, kind: str, block_ids: list[int], request_id: str | None = None, **fields: Any) -> None:
        group = None if request_id is None else 0
        said = {"kind": kind, "block_ids": block_ids, "request_id": request_id, "group_id": group}
        step = self.step_number + 1
        self.legality.take(PoolOperation(**{**said, "step": step, "scheduling": True, **fields}))

    def allocate(self, request_id: str, block_ids: list[int], index: int = 0, **fields: Any) -> None:
        fields = {"cause": "allocate", "first_index": index, **fields}
        self.pool(ALLOC, block_ids, request_id, **fields)

    def hit(self, request_id: str, block_ids: list[int], index: int = 0, **fields: Any) -> None:
        self.pool(TOUCH, block_ids, request_id, first_index=index, cause="hit", **fields)

    def cache(self, request_id: str, block_ids: list[int], tokens: int = 16) -> None:
        self.pool(CACHE, block_ids, request_id, hash_tokens=[tokens] * len(block_ids))

    def free(self, request_id: str | None, block_ids: list[int], cause: str = "finish") -> None:
        self.pool(FREE, block_ids, request_id, cause=cause)

    def hold(self, request_id: str, block_ids: list[int], cause: str = "finish") -> None:
        self.pool(HOLD, block_ids, request_id, cause=cause)

    def say(self, *, zero: list[int] | None = None, copies: Any = None, **said: Any) -> Declaration:
        """Declare, advance, and leave what finished to be ended by the next one."""
        if self.declaration is not None:
            self.legality.end_finished()
        declaration = super().say(**said)
        declaration.zero_blocks, declaration.copies = zero, copies
        self.legality.advance(declaration)
        self.declaration = declaration
        return declaration

    def content(self, parts: Iterable[Part] = PARTS, **said: Any) -> list[Finding]:
        """What is found about contents as a step is declared."""
        return judge_content(self.say(**said), self.legality, tuple(parts))

    def sound(self, **said: Any) -> Declaration:
        assert self.content(**said) == []
        assert self.declaration is not None
        return self.declaration

    def returned(self, declaration: Declaration) -> None:
        self.legality.confirm(declaration, None)

    def judge(self, declaration: Declaration, plan: Plan, parts: Iterable[Part] = PARTS) -> list[Finding]:
        parts = tuple(parts)
        findings = judge_batch(declaration, plan, parts)
        step = StepView(plan, declaration, self.bindings, self.ledger, self.legality)
        return findings + judge_plan(step, [step.group(batch) for batch in self.batches], parts)


def two_decode(topology: Topology = ONE_GROUP) -> Guarded:
    """``a`` has blocks 1, 2, 3 and ``b`` 4, 5, 6; both have computed 40 tokens in step 1, whose result is there."""
    scene = Guarded(topology)
    scene.allocate("a", [1, 2, 3])
    scene.cache("a", [1, 2])
    scene.allocate("b", [4, 5, 6])
    scene.cache("b", [4, 5])
    scene.returned(scene.sound(new=[("a", ([1, 2, 3],), 0, 40), ("b", ([4, 5, 6],), 0, 40)]))
    return scene
