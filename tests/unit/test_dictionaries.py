"""The generated pages and files in docs against the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kvscope.checks.catalog import RULES
from kvscope.events.schema import RECORDS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "document_dictionaries", ROOT / "scripts" / "document_dictionaries.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_what_the_code_makes_of_them(generator: ModuleType) -> None:
    for path, page in generator.documents().items():
        name = path.relative_to(ROOT)
        assert path.read_text(encoding="utf-8") == page, f"{name} is not up to date: run {generator.COMMAND}"


PAGES = ["reasons.md", "events.md", "metrics.md", "metrics.zh-CN.md", "runbook.md", "runbook.zh-CN.md"]


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_are_linked(name: str) -> None:
    assert f"({name})" in (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


def test_every_reason_and_every_event_has_its_heading() -> None:
    reasons = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8").splitlines()
    events = (ROOT / "docs" / "events.md").read_text(encoding="utf-8").splitlines()
    assert sorted(line[4:] for line in reasons if line.startswith("### ")) == sorted(RULES)
    assert [line[3:] for line in events if line.startswith("## ")] == list(RECORDS)
