"""A run that writes into a folder, its observers, and what a reader finds there afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvscope.config import parse
from kvscope.facts.requests import Declaration
from kvscope.facts.topology import Ranks, Topology
from kvscope.runtime.engine import EngineJudge
from kvscope.runtime.run import ProcessRole, Run
from kvscope.runtime.worker import WorkerJudge
from unit.checks.scenes import ONE_GROUP, Scene

RUN = "run"
MADE: list[Run] = []
"""Runs of the current test; whatever happens in it, they are closed when it ends (``conftest``)."""


class Hooks:
    """What a ledger says about its hooks."""

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.numbers: dict[str, tuple[int, int, int]] = {"scheduler.schedule": (5, 0, 50)}
        self.allocator_faults = [0]

    def seams_installed(self) -> list[str]:
        return ["scheduler.schedule"]

    def seams_absent(self) -> dict[str, str]:
        return {"worker.sample": "Worker has no method sample_tokens of its own"}

    def connector_faults(self) -> int:
        return 0

    def works(self, name: str) -> bool:
        return name not in self.failed

    def hook_numbers(self) -> dict[str, tuple[int, int, int]]:
        return dict(self.numbers)


def make_run(
    folder: Path,
    *roles: ProcessRole,
    trace: str | None = "log",
    guard: str | None = "log",
    topology: Topology = ONE_GROUP,
    ranks: Ranks | None = None,
    hooks: Hooks | None = None,
    monitor: dict[str, Any] | None = None,
    **output: Any,
) -> Run:
    """``trace`` and ``guard`` are the parts' actions, ``monitor`` the part's settings; None for a part that is off."""
    actions = (("kv_trace", trace), ("kv_guard_config", guard))
    parts: dict[str, Any] = {key: {"enabled": True, "action": action} for key, action in actions if action is not None}
    if monitor is not None:
        parts["kv_monitor"] = {"enabled": True, **monitor}
    config = parse({**parts, "kv_output": {"dir": str(folder), "log": "off", **output}}, {})
    run = Run(RUN, config, hooks or Hooks(), ("0.32.0", "cpu"))
    MADE.append(run)
    run.roles.update(roles or ("engine", "worker"))
    run.topology = topology
    run.ranks = ranks or Ranks(dp=0, tp=0, pp=0, world=0)
    return run


def records(run: Run) -> list[dict[str, Any]]:
    """All records of this process, in the order in which they were written."""
    run.close()
    paths = sorted(run.stream.folder.glob(f"{run.stream.stem}.*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]


def of_event(run: Run, event: str, kind: str | None = None) -> list[dict[str, Any]]:
    return [r for r in records(run) if r["event"] == event and (kind is None or r.get("kind") == kind)]


def last_coverage(run: Run) -> dict[str, Any]:
    return of_event(run, "kv.coverage")[-1]


class Live:
    """An engine and one worker of it in one process, with a scene that tells what happens."""

    def __init__(self, folder: Path, *, returns_results: bool = True, cause: str | None = None, **run: Any) -> None:
        topology = run.get("topology", ONE_GROUP)
        self.run = make_run(folder, **run)
        self.run.open()
        self.engine = EngineJudge(self.run, topology)
        self.worker = WorkerJudge(self.run, returns_results=returns_results, unjudged_cause=cause)
        self.worker.bind_topology(topology)
        self.scene = Scene(topology)

    def declare(self, **said: Any) -> Declaration:
        """The scheduler's side of a step."""
        self.engine.on_schedule_begin()
        step, _ = self.engine.next_step()
        declaration = self.scene.say(**said)
        assert declaration.step == step
        self.engine.on_schedule(declaration)
        return declaration

    def step(self, change: Any = None, **said: Any) -> Declaration:
        """A whole step up to its launch; ``change`` is made to the plan."""
        declaration = self.declare(**said)
        self.worker.on_input(declaration, declaration.requests.copy())
        plan = self.scene.plan(declaration)
        if change is not None:
            change(plan)
        self.worker.on_plan(plan)
        self.worker.on_launched()
        return declaration

    def warm(self) -> None:
        """As in ``scenes.decoding``: ``a`` in blocks 1 to 3, ``b`` in 4 to 6, 40 tokens each."""
        self.step(new=[("a", ([1, 2, 3],), 0, 40), ("b", ([4, 5, 6],), 0, 40)])

    def decode(self, computed: int = 40, change: Any = None, names: Iterable[str] = ("a", "b")) -> Declaration:
        return self.step(change, known=[(name, None, computed, 1) for name in names])
