"""Every reason has scenarios that fire it and scenarios that must not; and every rule says what it is worth."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args

import pytest

import unit.checks.connector_cases
import unit.checks.content_cases
import unit.checks.context_cases
import unit.checks.draft_cases
import unit.checks.guarded_cases
import unit.checks.hit_cases
import unit.checks.lifecycle_cases
import unit.checks.list_cases
import unit.checks.operator_cases
import unit.checks.other_cases
import unit.checks.plan_cases
import unit.checks.pool_cases
import unit.checks.result_cases  # noqa: F401  importing the modules of cases writes the book
from kvscope.checks import rule as vocabulary
from kvscope.checks.audit import BOOKS_RULES
from kvscope.checks.bind import BIND_RULES
from kvscope.checks.catalog import RULES
from kvscope.checks.connector import COMPLETION_RULES, FAILED_LOAD_RULES, INVALID_RULES, RECEIVE_RULES
from kvscope.checks.content import CONTENT_RULES
from kvscope.checks.context_parallel import CONTEXT_RULES, COORDINATE_RULES, LENGTH_RULES
from kvscope.checks.drafts import DRAFT_RULES
from kvscope.checks.dummy import DUMMY_RULES
from kvscope.checks.finding import Finding
from kvscope.checks.generation import GENERATION_RULES
from kvscope.checks.handover import HANDOVER_RULES
from kvscope.checks.initialized import INITIALIZED_RULES
from kvscope.checks.lifecycle import LIFECYCLE_RULES
from kvscope.checks.lifetime import LIFETIME_RULES
from kvscope.checks.lists import LIST_RULES
from kvscope.checks.operator import OPERATOR_RULES
from kvscope.checks.ownership import OWNERSHIP_RULES
from kvscope.checks.pool import POOL_RULES
from kvscope.checks.read import READ_RULES
from kvscope.checks.results import RESULT_RULES
from kvscope.checks.row import GROUP_RULES, ROW_RULES
from kvscope.checks.rule import CHECKS, PART_OF_CHECK, Rule, Severity
from kvscope.checks.write import WRITE_RULES
from unit.checks.cases import NEGATIVE, POSITIVE, Positive, Scenario

FIRING = [(reason, name, case) for reason, cases in POSITIVE.items() for name, case in cases.items()]
SILENT = [(reason, name, case) for reason, cases in NEGATIVE.items() for name, case in cases.items()]


def values(finding: Finding) -> dict[str, Any]:
    """All that a finding says, but for where it belongs."""
    said = {name: getattr(finding, name) for name in finding.__struct_fields__}
    assert said.pop("step") > 0
    said.pop("trace_id")
    return said


def whole(expected: dict[str, Any]) -> dict[str, Any]:
    return values(Finding(step=1, trace_id="", **expected))


@pytest.mark.parametrize(("reason", "name", "case"), FIRING, ids=[f"{reason}: {name}" for reason, name, _ in FIRING])
def test_the_rule_fires(reason: str, name: str, case: Positive) -> None:
    assert [values(finding) for finding in case.scenario()] == [whole(expected) for expected in case.expected]


@pytest.mark.parametrize(("reason", "name", "case"), SILENT, ids=[f"{reason}: {name}" for reason, name, _ in SILENT])
def test_the_rule_is_silent(reason: str, name: str, case: Scenario) -> None:
    assert reason not in [said for finding in case() for said in (finding.reason, *finding.also)]


@pytest.mark.parametrize("reason", RULES)
def test_a_reason_has_a_positive_and_a_negative_case(reason: str) -> None:
    assert POSITIVE.get(reason), f"nothing fires {reason}"
    assert NEGATIVE.get(reason), f"nothing leaves {reason} silent"


def test_the_book_has_no_case_of_a_reason_that_does_not_exist() -> None:
    assert POSITIVE.keys() | NEGATIVE.keys() <= RULES.keys()


def test_no_reason_is_only_ever_said_beside_another() -> None:
    """Each is the one that is reported somewhere, and so are its severity and its action."""
    assert {expected["reason"] for _, _, case in FIRING for expected in case.expected} == RULES.keys()


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.reason)
def test_a_rule_says_what_it_is_worth(rule: Rule) -> None:
    for text in (rule.title, rule.fires, rule.silent, rule.proves_not, *rule.sources):
        assert text.strip() == text
        assert text
    assert rule.fires.endswith(".")
    assert rule.silent.endswith(".")
    assert rule.severity in get_args(Severity)
    assert rule.check in CHECKS
    assert rule.part == PART_OF_CHECK[rule.check]


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.reason)
def test_a_rule_compares_two_objects_or_one_with_an_invariant(rule: Rule) -> None:
    one, other = rule.sources
    assert one != other
    assert rule.invariant == other.startswith("the rule that ")
    assert rule.evidence == f"{one} against {other}"


def test_the_catalog_is_every_family_in_the_order_of_a_step() -> None:
    families = (
        POOL_RULES,
        BOOKS_RULES,
        BIND_RULES,
        LIFECYCLE_RULES,
        RECEIVE_RULES,
        COMPLETION_RULES,
        FAILED_LOAD_RULES,
        INVALID_RULES,
        LIST_RULES,
        CONTENT_RULES,
        LIFETIME_RULES,
        HANDOVER_RULES,
        COORDINATE_RULES,
        GROUP_RULES,
        ROW_RULES,
        WRITE_RULES,
        READ_RULES,
        GENERATION_RULES,
        OWNERSHIP_RULES,
        INITIALIZED_RULES,
        OPERATOR_RULES,
        CONTEXT_RULES,
        LENGTH_RULES,
        DUMMY_RULES,
        RESULT_RULES,
        DRAFT_RULES,
    )
    assert list(RULES) == [function.rule.reason for family in families for function in family]
    assert len(RULES) == sum(map(len, families))


def test_every_check_has_a_meaning_and_a_part() -> None:
    assert CHECKS.keys() == PART_OF_CHECK.keys()


def test_the_order_of_precedence_is_the_published_one() -> None:
    v = vocabulary
    outside, null, released = {v.OUTSIDE}, {v.NULL}, {v.RELEASED, v.RESERVED}
    foreign = {v.FOREIGN_ROW, v.FOREIGN, v.FOREIGN_OWNER, v.SHARED, v.UNDECLARED}
    target_or_length = {v.OFFSETS, v.POSITION, v.ORDER, v.NEGATIVE, v.TWICE, v.TARGET, v.LENGTH, v.COUNT, v.SHORT}
    target_or_length |= {v.CP_OWNER, v.CP_ORDER}
    contents = {v.UNWRITTEN}
    classes = [outside, null, released, foreign, target_or_length, contents, {v.OTHER}]
    for earlier, later in pairwise(classes):
        assert max(earlier) < min(later)


@pytest.mark.parametrize(
    ("reason", "rank"),
    [
        ("write_outside_cache", vocabulary.OUTSIDE),
        ("read_outside_cache", vocabulary.OUTSIDE),
        ("bind_block_out_of_range", vocabulary.OUTSIDE),
        ("null_block_write", vocabulary.NULL),
        ("read_null_block", vocabulary.NULL),
        ("read_row_request_mismatch", vocabulary.FOREIGN_ROW),
        ("write_foreign_block", vocabulary.FOREIGN),
        ("read_foreign_block", vocabulary.FOREIGN),
        ("write_after_release", vocabulary.RELEASED),
        ("read_after_release", vocabulary.RELEASED),
        ("write_reserved_block", vocabulary.RESERVED),
        ("read_reserved_block", vocabulary.RESERVED),
        ("bind_null_block_declared", vocabulary.NULL),
        ("alloc_null_block", vocabulary.NULL),
    ],
)
def test_a_reason_stands_in_its_class(reason: str, rank: int) -> None:
    assert RULES[reason].rank == rank


@pytest.mark.parametrize("reason", ["write_outside_cache", "read_outside_cache", "bind_block_out_of_range"])
def test_what_can_crash_the_process_is_fatal(reason: str) -> None:
    assert RULES[reason].severity == "fatal"
