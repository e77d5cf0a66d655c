"""Small scenes with round numbers: requests, the declaration of a step, and the sound plan that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvscope.checks.agreement import Agreement
from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_batch, judge_bind, judge_plan
from kvscope.checks.plan_view import StepView
from kvscope.checks.rule import Part
from kvscope.facts.plans import GroupPlan, Plan
from kvscope.facts.requests import BlockIds, Declaration, StepRequests
from kvscope.facts.topology import Topology
from kvscope.state.batches import BatchTable
from kvscope.state.bindings import Bindings
from kvscope.state.followers import Follower
from unit.checks.worlds import group, pool

PARTS: tuple[Part, ...] = ("kv_trace", "kv_guard_config")
ONE_GROUP = pool(group(0))

New = tuple[str, BlockIds, int, int]
Known = tuple[str, BlockIds | None, int, int]


def declare(
    step: int,
    *,
    new: Iterable[New] = (),
    known: Iterable[Known] = (),
    resumed: Iterable[str] = (),
    finished: Iterable[str] = (),
    preempted: Iterable[str] = (),
) -> Declaration:
    """``new`` and ``known`` are ``(request, blocks, computed, scheduled)``."""
    new, known = list(new), list(known)
    scheduled = {entry[0]: entry[3] for entry in [*new, *known]}
    return Declaration(
        step=step,
        trace_id=f"t{step}",
        requests=StepRequests(
            new_ids=[entry[0] for entry in new],
            new_blocks=[entry[1] for entry in new],
            new_computed=[entry[2] for entry in new],
            cached_ids=[entry[0] for entry in known],
            cached_blocks=[entry[1] for entry in known],
            cached_computed=[entry[2] for entry in known],
            resumed=set(resumed),
            scheduled=scheduled,
            finished=set(finished),
            preempted=set(preempted),
        ),
        new_prompt_tokens=[entry[2] + entry[3] for entry in new],
        cached_output_tokens=[0] * len(known),
        spec_tokens={},
        invalid_spec_tokens={},
        total_num_scheduled_tokens=sum(scheduled.values()),
        token_budget=None,
        zero_blocks=None,
        copies=None,
        connector_plan=None,
    )


def sound_plan(declaration: Declaration, topology: Topology, tables: dict[str, list[list[int]]], pad: int = 3) -> Plan:
    """Rows in the order of the declaration, ``pad`` padding slots, tables exactly as declared and one column wider."""
    requests = declaration.requests
    computed = {
        **dict(zip(requests.new_ids, requests.new_computed, strict=True)),
        **dict(zip(requests.cached_ids, requests.cached_computed, strict=True)),
    }
    names, lens = list(requests.scheduled), list(requests.scheduled.values())
    positions = [computed[name] + offset for name in names for offset in range(requests.scheduled[name])]
    owners = [name for name in names for _ in range(requests.scheduled[name])]
    groups = []
    for index, of in enumerate(topology.groups):
        width = max(len(tables[name][index]) for name in names) + 1
        rows = [tables[name][index] + [0] * (width - len(tables[name][index])) for name in names]
        slots = [
            tables[name][index][position // of.block_size] * of.block_size + position % of.block_size
            if position // of.block_size < len(tables[name][index])
            else 0
            for name, position in zip(owners, positions, strict=True)
        ]
        groups.append(
            GroupPlan(
                group_id=of.group_id,
                tables=np.array(rows, np.int32),
                table_blocks=np.array([len(tables[name][index]) for name in names], np.int32),
                slots=np.array(slots + [-1] * pad, np.int64),
            )
        )
    return Plan(
        request_ids=names,
        query_start=np.array([0, *np.cumsum(lens)], np.int32),
        positions=np.array(positions, np.int64),
        seq_lens=np.array([computed[name] + n for name, n in zip(names, lens, strict=True)], np.int32),
        num_tokens=len(positions),
        groups=groups,
    )


class Scene:
    """One engine whose scheduler says what the test lets it say."""

    def __init__(self, topology: Topology = ONE_GROUP) -> None:
        self.topology = topology
        self.bindings = Bindings(topology)
        judged = [i for i, of in enumerate(topology.groups) if of.judged]
        self.batches = [BatchTable(self.bindings, index) for index in judged]
        self.agreement = Agreement(self.bindings, [Follower(self.bindings, index) for index in judged])
        self.tables: dict[str, list[list[int]]] = {}
        self.step_number = 0

    def say(self, **said: Any) -> Declaration:
        """The next declaration, taken over by the bindings."""
        self.step_number += 1
        declaration = declare(self.step_number, **said)
        requests = declaration.requests
        for name in requests.finished | requests.preempted:
            self.tables.pop(name, None)
        for name, blocks in zip(requests.new_ids, requests.new_blocks, strict=True):
            self.tables[name] = [list(of) for of in blocks]
        for name, delta in zip(requests.cached_ids, requests.cached_blocks, strict=True):
            if name in requests.resumed or name not in self.tables:
                self.tables[name] = [[] for _ in self.topology.groups]
            for table, more in zip(self.tables[name], delta or ((),) * len(self.topology.groups), strict=True):
                table.extend(more)
        self.bindings.apply(requests)
        return declaration

    def bound(self, parts: Iterable[Part] = PARTS, **said: Any) -> list[Finding]:
        return judge_bind(self.say(**said), self.bindings, tuple(parts))

    def plan(self, declaration: Declaration, pad: int = 3) -> Plan:
        return sound_plan(declaration, self.topology, self.tables, pad)

    def judge(self, declaration: Declaration, plan: Plan, parts: Iterable[Part] = PARTS) -> list[Finding]:
        parts = tuple(parts)
        findings = judge_batch(declaration, plan, parts)
        step = StepView(plan, declaration, self.bindings)
        return findings + judge_plan(step, step.groups(self.batches), parts)


def decoding(topology: Topology = ONE_GROUP) -> tuple[Scene, Declaration]:
    """``a`` has blocks 1, 2, 3 and ``b`` 4, 5, 6 in the first group; both decode their token 40, in slots 56 and 104.

    In further groups the blocks are 10, 20, … higher.
    """
    scene = Scene(topology)
    shift = [10 * index for index in range(len(topology.groups))]
    tables = {
        name: tuple([block + by for block in blocks] for by in shift)
        for name, blocks in (("a", [1, 2, 3]), ("b", [4, 5, 6]))
    }
    scene.say(new=[(name, blocks, 0, 40) for name, blocks in tables.items()])
    return scene, scene.say(known=[("a", None, 40, 1), ("b", None, 40, 1)])


def changed(change: Callable[[Plan], object], topology: Topology = ONE_GROUP) -> list[Finding]:
    """What a change of the sound plan of :func:`decoding` causes."""
    scene, declaration = decoding(topology)
    plan = scene.plan(declaration)
    change(plan)
    return scene.judge(declaration, plan)
