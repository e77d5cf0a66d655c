"""docs/configuration.md against the code, and what it calls inactive against the code that would act."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest

from kvscope.config import CONFIG_KEYS, Config, Setting, describe, parse
from kvscope.events.codec import NOT_DELIVERED
from kvscope.runtime.run import _parts_said

ROOT = Path(__file__).parents[2]
SECTIONS: dict[str, Any] = dict(zip(CONFIG_KEYS, get_type_hints(Config).values(), strict=False))
SETTINGS = {row.path.removeprefix("additional_config."): row for key in describe() for row in key.settings}


@pytest.fixture(scope="module")
def generator() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "scripts"))  # as where a script is run
    yield importlib.import_module("document_config")
    sys.path.remove(str(ROOT / "scripts"))


def test_the_pages_are_what_the_code_makes_of_them(generator: ModuleType) -> None:
    for language in generator.LANGUAGES:
        page = language.path.read_text(encoding="utf-8")
        assert page == generator.document(language), f"{language.path.name} is not up to date: run {generator.COMMAND}"


def test_no_text_lacks_its_translation_and_none_is_left_over(generator: ModuleType) -> None:
    chinese = sys.modules["configuration_zh"]
    generator.document(generator.LANGUAGES[1])
    assert set(chinese.TEXTS) | set(chinese.ALLOWED) == generator.CHINESE.asked
    with pytest.raises(LookupError, match="no translation of 'made up'"):
        generator.CHINESE.text("made up")
    with pytest.raises(LookupError, match="no translation of what is allowed: 'anything'"):
        generator.CHINESE.allowed("anything")


def test_the_chinese_page_is_in_chinese(generator: ModuleType) -> None:
    page = generator.LANGUAGES[1].path.read_text(encoding="utf-8")
    assert not re.search(r"[\u4e00-\u9fff][,:;(]", page), "half-width punctuation after a Chinese character"
    told = [line for line in page.partition("```json")[0].splitlines() if line.startswith(("| `", "- `"))]
    assert len(told) > 40
    assert [line for line in told if not re.search(r"[\u4e00-\u9fff]", line)] == []


def test_the_pages_are_linked() -> None:
    listed = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert "(configuration.md)" in listed
    assert "(configuration.zh-CN.md)" in listed


@pytest.mark.parametrize(("path", "row"), SETTINGS.items())
def test_every_value_of_a_few_has_a_meaning(path: str, row: Setting) -> None:
    key, name = path.split(".")
    hint = get_type_hints(SECTIONS[key])[name]
    literals = [value for part in (hint, *get_args(hint)) for value in get_args(part) if isinstance(value, str)]
    assert list(row.choices) == literals


def test_a_part_is_called_inactive_as_long_as_the_run_says_so() -> None:
    everything = parse({key: {"enabled": True} for key in CONFIG_KEYS if key != "kv_output"}, {})
    inactive = {key for key, said in _parts_said(everything, None).items() if said == NOT_DELIVERED}
    assert {key.key for key in describe() if not key.acts} == inactive


@pytest.mark.parametrize("key", ["kv_trace", "kv_guard_config"])
def test_isolate_is_called_inactive_as_long_as_the_run_says_so(key: str) -> None:
    isolating = parse({key: {"enabled": True, "action": "isolate"}}, {})
    inactive = NOT_DELIVERED in _parts_said(isolating, None)[key]
    assert ("not in this version" in SETTINGS[f"{key}.action"].choices["isolate"]) is inactive


def test_a_setting_is_called_inactive_as_long_as_nothing_reads_it() -> None:
    ours = {ROOT / "src" / "kvscope" / name for name in ("config.py", "settings.py")}
    source = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "src").rglob("*.py") if p not in ours)
    part = r"(trace|guard|part)"
    owners = {"kv_trace": part, "kv_guard_config": part, "kv_output": "output", "kv_monitor": "monitor"}
    asked_for = {"action": r"|\.action_for\b"}  # by the part that a rule belongs to
    unread = {
        path
        for path in SETTINGS
        if (owner := owners.get(path.split(".")[0]))
        if not re.search(rf"\b{owner}\.{path.split('.')[1]}\b{asked_for.get(path.split('.')[1], '')}", source)
    }
    inactive_parts = {key.key for key in describe() if not key.acts}
    assert {p for p, row in SETTINGS.items() if not row.acts and p.split(".")[0] not in inactive_parts} == unread


def test_a_trace_of_findings_is_said_not_to_be_replayable() -> None:
    said = SETTINGS["kv_output.records"].choices["findings"]
    assert "cannot be replayed" in said
    assert "exit code 3" in said
