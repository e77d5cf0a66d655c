"""Write what docs has from the code: dictionaries of findings, records and metrics, and dashboard, rules and runbook.

    .venv/bin/python scripts/document_dictionaries.py

A unit test fails while one of the files is not what this makes of the code. What a rule says about itself stands beside
its function in ``checks``, what a record says in ``events``; only what holds for all of them is written here. What is
made of the catalog of metrics is what ``kvscope assets export docs`` writes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from kvscope.checks.catalog import RULES
from kvscope.checks.rule import CHECKS, PART_OF_CHECK, Rule
from kvscope.cli import schema
from kvscope.events.envelope import SCHEMA
from kvscope.events.schema import RECORDS
from kvscope.metrics.assets.export import assets
from kvscope.settings import MonitorConfig

DOCS = Path(__file__).parents[1] / "docs"
COMMAND = ".venv/bin/python scripts/document_dictionaries.py"
WIDTH = 120


def documents() -> dict[Path, str]:
    """Every page, by its path."""
    generated = {DOCS / name: text for name, text in assets(MonitorConfig().prefix).items()}
    return {DOCS / "reasons.md": _page(_reasons()), DOCS / "events.md": _page(_events()), **generated}


def _page(lines: Iterator[str]) -> str:
    return "\n".join(lines).rstrip() + "\n"


def _prose(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )  # fmt: skip


# Reasons --------------------------------------------------------------------------------------------------------------


def _reasons() -> Iterator[str]:
    yield "# Reasons"
    yield ""
    yield from _prose(
        f"What a finding (`kv.violation`) can say: {len(RULES)} reasons in {len(_delivered())} checks. Each compares "
        "two sources that come from different objects, or holds one of them against an invariant that it must satisfy "
        "alone. None of them proves anything about values in the cache or about what a kernel did on the device: "
        "kvscope sees declarations, plans and the books of the block pool on the host. `kvscope rules REASON` prints "
        "the same."
    )
    yield ""
    yield from _prose(
        "Where several reasons fit one access the first of this order is reported, and the rest stand in `also`: "
        "outside the cache, null block, released or reserved, foreign, target or length."
    )
    for check in _delivered():
        yield ""
        yield f"## {check}"
        yield ""
        yield from _prose(
            f"{CHECKS[check].capitalize()}. Part: `{PART_OF_CHECK[check]}`, whose action its findings take."
        )
        for rule in RULES.values():
            if rule.check == check:
                yield from _reason(rule)


def _delivered() -> list[str]:
    found = {rule.check for rule in RULES.values()}
    return [check for check in CHECKS if check in found]


def _reason(rule: Rule) -> Iterator[str]:
    kind = "One source against an invariant" if rule.invariant else "Compares"
    yield ""
    yield f"### {rule.reason}"
    yield ""
    yield from _prose(f"{rule.title[0].upper()}{rule.title[1:]}. Severity: {rule.severity}.")
    yield ""
    for name, text in (
        ("Fires", rule.fires),
        ("Silent", rule.silent),
        (kind, f"{rule.sources[0]}, with {rule.sources[1]}."),
        ("Does not prove", rule.proves_not),
    ):
        yield from _prose(f"- **{name}**: {text}", "  ")


# Events ---------------------------------------------------------------------------------------------------------------


def _events() -> Iterator[str]:
    yield "# Events"
    yield ""
    yield from _prose(
        f"The records of a trace, `{SCHEMA}`: one JSON object a line, one file a process. `kvscope schema` prints the "
        "same, and with `--json` the JSON Schema that every record of this version is held against in the tests. "
        'Absent means "does not apply", `null` "applies, could not be observed", `[]` "observed, empty". Times are '
        "nanoseconds. There are no token ids, no text and no addresses in a record."
    )
    for event in RECORDS:
        yield ""
        yield f"## {event}"
        yield ""
        yield "```"
        yield from (text for _, text in schema.in_full(event, is_envelope_said=event == next(iter(RECORDS))))
        yield "```"


if __name__ == "__main__":
    for path, page in documents().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(page, encoding="utf-8")
