"""However many ask, there is one collection an interval; one that fails or hangs is said and holds nothing up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from kvscope.metrics.bodies import Bodies, CollectionError


class Source:
    """What is collected: a number that grows, at a time that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.collections = 0
        self.renderings = 0
        self.error: Exception | None = None
        self.may_end = threading.Event()
        self.may_end.set()

    def collect(self) -> int:
        self.collections += 1
        assert self.may_end.wait(10)
        if self.error is not None:
            raise self.error
        return self.collections

    def render(self, value: int) -> bytes:
        self.renderings += 1
        return str(value).encode()

    def bodies(self, *, interval_s: float = 10.0, deadline_s: float = 5.0) -> Bodies[int]:
        return Bodies(self.collect, interval_s=interval_s, deadline_s=deadline_s, clock=lambda: self.now_s)


@pytest.fixture
def source() -> Source:
    return Source()


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20))


def test_everybody_within_an_interval_gets_the_same_body_made_once(source: Source) -> None:
    async def story() -> None:
        bodies = source.bodies()
        assert set(await asyncio.gather(*(bodies.body("text", source.render) for _ in range(50)))) == {b"1"}
        source.now_s += 9.9
        assert await bodies.body("text", source.render) == b"1"
        assert (source.collections, source.renderings) == (1, 1)
        source.now_s += 0.2
        assert await bodies.body("text", source.render) == b"2"

    run(story())


def test_a_second_format_is_made_of_the_same_collection(source: Source) -> None:
    async def story() -> None:
        bodies = source.bodies()
        assert await bodies.body("text", source.render) == b"1"
        assert await bodies.body("json", lambda value: f"[{value}]".encode()) == b"[1]"
        assert source.collections == 1

    run(story())


def test_a_failure_is_one_line_and_is_tried_again_after_a_second(source: Source) -> None:
    async def story() -> None:
        bodies = source.bodies()
        source.error = ValueError("torn\nfile")
        for _ in range(3):
            with pytest.raises(CollectionError, match=r"^ValueError: torn file$"):
                await bodies.body("text", source.render)
        assert source.collections == 1
        source.error = None
        source.now_s += 1.1
        assert await bodies.body("text", source.render) == b"2"

    run(story())


def test_what_cannot_be_rendered_is_a_failure_too(source: Source) -> None:
    async def story() -> None:
        bodies = source.bodies()

        def render(value: int) -> bytes:
            raise TypeError(f"{value} has no text")

        for _ in range(2):
            with pytest.raises(CollectionError, match="TypeError: 1 has no text"):
                await bodies.body("text", render)

    run(story())


def test_a_collection_that_hangs_is_waited_for_only_so_long_and_never_begun_twice(source: Source) -> None:
    async def story() -> None:
        bodies = source.bodies(deadline_s=0.05)
        source.may_end.clear()
        for _ in range(3):
            with pytest.raises(CollectionError, match=r"collecting takes longer than 0\.05 s"):
                await bodies.body("text", source.render)
        assert source.collections == 1
        source.may_end.set()
        bodies = source.bodies()
        assert await bodies.body("text", source.render) == b"2"

    run(story())


def test_who_gives_up_waiting_does_not_end_the_collection_for_the_others(source: Source) -> None:
    async def story() -> None:
        bodies = source.bodies()
        source.may_end.clear()
        impatient = asyncio.ensure_future(bodies.body("text", source.render))
        patient = asyncio.ensure_future(bodies.body("text", source.render))
        await asyncio.sleep(0)
        impatient.cancel()
        source.may_end.set()
        assert await patient == b"1"

    run(story())


def test_a_collection_that_ends_after_the_loop_disturbs_nobody(source: Source) -> None:
    source.may_end.clear()

    async def story() -> None:
        with pytest.raises(CollectionError):
            await source.bodies(deadline_s=0.01).body("text", source.render)

    run(story())
    (collecting,) = [t for t in threading.enumerate() if t.name == "kvscope-collect"]
    source.may_end.set()
    collecting.join(5)
    assert not collecting.is_alive()
