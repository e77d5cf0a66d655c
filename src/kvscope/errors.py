"""Every error that kvscope raises on purpose.

    KvscopeError
    ├── ConfigurationError   (also ValueError)    a setting is wrong; start-up stops before the model loads
    ├── RegistrationError    (also ValueError)    a collector of an extension cannot be registered like this
    ├── ViolationError       (also RuntimeError)  action "raise" latched on a finding, in EngineCore
    ├── UnreadableTraceError                      a trace that the offline commands cannot make sense of
    ├── UnreadableMetricsError                    a metrics file that is foreign, torn or of another version
    └── HostMismatchError                         a seam of the host does not look as the adapter expects

Two of them ever reach vLLM: ConfigurationError at start-up, and ViolationError where the user chose action "raise".
All survive pickling with their attributes, because an error may have to cross from the engine's process to another.
"""

from __future__ import annotations

import reprlib

__all__ = [
    "ConfigurationError",
    "HostMismatchError",
    "KvscopeError",
    "RegistrationError",
    "UnreadableMetricsError",
    "UnreadableTraceError",
    "ViolationError",
    "quoted",
]


class KvscopeError(Exception):
    """The base of the tree: `except KvscopeError` catches what kvscope raises on purpose, and no host error."""

    # Subclasses hand all their constructor's arguments to Exception in order, since that is what pickling calls the
    # constructor with, and say their text in __str__.


class ConfigurationError(KvscopeError, ValueError):
    """A setting has a wrong type, an unknown name or a value out of range.

    `path` is the setting's full name (`additional_config.kv_trace.action`, or an environment variable's name) and
    `message` says what was found and what is allowed. Both together are the text, one line.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(path, message)
        self.path = path
        self.message = message

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class RegistrationError(KvscopeError, ValueError):
    """What an extension wants to register has a name, type or process that it cannot have; the text says why."""


class ViolationError(KvscopeError, RuntimeError):
    """A finding stopped the engine, because the action of the part that owns its rule is "raise".

    `text` is the finding's frozen line (`KV_GUARD reason= check= …`). An attribute is None where it does not apply:
    a finding of the allocator names no request, one about results no block.
    """

    def __init__(
        self,
        text: str,
        reason: str,
        request: str | None = None,
        group: int | None = None,
        block: int | None = None,
        step: int | None = None,
    ) -> None:
        super().__init__(text, reason, request, group, block, step)
        self.text = text
        self.reason = reason
        self.request = request
        self.group = group
        self.block = block
        self.step = step

    def __str__(self) -> str:
        return self.text


class UnreadableTraceError(KvscopeError):
    """What was given as a trace is missing, is no trace, or has a schema version that this kvscope does not read.

    A file that merely ends early is no such case: readers accept a file cut at any byte.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(path, message)
        self.path = path
        self.message = message

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class UnreadableMetricsError(KvscopeError):
    """A metrics file that says nothing: `reason` is `foreign` (no metrics file at all), `torn` (it ends early, or is
    damaged) or `other_version` (written by a kvscope whose metrics are others).
    """

    def __init__(self, path: str, reason: str, message: str) -> None:
        super().__init__(path, reason, message)
        self.path = path
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class HostMismatchError(KvscopeError):
    """A seam of the host has another shape than the adapter knows.

    It switches off what depends on that seam, with this text as the reason; it never stops the host.
    """

    def __init__(self, seam: str, expected: str, found: str) -> None:
        super().__init__(seam, expected, found)
        self.seam = seam
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        return f"{self.seam}: expected {self.expected}, found {self.found}"


# `repr` of a list of a million items would be slow, and of one nested a thousand deep would fail.
_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxstring = _SHORT_REPR.maxlong = _SHORT_REPR.maxother = 120
_SHORT_REPR.maxlevel = 4


def quoted(value: object) -> str:
    """The value as an error's text shows it: at most 80 printable characters, so that the text stays one line."""
    try:
        text = _SHORT_REPR.repr(value)
    except Exception:  # noqa: BLE001 - a foreign __repr__, or an integer with more digits than Python agrees to print
        text = f"<{type(value).__name__}>"
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text[:160])
    return text if len(text) <= 80 else f"{text[:77]}..."
