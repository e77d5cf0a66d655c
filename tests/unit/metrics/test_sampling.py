"""Calling collectors: once an interval, each in a thread of its own, whatever the others do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvscope import fence
from kvscope.fence import MAX_FAULTS
from kvscope.metrics import sampling
from kvscope.metrics.collectors import CollectorContext, Collectors
from kvscope.metrics.readout import Readout
from kvscope.metrics.sampling import Collected, Sampler
from unit.metrics.support import until

MILLISECOND_NS = 10**6


def context(engine: str = "0") -> CollectorContext:
    return CollectorContext(
        engine=engine, engine_id=f"run.{engine}", wall_ns=1, read=lambda: Readout((), at_s=time.time())
    )


class World:
    """A registry, a sampler of it, and what that has published last. Within its interval those that come back are
    waited for, which is for busy machines.
    """

    def __init__(self, interval_s: float = 1.0) -> None:
        self.registry = Collectors()
        self.registry.expect("p_")
        self.last: Collected = {}
        self.published = 0
        self.engines: Sequence[str] = ("0",)
        self.sampler = Sampler(
            ["engine"],
            prefix="p_",
            interval_s=interval_s,
            contexts=lambda: [context(engine) for engine in self.engines],
            publish=self._take,
            collectors=self.registry,
        )

    def register(self, function: Callable[[CollectorContext], Any], name: str = "p_mine", **given: Any) -> Any:
        given = {"kind": "gauge", "process": "engine", **given}
        return self.registry.register(function, name=name, **given)

    def values(self, engine: str = "0") -> dict[str, float]:
        return {value.name: value.value for value in self.last.get(engine, ())}

    def says(self, values: dict[str, float]) -> bool:
        """Whether that is said, after an interval or after a few more."""

        def sampled() -> bool:
            self.sampler.sample()
            return self.values() == values

        return until(sampled)

    def _take(self, collected: Collected) -> None:
        self.last = collected
        self.published += 1


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.sampler.stop()


@pytest.fixture
def quick() -> Iterator[World]:
    """Begins the next interval at once, and waits for nobody."""
    made = World(interval_s=0.01)
    yield made
    made.sampler.stop()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged."""
    said: list[str] = []

    def say(_level: int, text: str, *values: object, error: BaseException | None = None) -> None:
        if error is None:
            said.append(text % values)

    for module in (fence, sampling):
        monkeypatch.setattr(module, "say", say)
    return said


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Holds a collector up until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_what_is_said_is_published_in_the_same_interval_for_each_engine(world: World) -> None:
    world.engines = ("0", "1")
    world.register(lambda ctx: float(ctx.engine) + 4)
    world.register(lambda ctx: len(ctx.engine_id), "p_more")
    world.sampler.sample()
    assert (world.values("0"), world.values("1")) == ({"p_mine": 4, "p_more": 5}, {"p_mine": 5, "p_more": 5})
    assert world.registry.numbers() == (4, 0, 0)
    assert world.published == 1


def test_once_an_interval_each_is_called_in_a_thread_of_its_own_that_keeps_no_process_alive(world: World) -> None:
    threads: list[threading.Thread] = []

    def note(_: CollectorContext) -> float:
        threads.append(threading.current_thread())
        return 1.0

    world.register(note)
    world.register(note, "p_more")
    for _ in range(3):
        world.sampler.sample()
    assert (len(threads), len(set(threads))) == (6, 2)
    assert threading.current_thread() not in threads
    assert all(thread.daemon for thread in threads)


def test_there_is_no_thread_until_there_is_a_collector_for_this_process(quick: World) -> None:
    quick.sampler.start()
    quick.register(lambda _: 1.0, process="worker")
    assert quick.sampler._thread is None
    quick.register(lambda _: 2.0, "p_later")
    assert until(lambda: quick.values() == {"p_later": 2})
    quick.sampler.stop()
    assert quick.sampler._thread is not None
    assert not quick.sampler._thread.is_alive()


def test_one_registered_before_is_called_from_the_start_and_every_interval(quick: World) -> None:
    quick.register(lambda _: 1.0, "p_mine_total", kind="counter")
    quick.sampler.start()
    assert until(lambda: quick.published >= 3 and quick.values() == {"p_mine_total": 1})


def test_its_series_end_with_the_registration(world: World) -> None:
    first, second = world.register(lambda _: 1.0), world.register(lambda _: 2.0, "p_more")
    world.sampler.sample()
    first.close()
    world.sampler.sample()
    assert world.values() == {"p_more": 2}
    second.close()
    world.sampler.sample()
    assert world.values() == {}
    assert world.registry.numbers() == (3, 0, 0)


