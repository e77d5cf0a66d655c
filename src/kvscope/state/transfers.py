"""Loads and sends that were planned with a connector and have not been reported as finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from ..facts.connector import RECEIVING, SENDING, ConnectorPlan, ConnectorResult, PlannedReceive
from ..facts.requests import Declaration
from ..facts.topology import Topology
from .bindings import Bindings
from .visibility import first_visible_block

MOST_TRANSFERS = 4096
"""So many planned ones are kept of each direction, and so many finished ones."""

Name = TypeVar("Name")
Kept = TypeVar("Kept")


class Completion(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A transfer was reported as finished. ``planned_step`` says after which step it was planned, None if it was not;
    ``completed_step`` with which one it was reported before, if nothing has been planned since.
    """

    request_id: str
    direction: str
    is_known: bool
    planned_step: int | None
    completed_step: int | None


class Target(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A block into which a connector is to load: of a group, with its first token at ``position``."""

    group_id: int
    position: int
    block_id: int


class FailedLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request whose load was reported as failed: if it goes on, then not with more than ``most_tokens``.

    ``block_id`` of ``group_id`` is the first that lacks something, where the report says so. ``waits``: the load was
    to be waited for.
    """

    request_id: str
    waits: bool
    most_tokens: int
    group_id: int | None = None
    block_id: int | None = None


class Transfers:
    """What one scheduler has planned. ``is_partial``: some of it was not seen or has been forgotten, so that nothing
    follows from what is not there.
    """

    def __init__(self) -> None:
        self.is_partial = False
        self._receives: dict[str, tuple[int, PlannedReceive]] = {}
        self._sends: dict[str, int] = {}
        self._completed: dict[tuple[str, str], int] = {}

    def lose(self) -> None:
        """Something that was planned or reported has not been seen."""
        self.is_partial = True
        self._completed.clear()

    def plan(self, plan: ConnectorPlan, step: int) -> None:
        """Take over what was planned in or after step ``step``; of one request it replaces what was planned before."""
        for receive in plan.receives:
            if receive.waits:
                self._completed.pop((RECEIVING, receive.request_id), None)
                self._receives[receive.request_id] = (step, receive)
        for request_id in plan.sends:
            self._completed.pop((SENDING, request_id), None)
            self._sends[request_id] = step
        if len(self._receives) > MOST_TRANSFERS or len(self._sends) > MOST_TRANSFERS:
            self.is_partial = True
            _shorten(self._receives)
            _shorten(self._sends)

    def failed(self, result: ConnectorResult, declaration: Declaration | None, bindings: Bindings) -> list[FailedLoad]:
        """The loads that the result of a step says to have failed. To be asked before :meth:`complete`.

        A request that does not wait any more has lost its load for other reasons, and the host passes over it. Of loads
        inside of the step those are left out whose failed block somebody else of the step has, too: the host has one of
        them compute it.
        """
        failed = {
            name: FailedLoad(request_id=name, waits=True, most_tokens=0)
            for name in result.failed_recving
            if name in self._receives
        }
        if not result.invalid_blocks:
            return list(failed.values())
        invalid = frozenset(result.invalid_blocks)
        for name, (_, receive) in self._receives.items():
            found = _first(name, receive.blocks, receive.computed_tokens, invalid, bindings, waits=True)
            if found is not None:
                failed.setdefault(name, found)
        inside: list[FailedLoad] = []
        users: Counter[int] = Counter()
        for name, computed in (declaration.requests.computed() if declaration is not None else {}).items():
            bound = bindings.table_of(name)
            if bound is not None and name not in failed and name not in bindings.partial:
                found = _first(name, bound.blocks, computed, invalid, bindings, waits=False)
                if found is not None:
                    inside.append(found)
                    users.update(block for blocks in bound.blocks for block in invalid.intersection(blocks))
        return [*failed.values(), *(load for load in inside if load.block_id is None or users[load.block_id] == 1)]

    def complete(self, result: ConnectorResult, step: int) -> list[Completion]:
        """Take over what the result of step ``step`` says to be finished."""
        received = {name: self._receives.pop(name, (None, None))[0] for name in result.finished_recving}
        sent = {name: self._sends.pop(name, None) for name in result.finished_sending}
        completions = [
            Completion(
                request_id=name,
                direction=direction,
                is_known=name not in result.unknown,
                planned_step=planned,
                completed_step=None if planned is not None else self._completed.get((direction, name)),
            )
            for direction, steps in ((RECEIVING, received), (SENDING, sent))
            for name, planned in steps.items()
        ]
        self._completed |= {(completion.direction, completion.request_id): step for completion in completions}
        _shorten(self._completed)
        return completions


def targets(receive: PlannedReceive, topology: Topology) -> list[Target]:
    """The blocks with what is to be loaded and can be seen by attention, in groups whose blocks hold tokens."""
    found: list[Target] = []
    for group, blocks in zip(topology.groups, receive.blocks, strict=False):
        size, end = group.block_size, receive.computed_tokens
        if group.judged:
            visible = int(first_visible_block(group, np.array([end], np.int64))[0])
            first = max((end - receive.external_tokens) // size, visible)
            found += [
                Target(group_id=group.group_id, position=index * size, block_id=block)
                for index, block in enumerate(blocks[first : -(-end // size)], first)
            ]
    return found


def _first(
    request_id: str,
    tables: Sequence[Sequence[int]],
    computed: int,
    invalid: frozenset[int],
    bindings: Bindings,
    *,
    waits: bool,
) -> FailedLoad | None:
    """Where the first block with computed tokens stands that could not be loaded."""
    for group, blocks in zip(bindings.topology.groups, tables, strict=False):
        for index, block in enumerate(blocks[: -(-computed // group.block_size)]):
            if block in invalid:
                return FailedLoad(
                    request_id=request_id,
                    waits=waits,
                    most_tokens=index * group.block_size,
                    group_id=group.group_id,
                    block_id=block,
                )
    return None


def _shorten(kept: dict[Name, Kept]) -> None:
    while len(kept) > MOST_TRANSFERS:
        del kept[next(iter(kept))]
