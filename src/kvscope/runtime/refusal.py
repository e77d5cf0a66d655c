"""Makes an access outside the cache harmless where its launch cannot be stopped by an exception."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from ..facts.operators import OperatorArguments
from ..facts.plans import PAD_SLOT, Plan
from ..facts.topology import Topology

Bounded = tuple[npt.NDArray[Any], int]
"""An array, and one past the highest number that is allowed in it."""


def slots_and_tables(topology: Topology, of: Plan | OperatorArguments) -> tuple[list[Bounded], list[Bounded]]:
    """All slot mappings and all tables of a plan, or of the arguments of a forward."""
    size = {group.group_id: group.block_size for group in topology.groups}
    slots: list[Bounded] = []
    tables: list[Bounded] = []
    if isinstance(of, Plan):
        for planned in of.groups:
            slots.append((planned.slots, topology.num_blocks * size[planned.group_id]))
            tables.append((planned.tables, topology.num_blocks))
        return slots, tables
    for group in of.groups:
        kernel_end = (topology.num_blocks - 1) * group.kernel_stride + group.kernel_blocks
        slots += [(mapping.slots, topology.num_blocks * size[group.group_id]) for mapping in group.slots]
        tables += [(part.tables, kernel_end) for part in group.parts]
    return slots, tables


def make_harmless(slots: Iterable[Bounded], tables: Iterable[Bounded]) -> None:
    """Nothing is written where the cache ends, and the null block is read instead of what does not exist."""
    for array, end in slots:
        array[(array >= end) | (array < PAD_SLOT)] = PAD_SLOT
    for array, end in tables:
        array[(array < 0) | (array >= end)] = 0
