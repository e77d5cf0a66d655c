"""Starts that `unsupported: refuse` refuses, and what it says of them."""

from __future__ import annotations

from typing import Any

import pytest

from kvscope.boundary.ledger import Ledger
from kvscope.checks.catalog import RULES
from kvscope.config import Config, parse
from kvscope.facts.topology import FULL_ATTENTION, Group, Topology
from kvscope.plugin import PluginHub
from kvscope.runtime.unsupported import LOSES_NOTHING, refused_groups, refused_seams

DELIVERED = {rule.check for rule in RULES.values()}


def config(**parts: Any) -> Config:
    return parse({key: {"enabled": True, **part} for key, part in parts.items()}, {})


TRACE = config(kv_trace={"unsupported": "refuse"})
GUARD = config(kv_guard_config={"unsupported": "refuse"})


def topology(*kinds: str) -> Topology:
    groups = [
        Group(group_id=number, kind=kind, block_size=16, kernel_block_size=None, layers=1)
        for number, kind in enumerate(kinds)
    ]
    return Topology(num_blocks=8, null_block_id=0, groups=tuple(groups))


def guards(*checks: str) -> str:
    """The guard's checks among these that this version has, as a sentence names them."""
    named = [check for check in checks if check in DELIVERED]
    return f"check{'s' if len(named) > 1 else ''} {', '.join(named)}"


def test_a_group_that_cannot_be_judged_is_named_with_what_it_is_and_the_checks() -> None:
    assert str(refused_groups(TRACE, topology(FULL_ATTENTION, "mamba"))) == (
        "additional_config.kv_trace.unsupported: 'refuse', and checks C1, C4, C6 cannot run on group 1 (mamba)"
    )
    assert str(refused_groups(GUARD, topology("ring", FULL_ATTENTION, "mamba"))) == (
        f"additional_config.kv_guard_config.unsupported: 'refuse', and {guards('C2', 'C3', 'C5')} "
        "cannot run on group 0 (ring) and group 2 (mamba)"
    )


def test_what_keeps_all_groups_from_being_judged_is_named_with_each() -> None:
    assert str(refused_groups(TRACE, topology(FULL_ATTENTION, "mla"), "context_parallel")) == (
        "additional_config.kv_trace.unsupported: 'refuse', and checks C1, C4, C6 cannot run on "
        "group 0 (full_attention, context_parallel) and group 1 (mla, context_parallel)"
    )


@pytest.mark.parametrize(
    "lenient",
    [
        config(kv_trace={}, kv_guard_config={"unsupported": "skip"}),
        config(kv_trace={}, kv_guard_config={"enabled": False, "unsupported": "refuse"}),
        config(),
    ],
)
def test_a_part_that_skips_or_is_off_refuses_nothing(lenient: Config) -> None:
    assert refused_groups(lenient, topology("mamba"), "context_parallel") is None
    lost = {"scheduler.schedule": "engine", "pool.alloc": "allocator"}
    assert refused_seams(lenient, lost, dict.fromkeys(lost, "it has another shape")) is None


@pytest.mark.parametrize("strict", [TRACE, GUARD])
def test_what_can_be_judged_is_not_refused(strict: Config) -> None:
    assert refused_groups(strict, topology(FULL_ATTENTION, "mla", "sliding_window", "chunked_local")) is None
    assert refused_seams(strict, {}, {}) is None
    assert refused_seams(strict, dict.fromkeys(LOSES_NOTHING, "engine"), dict.fromkeys(LOSES_NOTHING, "gone")) is None


@pytest.mark.parametrize(
    ("strict", "role", "checks"),
    [
        (TRACE, "engine", "checks C1, C4, C6, L"),
        (TRACE, "worker", "checks C1, C4, C6, L"),
        (TRACE, "worker_v2", "checks C1, C4, C6"),
        (TRACE, "allocator", None),
        (GUARD, "allocator", guards("C2", "C3", "C5", "A")),
        (GUARD, "worker_v1", guards("C2", "C3", "C5")),
    ],
)
def test_a_lost_seam_is_named_with_the_checks_that_need_it(strict: Config, role: str, checks: str | None) -> None:
    error = refused_seams(strict, {"some.seam": role}, {"some.seam": "Pool has no method take of its own"})
    if checks is None:
        assert error is None
    else:
        path = "kv_trace" if strict is TRACE else "kv_guard_config"
        assert str(error) == (
            f"additional_config.{path}.unsupported: 'refuse', and {checks} cannot run without some.seam "
            "(Pool has no method take of its own)"
        )


def test_seams_that_no_check_needs_are_seams() -> None:
    assert {seam.name for seam in PluginHub(Ledger()).table} >= LOSES_NOTHING