def test_a_histogram_has_one_sample_an_interval(world: World) -> None:
    world.register(lambda _: 2.0, kind="histogram")
    for _ in range(3):
        world.sampler.sample()
    (value,) = world.last["0"]
    assert (value.value, value.buckets[-1][1]) == (6.0, 3.0)


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_one_that_raises_is_removed_after_its_last_chance_and_hurts_nobody(
    error: type[BaseException], world: World, lines: list[str]
) -> None:
    def fails(_: CollectorContext) -> float:
        raise error

    bad = world.register(fails, "p_bad")
    world.register(lambda _: 1.0)
    for interval in range(1, MAX_FAULTS + 4):
        world.sampler.sample()
        assert world.values() == {"p_mine": 1}
        assert bad.fence.faults == min(interval, MAX_FAULTS)
        assert bad.active == (interval < MAX_FAULTS)
    assert [each.name for each in world.registry.of(["engine"])] == ["p_mine"]
    assert world.registry.numbers() == (2 * MAX_FAULTS + 3, MAX_FAULTS, 0)
    name = bad.fence.name
    assert lines == [
        f"kvscope: collector {name} failed ({error.__name__}); it is removed after 16 faults",
        f"kvscope: collector {name} is removed after 16 faults",
    ]


def test_what_is_no_number_is_a_fault_and_a_gauge_has_no_value_meanwhile(world: World) -> None:
    answers: list[Any] = [1.0, None, 3.0]
    made = world.register(lambda _: answers.pop(0))
    found = []
    for _ in range(3):
        world.sampler.sample()
        found.append(world.values())
    assert found == [{"p_mine": 1}, {}, {"p_mine": 3}]
    assert made.fence.faults == 1


def test_one_that_never_returns_is_not_called_again_and_is_removed(
    gate: threading.Event, quick: World, lines: list[str]
) -> None:
    hangs = quick.register(lambda _: gate.wait(), "p_hangs", slow_ns=2 * MILLISECOND_NS)
    quick.register(lambda _: 1.0)
    began = time.monotonic()
    assert quick.says({"p_mine": 1})
    assert time.monotonic() - began < 5.0
    assert hangs.calls == 1
    assert until(lambda: hangs.fence.faults >= MAX_FAULTS)
    quick.sampler.sample()
    assert [each.name for each in quick.registry.of(["engine"])] == ["p_mine"]
    assert [line.rpartition("is removed")[2] for line in lines] == [" after 16 faults"]
    gate.set()
    assert until(lambda: hangs._thread is not None and not hangs._thread.is_alive())
    assert quick.says({"p_mine": 1})


def test_a_slow_one_is_published_when_it_has_come_back(gate: threading.Event, quick: World) -> None:
    slow = quick.register(lambda _: gate.wait() and 5.0)
    quick.sampler.sample()
    assert quick.values() == {}
    gate.set()
    assert until(lambda: not quick.sampler._busy)
    assert quick.says({"p_mine": 5})
    assert slow.calls >= 2
    assert slow.fence.faults == 0


def test_where_no_thread_can_be_started_it_is_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    made = world.register(lambda _: 1.0)
    monkeypatch.setattr(threading.Thread, "start", start)
    world.sampler.sample()
    world.sampler.start()
    assert (world.values(), world.sampler._thread, made.fence.faults) == ({}, None, 0)
    monkeypatch.undo()
    world.sampler.sample()
    assert world.values() == {"p_mine": 1}


def test_a_run_with_another_prefix_does_not_have_it_and_says_so_once(world: World, lines: list[str]) -> None:
    world.registry.expect("q_")
    world.register(lambda _: 1.0, "q_mine")
    for _ in range(2):
        world.sampler.sample()
    assert world.values() == {}
    assert lines == ["kvscope: collector q_mine is not called for this run, whose kv_monitor.prefix is 'p_'"]


def test_what_cannot_be_published_is_said_and_tried_again(lines: list[str]) -> None:
    world = World(interval_s=0.001)
    world.register(lambda _: 1.0)

    def broken(_: Collected) -> None:
        world.published += 1
        raise OSError

    world.sampler._publish = broken
    world.sampler.start()
    assert until(lambda: world.published == MAX_FAULTS)
    world.sampler.stop()
    assert [line.rpartition("; ")[2] for line in lines] == ["it is tried again", "it is not tried again"]
