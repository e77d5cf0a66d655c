"""Write docs/configuration.md, the reference of all settings, from the table of settings in the code.

    .venv/bin/python scripts/document_config.py

A unit test fails while the file is not what this makes of the code. Only what no setting can say about itself is
written here: how to set them, and what holds for all.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvscope.checks.catalog import RULES
from kvscope.checks.rule import CHECKS, PART_OF_CHECK
from kvscope.config import ENVIRONMENT_VARIABLES, Key, Setting, describe, parse
from kvscope.events.codec import NOT_DELIVERED

PATH = Path(__file__).parents[1] / "docs" / "configuration.md"
COMMAND = ".venv/bin/python scripts/document_config.py"
EXAMPLE = {
    "kv_trace": {"enabled": True},
    "kv_guard_config": {"enabled": True, "action": "raise"},
    "kv_output": {"dir": "/var/log/kvscope"},
}
WIDTH = 120
DELIVERED = frozenset(rule.check for rule in RULES.values())
INACTIVE = "**not in this version**"


def document() -> str:
    keys = describe()
    effective = parse(EXAMPLE, {}).to_public_dict()
    return "\n".join(
        [
            "# Configuration",
            "",
            *_prose(
                "Everything is off until a key of vLLM's `--additional-config` (in Python: `additional_config`) "
                "switches it on:"
            ),
            "",
            "```",
            f"vllm serve MODEL --shutdown-timeout 10 --additional-config \\\n  '{json.dumps(EXAMPLE)}'",
            "```",
            "",
            *_prose(
                "A key holds an object. An unknown field, a wrong type or a value out of range stops the start before "
                "the model loads, with the full name of the setting and what is allowed, also in a part that is off. "
                "Top-level keys other than those below are left alone, since they may be another plugin's; one that "
                "looks like a misspelled key of kvscope is named by a warning in vLLM's log."
            ),
            "",
            *_prose(
                f"What is marked {INACTIVE} is validated, and nothing acts on it. The first record of every trace "
                "file, `kv.enabled`, says what is on, and which checks do not run and why."
            ),
            "",
            "## The keys",
            "",
            *_table(
                ("key", "what it is for", "in this version"),
                ((f"[`{key.key}`](#{key.key})", key.meaning.rstrip("."), _state(key)) for key in keys),
            ),
            *_sections(keys),
            "",
            "## What a finding does",
            "",
            *_prose("A finding takes the action of the part that its check belongs to:"),
            "",
            *_table(("check", "part", "in this version"), _checks()),
            "",
            "## Environment variables",
            "",
            *_table(
                ("variable", "what it does"), ((f"`{name}`", said) for name, said in ENVIRONMENT_VARIABLES.items())
            ),
            "",
            "Neither can switch anything on.",
            "",
            "## Full example",
            "",
            *_prose("Every setting, as the command at the top leaves it:"),
            "",
            "```json",
            json.dumps(effective, indent=2),
            "```",
            "",
            "## This page",
            "",
            *_prose(
                "It is made from the code (`src/kvscope/settings.py`), and a unit test fails while it is out of date:"
            ),
            "",
            "```",
            COMMAND,
            "```",
            "",
        ]
    )


def _sections(keys: Iterable[Key]) -> Iterator[str]:
    told: dict[str, str] = {}
    for key in keys:
        yield from ("", f"## {key.key}", "", *_prose(f"{key.meaning[0].upper()}{key.meaning[1:]}"))
        if not key.acts:
            text = f"**Not in this version.** Switched on, it is `{NOT_DELIVERED}` in `kv.enabled`. With no other part "
            text += "on, a trace is recorded in which nothing is judged: `kvscope check` says *inconclusive*."
            yield from ("", *_prose(text))
        heads = ("field", "type", "default", "allowed", "meaning")
        yield from ("", *_table(heads, (_row(setting, key) for setting in key.settings)))
        for setting in key.settings:
            name = _name(setting)
            if not setting.choices:
                continue
            lines = [f"- `{json.dumps(value)}`: {meaning}" for value, meaning in setting.choices.items()]
            where = told.setdefault("\n".join(lines), key.key)
            if where == key.key:
                yield from ("", f"`{name}`:", "", *(line for item in lines for line in _prose(item, hang=2)))
            else:
                yield from ("", f"`{name}`: as in [{where}](#{where}).")


def _row(setting: Setting, key: Key) -> tuple[str, ...]:
    inactive = key.acts and not setting.acts
    meaning = f"{setting.meaning}; {INACTIVE}" if inactive else setting.meaning
    return (f"`{_name(setting)}`", setting.type, _default(setting), setting.allowed, meaning)


def _name(setting: Setting) -> str:
    return setting.path.rpartition(".")[2]


def _default(setting: Setting) -> str:
    mebibytes, rest = divmod(int(setting.default) if setting.path.endswith("_bytes") else 1, 1 << 20)
    return f"`{setting.default}`" if rest else f"`{setting.default}` ({mebibytes} MiB)"


def _state(key: Key) -> str:
    if not key.acts:
        return INACTIVE
    idle = [f"`{_name(setting)}`" for setting in key.settings if not setting.acts]
    values = [
        f"`{_name(setting)}` = `{json.dumps(value)}`"
        for setting in key.settings
        for value, meaning in setting.choices.items()
        if setting.acts and "not in this version" in meaning
    ]
    checks = [f"check {check}" for check, part in PART_OF_CHECK.items() if part == key.key and check not in DELIVERED]
    missing = ", ".join([*checks, *idle, *values])
    return f"works; {INACTIVE}: {missing}" if missing else "works"


def _checks() -> Iterator[tuple[str, ...]]:
    for check, meaning in CHECKS.items():
        state = "works" if check in DELIVERED else INACTIVE
        yield f"{check}: {meaning}", f"`{PART_OF_CHECK[check]}`", state


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _prose(text: str, *, hang: int = 0) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PATH.write_text(document(), encoding="utf-8")
