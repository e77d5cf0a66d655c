"""Subscribers: what they are told, and that nothing they do reaches anybody else."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvscope import fence
from kvscope.checks.catalog import RULES
from kvscope.checks.finding import Finding
from kvscope.events.names import RequestNames
from kvscope.fence import MAX_FAULTS
from kvscope.sinks.subscribers import QUEUED_EVENTS, GuardViolationEvent, Subscribers, Subscription

REASON = "write_foreign_block"
RULE = RULES[REASON]
MILLISECOND_NS = 10**6


def finding(step: int = 3, **facts: Any) -> Finding:
    return Finding(reason=REASON, step=step, trace_id=f"run.0.{step}", **facts)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not come about"
        time.sleep(0.002)


@pytest.fixture
def told() -> list[GuardViolationEvent]:
    return []


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []

    def say(_level: int, text: str, *values: object, error: BaseException | None = None) -> None:
        if error is None:
            lines.append(text % values)

    monkeypatch.setattr(fence, "say", say)
    return lines


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Holds a callback up until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_a_finding_is_told_with_what_it_names(told: list[GuardViolationEvent]) -> None:
    everybody = Subscribers()
    handle = everybody.subscribe(told.append)
    before = time.time_ns()
    everybody.publish(
        finding(request_id="a", other_request_id="b", block_id=np.int32(7), generation=np.int64(2), group_id=0), RULE
    )
    until(lambda: handle.delivered == 1)
    (event,) = told
    assert dataclasses.replace(event, wall_ns=0) == GuardViolationEvent(
        reason=REASON, check="C3", severity="error", block_id=7, generation=2, request_ids=("a", "b"), group=0, step=3,
        wall_ns=0,
    )  # fmt: skip
    assert before <= event.wall_ns <= time.time_ns()
    json.dumps(dataclasses.asdict(event))


def test_an_event_cannot_be_changed(told: list[GuardViolationEvent]) -> None:
    everybody = Subscribers()
    handle = everybody.subscribe(told.append)
    everybody.publish(finding(), RULE)
    until(lambda: handle.delivered == 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        told[0].step = 4  # type: ignore[misc]  # that it is refused is the point
    assert (told[0].block_id, told[0].request_ids, told[0].group) == (None, (), None)


@pytest.mark.parametrize(
    ("names", "seen"),
    [
        (RequestNames("plain"), ("a", "b")),
        (RequestNames("hashed", b"0" * 16), tuple(map(RequestNames("hashed", b"0" * 16), "ab"))),
        (RequestNames("omitted"), ()),
    ],
    ids=["plain", "hashed", "omitted"],
)
def test_request_ids_stand_in_an_event_as_they_do_in_a_record(
    names: RequestNames, seen: tuple[str, ...], told: list[GuardViolationEvent]
) -> None:
    everybody = Subscribers()
    handle = everybody.subscribe(told.append)
    everybody.publish(finding(request_id="a", other_request_id="b"), RULE, names)
    until(lambda: handle.delivered == 1)
    assert told[0].request_ids == seen


def test_all_are_told_in_the_order_of_the_findings() -> None:
    everybody = Subscribers()
    heard: list[list[int]] = [[], []]

    def into(steps: list[int]) -> Callable[[GuardViolationEvent], None]:
        return lambda event: steps.append(event.step)

    handles = [everybody.subscribe(into(steps)) for steps in heard]
    for step in range(1, 101):
        everybody.publish(finding(step), RULE)
    until(lambda: all(handle.delivered == 100 for handle in handles))
    assert heard == [list(range(1, 101))] * 2


def test_the_call_is_made_in_a_thread_of_its_own_that_keeps_no_process_alive() -> None:
    threads: list[threading.Thread] = []
    everybody = Subscribers()
    handles = [everybody.subscribe(lambda _: threads.append(threading.current_thread())) for _ in range(2)]
    for _ in range(2):
        everybody.publish(finding(), RULE)
    until(lambda: all(handle.delivered == 2 for handle in handles))
    assert len(set(threads)) == 2
    assert threading.main_thread() not in threads
    assert all(thread.daemon for thread in threads)


def test_who_subscribes_later_is_told_what_comes_later(told: list[GuardViolationEvent]) -> None:
    everybody = Subscribers()
    everybody.publish(finding(1), RULE)
    assert everybody.numbers() is None
    handle = everybody.subscribe(told.append)
    everybody.publish(finding(2), RULE)
    until(lambda: handle.delivered == 1)
    assert [event.step for event in told] == [2]


def test_closed_it_is_told_nothing_more_and_closing_again_is_safe(told: list[GuardViolationEvent]) -> None:
    everybody = Subscribers()
    handle, other = everybody.subscribe(told.append), everybody.subscribe(lambda _: None)
    everybody.publish(finding(1), RULE)
    until(lambda: handle.delivered == 1)
    handle.close()
    handle.close()
    everybody.publish(finding(2), RULE)
    until(lambda: other.delivered == 2)
    assert [event.step for event in told] == [1]
    assert (handle.active, other.active) == (False, True)
    assert everybody._known == (other,)
    until(lambda: handle._thread is not None and not handle._thread.is_alive())


def test_a_callback_may_close_its_own_subscription() -> None:
    everybody = Subscribers()
    handle: Subscription = everybody.subscribe(lambda _: handle.close())
    for step in (1, 2):
        everybody.publish(finding(step), RULE)
    until(lambda: handle._thread is not None and not handle._thread.is_alive())
    assert (handle.delivered, handle.faults) == (1, 0)


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_is_removed_after_its_last_chance(
    error: type[BaseException], warnings: list[str], told: list[GuardViolationEvent]
) -> None:
    def fails(event: GuardViolationEvent) -> None:
        raise error(event.step)

    everybody = Subscribers()
    bad, good = everybody.subscribe(fails), everybody.subscribe(told.append)
    for step in range(1, MAX_FAULTS + 5):
        everybody.publish(finding(step), RULE)
    until(lambda: bad.faults == MAX_FAULTS and good.delivered == MAX_FAULTS + 4)
    assert not bad.active
    everybody.publish(finding(99), RULE)
    until(lambda: good.delivered == MAX_FAULTS + 5)
    assert (bad.faults, bad.delivered, everybody._known) == (MAX_FAULTS, 0, (good,))
    assert [event.step for event in told][-1] == 99
    assert everybody.numbers() is not None
    assert everybody.numbers()[:2] == (MAX_FAULTS + 5, MAX_FAULTS)  # type: ignore[index]  # the line before says so
    name = f"{__name__}.test_a_callback_that_raises_is_removed_after_its_last_chance.<locals>.fails"
    assert warnings == [
        f"kvscope: subscriber {name} failed ({error.__name__}); it is removed after 16 faults",
        f"kvscope: subscriber {name} is removed after 16 faults",
    ]


def test_a_callback_that_never_returns_is_removed_and_holds_nobody_up(
    gate: threading.Event, told: list[GuardViolationEvent], warnings: list[str]
) -> None:
    everybody = Subscribers()
    hangs = everybody.subscribe(lambda _: gate.wait(), slow_ns=2 * MILLISECOND_NS)
    good = everybody.subscribe(told.append)
    began = time.perf_counter()
    for step in range(1, 4):
        everybody.publish(finding(step), RULE)
    assert time.perf_counter() - began < 1.0
    until(lambda: good.delivered == 3)
    until(lambda: hangs.faults >= MAX_FAULTS)
    everybody.publish(finding(4), RULE)
    until(lambda: good.delivered == 4)
    assert (hangs.active, hangs.delivered, everybody._known) == (False, 0, (good,))
    assert [line.rpartition("is removed")[2] for line in warnings] == [" after 16 faults"]
    gate.set()
    until(lambda: hangs._thread is not None and not hangs._thread.is_alive())
    assert hangs.delivered == 1  # what was under way has ended, what waited is not told


def test_a_slow_callback_has_a_fault_for_each_time_that_it_takes_too_long(warnings: list[str]) -> None:
    everybody = Subscribers()
    slow = everybody.subscribe(lambda _: time.sleep(0.05), slow_ns=20 * MILLISECOND_NS)
    everybody.publish(finding(), RULE)
    until(lambda: slow.delivered == 1 and not slow.fence.is_running and slow.faults > 0)
    assert slow.active
    assert 2 <= slow.faults < MAX_FAULTS
    assert [line.rpartition("failed ")[2] for line in warnings] == ["(slow); it is removed after 16 faults"]


def test_what_cannot_wait_is_dropped_and_counted(gate: threading.Event) -> None:
    everybody = Subscribers()
    busy = everybody.subscribe(lambda _: gate.wait())
    everybody.publish(finding(0), RULE)
    until(lambda: busy.fence.is_running)
    for step in range(QUEUED_EVENTS + 10):
        everybody.publish(finding(step), RULE)
    assert (busy.dropped, busy.delivered, busy.faults) == (10, 0, 0)
    gate.set()
    until(lambda: busy.delivered == QUEUED_EVENTS + 1)


def test_where_no_thread_can_be_started_the_event_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    everybody = Subscribers()
    handle = everybody.subscribe(lambda _: None)
    monkeypatch.setattr(threading.Thread, "start", start)
    everybody.publish(finding(), RULE)
    assert (handle.dropped, handle.delivered) == (1, 0)
    monkeypatch.undo()
    everybody.publish(finding(), RULE)
    until(lambda: handle.delivered == 1)


async def _coroutine(event: GuardViolationEvent) -> None:
    """Nobody awaits it."""


@pytest.mark.parametrize("callback", [None, "print", _coroutine])
def test_what_cannot_be_called_is_refused_at_once(callback: Any) -> None:
    with pytest.raises(TypeError):
        Subscribers().subscribe(callback)


def test_an_object_that_can_be_called_has_a_name() -> None:
    class Counter:
        def __call__(self, event: GuardViolationEvent) -> None:
            """Counts."""

    assert Subscribers().subscribe(Counter()).name.endswith("<locals>.Counter")


FORKING = """
import json, os, sys, time
from kvscope.checks.catalog import RULES
from kvscope.checks.finding import Finding
from kvscope.monitor import subscribe_guard_events
from kvscope.sinks.subscribers import SUBSCRIBERS

def publish(step):
    SUBSCRIBERS.publish(Finding(reason="write_foreign_block", step=step, trace_id="t"), RULES["write_foreign_block"])

def heard(handle, count):
    ends = time.monotonic() + 10
    while handle.delivered < count and time.monotonic() < ends:
        time.sleep(0.002)

steps = []
handle = subscribe_guard_events(lambda event: steps.append(event.step))
publish(1)
heard(handle, 1)
out, into = os.pipe()
child = os.fork()
if not child:
    publish(2)
    inherited = handle.active
    handle.close()
    own = subscribe_guard_events(lambda event: steps.append(event.step * 10))
    publish(3)
    heard(own, 1)
    os.write(into, json.dumps([steps, inherited, SUBSCRIBERS.numbers()[:2]]).encode())
    os._exit(0)
os.waitpid(child, 0)
publish(4)
heard(handle, 2)
print(json.dumps({"child": json.loads(os.read(out, 4096)), "parent": [steps, handle.active]}))
"""


def test_registrations_do_not_survive_a_fork_and_the_parents_are_left_alone() -> None:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=60, check=True, env=variables
    )
    assert json.loads(done.stdout) == {"child": [[1, 30], False, [1, 0]], "parent": [[1, 4], True]}
