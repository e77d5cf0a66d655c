from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope.facts import allocator
from kvscope.facts.allocator import ALLOC, CAUSES, KINDS, PoolOperation

COUNTS = st.none() | st.lists(st.integers(0, 1 << 20), max_size=4)


@st.composite
def operations(draw: st.DrawFn) -> PoolOperation:
    return PoolOperation(
        kind=draw(st.sampled_from(KINDS)),
        block_ids=draw(st.lists(st.integers(0, 1 << 20), max_size=4)),
        pool=draw(st.integers(0, 3)),
        cause=draw(st.sampled_from(CAUSES)),
        request_id=draw(st.none() | st.text(max_size=8)),
        group_id=draw(st.none() | st.integers(0, 7)),
        first_index=draw(st.none() | st.integers(0, 1 << 16)),
        reserved=draw(st.booleans()),
        ref_counts=draw(COUNTS),
        hash_counts=draw(COUNTS),
        hash_tokens=draw(COUNTS),
    )


@given(operations())
def test_an_operation_survives_being_written_and_read(operation: PoolOperation) -> None:
    assert msgspec.json.decode(msgspec.json.encode(operation), type=PoolOperation) == operation


@given(operations(), st.sampled_from(PoolOperation.__struct_fields__))
def test_no_field_is_left_out_of_the_comparison(operation: PoolOperation, field: str) -> None:
    changed = msgspec.structs.replace(operation, **{field: "something else"})
    assert changed != operation


def test_what_does_not_apply_is_not_written() -> None:
    assert msgspec.json.encode(PoolOperation(kind=ALLOC, block_ids=[3])) == b'{"kind":"alloc","block_ids":[3]}'


@pytest.mark.parametrize("names", [KINDS, CAUSES])
def test_a_name_stands_for_one_thing(names: tuple[str, ...]) -> None:
    assert len(set(names)) == len(names)


def test_every_constant_is_listed() -> None:
    constants = {name: value for name, value in vars(allocator).items() if name.isupper() and isinstance(value, str)}
    assert {value for name, value in constants.items() if name.startswith("CAUSE_")} == set(CAUSES)
    assert {value for name, value in constants.items() if not name.startswith("CAUSE_")} == set(KINDS)


def test_the_order_of_causes_does_not_change() -> None:
    """Snapshots of ledgers hold their places."""
    assert CAUSES[:15] == (
        "unknown", "allocate", "hit", "external", "finish", "preempt", "window", "copy", "evict", "reset", "abort",
        "load_failed", "deferred", "pin", "unpin",
    )  # fmt: skip


def test_the_host_has_the_functions_that_the_facts_are_taken_from() -> None:
    """A name in a docstring that the host does not have would send a reader nowhere."""
    core = pytest.importorskip("vllm.v1.core", reason="vLLM is not installed")
    text = Path(str(allocator.__file__)).read_text(encoding="utf-8")
    named = {name.rpartition(".")[2] for name in re.findall(r"``([\w.]+)``", text) if "_" in name}
    ours = {*PoolOperation.__struct_fields__, *CAUSES}
    source = "\n".join(p.read_text(encoding="utf-8") for p in Path(core.__path__[0]).rglob("*.py"))
    assert sorted(name for name in named - ours if not re.search(rf"\b{name}\b", source)) == []
