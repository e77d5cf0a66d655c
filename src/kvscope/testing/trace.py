"""Writes traces without an engine: a small scheduler hands out blocks, a small runner makes the plan that follows.

    builder = TraceBuilder(directory)
    builder.admit("r1", prompt_tokens=40)
    builder.step({"r1": 40})
    builder.step({"r1": 1}, damage_plan=lambda plan: plan.groups[0].slots.__setitem__(0, 3))
    builder.close()

Facts pass through the same bindings, rules, snapshots and codec as in a live process, so a finding stands in the trace
exactly when a live kvscope would have put it there. What a test wants to go wrong it says with ``damage_*`` (before
anything looks) or does to the file afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from kvscope.checks.catalog import RULES
from kvscope.checks.finding import Finding
from kvscope.checks.judge import (
    judge_batch,
    judge_bind,
    judge_dummy,
    judge_handover,
    judge_lifecycle,
    judge_plan,
    judge_result,
)
from kvscope.checks.plan_view import StepView
from kvscope.checks.rule import Part
from kvscope.config import CONFIG_KEYS
from kvscope.events.codec import (
    bind_record,
    dummy_record,
    enabled_record,
    operation_record,
    result_record,
    violation_record,
    worker_input_record,
    write_read_records,
)
from kvscope.events.envelope import Envelope
from kvscope.events.names import PLAIN, RequestNames
from kvscope.facts.allocator import CAUSE_FINISH, CAUSE_PREEMPT, PoolOperation
from kvscope.facts.plans import DummyRun, PersistentSlots, Plan
from kvscope.facts.requests import BlockIds, Declaration, Drafts, StepRequests, StepResult, Verification
from kvscope.facts.topology import FULL_ATTENTION, Group, Ranks, Topology
from kvscope.runtime.selection import judged_rows
from kvscope.runtime.snapshots import take_snapshot
from kvscope.state.batches import BatchTable
from kvscope.state.bindings import Bindings
from kvscope.state.blocks import BlockLedger
from kvscope.state.legality import Legality
from kvscope.state.lifecycle import Lifecycle
from kvscope.testing.drafts import BuiltDrafts
from kvscope.testing.plans import sound_plan
from kvscope.testing.pool import BuiltPool, allocation, release
from kvscope.testing.trace_file import TraceFile, coverage_of

TOPOLOGY = Topology(
    num_blocks=64,
    null_block_id=0,
    groups=(Group(group_id=0, kind=FULL_ATTENTION, block_size=16, kernel_block_size=16, layers=2),),
)
PARTS: tuple[Part, ...] = ("kv_trace", "kv_guard_config")


def behind_tokens(tokens: int, slots: tuple[int, ...]) -> PersistentSlots:
    """The rest of a slot buffer, which begins with these slots and is off otherwise."""
    indexes = np.arange(tokens, tokens + len(slots))
    return PersistentSlots(checked=64, indexes=indexes, slots=np.array(slots, np.int64))


def _undamaged(_fact: object) -> None:
    pass


class TraceBuilder:
    """One engine's run. ``ranks`` workers have files of their own; with ``in_process`` everything is in one file.

    ``directory`` is the run's folder; it is created. ``parts`` are the parts that judge. With ``observe_pool`` it
    records what the pool did, and results; ``observed`` has then the ledgers that live processes would have.
    """

    def __init__(
        self,
        directory: Path,
        *,
        topology: Topology = TOPOLOGY,
        ranks: int = 1,
        in_process: bool = False,
        full: bool = False,
        parts: Iterable[Part] = PARTS,
        names: RequestNames = PLAIN,
        configuration: Mapping[str, object] | None = None,
        observe_pool: bool = False,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.topology, self.parts, self.names, self._full = directory, topology, set(parts), names, full
        self.step_number = 0
        self.steps = self.rows = self.tokens = 0
        self.pool = list(range(1, topology.num_blocks))
        self.blocks: dict[str, list[list[int]]] = {}
        self._prompt: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        self._brought: dict[str, int] = {}
        self._preempted: set[str] = set()
        self._bindings = Bindings(topology)
        self._lifecycle = Lifecycle()
        self._worker_bindings = [Bindings(topology) for _ in range(1 if in_process else ranks)]
        self.observed = BuiltPool(topology, self._bindings, self._worker_bindings, self.parts) if observe_pool else None
        self._drafts = BuiltDrafts(len(self._worker_bindings), self.parts, names)
        self._batches = [[BatchTable(b, index) for index in self._judged()] for b in self._worker_bindings]
        run, group = directory.name, Ranks(dp=0)
        workers = [Ranks(dp=0, tp=rank, pp=0, world=rank) for rank in range(len(self._worker_bindings))]
        if in_process:
            self.engine = TraceFile(directory, "all", 0, 100, run, workers[0])
            self.workers = [self.engine]
        else:
            self.engine = TraceFile(directory, "engine", 0, 100, run, group)
            self.workers = [
                TraceFile(directory, "worker", rank, 200 + rank, run, ranks_) for rank, ranks_ in enumerate(workers)
            ]
        for stream in dict.fromkeys([self.engine, *self.workers]):
            stream.write(self._enabled(stream, dict(configuration or {})), "worker", "config")

    def admit(self, request_id: str, prompt_tokens: int) -> None:
        """A request arrives; nothing is recorded until a step schedules it."""
        self._prompt[request_id] = prompt_tokens

    def bring(self, request_id: str, tokens: int, block_ids: list[int]) -> None:
        """The request will come in with so many tokens computed, in these blocks of the first group; what the pool did
        for that is told by :meth:`pool_does`.
        """
        self.blocks[request_id] = [list(block_ids), *([] for _ in self.topology.groups[1:])]
        self.pool = [block for block in self.pool if block not in block_ids]
        self._brought[request_id] = tokens

    def declare(
        self,
        scheduled: Mapping[str, int],
        *,
        finished: Iterable[str] = (),
        preempted: Iterable[str] = (),
        drafts: Mapping[str, int] | None = None,
    ) -> Declaration:
        """The next step's declaration, with blocks for every scheduled token; ``drafts`` are so many of them."""
        self.step_number += 1
        gone, kicked = set(finished), set(preempted)
        for request_id in sorted(gone):
            self._release(request_id, step=self.step_number - 1, cause=CAUSE_FINISH)
        for request_id in sorted(kicked - gone):
            self._release(request_id, step=self.step_number, scheduling=True, cause=CAUSE_PREEMPT)
        self._preempted |= kicked
        requests = StepRequests(
            new_ids=[], new_blocks=[], new_computed=[], cached_ids=[], cached_blocks=[], cached_computed=[],
            resumed=set(), scheduled=dict(scheduled), finished=gone, preempted=kicked,
        )  # fmt: skip
        for request_id, tokens in scheduled.items():
            if request_id not in self._computed:
                computed = self._brought.pop(request_id, 0)
                self._grow(request_id, computed + tokens)
                requests.new_ids.append(request_id)
                requests.new_computed.append(computed)
                requests.new_blocks.append(tuple(list(table) for table in self.blocks[request_id]))
                self._computed[request_id] = computed + tokens
                continue
            if request_id in self._preempted:
                self._preempted.discard(request_id)
                requests.resumed.add(request_id)
                self._computed[request_id] = 0
            requests.cached_ids.append(request_id)
            requests.cached_computed.append(self._computed[request_id])
            delta = self._grow(request_id, self._computed[request_id] + tokens)
            requests.cached_blocks.append(delta if any(delta) else None)
            self._computed[request_id] += tokens
        return Declaration(
            step=self.step_number,
            trace_id=self._trace_id(self.step_number),
            requests=requests,
            new_prompt_tokens=[self._prompt.get(r, scheduled[r]) for r in requests.new_ids],
            cached_output_tokens=[0] * len(requests.cached_ids),
            spec_tokens=dict(drafts or {}),
            invalid_spec_tokens={},
            total_num_scheduled_tokens=sum(scheduled.values()),
            token_budget=None,
            zero_blocks=None,
            copies=None,
            connector_plan=None,
        )

    def step(
        self,
        scheduled: Mapping[str, int],
        *,
        finished: Iterable[str] = (),
        preempted: Iterable[str] = (),
        drafts: Mapping[str, int] | None = None,
        damage_declaration: Callable[[Declaration], None] = _undamaged,
        damage_received: Callable[[StepRequests], None] | None = None,
        received_drafts: Drafts | None = None,
        received_after: int | None = None,
        damage_plan: Callable[[Plan], None] = _undamaged,
        damage_counted: Callable[[Verification], None] = _undamaged,
        damage_result: Callable[[StepResult], StepResult] | None = None,
        comes_back: bool = True,
    ) -> Declaration:
        """One step through all processes: declared, handed over, planned, judged, written down. A step without work is
        only declared, and there is no result of it. Without ``comes_back`` the step is still on its way at the end.
        ``received_after`` is the step after which it arrives in a worker, if that is not the one before.
        """
        declaration = self.declare(scheduled, finished=finished, preempted=preempted, drafts=drafts)
        damage_declaration(declaration)
        if self.observed is not None:
            self.observed.hand_over(declaration)
        self._bindings.apply(declaration.requests)
        self.engine.write(bind_record(declaration, self.names), "scheduler", "scheduler.schedule")
        if self.observed is not None:
            now_ns = self.engine.clock(declaration.step)
            self._violations(self.engine, self.observed.declare(declaration, now_ns))
        self._violations(self.engine, self._drafts.declare(declaration))
        ledger = self.observed.scheduler.ledger if self.observed is not None else None
        self._violations(self.engine, judge_bind(declaration, self._bindings, self.parts, ledger))
        if self._lifecycle.take(declaration):
            self._violations(self.engine, judge_lifecycle(declaration, self._lifecycle, self.parts))
        for rank, stream in enumerate(self.workers):
            received = declaration.requests
            if damage_received is not None:
                received = received.copy()
                damage_received(received)
            self._run_worker(rank, stream, declaration, received, received_drafts, received_after, damage_plan)
            if declaration.spec_tokens:
                self._violations(stream, self._drafts.count(rank, stream, declaration, damage_counted))
        if declaration.is_empty:
            return declaration
        if damage_result is not None or (self.observed is not None and comes_back):
            self._return(declaration, damage_result)
        self.steps += 1
        self.rows += len(scheduled) * len(self._judged())
        self.tokens += sum(scheduled.values())
        return declaration

    def pool_does(self, operation: PoolOperation) -> None:
        """The pool does something. Without ``observe_pool`` nobody sees it."""
        if self.observed is None:
            return
        trace_id = self._trace_id(operation.step)
        findings = self.observed.take(operation, trace_id, self.engine.clock(operation.step))
        record = operation_record(operation, self.names)
        if operation.scheduling:
            record.trace_id = trace_id
        self.engine.write(record, "allocator", f"pool.{operation.kind}", after=operation.step)
        self._violations(self.engine, findings)

    def dummy(self, slots: Mapping[int, list[int]], *, behind: tuple[int, ...] = (), warm_up: bool = False) -> None:
        """A run that serves no request, after the last step, in every worker. ``behind`` are slots of the first group
        that stand at the beginning of the rest of its buffer.
        """
        arrays = {group: np.array(values, np.int64) for group, values in slots.items()}
        tokens = max(map(len, slots.values()))
        persistent = {group: behind_tokens(tokens, () if group else behind) for group in slots}
        run = DummyRun(slots=arrays, num_tokens=tokens, persistent=persistent, warm_up=warm_up)
        for rank, stream in enumerate(self.workers):
            stream.write(dummy_record(run), "runner", "runner_v1.dummy", after=self.step_number)
            ledger, _ = self._sides(rank)
            bindings = self._worker_bindings[rank]
            self._violations(stream, judge_dummy(run, self.step_number, bindings, self.parts, ledger=ledger))

    def wait(self, seconds: float) -> None:
        """Nothing happens for so long."""
        for stream in dict.fromkeys([self.engine, *self.workers]):
            stream.waited_ns += int(seconds * 1e9)

    def close(self, *, coverage: bool = True) -> Path:
        """End the run. Without ``coverage`` it ends as if its processes had been killed."""
        for stream in dict.fromkeys([self.engine, *self.workers]):
            if coverage:
                totals = {"steps": self.steps, "rows": self.rows, "tokens": self.tokens}
                record = coverage_of(stream, stream is self.engine, stream in self.workers, **totals)
                stream.write(record, "worker", "shutdown", after=self.step_number)
            stream.close()
        return self.directory

    def _run_worker(
        self,
        rank: int,
        stream: TraceFile,
        declaration: Declaration,
        received: StepRequests,
        drafts: Drafts | None,
        previous: int | None,
        damage_plan: Callable[[Plan], None],
    ) -> None:
        bindings = self._worker_bindings[rank]
        if self.observed is not None:
            self.observed.receive(rank, declaration)
        bindings.apply(declaration.requests)
        if self.observed is not None:
            self.observed.carry_out(rank, declaration)
        if declaration.is_empty and received == declaration.requests:
            return
        record = worker_input_record(received, declaration.requests, self.names, drafts=drafts, previous_step=previous)
        record.trace_id = declaration.trace_id
        stream.write(record, "worker", "worker.execute", step=declaration.step)
        self._violations(stream, judge_handover(declaration, received, self.parts, drafts, previous))
        plan = sound_plan(declaration, bindings)
        damage_plan(plan)
        findings = self._drafts.plan(rank, declaration, plan)
        findings += judge_batch(declaration, plan, self.parts)
        view = StepView(judged_rows(plan, declaration, bindings), declaration, bindings, *self._sides(rank))
        groups = view.groups(self._batches[rank])
        sizes = {group.group_id: group.block_size for group in self.topology.groups}
        snapshot = take_snapshot(view, groups, spell_tables=self._full)
        for record_ in write_read_records(snapshot, self.names, full=self._full, block_sizes=sizes):
            stream.write(record_, "runner", "runner_v1.slots")
        self._violations(stream, findings + judge_plan(view, groups, self.parts))

    def _sides(self, rank: int) -> tuple[BlockLedger, Legality] | tuple[None, None]:
        """What a worker knows of the pool."""
        if self.observed is None:
            return None, None
        legality = self.observed.workers[rank]
        return legality.ledger, legality

    def _judged(self) -> list[int]:
        return [index for index, group in enumerate(self.topology.groups) if group.judged]

    def _violations(self, stream: TraceFile, findings: list[Finding]) -> None:
        for finding in findings:
            record = violation_record(finding, RULES[finding.reason], "log", 0, self.names)
            stream.write(record, "worker", "judge", step=finding.step)

    def _return(self, declaration: Declaration, damage: Callable[[StepResult], StepResult] | None) -> None:
        ids = tuple(declaration.requests.scheduled)
        result = StepResult(request_ids=ids, sampled_tokens=(1,) * len(ids))
        result = result if damage is None else damage(result)
        record = result_record("update_input", result, self.names)
        record.trace_id = declaration.trace_id
        self.engine.write(record, "scheduler", "update_input", step=declaration.step)
        self._lifecycle.confirm(declaration, result)
        self._violations(self.engine, judge_result(declaration, result, self.parts))
        if self.observed is not None:
            self.observed.confirm(declaration, result)

    def _trace_id(self, step: int) -> str:
        return f"{self.directory.name}-{step:x}"

    def _grow(self, request_id: str, tokens: int) -> BlockIds:
        tables = self.blocks.setdefault(request_id, [[] for _ in self.topology.groups])
        delta: list[list[int]] = []
        for table, group in zip(tables, self.topology.groups, strict=True):
            missing = max(-(-tokens // group.block_size) - len(table), 0)
            taken, self.pool = self.pool[:missing], self.pool[missing:]
            if taken:
                self.pool_does(allocation(request_id, group.group_id, len(table), taken, step=self.step_number))
            table.extend(taken)
            delta.append(taken)
        return tuple(delta)

    def _release(self, request_id: str, *, step: int, cause: str, scheduling: bool = False) -> None:
        blocks = [block for table in self.blocks.pop(request_id, []) for block in table]
        self.pool.extend(blocks)
        if blocks:
            self.pool_does(release(request_id, blocks[::-1], step=step, cause=cause, scheduling=scheduling))

    def _enabled(self, stream: TraceFile, configuration: dict[str, object]) -> Envelope:
        return enabled_record(
            run_id=self.directory.name,
            process=stream.process,
            pid=stream.pid,
            configuration=configuration,
            parts={key: "on" if key in self.parts else "off" for key in CONFIG_KEYS[:4]},
            actions=dict.fromkeys(sorted(self.parts), "log"),
            seams_installed=["scheduler.schedule"] if stream is self.engine else ["worker.execute", "runner_v1.slots"],
            topology=self.topology,
            vllm_version="0.32.0",
            platform_version="cpu 0.32.0",
            runner="v1",
            rank=stream.rank,
        )
