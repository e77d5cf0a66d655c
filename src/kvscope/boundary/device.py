"""Copies of device tensors for an audit that comes later, taken without ever waiting for the device.

    launching stream   ... slots, tables │ clone │ forward, sampler, speculator (which reuses the slot buffers) ...
    side stream                          └ event ► copy to pinned memory ► event
    host               ... launch ─────────────────────────────────────────► result is consumed: audit

A clone is a few copies on the device itself, on the stream that the host launches on: so it holds what the forward is
going to read, whatever is launched behind it. A stream of its own brings it to the host. Both memories are taken once
and used again in turn (:class:`CloneRing`); where all of them still wait the step goes unaudited, and is counted.

Source of the APIs: ``torch.Stream``, ``torch.Event``, ``torch.accelerator`` (2.9 and later), which serve every backend
alike. torch is imported when a runner is attached: a process without one never loads it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..facts.plans import DummyRun, Plan

CLONES = "_kvscope_clones"
"""Attribute by which a runner whose tensors are on a device carries its :class:`CloneRing`."""

SPARE_CLONES = 2
"""So many more than steps that can be on their way: for runs without requests in between."""
MOST_CLONE_BYTES = 16 << 20
"""Of one clone. 1024 requests of 4000 blocks fit; what a runner can hand over at most is often less."""

DEVICE_TENSORS = "device_tensors"
RING_FULL = "ring_full"
TOO_LARGE = "clone_too_large"
CAPTURING = "graph_capture"
WARM_UP = "warm_up"
"""Causes under which what was not cloned is counted."""

_ALIGNMENT_BYTES = 16
_POLL_SECONDS = 0.0002

Array = npt.NDArray[Any]
T = TypeVar("T")


class Device(Protocol):
    """What a clone needs of a device. All tensors are torch's; nothing here but :meth:`wait` may wait."""

    def memory(self, num_bytes: int) -> tuple[Any, Any]:
        """``uint8 [num_bytes]`` on the device, and as much on the host that the device can copy to by itself."""

    def events(self) -> Any:
        """What :meth:`to_host` needs to say that a copy is there; for one copy at a time."""

    def clone(self, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        """Copy on the device, in the order of what the calling thread launches."""

    def to_host(self, source: Any, target: Any, events: Any) -> None:
        """Copy to the host beside what is launched from now on, and behind what was launched so far."""

    def ready(self, events: Any) -> bool:
        """Whether the copy is there."""

    def wait(self, events: Any) -> None:
        """Return when the copy is there."""

    def is_capturing(self) -> bool:
        """Whether what the calling thread launches goes into a graph instead of to the device."""


class Accelerator:
    """Any device that torch calls an accelerator (``cuda``, ``npu``, ``xpu``)."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device.type, device.index or 0)
        self._module = torch.get_device_module(self._device)
        self._stream = torch.Stream(self._device)
        self._threads = threading.local()

    def memory(self, num_bytes: int) -> tuple[Any, Any]:
        byte = self._torch.uint8
        on_device = self._torch.empty(num_bytes, dtype=byte, device=self._device)
        return on_device, self._torch.empty(num_bytes, dtype=byte, pin_memory=True)

    def events(self) -> Any:
        return self._torch.Event(self._device), self._torch.Event(self._device)

    def clone(self, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)

    def to_host(self, source: Any, target: Any, events: Any) -> None:
        cloned, arrived = events
        cloned.record(self._torch.accelerator.current_stream(self._device))
        self._stream.wait_event(cloned)
        with self._stream:
            target.copy_(source, non_blocking=True)
        arrived.record(self._stream)

    def ready(self, events: Any) -> bool:
        if not hasattr(self._threads, "has_device"):
            # A thread that has not chosen a device opens a context on the first one, just by asking for an event.
            self._torch.accelerator.set_device_index(self._device.index)
            self._threads.has_device = True
        return bool(events[1].query())

    def wait(self, events: Any) -> None:
        # `Event.synchronize` may spin, since `torch.Event` ignores `blocking`; as a rule the copy is there already.
        while not self.ready(events):
            time.sleep(_POLL_SECONDS)

    def is_capturing(self) -> bool:
        return bool(self._module.is_current_stream_capturing())


class HostDevice:
    """The same without a device: every copy is there at once. For tests; in service host tensors are read in place."""

    def memory(self, num_bytes: int) -> tuple[Any, Any]:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)

    def events(self) -> Any:
        return None

    def clone(self, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    def to_host(self, source: Any, target: Any, events: Any) -> None:
        target.copy_(source)

    def ready(self, events: Any) -> bool:
        return True

    def wait(self, events: Any) -> None:
        """There is nothing to wait for."""

    def is_capturing(self) -> bool:
        return False


def audit_device(runner: Any) -> Device | None:
    """The device of a runner's tensors; None: they are on the host, where they are read in place.

    Raises whatever torch raises where it cannot serve the device.
    """
    return None if runner.device.type == "cpu" else Accelerator(runner.device)


class _Room:
    """One clone's memory on both sides. Its views are kept as long as the sizes stay what they are."""

    def __init__(self, on_device: Any, on_host: Any, events: Any) -> None:
        self.on_device, self.on_host, self.events = on_device, on_host, events
        self._host_bytes = on_host.numpy()
        self._layout: list[tuple[Any, ...]] = []
        self.used_bytes = 0
        self.targets: list[Any] = []
        self.arrays: list[Array] = []

    def lay_out(self, sources: Sequence[Any]) -> bool:
        """Make room for tensors of these shapes, one behind the other; False: they do not fit."""
        layout = [(source.shape, source.dtype) for source in sources]
        if layout == self._layout:
            return True
        self._layout, self.targets, self.arrays = [], [], []
        start = 0
        for source in sources:
            end = start + source.numel() * source.element_size()
            if end > self.on_device.numel():
                return False
            self.targets.append(self.on_device[start:end].view(source.dtype).view(source.shape))
            kind = np.dtype(str(source.dtype).rpartition(".")[2])
            self.arrays.append(self._host_bytes[start:end].view(kind).reshape(tuple(source.shape)))
            self.used_bytes = end
            start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._layout = layout
        return True


class Clone(Generic[T]):
    """One step's copy, on its way to the host or there. Whoever has it gives it back with :meth:`release`, once it has
    arrived and been read; a copy that never arrives keeps its memory.
    """

    def __init__(self, ring: CloneRing, room: _Room, make: Callable[[list[Array]], T]) -> None:
        self._ring, self._room, self._make = ring, room, make

    def ready(self) -> bool:
        """Whether it has arrived."""
        return self._ring.device.ready(self._room.events)

    def wait(self) -> None:
        """Return when it has arrived."""
        self._ring.device.wait(self._room.events)

    def read(self) -> T:
        """What was cloned. Its arrays are valid until :meth:`release`."""
        return self._make(self._room.arrays)

    def release(self) -> None:
        """Let another step have the memory."""
        self._ring.take_back(self._room)


class CloneRing:
    """The memory for clones, taken once: ``device_bytes`` on the device and as much pinned on the host."""

    def __init__(self, device: Device, clone_bytes: int, clones: int) -> None:
        self.device = device
        self.device_bytes = clone_bytes * clones
        on_device, on_host = device.memory(self.device_bytes)
        self._free = deque(
            _Room(on_device[start : start + clone_bytes], on_host[start : start + clone_bytes], device.events())
            for start in range(0, self.device_bytes, clone_bytes)
        )

    @property
    def is_full(self) -> bool:
        """Whether all of it waits to be audited."""
        return not self._free

    def clone(self, sources: Sequence[Any], make: Callable[[list[Array]], T]) -> Clone[T] | None:
        """Start a copy of these tensors, of which ``make`` will be given arrays of the same shapes, in their order.

        None: they do not fit. The ring must not be full.
        """
        room = self._free.popleft()
        if not room.lay_out(sources):
            self._free.append(room)
            return None
        try:
            self.device.clone(sources, room.targets)
        except Exception:
            self._free.append(room)  # nothing of it is on its way to the host
            raise
        self.device.to_host(room.on_device[: room.used_bytes], room.on_host[: room.used_bytes], room.events)
        return Clone(self, room, make)

    def take_back(self, room: _Room) -> None:
        """What was read is not needed any more; from any thread."""
        self._free.append(room)


def clone_bytes_of(tensors: Sequence[Any]) -> int:
    """Bytes of a clone that has room for all of these tensors, if it may be that large."""
    needed: int = sum(tensor.numel() * tensor.element_size() + _ALIGNMENT_BYTES for tensor in tensors)
    whole = -(-needed // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return min(whole, MOST_CLONE_BYTES)


def clones_of(vllm_config: Any) -> int:
    """How many clones may have to wait at the same time. Source: ``VllmConfig.max_concurrent_batches``."""
    return int(vllm_config.max_concurrent_batches) + SPARE_CLONES


def ring_of(observer: Any, runner: Any) -> CloneRing | str:
    """Where a clone of a runner's tensors can go, or the cause for which there can be none now."""
    ring: CloneRing | None = getattr(runner, CLONES, None)
    if ring is None:
        return DEVICE_TENSORS
    if ring.device.is_capturing():
        return CAPTURING
    if ring.is_full:
        observer.make_room()
    return RING_FULL if ring.is_full else ring


def table_width(counts: npt.NDArray[np.int32], longest: int, block_size: int, width: int) -> int:
    """Columns of a block table that attention may read: as many as the runner counts, or as the longest row (tokens, at
    most) needs, in steps of eight so that batches of one size share a layout.
    """
    needed = max(int(counts.max(initial=1)), -(-longest // block_size))
    columns: int = min((needed // 8 + 1) * 8, width)
    return columns


def hand_on_plan(observer: Any, clone: Clone[Plan] | str | None) -> None:
    """Hand on a clone of a plan, or the cause for which there is none."""
    if isinstance(clone, Clone):
        observer.on_plan_clone(clone)
    else:
        observer.on_plan_skipped(clone or TOO_LARGE)


def hand_on_dummy(observer: Any, runner: Any, slots: Sequence[Any], make: Callable[[list[Array]], DummyRun]) -> None:
    """Hand on a clone of the slots of a run that serves no request.

    None is made while a host warms up: it may be capturing graphs, and meanwhile nobody may ask how far a copy is.
    """
    ring = ring_of(observer, runner)
    if isinstance(ring, CloneRing) and not observer.has_begun:
        ring = WARM_UP
    clone = ring if isinstance(ring, str) else ring.clone(slots, make)
    if isinstance(clone, Clone):
        observer.on_dummy_clone(clone)
    else:
        observer.on_dummy_skipped(clone or TOO_LARGE)
