"""Slots as the rest of kvscope counts them, whatever shape a host's kernels want them in.

vLLM itself has ``int64``. vLLM-Ascend stores ``int32`` (``AscendBlockTables``: its cache kernels take no other), and
hands some of them ``(block, offset)`` pairs (``format_dsa_slot_mapping``), by floor division: the padding slot -1 is
the pair ``(-1, block_size - 1)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..facts.plans import Int64


def as_slots(mapping: Any, block_size: int) -> Int64:
    """``int64 [tokens]`` of a mapping ``[tokens]`` or ``[tokens, 2]`` of any integer type; itself where it is that.

    ``block_size`` is how many slots a block has, by which pairs were made.

    Raises:
        ValueError: the mapping has another shape.
    """
    if mapping.ndim == 1:
        slots: Int64 = mapping.astype(np.int64, copy=False)
        return slots
    if mapping.ndim != 2 or mapping.shape[1] != 2:
        raise ValueError(f"slots of shape {mapping.shape}")
    pairs = mapping.astype(np.int64, copy=False)
    joined: Int64 = pairs[:, 0] * block_size + pairs[:, 1]
    return joined


def is_direct(mapping: Any) -> bool:
    """Whether :func:`as_slots` gives back the array itself, so that a view of it stays one."""
    return bool(mapping.ndim == 1 and mapping.dtype == np.int64)
