"""The book of cases: per reason, what must fire it and what must not. ``test_catalog`` runs them and counts them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from kvscope.checks.finding import Finding

Scenario = Callable[[], list[Finding]]


class Positive(NamedTuple):
    """A scenario whose findings are exactly ``expected``: each a dict of the fields that must be as they stand there.
    A field that is not named is at its default, except for step and trace id.
    """

    scenario: Scenario
    expected: list[dict[str, Any]]


POSITIVE: dict[str, dict[str, Positive]] = defaultdict(dict)
NEGATIVE: dict[str, dict[str, Scenario]] = defaultdict(dict)


def fires(reason: str, *others: dict[str, Any], **fields: Any) -> Callable[[Scenario], Scenario]:
    """The scenario causes one finding of ``reason`` with these fields, and ``others``, and nothing else."""

    def note(scenario: Scenario) -> Scenario:
        assert scenario.__name__ not in POSITIVE[reason], scenario.__name__
        POSITIVE[reason][scenario.__name__] = Positive(scenario, [{"reason": reason, **fields}, *others])
        return scenario

    return note


def silent(*reasons: str) -> Callable[[Scenario], Scenario]:
    """The scenario causes no finding that has one of these reasons, not even beside another."""

    def note(scenario: Scenario) -> Scenario:
        for reason in reasons:
            assert scenario.__name__ not in NEGATIVE[reason], scenario.__name__
            NEGATIVE[reason][scenario.__name__] = scenario
        return scenario

    return note
