"""Action ``isolate``: end the requests that a finding names, and hold their blocks back.

Acts where vLLM would take up an abort, ahead of the result of the faulty step, so that its token goes nowhere and rows
that are already submitted are passed over. What cannot be isolated stops the engine, as ``raise`` does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from ..checks.catalog import RULES
from ..checks.finding import Finding
from ..checks.rule import is_read
from ..events.names import RequestNames
from ..logs import say
from ..sinks.mailbox import ID_CHARACTERS
from ..state.block_states import CountedLedger
from .pool import PoolJudge

HELD_PERCENT = 5
"""Share of the pool that may be held back. Whoever needs more has lost more than a few requests."""

_REMEMBERED = 4096

_LEAVES_CONTENT = frozenset({"C4", "L"})
_SPOILS_CONTENT = frozenset({"read_uninitialized", "bind_copy_conflict", "bind_zero_conflict"})


class RequestControl(Protocol):
    """What isolation asks of the scheduler. Implemented by the boundary."""

    @property
    def num_blocks(self) -> int: ...

    def live(self) -> list[str]: ...

    def alone(self, request_id: str) -> bool: ...

    def blocks_of(self, request_id: str) -> set[int]: ...

    def owners_of(self, block_id: int) -> list[str]: ...

    def is_null(self, block_id: int) -> bool: ...

    def hold(self, block_ids: Iterable[int]) -> None: ...

    def release(self, block_ids: Iterable[int]) -> None: ...

    def end(self, request_ids: Iterable[str]) -> None: ...

    def answer(self, outputs: object) -> None: ...


class Isolation:
    """What is held back in one engine, and why nothing more can be. ``states`` is told, where blocks are counted."""

    def __init__(
        self,
        control: RequestControl,
        names: RequestNames,
        pool: PoolJudge | None = None,
        states: CountedLedger | None = None,
    ) -> None:
        self.control = control
        self.held: set[int] = set()
        self._names = names
        self._pool = pool
        self._states = states
        self._isolated: dict[str, None] = {}  # the last ones: findings about them go on coming for a step or two
        self._most = control.num_blocks * HELD_PERCENT // 100

    def act(self, finding: Finding, *, posted: bool = False) -> str | None:
        """Isolate what the finding names; None when that is done, else why it cannot be and the engine has to stop.

        ``posted`` findings have their request ids as they may be written: they came through a worker's mailbox.
        """
        control = self.control
        if posted and self._names.mode == "omitted":
            return "kv_output.request_ids is omitted, so that a worker cannot say which request it is"
        named = list(filter(None, (finding.request_id, finding.other_request_id)))
        if not named:
            return None
        live = control.live()
        if posted:
            known = {str(self._names(name))[:ID_CHARACTERS]: name for name in live}
            named = [known.get(name, name) for name in named]
        block = self._damaged(finding)
        readers = control.owners_of(block) if block is not None and _damages(finding) else []
        ending = list(dict.fromkeys(name for name in (*named, *readers) if name in live))
        kept = next((name for name in ending if not control.alone(name)), None)
        if kept is not None:
            return f"{self._names(kept)} is a pooling request or a session, which vLLM cannot end by itself"
        holding = set() if block is None else {block}
        for name in (*named, *ending):
            holding |= control.blocks_of(name) if name in ending else self._left_by(name)
        holding -= self.held
        if len(self.held) + len(holding) > self._most:
            total = len(self.held) + len(holding)
            return f"{total} of {control.num_blocks} blocks would be held back, more than {HELD_PERCENT} %"
        control.hold(holding)
        self.held |= holding
        if self._states is not None:
            self._states.isolate(holding)
        control.end(dict.fromkeys((*named, *ending)))
        self._isolated |= dict.fromkeys((*named, *ending))
        while len(self._isolated) > _REMEMBERED:
            del self._isolated[next(iter(self._isolated))]
        if ending or holding:
            said = ", ".join(map(str, self._names.of(ending))) or "nobody"
            text = "kvscope: isolate (%s) ended %s; %d of %d blocks are held back"
            say(logging.ERROR, text, finding.reason, said, len(self.held), control.num_blocks)
        return None

    def release(self) -> None:
        """The prefix cache is about to be reset: nothing in a block counts any more."""
        held, self.held = self.held, set()
        self.control.release(held)
        if self._states is not None:
            self._states.end_isolation(held)

    def _left_by(self, request_id: str) -> set[int]:
        """What a request that is over had: what still waits for its connector, and what nobody has got since."""
        left = self.control.blocks_of(request_id)
        if self._pool is not None and self._pool.lost is None and request_id not in self._isolated:
            seen = self._pool.ledger.snapshot()
            rows = zip(seen.block_ids.tolist(), seen.references.tolist(), seen.freed_by, strict=True)
            left |= {block for block, references, name in rows if not references and name == request_id}
        return left

    def _damaged(self, finding: Finding) -> int | None:
        """The block that the finding names, if the pool has it to hold back."""
        block = finding.block_id
        if block is None or not 0 <= block < self.control.num_blocks or self.control.is_null(block):
            return None
        return int(block)


def _damages(finding: Finding) -> bool:
    """Whether what happened can have spoilt the block for all who have it: reading it does not."""
    if finding.reason in _SPOILS_CONTENT:
        return True
    return not is_read(finding.reason) and RULES[finding.reason].check not in _LEAVES_CONTENT


def take_due(findings: list[Finding], step: int) -> list[Finding]:
    """Take the findings up to a step out of a list."""
    due = [finding for finding in findings if finding.step <= step]
    if due:
        findings[:] = [finding for finding in findings if finding.step > step]
    return due
