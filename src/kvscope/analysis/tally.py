"""Findings folded: one entry for each reason and group, with what came first in full and the rest counted."""

from __future__ import annotations

import msgspec

from kvscope.analysis.scene import Scene
from kvscope.checks.catalog import RULES
from kvscope.checks.finding import Finding
from kvscope.events.finding_schema import BlockHistory, FindingCount
from kvscope.runtime.folding import SUBJECTS

KEPT_REQUESTS = 8

REPLAY = "replay"
LIVE = "live"

Key = tuple[str, int | None, str | None]
"""Reason, group and request: what live and replay must agree about."""


NOT_REPLAYABLE = frozenset(
    {
        "handover_missing",
        "handover_request_mismatch",
        "alloc_live_block",
        "alloc_null_block",
        "alias_owner_mismatch",
        "free_list_damaged",
        "ledger_pool_mismatch",
        "operator_argument_mismatch",
    }
)
"""Reasons that live can find in what a trace does not hold: a message without its declaration, a row of a batch that
was never declared, what the host's free queue hands out before the host has looked at it, an audit of the host's own
books, and the arguments of operators, of which only what differs is recorded.
"""


class FoldedFinding(msgspec.Struct, kw_only=True):
    """All findings of one reason in one group. ``first`` is the first one, ``scene`` what surrounded it, ``history``
    what its live record says about the block.

    ``in_replay`` counts the findings of the replay, ``in_trace`` the kv.violation records that were written live, and
    ``told`` by process what kv.coverage said at last: live processes do not write each of many equal findings.
    ``unnamed`` counts live findings whose requests are not known, since there were too many of them.
    ``requests`` holds the first few request ids, ``num_requests`` how many there were.
    """

    first: Finding
    process: str
    runner: str | None
    action: str
    scene: Scene | None = None
    history: BlockHistory | None = None
    in_replay: int = 0
    in_trace: int = 0
    told: dict[str, int] = msgspec.field(default_factory=dict)
    unnamed: int = 0
    first_step: int
    last_step: int
    requests: list[str] = msgspec.field(default_factory=list)
    num_requests: int = 0
    processes: list[str] = msgspec.field(default_factory=list)

    @property
    def count(self) -> int:
        return max(self.in_replay, self.live)

    @property
    def live(self) -> int:
        """Findings that the live processes made."""
        return max(self.in_trace, sum(self.told.values()))


def _same_access(one: Finding, other: Finding) -> bool:
    return (one.step, one.request_id, one.block_id) == (other.step, other.request_id, other.block_id)


class FindingTally:
    """Collects findings from both sides. Memory grows with distinct (reason, group, request), not with findings."""

    def __init__(self) -> None:
        self._folded: dict[tuple[str, int | None], FoldedFinding] = {}
        self.keys: dict[str, set[Key]] = {REPLAY: set(), LIVE: set()}

    def add(
        self,
        side: str,
        finding: Finding,
        *,
        process: str,
        runner: str | None,
        action: str,
        scene: Scene | None = None,
        history: BlockHistory | None = None,
    ) -> None:
        """One finding; ``scene`` is the replay's, ``history`` that of a live record."""
        key = (finding.reason, finding.group_id)
        entry = self._folded.get(key)
        if entry is None:
            entry = self._folded[key] = FoldedFinding(
                first=finding, process=process, runner=runner, action=action, scene=scene,
                first_step=finding.step, last_step=finding.step,
            )  # fmt: skip
        elif side == REPLAY and entry.scene is None:
            if not _same_access(entry.first, finding):
                entry.history = None
            entry.first, entry.scene = finding, scene
        if entry.history is None and _same_access(entry.first, finding):
            entry.history = history
        if side == REPLAY:
            entry.in_replay += 1
        else:
            entry.in_trace += 1
            entry.action = action
        entry.first_step = min(entry.first_step, finding.step)
        entry.last_step = max(entry.last_step, finding.step)
        if process not in entry.processes:
            entry.processes.append(process)
        self._note_request(entry, finding)
        self.keys[side].add((finding.reason, finding.group_id, finding.request_id))

    def told(self, said: FindingCount, process: str) -> None:
        """A process said how often it found something."""
        entry = self._folded.get((said.reason, said.group_id))
        if entry is not None:
            entry.told[process] = said.count
            entry.unnamed += said.unnamed

    def differences(self) -> tuple[list[Key], list[Key]]:
        """``(only live, only in the replay)``. Where very many requests were hit, live does not know all of them; a
        process that was killed did not even say so.
        """
        live, replay = self.keys[LIVE], self.keys[REPLAY]
        capped = {key for key, entry in self._folded.items() if entry.unnamed or entry.in_trace >= SUBJECTS}
        only_live = [key for key in live - replay if key[0] not in NOT_REPLAYABLE]
        only_replay = [key for key in replay - live if key[:2] not in capped]
        return sorted(only_live, key=str), sorted(only_replay, key=str)

    def has_scene(self, finding: Finding) -> bool:
        entry = self._folded.get((finding.reason, finding.group_id))
        return entry is not None and entry.scene is not None

    def folded(self) -> list[FoldedFinding]:
        """The gravest first, then the earliest."""
        gravity = {"fatal": 0, "error": 1, "warning": 2, "info": 3}
        return sorted(
            self._folded.values(),
            key=lambda entry: (
                gravity[RULES[entry.first.reason].severity] if entry.first.reason in RULES else 4,
                entry.first_step,
            ),
        )

    def _note_request(self, entry: FoldedFinding, finding: Finding) -> None:
        request = finding.request_id
        key = (finding.reason, finding.group_id, request)
        if request is None or any(key in keys for keys in self.keys.values()):
            return
        entry.num_requests += 1
        if len(entry.requests) < KEPT_REQUESTS:
            entry.requests.append(request)
