"""Context parallelism in the words of the runner that runs it: where a rank stands, and which part of a batch is its.

Decode context parallelism (DCP) deals the tokens of a sequence out over ranks, so that each stores its share of every
block. Prefill context parallelism (PCP) has each rank compute two chunks of every prompt, and gathers the keys and
values of all before they are stored. Sources: ``vllm/v1/worker/gpu/block_table.py``, ``vllm/v1/worker/block_table.py``,
``vllm/v1/worker/gpu/pcp_manager.py``, ``vllm/v1/worker/gpu/cp_utils.py`` (vLLM 0.32).
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

NO_WRITER = -1
"""A place of the gathered keys and values that nothing is stored of: padding, or another rank's copy of the same."""


class ContextParallel(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's own coordinates, as the objects say that compute its slots.

    Of every ``interleave * dcp_size`` consecutive tokens the rank stores the ``dcp_rank``-th ``interleave``, in the
    groups named in ``sharded`` (their ids); in the others every rank stores all tokens.
    """

    dcp_size: int = 1
    dcp_rank: int = 0
    interleave: int = 1
    pcp_size: int = 1
    pcp_rank: int = 0
    sharded: tuple[int, ...] = ()


class LocalRows(msgspec.Struct, kw_only=True, gc=False):
    """The rows that one PCP rank computes of a batch, in its order; a request stands there once for each of its chunks.

    ``query_start`` is ``int32 [rows + 1]``, ``positions`` ``int64 [local tokens]``, ``seq_lens`` ``int32 [rows]``.
    ``writers`` ``int64 [pcp_size * padded tokens]`` says of each place of the gathered keys and values, rank after
    rank, which token of the whole batch is stored from there, :data:`NO_WRITER` for none.
    """

    request_ids: list[str]
    query_start: Int32
    positions: Int64
    seq_lens: Int32
    writers: Int64


class LocalLengths(msgspec.Struct, kw_only=True, gc=False):
    """How many tokens of each row a DCP rank was told to have, ``lengths`` ``int32 [rows]``, in the order of the plan.

    ``seq_lens`` ``int32 [rows]`` is how long the sequence is by the end of each row, None where that is all of it.
    """

    request_ids: list[str]
    lengths: Int32
    seq_lens: Int32 | None = None
