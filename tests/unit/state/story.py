"""What a scheduler tells about its pool and its steps, heard by two sides that judge it: EngineCore and a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvscope.facts.allocator import (
    ALLOC,
    CACHE,
    CAUSE_ALLOCATE,
    CAUSE_FINISH,
    CAUSE_HIT,
    FREE,
    TOUCH,
    PoolOperation,
)
from kvscope.facts.requests import Declaration, StepResult
from kvscope.facts.topology import Topology
from kvscope.state.bindings import Bindings
from kvscope.state.blocks import BlockLedger
from kvscope.state.legality import Legality
from unit.checks.scenes import ONE_GROUP, declare


class Side:
    """One process: its bindings, its ledger, and what it finds illegal."""

    def __init__(self, topology: Topology) -> None:
        self.bindings = Bindings(topology)
        self.ledger = BlockLedger(topology.num_blocks, topology.null_block_id)
        self.legality = Legality(topology, self.ledger, self.bindings)


class Story:
    """Blocks of 16 tokens. ``step`` is the last one that was declared; its results come when :meth:`back` says so."""

    def __init__(self, topology: Topology = ONE_GROUP) -> None:
        self.engine, self.worker = Side(topology), Side(topology)
        self.step = 0
        self._said: list[PoolOperation] = []
        self._open: dict[int, Declaration] = {}

    @property
    def legality(self) -> Legality:
        return self.engine.legality

    @property
    def ledger(self) -> BlockLedger:
        return self.engine.ledger

    def say(self, kind: str, block_ids: list[int], request_id: str | None = None, **fields: Any) -> None:
        """The pool does something."""
        operation = PoolOperation(
            **{
                "kind": kind,
                "block_ids": block_ids,
                "request_id": request_id,
                "group_id": None if request_id is None else 0,
                "step": self.step + 1,
                "scheduling": True,
                **fields,
            }
        )
        self.engine.legality.take(operation)
        self._said.append(operation)

    def get(self, name: str, block_ids: list[int], index: int = 0, **fields: Any) -> None:
        self.say(ALLOC, block_ids, name, **{"first_index": index, "cause": CAUSE_ALLOCATE, **fields})

    def hit(self, name: str, block_ids: list[int], index: int = 0, **fields: Any) -> None:
        self.say(TOUCH, block_ids, name, **{"first_index": index, "cause": CAUSE_HIT, **fields})

    def cache(self, name: str, block_ids: list[int], tokens: int = 16, **fields: Any) -> None:
        count = len(block_ids)
        self.say(CACHE, block_ids, name, hash_counts=[1] * count, hash_tokens=[tokens] * count, **fields)

    def free(self, name: str | None, block_ids: list[int], cause: str = CAUSE_FINISH, **fields: Any) -> None:
        self.say(FREE, block_ids, name, cause=cause, **fields)

    def declare(
        self,
        *,
        copies: list[tuple[int, int]] | None = None,
        drafts: Mapping[str, int] | None = None,
        **said: Any,
    ) -> bool:
        """A step is declared; whether there is something for the rules to look at. Both sides say the same."""
        self.step += 1
        declaration = declare(self.step, **said)
        declaration.copies, declaration.spec_tokens = copies, dict(drafts or {})
        declaration.operations, self._said = self._said, []
        for operation in declaration.operations:
            self.worker.legality.take(msgspec.structs.replace(operation))
        looked = []
        for side in (self.engine, self.worker):
            side.bindings.apply(declaration.requests)
            looked.append(side.legality.advance(declaration))
        ours, theirs = self.engine.legality, self.worker.legality
        assert looked[0] == looked[1]
        assert (ours.stale, ours.unwritten, ours.gaps) == (theirs.stale, theirs.unwritten, theirs.gaps)
        assert (ours.shared, ours.exceeded) == (theirs.shared, theirs.exceeded)
        self._open[self.step] = declaration
        return looked[0]

    def end(self) -> list[str]:
        """The rules have looked. Who finished before the step with something unreleased."""
        unreleased = self.legality.unreleased()
        assert unreleased == self.worker.legality.unreleased()
        for side in (self.engine, self.worker):
            side.legality.end_finished()
        return unreleased

    def back(self, step: int | None = None, sampled: Mapping[str, int | None] | None = None) -> None:
        """The result of a step is there, by default that of the last."""
        declaration = self._open.pop(self.step if step is None else step)
        names = tuple(declaration.requests.scheduled)
        tokens = tuple((sampled or {}).get(name, 1) for name in names)
        for side in (self.engine, self.worker):
            side.legality.confirm(declaration, StepResult(request_ids=names, sampled_tokens=tokens))

    def whole(self, **said: Any) -> None:
        """A step from its declaration to its result, in which nothing is wrong."""
        self.declare(**said)
        self.fine()
        self.end()
        self.back()

    def fine(self) -> None:
        legality = self.legality
        assert not legality.doubtful
        assert (legality.stale, legality.unwritten, legality.gaps, legality.shared) == ({}, [], [], [])
        assert (legality.exceeded, legality.aborted) == ([], {})

    def same(self) -> bool:
        """Whether both sides know the same of every block."""
        return self.engine.ledger.equals(self.worker.ledger)

    def declared(self, block_ids: Sequence[int]) -> list[int]:
        tokens: list[int] = self.ledger.written_of(block_ids)[0].tolist()
        return tokens

    def confirmed(self, block_ids: Sequence[int]) -> list[int]:
        tokens: list[int] = self.ledger.written_of(block_ids)[1].tolist()
        return tokens
