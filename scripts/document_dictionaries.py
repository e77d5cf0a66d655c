"""Write what docs has from the code: dictionaries of findings, records and metrics, and dashboard, rules and runbook.

    .venv/bin/python scripts/document_dictionaries.py

A unit test fails while one of the files is not what this makes of the code. What a rule says about itself stands beside
its function in ``checks``, what a record says in ``events``; only what holds for all of them is written here. What is
made of the catalog of metrics is what ``kvscope assets export docs`` writes. The reasons are written in Chinese too,
by ``reasons_zh.json``: English text -> Chinese text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from configuration_zh import TEXTS, Chinese
from document_config import Language

from kvscope.checks.catalog import RULES
from kvscope.checks.rule import CHECKS, PART_OF_CHECK, Rule
from kvscope.cli import schema
from kvscope.events.envelope import SCHEMA
from kvscope.events.schema import RECORDS
from kvscope.metrics.assets.export import assets
from kvscope.settings import MonitorConfig

DOCS = Path(__file__).parents[1] / "docs"
COMMAND = ".venv/bin/python scripts/document_dictionaries.py"
REASONS_ZH = Path(__file__).with_name("reasons_zh.json")
CHINESE = Chinese(
    json.loads(REASONS_ZH.read_text(encoding="utf-8")) | {text: TEXTS[text] for text in CHECKS.values()},
    REASONS_ZH.name,
)
ENGLISH_PAGE = Language(
    path=DOCS / "reasons.md",
    link="English | [简体中文](reasons.zh-CN.md)",
    text=str,
    allowed=str,
    colon=": ",
    separator=". ",
    wraps=True,
)
CHINESE_PAGE = Language(
    path=DOCS / "reasons.zh-CN.md",
    link="[English](reasons.md) | 简体中文",
    text=CHINESE.text,
    allowed=CHINESE.allowed,
    colon="：",
    separator="。",
    wraps=False,
)


def documents() -> dict[Path, str]:
    """Every page, by its path."""
    generated = {DOCS / name: text for name, text in assets(MonitorConfig().prefix).items()}
    reasons = {page.path: _page(_reasons(page)) for page in (ENGLISH_PAGE, CHINESE_PAGE)}
    return {**reasons, DOCS / "events.md": _page(_events()), **generated}


def _page(lines: Iterator[str]) -> str:
    return "\n".join(lines).rstrip() + "\n"


# Reasons --------------------------------------------------------------------------------------------------------------


def _reasons(language: Language) -> Iterator[str]:
    say = language.text
    yield f"# {say('Reasons')}"
    yield ""
    yield language.link
    yield ""
    yield from language.wrapped(
        say(
            "What a finding (`kv.violation`) can say: {reasons} reasons in {checks} checks. Each compares two sources "
            "that come from different objects, or holds one of them against an invariant that it must satisfy alone. "
            "None of them proves anything about values in the cache or about what a kernel did on the device: kvscope "
            "sees declarations, plans and the books of the block pool on the host. `kvscope rules REASON` prints the "
            "same."
        ).format(reasons=len(RULES), checks=len(_delivered()))
    )
    yield ""
    yield from language.prose(
        "Where several reasons fit one access the first of this order is reported, and the rest stand in `also`: "
        "outside the cache, null block, released or reserved, foreign, target or length."
    )
    for check in _delivered():
        yield ""
        yield f"## {check}"
        yield ""
        part = say("Part: `{part}`, whose action its findings take.").format(part=PART_OF_CHECK[check])
        yield from language.wrapped(f"{say(CHECKS[check]).capitalize()}{language.separator}{part}")
        for rule in RULES.values():
            if rule.check == check:
                yield from _reason(rule, language)


def _delivered() -> list[str]:
    found = {rule.check for rule in RULES.values()}
    return [check for check in CHECKS if check in found]


def _reason(rule: Rule, language: Language) -> Iterator[str]:
    say, title = language.text, language.text(rule.title)
    kind = "One source against an invariant" if rule.invariant else "Compares"
    sources = say("{one}, with {other}.").format(one=say(rule.sources[0]), other=say(rule.sources[1]))
    severity = f"{say('Severity')}{language.colon}{rule.severity}{language.separator.rstrip()}"
    yield ""
    yield f"### {rule.reason}"
    yield ""
    yield from language.wrapped(f"{title[0].upper()}{title[1:]}{language.separator}{severity}")
    yield ""
    for name, text in (
        ("Fires", say(rule.fires)),
        ("Silent", say(rule.silent)),
        (kind, sources),
        ("Does not prove", say(rule.proves_not)),
    ):
        yield from language.wrapped(f"- **{say(name)}**{language.colon}{text}", hang=2)


# Events ---------------------------------------------------------------------------------------------------------------


def _events() -> Iterator[str]:
    yield "# Events"
    yield ""
    yield from ENGLISH_PAGE.prose(
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
