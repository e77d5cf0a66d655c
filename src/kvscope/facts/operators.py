"""What the attention operators of a forward are really called with: the last that the host knows of a step.

Sources: the metadata that the builders make of a runner's tables, slots and lengths (``vllm/v1/attention/backends``),
and the slot mapping of the forward context, by which layers write their cache (vLLM 0.32).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy.typing as npt

from .plans import Int32, Int64


class OperatorRows(msgspec.Struct, kw_only=True, gc=False):
    """Consecutive rows of a batch that are handed over together: all of them, or one of several parts.

    ``rows`` real rows begin at row ``first_row`` of the plan, and their tokens at ``first_token`` of the batch;
    ``end_token`` is where the part ends, which may cut its last row short. ``tables`` is ``int32 [rows, width]`` in
    blocks of the kernel. ``seq_lens`` ``int32 [rows]`` and ``query_start`` ``int32 [rows + 1]``, which counts from the
    part's first token, are None where the operator is not given any. All may have more rows, of padding.

    With ``chunk_tokens`` the rows are cut wherever a chunk of so many tokens of a sequence ends, and the arrays have an
    entry for each piece: its table begins with its chunk's first block, and its length counts from there.
    """

    first_row: int
    rows: int
    first_token: int
    end_token: int
    tables: Int32
    seq_lens: Int32 | None = None
    query_start: Int32 | None = None
    chunk_tokens: int | None = None


class OperatorSlots(msgspec.Struct, kw_only=True, gc=False):
    """A slot mapping, ``int64 [tokens, padding included]``, that begins with token ``first_token`` of the batch and has
    ``tokens`` real ones. Where it is a copy, because the host has it in another shape, ``host_slots`` is the host's.
    """

    first_token: int
    tokens: int
    slots: Int64
    host_slots: npt.NDArray[Any] | None = None


class OperatorGroup(msgspec.Struct, kw_only=True, gc=False):
    """What the layers of one group share: one KV-cache group, or the part of it that has one attention backend.

    Block ``b`` of the manager is made of ``kernel_blocks`` blocks of the kernel, ``b * kernel_stride`` and those that
    follow it. ``slots`` are all mappings by which these layers write: that of the metadata and that of the forward.
    """

    group_id: int
    parts: list[OperatorRows]
    slots: list[OperatorSlots]
    kernel_blocks: int = 1
    kernel_stride: int = 1


class OperatorArguments(msgspec.Struct, kw_only=True, gc=False):
    """One forward. The arrays may be views of live buffers, valid until the hook returns, and whoever makes them may
    hand out the same object again for as long as they lie where they did.

    ``unread`` has, by KV-cache group, why its arguments could not be read.
    """

    groups: list[OperatorGroup]
    unread: dict[int, str] = {}
