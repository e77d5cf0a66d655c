"""The way of a record to a reader: stamped, held against the published schema, encoded, decoded."""

from __future__ import annotations

import json
from typing import TypeVar

import jsonschema

from kvscope.events import codec
from kvscope.events.envelope import Envelope
from kvscope.events.schema import decode_record, json_schema
from kvscope.facts.topology import Ranks

VALIDATOR = jsonschema.Draft202012Validator(json_schema())
OF_EVENT = {
    name: jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": json_schema()["$defs"]})
    for name in json_schema()["$defs"]
}
IDENTITY = codec.Identity(engine_id="0", ranks=Ranks(dp=0, tp=1))
R = TypeVar("R", bound=Envelope)


def through_a_line(record: R) -> R:
    """The record as a reader gets it; on its way it is held against the published schema."""
    codec.stamp(
        record, IDENTITY, seq=7, component="runner", boundary="GPUModelRunner", mono_ns=1, wall_ns=2, after_step=3
    )
    line = codec.encode(record)
    OF_EVENT[type(record).__name__].validate(json.loads(line))
    back = decode_record(line)
    assert type(back) is type(record)
    return back
