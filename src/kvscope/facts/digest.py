"""A digest of block-table rows that is cheap on the step path and reproducible offline."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, from the golden ratio: neighbouring columns get unrelated weights


@lru_cache(maxsize=64)
def column_weights(width: int) -> npt.NDArray[np.uint64]:
    """Odd 64-bit weights ``uint64 [width]``, the same in every process and version of ``kvscope.trace/1``.

    The array is shared and cannot be written to.
    """
    columns = np.arange(1, width + 1, dtype=np.uint64)
    mixed = columns * np.uint64(_MULTIPLIER)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(_MULTIPLIER)
    odd: npt.NDArray[np.uint64] = mixed | np.uint64(1)
    odd.flags.writeable = False
    return odd


def table_digest(
    tables: npt.NDArray[np.int32], judged: npt.NDArray[np.bool_], weights: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Weighted sum of each row modulo 2**64, over the entries where ``judged`` is True.

    ``tables`` ``int32 [rows, width]``, ``judged`` the same shape, ``weights`` ``uint64 [width]``. Two rows that differ
    in one entry always differ in the digest, since the weights are odd; for longer differences a chance collision
    has a probability of about 2**-64.
    """
    entries = np.where(judged, tables, 0).astype(np.uint64)
    digest: npt.NDArray[np.uint64] = entries @ weights
    return digest
