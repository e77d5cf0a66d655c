"""What kvscope itself took: the time that its hooks measured in each process, in relation to the steps of EngineCore.

Only the process of the scheduler counts steps. A worker carries out each of them once, so that its time is divided by
the same number. What happens once in a run, once for a request or without one is no part of a step and stands apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvscope.analysis.engines import EngineSetup
from kvscope.analysis.reader import ProcessLog


class OwnTime(msgspec.Struct, kw_only=True):
    """``per_step_ns`` and ``apart_ns`` are by process and then by hook. A process is in ``per_step_ns`` only if the
    steps of its engine are known. ``step_ns`` is the scheduler's side and its slowest worker together, of the slowest
    engine; None where one of the two did not say.
    """

    per_step_ns: dict[str, dict[str, int]]
    apart_ns: dict[str, dict[str, int]]
    step_ns: int | None


def is_apart(hook: str) -> bool:
    """Whether a hook runs at start-up, at shutdown, for an admission, for a reset or in a run without requests.

    The names are those of the wrapped functions of vLLM, as kv.coverage has them.
    """
    if hook in {"worker.cache", "pool.reset", "scheduler.reset"}:
        return True
    return hook.startswith(("config.", "frontend.")) or hook.endswith((".create", ".shutdown", ".dummy", ".capture"))


def own_time(logs: Sequence[ProcessLog], setups: Sequence[EngineSetup]) -> OwnTime:
    """The time of all processes whose last kv.coverage was read."""
    apart = {log.name: {hook: ns for hook, ns in _times(log).items() if is_apart(hook)} for log in logs}
    per_step: dict[str, dict[str, int]] = {}
    totals: list[int] = []
    for setup in setups:
        declaring = setup.declaring
        steps = declaring.coverage.steps if declaring and declaring.coverage else 0
        if declaring is None or not steps:
            continue
        sums: dict[str, int] = {}
        for log in [declaring, *(rank for rank in setup.ranks if rank is not declaring)]:
            if log.coverage is None:
                continue
            times = {hook: ns for hook, ns in _times(log).items() if not is_apart(hook)}
            per_step[log.name] = {hook: ns // steps for hook, ns in times.items()}
            sums[log.name] = sum(times.values()) // steps
        scheduler = sums.pop(declaring.name)
        if sums or declaring.is_worker:
            totals.append(scheduler + max(sums.values(), default=0))
    return OwnTime(per_step_ns=per_step, apart_ns=apart, step_ns=max(totals, default=None))


def _times(log: ProcessLog) -> dict[str, int]:
    return {hook: ns for hook, ns in log.coverage.hook_time_ns.items() if ns} if log.coverage else {}
