"""Makes an access outside the cache harmless where its launch cannot be stopped by an exception."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from ..facts.operators import OperatorArguments
from ..facts.plans import PAD_SLOT, Plan
from ..facts.topology import Topology

Bounded = tuple[npt.NDArray[Any], npt.NDArray[Any], int]
"""The host's array, its entries as numbers, and one past the highest that is allowed."""


def slots_and_tables(topology: Topology, of: Plan | OperatorArguments) -> tuple[list[Bounded], list[Bounded]]:
    """All slot mappings and all tables of a plan, or of the arguments of a forward."""
    end_slot = {group.group_id: topology.num_blocks * group.slots_per_block for group in topology.groups}
    slots: list[Bounded] = []
    tables: list[Bounded] = []
    if isinstance(of, Plan):
        for planned in of.groups:
            slots.append((*_own(planned.slots, planned.host_slots), end_slot[planned.group_id]))
            own_tables = planned.tables if planned.host_tables is None else planned.host_tables
            tables.append((own_tables, own_tables, topology.num_blocks))
        return slots, tables
    for group in of.groups:
        kernel_end = (topology.num_blocks - 1) * group.kernel_stride + group.kernel_blocks
        slots += [(*_own(mapping.slots, mapping.host_slots), end_slot[group.group_id]) for mapping in group.slots]
        tables += [(part.tables, part.tables, kernel_end) for part in group.parts]
    return slots, tables


def _own(slots: npt.NDArray[Any], host_slots: npt.NDArray[Any] | None) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The host's slots, and what they say; pairs say it together, and the converted ones are in their order."""
    if host_slots is None or host_slots.ndim == 1:
        own = slots if host_slots is None else host_slots
        return own, own
    return host_slots, slots


def make_harmless(slots: Iterable[Bounded], tables: Iterable[Bounded]) -> None:
    """Nothing is written where the cache ends, and the null block is read instead of what does not exist."""
    for array, numbers, end in slots:
        array[(numbers >= end) | (numbers < PAD_SLOT)] = PAD_SLOT
    for array, numbers, end in tables:
        array[(numbers < 0) | (numbers >= end)] = 0
