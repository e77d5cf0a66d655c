"""``kvscope schema``: the JSON Schema of every event, or what the events are."""

from __future__ import annotations

import inspect

from kvscope.cli.screen import JSON_OPTION, Line, facts, next_command, show, show_json


def command(as_json: bool = JSON_OPTION) -> None:
    """Describe the records of a trace. With --json: their JSON Schema, to validate a line against."""
    from kvscope.events.envelope import SCHEMA
    from kvscope.events.schema import RECORDS, json_schema

    if as_json:
        show_json(json_schema())
        return
    lines: list[Line] = [("label", f"{SCHEMA}: one JSON object a line, one file a process"), ("", "")]
    envelope = "schema event trace_id step|after_step seq component boundary engine_id *_rank mono_ns wall_ns"
    lines += facts([("every record", envelope)], label_width=16)
    for event, record in RECORDS.items():
        said = " ".join(inspect.cleandoc(record.__doc__ or "").replace("`", "").split())
        lines += [("", ""), *facts([(event, said.partition(". ")[0].rstrip(".:"))], label_width=16)]
        own = [name for name in record.__annotations__ if name not in {"schema", "event"}]
        lines += facts([("", " ".join(own))], label_width=16)
    show([*lines, ("", ""), *next_command("kvscope", "schema", "--json")])
