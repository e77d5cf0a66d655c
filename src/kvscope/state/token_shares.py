"""Which tokens of a block a rank of decode context parallelism stores, and where.

The tokens are dealt out like cards: ``interleave`` to the first rank, as many to the next, and around again. A block of
the manager holds ``dcp_size`` times as many tokens as a rank has slots in it, so that a deal ends with every block.
Source: ``_compute_slot_mappings_kernel`` (``vllm/v1/worker/gpu/block_table.py``) and ``get_dcp_local_seq_lens``
(``vllm/v1/attention/backends/utils.py``), vLLM 0.32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..facts.context_parallel import ContextParallel
from ..facts.plans import Int64

Bool = npt.NDArray[np.bool_]


def owned(context: ContextParallel, positions: Int64) -> Bool:
    """Which of these positions the rank stores."""
    owner = positions // context.interleave % context.dcp_size
    mine: Bool = owner == context.dcp_rank
    return mine


def local_offsets(context: ContextParallel, offsets: Int64) -> Int64:
    """Where in its part of a block the owner stores the token at an offset of the whole block."""
    deal = context.interleave * context.dcp_size
    local: Int64 = offsets // deal * context.interleave + offsets % context.interleave
    return local


def block_offset(context: ContextParallel, local: int) -> int:
    """The offset in the whole block of what the rank has at ``local``: :func:`local_offsets` the other way round."""
    deal, within = divmod(local, context.interleave)
    return deal * context.interleave * context.dcp_size + context.dcp_rank * context.interleave + within


def local_lengths(context: ContextParallel, lengths: Int64) -> Int64:
    """How many of the first ``lengths`` tokens of a sequence the rank stores."""
    deal = context.interleave * context.dcp_size
    rest = lengths % deal - context.dcp_rank * context.interleave
    local: Int64 = lengths // deal * context.interleave + np.clip(rest, 0, context.interleave)
    return local
