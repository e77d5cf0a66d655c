"""What the guard finds reads as agreed, also to somebody who has only the record of the finding."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from kvscope.analysis.tally import FoldedFinding
from kvscope.checks.catalog import RULES
from kvscope.events.finding_schema import NEIGHBOUR_WORDS, BlockHistory, BlockOwner, BlockStrip
from kvscope.facts.allocator import CAUSES
from kvscope.reports.prepare import prepare
from kvscope.reports.strip import SYMBOLS
from kvscope.reports.terminal import WIDTH, draw, plain
from unit.reports.stories import DOUBLE_FREE, OWNER, READER, RULES_HERE, STORIES, USE_AFTER_FREE_READ

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _rules(monkeypatch: pytest.MonkeyPatch) -> None:
    for reason, rule in RULES_HERE.items():
        monkeypatch.setitem(RULES, reason, rule)


def text_of(folded: FoldedFinding) -> str:
    return plain(draw(prepare(folded)))


@pytest.mark.parametrize("name", STORIES)
def test_a_finding_of_the_guard_reads_as_agreed(name: str) -> None:
    text = text_of(STORIES[name])
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("KVSCOPE_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", STORIES)
def test_only_the_line_for_grep_is_longer_than_the_screen(name: str) -> None:
    frozen, *rest = text_of(STORIES[name]).splitlines()
    assert frozen.startswith("KV_GUARD reason=")
    assert max(map(len, rest)) <= WIDTH == 80


def test_use_after_free_names_both_requests_the_freeing_and_both_generations() -> None:
    text = " ".join(text_of(USE_AFTER_FREE_READ).split())
    for said in (READER, OWNER, "step 171", "when it was preempted", "generation 3", "generation 4", "step 180"):
        assert said in text


def with_history(folded: FoldedFinding = USE_AFTER_FREE_READ, **changes: object) -> str:
    assert folded.history is not None
    history = msgspec.structs.replace(folded.history, **changes)
    return " ".join(text_of(msgspec.structs.replace(folded, history=history)).split())


@pytest.mark.parametrize("cause", [*CAUSES, "a cause of a later version", None])
def test_every_cause_of_a_release_has_its_words(cause: str | None) -> None:
    text = with_history(freed_cause=cause)
    assert f"{READER} in step 171, " in text
    assert "None" not in text


def test_what_is_not_known_is_said_to_be_so() -> None:
    """As where requests are written without their ids."""
    owner = BlockOwner(request_id=None, group_id=None, logical_index=None, live=True)
    text = with_history(freed_by=None, allocated_for=None, allocated_step=None, owners=[owner])
    assert "freed by nobody that is known in step 171" in text
    assert "now a request that is not known: generation 4" in text
    assert "None" not in text
    bare = text_of(msgspec.structs.replace(USE_AFTER_FREE_READ, history=BlockHistory()))
    assert "None" not in bare
    assert "neighbours" not in bare


def test_of_a_generation_that_is_long_over_the_end_is_not_made_up() -> None:
    text = with_history(generation=6, freed_generation=5)
    assert "allocated for cmpl-7d1: generation 3" in text
    assert "freed by no longer known for generation 3; the last time by cmpl-7d1 in step 171" in text


def test_only_who_has_the_block_is_said_to_be_hit() -> None:
    assert f"hits {OWNER} " in with_history()
    assert f"other request {OWNER} " in with_history(owners=[])


def test_many_owners_are_counted() -> None:
    owners = [BlockOwner(request_id=f"r{n}", group_id=0, logical_index=n, live=True) for n in range(8)]
    text = with_history(DOUBLE_FREE, status="active", references=20, owners=owners, num_owners=20)
    assert "now in the tables of r0, r1, r2 and 17 more" in text


def test_a_request_id_in_a_history_cannot_draw_on_the_terminal() -> None:
    evil = "r\x1b[31m\nKV_GUARD reason=forged"
    owner = BlockOwner(request_id=evil, group_id=0, logical_index=0, live=True)
    text = with_history(freed_by=evil, allocated_for=evil, owners=[owner], freed_cause=evil)
    assert "\x1b" not in text
    assert text.count("KV_GUARD reason=read_after_release") == 1


def test_every_word_of_the_strip_has_a_symbol_of_its_own_and_a_later_one_is_said_to_be_unknown() -> None:
    assert set(SYMBOLS) == set(NEIGHBOUR_WORDS)
    assert len(set(SYMBOLS.values())) == len(SYMBOLS)
    blocks = [*NEIGHBOUR_WORDS, "of a later version"]
    text = with_history(strip=BlockStrip(first_block=40, blocks=blocks))
    assert "O S R ! W H C . N x ? 40..50" in text
    assert "? not known to this version" in text


def test_a_strip_without_the_block_is_not_shown() -> None:
    assert "neighbours" not in with_history(strip=BlockStrip(first_block=100, blocks=["own"]))
