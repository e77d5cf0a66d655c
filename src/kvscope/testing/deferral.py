"""Has an engine on the host judged as one on a device is: from copies, when a step's result is taken.

    with deferring(), running(additional_config=...) as llm:
        ...

The copies are made by `HostDevice`, or by whatever device is given; everything else is the code that serves a device.
There is no setting for it: host tensors are read in place, which costs less and finds more. An engine in processes of
its own is told by `kv_output.extensions`, see `deferring_extension`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from kvscope.boundary.device import Device, HostDevice

_ASKED = "kvscope.plugin.audit_device"


@contextmanager
def deferring(device: Device | None = None) -> Iterator[None]:
    """Workers that start within the `with` block, in this process, are judged from copies on `device`."""
    with mock.patch(_ASKED, return_value=device or HostDevice()):
        yield


def defer_always() -> None:
    """The same for all that this process will ever start."""
    mock.patch(_ASKED, return_value=HostDevice()).start()


class LateDevice(HostDevice):
    """A device whose copies arrive only when somebody waits for them: as late as they can, and in no other thread."""

    def events(self) -> Any:
        return {}

    def to_host(self, source: Any, target: Any, events: Any) -> None:
        events["copy"] = (source, target)

    def ready(self, events: Any) -> bool:
        return not events

    def wait(self, events: Any) -> None:
        source, target = events.pop("copy")
        target.copy_(source)
