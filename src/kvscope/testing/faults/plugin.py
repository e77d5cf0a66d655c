"""The fault in the processes of an engine that has several: vLLM loads this as a general plugin in each of them.

    additional_config={"kvscope_fault": {"name": "slot_plus_one", "rank": 1, "after_steps": 8, "report": "/tmp/x.json"}}

The other fields are those of `arm`: `group_id`, `once`, `attribute`. `report` is a file that gets `Injection.what` as
JSON as soon as the fault has happened; `{rank}` in it is replaced, for faults that happen on every rank. Plugins load
before any configuration exists, so that `register` wraps the two constructors that bring one (`WorkerBase` in a worker,
`Scheduler` in the core process) and takes the wrappers away with the first configuration that it sees.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvscope.testing.faults.catalog import FAULTS
from kvscope.testing.faults.hooks import Hook
from kvscope.testing.faults.injection import Injection, arm

_bootstrap: list[Hook] = []
_armed: list[Injection] = []


def register() -> None:
    """Entry point `kvscope_faults`. Idle where the engine shares the caller's process: there `arm` is the way."""
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" or _bootstrap or _armed:
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.worker_base import WorkerBase

    def worker(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _configured(self.vllm_config, rank=int(self.rank))

    def scheduler(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _configured(self.vllm_config, rank=None)

    _bootstrap.extend([Hook(WorkerBase, "__init__", worker), Hook(Scheduler, "__init__", scheduler)])


def _configured(vllm_config: Any, *, rank: int | None) -> None:
    """Act on the process's first configuration: `rank` is a worker's, or None in the process of the scheduler."""
    while _bootstrap:
        _bootstrap.pop().remove()
    config = getattr(vllm_config, "additional_config", None)
    settings = config.get("kvscope_fault") if isinstance(config, Mapping) else None
    if not settings or _armed:
        return
    settings = dict(settings)
    report = settings.pop("report", None)
    name = settings.get("name")
    if name in FAULTS and FAULTS[name].in_process:
        raise ValueError(f"the fault {name!r} needs scheduler and worker in one process")
    injection = arm(**settings, on_fire=None if report is None else lambda what: _report(str(report), what))
    if belongs(injection, rank):
        _armed.append(injection.install())


def belongs(injection: Injection, rank: int | None) -> bool:
    """Whether this process is the one to put the fault in. A handover to all ranks is spoiled where it is sent."""
    point = injection.fault.point
    if point in {"allocator", "connector", "declaration", "result"} or (point == "handover" and injection.rank is None):
        return rank is None
    return rank is not None and injection.concerns(rank)


def _report(path: str, what: dict[str, Any]) -> None:
    """Written beside and renamed, so that a reader never finds half of it."""
    target = Path(path.replace("{rank}", str(what["rank"])))
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    draft.write_text(json.dumps(what) + "\n", encoding="utf-8")
    draft.replace(target)
