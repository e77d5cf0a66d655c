"""What all records share: the envelope, and how lists of integers are spelled."""

from __future__ import annotations

from typing import Annotated, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

T = TypeVar("T")
D = TypeVar("D")

SCHEMA = "kvscope.trace/1"
COMPONENTS = ("scheduler", "worker", "runner", "connector", "allocator", "frontend")
PROCESSES = ("frontend", "engine", "worker", "all")
BOUNDARY_KINDS = ("frontend_admit", "worker_input", "dummy", "worker_result", "update_input", "connector_result")

ENVELOPE_REQUIRED = ("schema", "event", "seq", "component", "boundary", "engine_id", "mono_ns", "wall_ns")
"""What the JSON Schema demands of every record; the Structs have defaults, since a writer stamps them last."""

Count = Annotated[int, Meta(ge=0)]
RequestId = str | None
"""As ``kv_output.request_ids`` has it: the id, 16 hex digits, or null where ids are omitted."""

Ranges = list[list[int]]
"""A list of integers as inclusive ascending ranges, in the list's order: ``[7, 8, 9, 4]`` is ``[[7, 9], [4, 4]]``."""

Runs = int | list[int | list[int]]
"""A list of integers, exactly: one integer stands for itself; else each item is a value, a range ``[first, last]`` of
neighbours, ascending or descending, or ``[value, value, count]`` for a value that stands ``count`` times."""


class Envelope(Struct, kw_only=True, tag_field="event", tag="kv.unknown"):
    """What every record starts with. A record about a step has ``step``, any other ``after_step``.

    A rank is absent where it does not apply. ``seq`` counts the records of one process from 1, without gaps, over all
    of its files.
    """

    schema: Annotated[str, Meta(extra_json_schema={"const": SCHEMA})] = SCHEMA
    trace_id: str | UnsetType = UNSET
    step: int | UnsetType = UNSET
    after_step: int | UnsetType = UNSET
    seq: Count = 0
    component: Annotated[str, Meta(extra_json_schema={"enum": list(COMPONENTS)})] = "worker"
    boundary: str = ""
    engine_id: str = ""
    dp_rank: int | UnsetType = UNSET
    tp_rank: int | UnsetType = UNSET
    pp_rank: int | UnsetType = UNSET
    pcp_rank: int | UnsetType = UNSET
    dcp_rank: int | UnsetType = UNSET
    mono_ns: int = 0
    wall_ns: int = 0


def given(value: T | UnsetType, default: D) -> T | D:
    """The value of a field, or the default where the field is absent."""
    return default if isinstance(value, UnsetType) else value


def or_absent(value: T | None) -> T | UnsetType:
    """A fact's None ("does not apply") as an absent field."""
    return UNSET if value is None else value
