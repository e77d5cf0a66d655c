"""``kvscope schema``: the records of a trace, or one of them field by field; with --json their JSON Schema."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

from kvscope.cli.screen import JSON_OPTION, Line, UnknownNameError, facts, next_command, show, show_json, typed, wrapped

LABEL_WIDTH = 29

SPELLINGS = {
    "Ranges": "a list of integers as inclusive ascending ranges [first, last], in the list's order",
    "Runs": "a list of integers: an integer alone stands for itself, else each item is a value, a range [first, last], "
    "ascending or descending, or [value, value, count] for a value that stands count times",
}
"""How lists of integers are spelled: the names in ``events.envelope``, which JSON Schema does not keep."""


def _complete(incomplete: str) -> list[str]:
    from kvscope.events.schema import RECORDS

    return [event for event in RECORDS if event.startswith(incomplete)]


def command(
    event: str | None = typer.Argument(None, help="An event, as a record names it.", autocompletion=_complete),
    as_json: bool = JSON_OPTION,
) -> None:
    """Describe the records of a trace, or one of them. With --json: JSON Schema, to validate a line against."""
    from kvscope.events.schema import RECORDS, json_schema

    if event is not None and event not in RECORDS:
        close = difflib.get_close_matches(event, RECORDS, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else f"{typed()} schema lists them"
        raise UnknownNameError(f"schema: {event!r} is no event of this version; {hint}")
    chosen = [] if event is None else [event]
    if as_json:
        show_json(json_schema(*chosen))
    elif event is None:
        show([*_overview(), ("", ""), *next_command("schema", next(iter(RECORDS)))])
    else:
        show([*in_full(event), ("", ""), *next_command("schema", event, "--json")])


def _overview() -> list[Line]:
    from kvscope.events.envelope import SCHEMA, Envelope
    from kvscope.events.schema import RECORDS

    lines: list[Line] = [("label", f"{SCHEMA}: one JSON object a line, one file a process"), ("", "")]
    envelope = "schema event trace_id step|after_step seq component boundary engine_id *_rank mono_ns wall_ns"
    lines += facts([("every record", envelope)], label_width=16)
    for event, record in RECORDS.items():
        said = " ".join(inspect.cleandoc(record.__doc__ or "").replace("`", "").split())
        lines += [("", ""), *facts([(event, said.partition(". ")[0].rstrip(".:"))], label_width=16)]
        own = [name for name in record.__struct_fields__ if name not in Envelope.__struct_fields__]
        lines += facts([("", " ".join(own))], label_width=16)
    return lines


def in_full(event: str, *, is_envelope_said: bool = True) -> list[Line]:
    """The event with its own fields, then what these are made of, then the fields that every record has."""
    from kvscope.events.envelope import Envelope
    from kvscope.events.schema import RECORDS, json_schema

    definitions: dict[str, Any] = json_schema(event)["$defs"]
    record = definitions.pop(RECORDS[event].__name__)
    shared = [name for name in ("event", *Envelope.__struct_fields__) if name in record["properties"]]
    own = [name for name in record["properties"] if name not in shared]
    lines: list[Line] = [("label", event), *_prose(record), ("", ""), *_fields(record, own)]
    for name, definition in definitions.items():
        lines += [("", ""), ("label", name), *_prose(definition), *_fields(definition, list(definition["properties"]))]
    used = " ".join(text for _, text in lines)
    for name, meaning in SPELLINGS.items():
        if name in used:
            lines += [("", ""), ("label", name), *wrapped(meaning, hang=0)]
    if is_envelope_said:
        lines += [("", ""), ("label", "as in every record"), *_fields(record, shared)]
    return lines


def _prose(definition: dict[str, Any]) -> Iterator[Line]:
    """The description, paragraph by paragraph; an item of a list is one of its own."""
    text = definition.get("description", "").replace("`", "")
    for paragraph in re.split(r"\n\s*\n|\n(?=- )", text):
        if paragraph.strip():
            yield from wrapped(" ".join(paragraph.split()), hang=2 if paragraph.startswith("- ") else 0)


def _fields(definition: dict[str, Any], names: list[str]) -> Iterator[Line]:
    required = definition.get("required", [])
    for name in names:
        absent = "" if name in required else ", may be absent"
        yield from facts([(name, _type(definition["properties"][name]) + absent)], indent=2, label_width=LABEL_WIDTH)


def _type(schema: dict[str, Any], *, plural: bool = False) -> str:
    """What a field holds, in words: ``list of integers``, ``text or null``."""
    spelling = _spelling(schema)
    if spelling is not None:
        return spelling
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(_type(part, plural=plural) for part in schema["anyOf"])
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        return " | ".join(map(str, values))
    kind = schema.get("type")
    if kind == "array":
        inner = _type(schema.get("items", {}), plural=True)
        return f"{'lists' if plural else 'list'} of {f'({inner})' if ' or ' in inner else inner}"
    if kind == "object":
        values_of = schema.get("additionalProperties")
        return (
            f"object{'s' if plural else ''} of {_type(values_of, plural=True)}"
            if isinstance(values_of, dict) and values_of
            else "object"
        )
    words = {"integer": ("integer", "integers"), "string": ("text", "texts"), "null": ("null", "null")}
    return words.get(str(kind), (str(kind or "any value"),) * 2)[plural]


def _spelling(schema: dict[str, Any]) -> str | None:
    import msgspec

    from kvscope.events import envelope

    return next((name for name in SPELLINGS if msgspec.json.schema(getattr(envelope, name)) == schema), None)
