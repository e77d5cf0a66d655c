from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given

from kvscope.facts.requests import Declaration, StepRequests
from kvscope.facts.topology import CHUNKED_LOCAL, FULL_ATTENTION, MLA, SLIDING_WINDOW, Group
from unit.events.samples import declarations, step_requests


def containers(value: Any) -> list[int]:
    """Identities of every mutable container inside."""
    if isinstance(value, StepRequests):
        return [found for name in value.__struct_fields__ for found in containers(getattr(value, name))]
    if isinstance(value, (list, tuple, set)):
        inner = [found for item in value for found in containers(item)]
        return inner if isinstance(value, tuple) else [id(value), *inner]
    return [id(value)] if isinstance(value, dict) else []


@given(step_requests())
def test_a_copy_is_equal_and_shares_no_list(requests: StepRequests) -> None:
    copied = requests.copy()
    assert copied == requests
    assert not set(containers(copied)) & set(containers(requests))


@given(declarations())
def test_a_declaration_survives_the_trip_to_another_process(declaration: Declaration) -> None:
    assert pickle.loads(pickle.dumps(declaration)) == declaration


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.new_ids.append("x"),
        lambda r: r.new_blocks[0][0].append(9),
        lambda r: r.new_computed.__setitem__(0, 1),
        lambda r: r.cached_ids.append("x"),
        lambda r: r.cached_blocks.__setitem__(0, None),
        lambda r: r.cached_blocks[0][0].__setitem__(0, 8),
        lambda r: r.cached_computed.__setitem__(0, 1),
        lambda r: r.resumed.add("x"),
        lambda r: r.scheduled.__setitem__("a", 2),
        lambda r: r.finished.add("x"),
        lambda r: r.preempted.add("x"),
    ],
)
def test_a_word_that_arrives_otherwise_is_unequal(change: Any) -> None:
    requests = StepRequests(
        new_ids=["a"],
        new_blocks=[([1, 2],)],
        new_computed=[0],
        cached_ids=["b"],
        cached_blocks=[([3],)],
        cached_computed=[32],
        resumed=set(),
        scheduled={"a": 20, "b": 1},
        finished=set(),
        preempted=set(),
    )
    changed = requests.copy()
    change(changed)
    assert changed != requests


@given(declarations())
def test_a_step_without_tokens_is_empty(declaration: Declaration) -> None:
    declaration.total_num_scheduled_tokens = 1
    assert not declaration.is_empty
    declaration.total_num_scheduled_tokens = 0
    assert declaration.is_empty


@pytest.mark.parametrize(
    ("kind", "judged"),
    [
        (FULL_ATTENTION, True),
        (MLA, True),
        (SLIDING_WINDOW, True),
        (CHUNKED_LOCAL, True),
        ("mamba", False),
        ("cross_attention", False),
        ("mixed", False),
        ("something_new", False),
    ],
)
def test_only_tables_whose_meaning_is_known_are_judged(kind: str, judged: bool) -> None:
    assert Group(group_id=0, kind=kind, block_size=16, kernel_block_size=None, layers=1).judged is judged


def test_tables_that_come_whole_are_counted_by_their_blocks() -> None:
    requests = StepRequests(
        new_ids=["a"],
        new_blocks=[([1, 2, 3], [4])],
        new_computed=[0],
        cached_ids=["b", "c"],
        cached_blocks=[([5],), None],
        cached_computed=[8, 8],
        resumed=set(),
        scheduled={"a": 8, "b": 1, "c": 1},
        finished=set(),
        preempted=set(),
    )
    assert requests.table_bytes == 4 * 40
    requests.resumed = {"b"}
    assert requests.table_bytes == 5 * 40
