"""Which processes of a run make up an engine, and what they said about it when they introduced themselves."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UnsetType

from kvscope.analysis.reader import ProcessLog
from kvscope.checks.rule import PART_OF_CHECK, Part
from kvscope.events.schema import EnabledRecord
from kvscope.facts.topology import Group, Topology

JUDGING_PARTS: tuple[Part, ...] = tuple(dict.fromkeys(PART_OF_CHECK.values()))


class EngineSetup(msgspec.Struct, kw_only=True):
    """One engine (a data-parallel rank). ``topology`` is None where no process recorded one, ``declaring`` where the
    file of the scheduler's process is not there. ``others`` are further processes that claim the same place, and
    ``absent_ranks`` ranks without a file although a higher one has one.
    """

    dp_rank: int
    topology: Topology | None
    parts: set[Part]
    actions: dict[str, str]
    runner: str | None
    declaring: ProcessLog | None
    ranks: list[ProcessLog]
    others: list[ProcessLog]
    absent_ranks: list[int]


def engines_of(logs: Sequence[ProcessLog], *, whole_run: bool) -> list[EngineSetup]:
    """The engines of a run, by data-parallel rank. Only of a ``whole_run`` can a rank be absent."""
    setups: list[EngineSetup] = []
    for dp_rank in sorted({log.dp_rank for log in logs if log.process != "frontend"}):
        mine = [log for log in logs if log.dp_rank == dp_rank and log.process != "frontend"]
        declaring = [log for log in mine if log.process in {"engine", "all"}]
        ranks = {log.files.rank: log for log in reversed(mine) if log.is_worker}
        numbers = {rank for rank, log in ranks.items() if rank is not None and log.process == "worker"}
        enabled = [log.enabled for log in mine if log.enabled]
        setups.append(
            EngineSetup(
                dp_rank=dp_rank,
                topology=next(filter(None, map(topology_from, enabled)), None),
                parts={part for record in enabled for part in JUDGING_PARTS if is_on(record.parts.get(part, ""))},
                actions={part: action for record in enabled for part, action in record.actions.items()},
                runner=next((r.runner for r in enabled if r.runner and r.process != "engine"), None),
                declaring=declaring[0] if declaring else None,
                ranks=sorted(ranks.values(), key=lambda log: log.files.rank or 0),
                others=[*declaring[1:], *(log for log in mine if log.is_worker and ranks[log.files.rank] is not log)],
                absent_ranks=sorted(set(range(max(numbers, default=-1) + 1)) - numbers) if whole_run else [],
            )
        )
    return setups


def is_on(said: str) -> bool:
    """Whether a part was on, by what kv.enabled says of it: ``on``, or ``on; …`` with a restriction behind it."""
    return said.partition(";")[0].strip() == "on"


def topology_from(record: EnabledRecord) -> Topology | None:
    """The pool and its groups as a kv.enabled has them; None where it has none."""
    groups, num_blocks, null_block_id = record.groups, record.num_blocks, record.null_block_id
    if not isinstance(groups, list) or not isinstance(num_blocks, int) or not isinstance(null_block_id, int):
        return None
    return Topology(
        num_blocks=num_blocks,
        null_block_id=null_block_id,
        groups=tuple(
            Group(
                group_id=group.group_id,
                kind=group.kind,
                block_size=max(group.block_size, 1),
                kernel_block_size=group.kernel_block_size,
                layers=group.layers,
                visible_tokens=None if isinstance(group.visible_tokens, UnsetType) else group.visible_tokens,
                shards=1 if isinstance(group.shards, UnsetType) else group.shards,
            )
            for group in groups
        ),
        pcp_size=1 if isinstance(record.context_parallel, UnsetType) else record.context_parallel.pcp_size,
        dcp_size=1 if isinstance(record.context_parallel, UnsetType) else record.context_parallel.dcp_size,
    )
