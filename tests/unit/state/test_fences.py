from __future__ import annotations

from kvscope.facts.allocator import ALLOC, FREE, PoolOperation
from kvscope.facts.requests import Declaration
from kvscope.state.fences import Fences
from unit.events.samples import decode_batch


def step(number: int, *names: str) -> Declaration:
    declaration, _ = decode_batch(1)
    declaration.step = number
    declaration.requests.scheduled = dict.fromkeys(names, 1)
    declaration.total_num_scheduled_tokens = len(names)
    return declaration


def freed(fences: Fences, name: str | None, *blocks: int) -> None:
    fences.take(PoolOperation(kind=FREE, block_ids=list(blocks), request_id=name))


def test_what_a_request_releases_under_its_own_running_step_is_fenced_until_no_step_is_on_its_way() -> None:
    fences = Fences()
    fences.declare(step(1, "a", "b"))
    freed(fences, "a", 3, 4)
    fences.declare(step(2, "b"))
    freed(fences, "b", 5)
    assert fences.blocks == {3: 1, 4: 1, 5: 2}
    fences.returned(1)
    assert 5 in fences.blocks
    fences.returned(2)
    assert fences.blocks == {}


def test_nothing_is_fenced_without_a_step_that_could_touch_it() -> None:
    fences = Fences()
    freed(fences, "a", 3)
    fences.declare(step(1))
    fences.declare(step(2, "b"))
    freed(fences, "a", 3)
    freed(fences, None, 3)
    fences.take(PoolOperation(kind=ALLOC, block_ids=[3], request_id="b"))
    assert fences.blocks == {}
    fences.returned(2)
    freed(fences, "b", 3)
    assert fences.blocks == {}
