"""A pool of 24 blocks whose calls are judged as they come: a host that counts, and the ledger beside it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_audit, judge_pool, judge_settled
from kvscope.checks.rule import Part
from kvscope.facts.allocator import ALLOC, CACHE, FREE, TOUCH, PoolOperation
from kvscope.state.blocks import BlockLedger

PARTS: tuple[Part, ...] = ("kv_trace", "kv_guard_config")
NUM_BLOCKS = 24
CHANGE = {ALLOC: 1, TOUCH: 1, FREE: -1}


class Calls:
    """Each call is a step of its own, from 1 on. ``references`` are the host's counts: they may go below zero."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        self.ledger = BlockLedger(num_blocks, 0)
        self.references: Counter[int] = Counter()
        self.in_flight: dict[int, int] = {}
        self.step = 0

    def call(self, kind: str, block_ids: list[int], request_id: str | None = None, **fields: Any) -> list[Finding]:
        """What is found about a call, before and after the ledger takes it over."""
        self.step += 1
        for block in block_ids:
            self.references[block] += CHANGE.get(kind, 0)
        operation = PoolOperation(
            **{
                "kind": kind,
                "block_ids": block_ids,
                "request_id": request_id,
                "group_id": None if request_id is None else 0,
                "step": self.step,
                "ref_counts": [self.references[block] for block in block_ids],
                **fields,
            }
        )
        findings = judge_pool(operation, self.ledger, f"t{self.step}", PARTS, self.in_flight)
        self.ledger.apply(operation, self.step)
        return findings + judge_settled(operation, self.ledger, f"t{self.step}", PARTS)

    def sound(self, kind: str, block_ids: list[int], request_id: str | None = None, **fields: Any) -> None:
        assert self.call(kind, block_ids, request_id, **fields) == []

    def audit(self, *arguments: Any) -> list[Finding]:
        """What is found where the host's books are as given: reference counts, free queue, tables, hashes."""
        differences = self.ledger.differences(*arguments)
        return judge_audit(differences, self.step, f"t{self.step}", self.ledger, PARTS)


def lives() -> Calls:
    """``a`` had the blocks 1, 2, 3 and left in step 5; ``b`` hit 1 and 2 and has 4; ``c`` got 3 again, and 5."""
    calls = Calls()
    calls.sound(ALLOC, [1, 2, 3], "a", first_index=0, cause="allocate")
    calls.sound(CACHE, [1, 2], "a", cause="allocate", hash_tokens=[16, 16])
    calls.sound(TOUCH, [1, 2], "b", first_index=0, cause="hit")
    calls.sound(ALLOC, [4], "b", first_index=2, cause="allocate")
    calls.sound(FREE, [3, 2, 1], "a", cause="finish")
    calls.sound(ALLOC, [3, 5], "c", first_index=0, cause="allocate")
    return calls


REF_COUNTS = [1, 1, 1, 1, 1, 1] + [0] * 18  # that of the null block means nothing
FREE_IDS = list(range(6, NUM_BLOCKS))
TABLES = {"b": [[1, 2, 4]], "c": [[3, 5]]}
HASH_COUNTS = [0, 1, 1] + [0] * 21
