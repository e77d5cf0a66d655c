"""The vocabulary of the table of settings in `config`: what a setting accepts, and what it says about itself."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast, get_args

from kvscope.errors import ConfigurationError, quoted

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind:
    """A set of values: `allowed` completes the sentence "<value> is not …"."""

    type_name: str
    allowed: str
    accepts: Callable[[object], bool]
    convert: Callable[[Any], object] = lambda value: value
    items: Kind | None = None

    def checked(self, value: object, path: str) -> object:
        """The value as Config holds it.

        Raises:
            ConfigurationError: naming `path`, or the list item in it, and what is allowed.
        """
        if not self.accepts(value):
            raise ConfigurationError(path, f"{quoted(value)} is not {self.allowed}")
        if self.items is not None:
            items = cast("list[object]", value)
            return tuple(self.items.checked(item, f"{path}[{index}]") for index, item in enumerate(items))
        return self.convert(value)


def listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def choice(literal: object) -> Kind:
    choices: tuple[str, ...] = get_args(literal)
    return Kind("string", f"one of {listed(choices)}", lambda value: isinstance(value, str) and value in choices)


def _range(type_name: str, noun: str, types: tuple[type, ...], low: float, high: float) -> Kind:
    def accepts(value: object) -> bool:
        # bool is an int in Python, and `"port": true` is a mistake. NaN compares false, so it is in no range.
        return isinstance(value, types) and not isinstance(value, bool) and low <= cast("float", value) <= high

    return Kind(type_name, f"{noun} from {low} to {high}", accepts, types[-1])


def integer(low: int, high: int) -> Kind:
    return _range("integer", "an integer", (int,), low, high)


def text(pattern: str, allowed: str) -> Kind:
    matches = re.compile(pattern, re.ASCII).fullmatch
    return Kind("string", allowed, lambda value: isinstance(value, str) and matches(value) is not None)


def _is_module_name(value: object) -> bool:
    if not isinstance(value, str) or len(value) > 255:
        return False
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in value.split("."))


def list_of(item: Kind, noun: str, most: int) -> Kind:
    allowed = f"a list of at most {most} {noun}"
    return Kind("list", allowed, lambda value: isinstance(value, list) and len(value) <= most, items=item)


def or_null(kind: Kind) -> Kind:
    allowed = f"{kind.allowed} or null"
    return Kind(f"{kind.type_name} or null", allowed, lambda value: value is None or kind.accepts(value))


BOOLEAN = Kind("boolean", "true or false", lambda value: isinstance(value, bool))
# Surrogates stand for bytes that are no UTF-8: such a path could not be written into a record.
PATH = text(
    r"(?=.*\S)[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,4096}",
    "a path of 1 to 4096 characters, no control characters among them",
)
MODULE = Kind("string", "a dotted module name such as 'package.module'", _is_module_name)
DURATION = _range("number", "a number of seconds", (int, float), 0.001, 86_400)
HOST = text(r"[!-~]{1,255}", "a host name or address of 1 to 255 visible ASCII characters")
URL_PATH = text(r"/[\w.~!$&'()*+,;=:@%/-]{0,254}", "a path that starts with '/', of at most 255 URL characters")
PREFIX = text(r"[A-Za-z_:][A-Za-z0-9_:]{0,63}", "1 to 64 letters, digits, '_' and ':', the first of them no digit")
TAG = text(r"[!-~]{1,64}", "1 to 64 visible ASCII characters, no spaces")


def setting(default: T, kind: Kind, meaning: str) -> T:
    """A row of the table of settings. (It claims to return the value so that a field keeps its type.)"""
    return field(default=default, metadata={"kind": kind, "meaning": meaning})
