"""What is asked of torch for a clone, in which order and on which stream. On a torch that only notes it."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope.boundary.device import Accelerator, audit_device


class Noted:
    """A torch of one device, ``npu:2``. ``log`` has what was asked, each with the stream it was launched on."""

    uint8 = "uint8"

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.current = "launching"
        self.capturing = False
        self.arrived = 2
        self.accelerator = SimpleNamespace(current_stream=self._current_stream, set_device_index=self._set_device)

    def device(self, kind: str, index: int) -> Any:
        return SimpleNamespace(type=kind, index=index)

    def get_device_module(self, device: Any) -> Any:
        assert device.type == "npu"
        return SimpleNamespace(is_current_stream_capturing=lambda: self.capturing)

    def empty(self, size: int, **how: Any) -> Any:
        return size, how

    def Stream(self, device: Any) -> Any:  # noqa: N802  torch's name
        assert device.index == 2
        noted = self

        class Side:
            def __enter__(self) -> None:
                noted.current = "side"

            def __exit__(self, *_: object) -> None:
                noted.current = "launching"

            def wait_event(self, event: Any) -> None:
                noted.log.append(("side waits for", event.name))

            name = "side"

        return Side()

    def Event(self, device: Any) -> Any:  # noqa: N802  torch's name
        assert device.index == 2
        event = SimpleNamespace(name=None)
        event.record = lambda stream: self._record(event, stream)
        event.query = self._query
        return event

    def tensor(self, name: str) -> Any:
        def copy(source: Any, *, non_blocking: bool) -> None:
            assert non_blocking
            self.log.append((f"{source.name} to {name}", self.current))

        return SimpleNamespace(name=name, copy_=copy)

    def _record(self, event: Any, stream: Any) -> None:
        event.name = f"event of {stream.name}"
        self.log.append(("record", stream.name))

    def _query(self) -> bool:
        self.arrived -= 1
        return self.arrived < 0

    def _current_stream(self, device: Any) -> Any:
        assert device.index == 2
        return SimpleNamespace(name=self.current)

    def _set_device(self, index: int) -> None:
        self.log.append(("device", index, threading.current_thread().name))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    torch = Noted()
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def accelerator() -> Any:
    return audit_device(SimpleNamespace(device=SimpleNamespace(type="npu", index=2)))


def test_a_clone_is_launched_in_order_and_comes_to_the_host_beside_what_follows(noted: Noted) -> None:
    device = accelerator()
    source, clone, host = noted.tensor("slots"), noted.tensor("clone"), noted.tensor("host")
    device.clone([source], [clone])
    device.to_host(clone, host, device.events())
    assert noted.log == [
        ("slots to clone", "launching"),
        ("record", "launching"),
        ("side waits for", "event of launching"),
        ("clone to host", "side"),
        ("record", "side"),
    ]
    assert noted.current == "launching"


def test_memory_is_the_devices_and_pinned(noted: Noted) -> None:
    on_device, on_host = accelerator().memory(64)
    assert (on_device[0], on_device[1]["dtype"], on_device[1]["device"].index) == (64, "uint8", 2)
    assert on_host == (64, {"dtype": "uint8", "pin_memory": True})


def test_a_thread_chooses_its_device_before_it_asks_for_the_first_time(noted: Noted) -> None:
    device = accelerator()
    events = device.events()
    assert not device.ready(events)
    assert not device.ready(events)
    assert device.ready(events)
    thread = threading.Thread(target=device.ready, args=(events,), name="another")
    thread.start()
    thread.join()
    assert [entry for entry in noted.log if entry[0] == "device"] == [
        ("device", 2, threading.current_thread().name),
        ("device", 2, "another"),
    ]


def test_waiting_ends_when_the_copy_is_there(noted: Noted) -> None:
    accelerator().wait(accelerator().events())
    assert noted.arrived == -1


def test_a_capture_is_noticed(noted: Noted) -> None:
    device = accelerator()
    assert device.is_capturing() is False
    noted.capturing = True
    assert device.is_capturing() is True


def test_host_tensors_have_no_device() -> None:
    assert audit_device(SimpleNamespace(device=SimpleNamespace(type="cpu"))) is None


def test_a_device_without_an_index_is_the_first(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noted, "Stream", lambda device: device)
    device = Accelerator(SimpleNamespace(type="npu", index=None))
    assert device.memory(1)[0][1]["device"].index == 0
