"""Foreign text on a terminal: a client chooses its request ids, and a trace file can hold anything in any field."""

from __future__ import annotations


def clean(text: str) -> str:
    """The text on one line, with everything escaped by which it could draw on a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def clean_json(text: str, *, only_ascii: bool) -> str:
    """The same JSON document, with what cannot be printed escaped as JSON does it; ``only_ascii`` all but ASCII."""
    if text.isascii():
        return text
    return "".join(
        c if c == "\n" or (c.isprintable() and (c.isascii() or not only_ascii)) else _json_escape(c) for c in text
    )


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2))
