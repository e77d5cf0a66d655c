"""What a run asks the boundary about the hooks of its process."""

from __future__ import annotations

from typing import Protocol


class HookBook(Protocol):
    """What the run publishes about the hooks of its process. Implemented by the boundary's ledger."""

    def seams_installed(self) -> list[str]: ...

    def seams_absent(self) -> dict[str, str]: ...

    @property
    def allocator_faults(self) -> list[int]: ...

    def connector_faults(self) -> int: ...

    def works(self, name: str) -> bool: ...

    def hook_numbers(self) -> dict[str, tuple[int, int, int]]: ...
