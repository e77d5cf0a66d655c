"""The generated pages and files in docs against the code."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvscope.checks.catalog import RULES
from kvscope.checks.rule import CHECKS
from kvscope.events.schema import RECORDS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "scripts"))  # as where a script is run
    yield importlib.import_module("document_dictionaries")
    sys.path.remove(str(ROOT / "scripts"))


def test_the_pages_are_what_the_code_makes_of_them(generator: ModuleType) -> None:
    for path, page in generator.documents().items():
        name = path.relative_to(ROOT)
        assert path.read_text(encoding="utf-8") == page, f"{name} is not up to date: run {generator.COMMAND}"


PAGES = [
    "reasons.md",
    "reasons.zh-CN.md",
    "events.md",
    "metrics.md",
    "metrics.zh-CN.md",
    "runbook.md",
    "runbook.zh-CN.md",
]


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_are_linked(name: str) -> None:
    assert f"({name})" in (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


def test_no_reason_lacks_its_translation_and_none_is_left_over(generator: ModuleType) -> None:
    generator.documents()
    assert set(generator.CHINESE.texts) - generator.CHINESE.asked <= set(CHECKS.values())
    with pytest.raises(LookupError, match=r"scripts/reasons_zh.json has no translation of 'made up'"):
        generator.CHINESE.text("made up")


def test_a_translation_is_a_whole_sentence_where_the_text_is_and_names_the_same_reasons(generator: ModuleType) -> None:
    name = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)+|`[^`]*`")
    for english, chinese in generator.CHINESE.texts.items():
        assert re.search(r"[\u4e00-\u9fff]", chinese), english
        assert english.endswith(".") == chinese.endswith(("。", "（英文）。")), english
        assert not re.search(r"[\u4e00-\u9fff][,:;(]", chinese), "half-width punctuation after a Chinese character"
        assert sorted(name.findall(english)) == sorted(name.findall(chinese)), english


def test_every_reason_and_every_event_has_its_heading() -> None:
    reasons = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8").splitlines()
    events = (ROOT / "docs" / "events.md").read_text(encoding="utf-8").splitlines()
    assert sorted(line[4:] for line in reasons if line.startswith("### ")) == sorted(RULES)
    assert [line[3:] for line in events if line.startswith("## ")] == list(RECORDS)
