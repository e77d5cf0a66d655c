"""Write docs/configuration.md and docs/configuration.zh-CN.md, the reference of all settings, from the table of them.

    .venv/bin/python scripts/document_config.py

A unit test fails while a file is not what this makes of the code. Only what no setting can say about itself is written
here: how to set them, and what holds for all. What everything is in Chinese stands in ``configuration_zh.py``.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from configuration_zh import Chinese

from kvscope.checks.catalog import RULES
from kvscope.checks.rule import CHECKS, PART_OF_CHECK
from kvscope.config import ENVIRONMENT_VARIABLES, Key, Setting, describe, parse
from kvscope.events.codec import NOT_DELIVERED

DOCS = Path(__file__).parents[1] / "docs"
COMMAND = ".venv/bin/python scripts/document_config.py"
EXAMPLE = {
    "kv_trace": {"enabled": True},
    "kv_guard_config": {"enabled": True, "action": "raise"},
    "kv_output": {"dir": "/var/log/kvscope"},
}
WIDTH = 120
DELIVERED = frozenset(rule.check for rule in RULES.values())
INACTIVE = "**not in this version**"


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """``text`` translates what stands in the code in English, ``allowed`` what a setting accepts."""

    path: Path
    link: str
    text: Callable[[str], str]
    allowed: Callable[[str], str]
    colon: str
    separator: str
    wraps: bool

    def prose(self, text: str, *, hang: int = 0) -> list[str]:
        """One paragraph, of a text in English. Chinese, which has no places to wrap at, stands in one line."""
        return self.wrapped(self.text(text), hang=hang)

    def wrapped(self, text: str, *, hang: int = 0) -> list[str]:
        if not self.wraps:
            return [text]
        return textwrap.wrap(text, WIDTH, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False)


CHINESE = Chinese()
LANGUAGES = (
    Language(
        path=DOCS / "configuration.md",
        link="English | [简体中文](configuration.zh-CN.md)",
        text=str,
        allowed=str,
        colon=": ",
        separator=", ",
        wraps=True,
    ),
    Language(
        path=DOCS / "configuration.zh-CN.md",
        link="[English](configuration.md) | 简体中文",
        text=CHINESE.text,
        allowed=CHINESE.allowed,
        colon="：",
        separator="、",
        wraps=False,
    ),
)


def document(language: Language) -> str:
    keys, say, prose = describe(), language.text, language.prose
    effective = parse(EXAMPLE, {}).to_public_dict()
    return "\n".join(
        [
            f"# {say('Configuration')}",
            "",
            language.link,
            "",
            *prose(
                "Everything is off until a key of vLLM's `--additional-config` (in Python: `additional_config`) "
                "switches it on:"
            ),
            "",
            "```",
            f"vllm serve MODEL --shutdown-timeout 10 --additional-config \\\n  '{json.dumps(EXAMPLE)}'",
            "```",
            "",
            *prose(
                "A key holds an object. An unknown field, a wrong type or a value out of range stops the start before "
                "the model loads, with the full name of the setting and what is allowed, also in a part that is off. "
                "Top-level keys other than those below are left alone, since they may be another plugin's; one that "
                "looks like a misspelled key of kvscope is named by a warning in vLLM's log."
            ),
            "",
            *prose(
                f"What is marked {INACTIVE} is validated, and nothing acts on it. The first record of every trace "
                "file, `kv.enabled`, says what is on, and which checks do not run and why."
            ),
            "",
            f"## {say('The keys')}",
            "",
            *_table(
                (say("key"), say("what it is for"), say("in this version")),
                ((f"[`{key.key}`](#{key.key})", say(key.meaning).rstrip(".。"), _state(key, language)) for key in keys),
            ),
            *_sections(keys, language),
            "",
            f"## {say('What a finding does')}",
            "",
            *prose("A finding takes the action of the part that its check belongs to:"),
            "",
            *_table((say("check"), say("part"), say("in this version")), _checks(language)),
            "",
            f"## {say('Environment variables')}",
            "",
            *_table(
                (say("variable"), say("what it does")),
                ((f"`{name}`", say(said)) for name, said in ENVIRONMENT_VARIABLES.items()),
            ),
            "",
            say("Neither can switch anything on."),
            "",
            f"## {say('Full example')}",
            "",
            *prose("Every setting, as the command at the top leaves it:"),
            "",
            "```json",
            json.dumps(effective, indent=2),
            "```",
            "",
            f"## {say('This page')}",
            "",
            *prose(
                "It is made from the code (`src/kvscope/settings.py`), and a unit test fails while it is out of date:"
            ),
            "",
            "```",
            COMMAND,
            "```",
            "",
        ]
    )


def _sections(keys: Iterable[Key], language: Language) -> Iterator[str]:
    told: dict[str, str] = {}
    for key in keys:
        meaning = language.text(key.meaning)
        yield from ("", f"## {key.key}", "", *language.wrapped(f"{meaning[0].upper()}{meaning[1:]}"))
        if not key.acts:
            text = f"**Not in this version.** Switched on, it is `{NOT_DELIVERED}` in `kv.enabled`. With no other part "
            text += "on, a trace is recorded in which nothing is judged: `kvscope check` says *inconclusive*."
            yield from ("", *language.prose(text))
        heads = tuple(map(language.text, ("field", "type", "default", "allowed", "meaning")))
        yield from ("", *_table(heads, (_row(setting, key, language) for setting in key.settings)))
        for setting in key.settings:
            name = _name(setting)
            if not setting.choices:
                continue
            lines = [
                f"- `{json.dumps(value)}`{language.colon}{language.text(meaning)}"
                for value, meaning in setting.choices.items()
            ]
            where = told.setdefault("\n".join(lines), key.key)
            if where == key.key:
                listed = (line for item in lines for line in language.wrapped(item, hang=2))
                yield from ("", f"`{name}`{language.colon.rstrip()}", "", *listed)
            else:
                yield from (
                    "",
                    language.text("`{name}`: as in {where}.").format(name=name, where=f"[{where}](#{where})"),
                )


def _row(setting: Setting, key: Key, language: Language) -> tuple[str, ...]:
    meaning = language.text(setting.meaning)
    if key.acts and not setting.acts:
        meaning = f"{meaning}; {language.text(INACTIVE)}"
    kind, allowed = language.text(setting.type), language.allowed(setting.allowed)
    return (f"`{_name(setting)}`", kind, _default(setting), allowed, meaning)


def _name(setting: Setting) -> str:
    return setting.path.rpartition(".")[2]


def _default(setting: Setting) -> str:
    mebibytes, rest = divmod(int(setting.default) if setting.path.endswith("_bytes") else 1, 1 << 20)
    return f"`{setting.default}`" if rest else f"`{setting.default}` ({mebibytes} MiB)"


def _state(key: Key, language: Language) -> str:
    if not key.acts:
        return language.text(INACTIVE)
    idle = [f"`{_name(setting)}`" for setting in key.settings if not setting.acts]
    values = [
        f"`{_name(setting)}` = `{json.dumps(value)}`"
        for setting in key.settings
        for value, meaning in setting.choices.items()
        if setting.acts and "not in this version" in meaning
    ]
    lacking = [check for check, part in PART_OF_CHECK.items() if part == key.key and check not in DELIVERED]
    checks = [f"{language.text('check')} {check}" for check in lacking]
    missing = language.separator.join([*checks, *idle, *values])
    works = language.text("works")
    return f"{works}; {language.text(INACTIVE)}{language.colon}{missing}" if missing else works


def _checks(language: Language) -> Iterator[tuple[str, ...]]:
    for check, meaning in CHECKS.items():
        state = language.text("works" if check in DELIVERED else INACTIVE)
        yield f"{check}{language.colon}{language.text(meaning)}", f"`{PART_OF_CHECK[check]}`", state


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


if __name__ == "__main__":
    for each in LANGUAGES:
        each.path.write_text(document(each), encoding="utf-8")
