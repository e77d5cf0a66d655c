"""What ``unsupported: refuse`` refuses: a start after which a check of that part could not run.

With ``skip``, the default, the same stands in kv.enabled and is counted in kv.coverage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..checks.catalog import RULES
from ..checks.rule import PART_OF_CHECK
from ..config import Config
from ..errors import ConfigurationError
from ..facts.topology import Group, Topology

PLAN_CHECKS = ("C1", "C2", "C3", "C4", "C5", "C6")
"""Checks that read slots or block tables, or what a declaration means for them."""
LEDGER_CHECKS = ("C2", "C3", "C5", "A")
"""Checks that need to know what the block pool does."""
LOSES_NOTHING = frozenset(
    {
        "frontend.create",
        "frontend.admit",
        "scheduler.reset",
        "engine.shutdown",
        "worker.sample",
        "worker.shutdown",
        "runner_v1.output",
        "runner_v1.pooled",
        "runner_v2.output",
        "runner_v2.pooled",
        "runner_v1.graph",
        "runner_v2.graph",
    }
)
"""Seams that yield names and numbers for readers, or let go of something, and nothing that a check needs."""


def refused_groups(config: Config, topology: Topology, cause: str | None = None) -> ConfigurationError | None:
    """The error by which the start fails, if a part that refuses has checks which cannot judge a group.

    ``cause`` is why no plan of this engine can be judged, None if it is only a group's own semantics.
    """
    groups = [_called(group, cause) for group in topology.groups if cause is not None or not group.judged]
    if not groups:
        return None
    return _error(config, PLAN_CHECKS, f"cannot run on {' and '.join(groups)}")


def refused_seams(config: Config, lost: Mapping[str, str], reasons: Mapping[str, str]) -> ConfigurationError | None:
    """The error by which the start fails, if a part that refuses has checks which need a seam that this vLLM lacks.

    ``lost`` is ``{seam: the process or runner that it belongs to}``, ``reasons`` ``{seam: why it is absent}``.
    """
    for name in sorted(lost.keys() - LOSES_NOTHING):
        why = f"cannot run without {name} ({reasons[name]})"
        error = _error(config, _lost_without(lost[name]), why)
        if error is not None:
            return error
    return None


def _lost_without(role: str) -> Iterable[str]:
    if role == "allocator":
        return LEDGER_CHECKS
    return PLAN_CHECKS if role.startswith("worker_") else PART_OF_CHECK


def _called(group: Group, cause: str | None) -> str:
    return f"group {group.group_id} ({group.kind if cause is None else f'{group.kind}, {cause}'})"


def _error(config: Config, lost: Iterable[str], why: str) -> ConfigurationError | None:
    delivered = {rule.check for rule in RULES.values()}
    for key, part in (("kv_trace", config.trace), ("kv_guard_config", config.guard)):
        if not part.enabled or part.unsupported != "refuse":
            continue
        checks = [check for check in lost if PART_OF_CHECK[check] == key and check in delivered]
        if checks:
            named = f"check{'s' if len(checks) > 1 else ''} {', '.join(checks)}"
            return ConfigurationError(f"additional_config.{key}.unsupported", f"'refuse', and {named} {why}")
    return None
