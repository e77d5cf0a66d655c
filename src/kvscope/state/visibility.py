"""Which logical blocks of a sequence attention can still look at."""

from __future__ import annotations

import numpy as np

from ..facts.plans import Int64
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
