"""Which logical blocks of a sequence attention can still look at."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..facts.plans import Int32, Int64
from ..facts.topology import CHUNKED_LOCAL, SLIDING_WINDOW, Group


def first_visible_block(group: Group, computed: Int64) -> Int64:
    """Index of the first block that a query at position ``computed`` can see, ``int64 [rows]``.

    Sliding window (``SlidingWindowManager.get_num_skipped_tokens``): tokens up to ``computed - window`` are skipped.
    Chunked local (``ChunkedLocalAttentionManager.get_num_skipped_tokens``): everything before the current chunk is.
    Earlier entries of a table may be stale and may have been handed to somebody else; nothing reads them.
    Source: ``vllm/v1/core/single_type_kv_cache_manager.py``.
    """
    if group.visible_tokens is None:
        return np.zeros_like(computed)
    if group.kind == SLIDING_WINDOW:
        skipped = np.maximum(computed - group.visible_tokens + 1, 0)
    elif group.kind == CHUNKED_LOCAL:
        skipped = computed // group.visible_tokens * group.visible_tokens
    else:
        return np.zeros_like(computed)
    return skipped // group.block_size


def relied_on(group: Group, blocks: Iterable[int], start: int) -> tuple[int, Int64, Int32]:
    """What attention reads of a request that has ``start`` tokens: the index of the first block, the blocks ``[n]``,
    and how many tokens of each ``[n]``.
    """
    size = group.block_size
    count = -(-start // size)
    visible = int(first_visible_block(group, np.array([start], np.int64))[0])
    relied = np.array(blocks, np.int64)[visible:count]
    needed = np.full(relied.size, size, np.int32)
    if start % size and relied.size and count - visible == relied.size:
        needed[-1] = start % size
    return visible, relied, needed
