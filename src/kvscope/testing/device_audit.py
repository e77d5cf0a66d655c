"""The audit of tensors on a device, on the device of this machine: `python -m kvscope.testing.device_audit`.

No vLLM and no model: a runner of a few lines has torch tensors where vLLM's has its own, and a forward that writes and
reads a paged cache is captured into a graph and replayed. Around it runs what serves an engine: the same adapter, the
same clones, the same observer and rules. Two steps are on their way at a time; in one a slot is wrong; and after every
forward the slot buffer is overwritten, as a speculator does. The whole is run again with nothing observed.

On a machine without an accelerator it says `not run: no accelerator`; `--host` runs it there, without a device's speed
and without a graph, on the stand-in that the tests use.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import msgspec

from kvscope.boundary import runner_v1
from kvscope.boundary.device import CLONES, Accelerator, CloneRing, Device, HostDevice, clone_bytes_of
from kvscope.boundary.ledger import Ledger
from kvscope.config import parse
from kvscope.facts.requests import Declaration, StepRequests, StepResult
from kvscope.facts.topology import FULL_ATTENTION, Group, Ranks, Topology
from kvscope.plugin import LedgerBook
from kvscope.runtime.deferred import DeferredJudge, Due
from kvscope.runtime.engine import EngineJudge
from kvscope.runtime.run import Run
from kvscope.runtime.worker import WorkerJudge

NOT_RUN = "not run: no accelerator"
BLOCK_SIZE, PROMPT_TOKENS, FEATURES = 16, 40, 64
STEPS_ON_THEIR_WAY = 2
PLANTED = "write_target_mismatch"
_GRAPHS = ("CUDAGraph", "NPUGraph", "XPUGraph")


class Outcome(msgspec.Struct, kw_only=True):
    """What one run measured. Times are medians, of the host, per step; `busy_steps` are those whose launch was over,
    clone included, while the device still worked. `checksum` is over the cache and all that the forwards gave.
    """

    steps: int = 0
    replayed: int = 0
    rows_scheduled: int = 0
    rows: int = 0
    skipped: dict[str, int] = {}
    captures_skipped: int = 0
    findings: list[tuple[str, int]] = []
    clone_bytes: int = 0
    clone_us: float = 0.0
    audit_us: float = 0.0
    busy_steps: int = 0
    total_s: float = 0.0
    checksum: float = 0.0


class Runner:
    """Has its tensors by the names that vLLM's runner V1 has for them, so that its adapter can read them.

    Every request has its whole table from the start; `tables` are the blocks on the host.
    """

    use_async_spec_decode = False

    def __init__(self, torch: Any, device: Any, requests: int, steps: int) -> None:
        self._torch, self._device = torch, device
        blocks_each = -(-(PROMPT_TOKENS + steps) // BLOCK_SIZE)
        self.num_blocks = requests * blocks_each + 1
        order = torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.tables: list[list[int]] = order[: requests * blocks_each].view(requests, blocks_each).tolist()
        tokens = requests * PROMPT_TOKENS
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(requests, dtype=torch.int32, device=device)
        self.optimistic_seq_lens_cpu = torch.zeros(requests, dtype=torch.int32)
        self.query_start_loc = SimpleNamespace(gpu=torch.zeros(requests + 1, dtype=torch.int32, device=device))
        table = SimpleNamespace(
            block_size=BLOCK_SIZE,
            block_table=SimpleNamespace(gpu=torch.tensor(self.tables, dtype=torch.int32, device=device)),
            num_blocks_per_row=torch.full((requests,), blocks_each, dtype=torch.int32).numpy(),
            slot_mapping=SimpleNamespace(gpu=torch.full((tokens,), -1, dtype=torch.int64, device=device)),
        )
        self.input_batch = SimpleNamespace(
            num_reqs=requests,
            req_ids=[f"request-{index}" for index in range(requests)],
            block_table=SimpleNamespace(block_tables=[table]),
        )
        self._rows = torch.arange(requests, device=device)
        generator = torch.Generator().manual_seed(1)
        self._weights = (torch.randn(FEATURES, FEATURES, generator=generator) / FEATURES**0.5).to(device)
        self.cache = torch.zeros(self.num_blocks * BLOCK_SIZE, FEATURES, device=device)
        self._rounds = 4 if device.type == "cpu" else 400  # a device is to be busy for longer than the host launches
        self.given = torch.zeros(requests, FEATURES, device=device)

    @property
    def slots(self) -> Any:
        """The slot of every token, as far as the largest batch goes."""
        return self.input_batch.block_table.block_tables[0].slot_mapping.gpu

    @property
    def blocks(self) -> Any:
        """The block table of every row."""
        return self.input_batch.block_table.block_tables[0].block_table.gpu

    def prepare(self, computed: int, each: int) -> int:
        """Positions, lengths and slots of a step in which every request has `each` tokens; how many that are."""
        torch, requests = self._torch, len(self.tables)
        tokens = requests * each
        self.query_start_loc.gpu.copy_(torch.arange(requests + 1, device=self._device) * each)
        offsets = torch.arange(each, device=self._device).repeat(requests)
        self.positions[:tokens] = computed + offsets
        self.seq_lens.fill_(computed + each)
        self.optimistic_seq_lens_cpu.fill_(computed + each)
        rows, positions = self._rows.repeat_interleave(each), self.positions[:tokens]
        self.slots[:tokens] = self.blocks[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        return tokens

    def forward(self, tokens: int) -> None:
        """Write every token into its slot, read all blocks of every row through its table, and go on from there."""
        positions = self.positions[:tokens, None].float()
        written = self._torch.sin(positions * self._weights[0] + self._weights[1])
        self.cache.index_copy_(0, self.slots[:tokens], written)
        blocks = self.cache.view(self.num_blocks, BLOCK_SIZE, FEATURES)[self.blocks.long()]
        attended = blocks.flatten(1, 2).sum(1) / self.seq_lens[:, None]
        for _ in range(self._rounds):
            attended = self._torch.tanh(attended @ self._weights)
        self.given += attended

    def speculate(self) -> None:
        """Reuse the slot buffer, as a speculator does for its own forwards."""
        self.slots.fill_(-7)


class Engine:
    """The scheduler's side and the observers; `device` None: nothing is observed."""

    def __init__(self, runner: Runner, device: Device | None, folder: Path) -> None:
        self.runner = runner
        self.observer: DeferredJudge | None = None
        if device is None:
            return
        part = {"enabled": True, "action": "log"}
        config = parse({"kv_trace": part, "kv_output": {"dir": str(folder), "log": "off"}}, {})
        group = Group(group_id=0, kind=FULL_ATTENTION, block_size=BLOCK_SIZE, kernel_block_size=None, layers=1)
        topology = Topology(num_blocks=runner.num_blocks, null_block_id=0, groups=(group,))
        self.run = Run("device-audit", config, LedgerBook(Ledger()), (None, None))
        self.run.roles.update(("engine", "worker"))
        self.run.topology, self.run.ranks = topology, Ranks(dp=0, tp=0, pp=0, world=0)
        self.ring = CloneRing(device, clone_bytes_of(runner_v1.whole_plan(runner)), STEPS_ON_THEIR_WAY + 2)
        self.run.device_clone_bytes = self.ring.device_bytes
        setattr(runner, CLONES, self.ring)
        self.run.open()
        self.scheduler = EngineJudge(self.run, topology)
        judge = WorkerJudge(self.run, returns_results=True)
        judge.bind_topology(topology)
        self.observer = DeferredJudge(judge, self.run, returns_results=True)

    def declare(self, computed: int, each: int) -> None:
        """Say what the next step is, to the scheduler's observer and to the worker's."""
        if self.observer is None:
            return
        self.scheduler.on_schedule_begin()
        step, trace_id = self.scheduler.next_step()
        names = self.runner.input_batch.req_ids
        known = [] if step == 1 else list(names)
        fresh = [] if known else list(names)
        requests = StepRequests(
            new_ids=fresh,
            new_blocks=[(list(self.runner.tables[row]),) for row in range(len(fresh))],
            new_computed=[computed] * len(fresh),
            cached_ids=known,
            cached_blocks=[None] * len(known),
            cached_computed=[computed] * len(known),
            resumed=set(),
            scheduled=dict.fromkeys(names, each),
            finished=set(),
            preempted=set(),
        )
        declaration = Declaration(
            step=step,
            trace_id=trace_id,
            requests=requests,
            new_prompt_tokens=[PROMPT_TOKENS] * len(fresh),
            cached_output_tokens=[0] * len(known),
            spec_tokens={},
            invalid_spec_tokens={},
            total_num_scheduled_tokens=each * len(names),
            token_budget=None,
            zero_blocks=None,
            copies=None,
            connector_plan=None,
        )
        self.scheduler.on_schedule(declaration)
        self.observer.on_input(declaration, requests)

    def hand_over(self, tokens: int) -> None:
        """The seam: slots and tables are final, the forward has not been launched."""
        if self.observer is not None:
            result = ({0: self.runner.slots[:tokens]}, None)
            runner_v1.after_slot_mappings(self.observer, self.runner, (), {"num_tokens_unpadded": tokens}, result)

    def launched(self) -> Due | None:
        """The step is launched, and its result on its way."""
        if self.observer is None:
            return None
        self.observer.on_launched()
        names = tuple(self.runner.input_batch.req_ids)
        self.observer.on_result(StepResult(request_ids=names, sampled_tokens=(None,) * len(names)))
        return self.observer.due()

    def close(self, outcome: Outcome) -> None:
        """Add what was audited to the outcome."""
        if self.observer is None:
            return
        self.observer.drain()
        coverage = self.run.coverage
        outcome.rows_scheduled, outcome.rows = coverage.rows_scheduled, coverage.rows
        outcome.skipped = {cause: count for (check, cause), count in coverage.skipped.items() if check == "plan"}
        outcome.findings = [(reason, tally.first_step) for (reason, _), tally in coverage.findings.items()]
        outcome.clone_bytes = self.ring.device_bytes
        self.run.close()


def capture(torch: Any, device: Any, launch: Callable[[], None], inside: Callable[[], None]) -> Callable[[], None]:
    """`launch` as a captured graph, to be replayed; `inside` runs within the capture. On a host: `launch` itself."""
    module = torch.get_device_module(device)
    name = next((name for name in _GRAPHS if hasattr(module, name)), None)
    if device.type == "cpu" or name is None:
        return launch
    graph = getattr(module, name)()
    with module.graph(graph):
        launch()
        inside()
    replay: Callable[[], None] = graph.replay
    return replay


def audited(torch: Any, device: Any, audit: Device | None, *, requests: int, steps: int, planted_at: int) -> Outcome:
    """One run of `steps` steps, the first of which computes the prompts; in step `planted_at` a slot is wrong."""
    outcome, host = Outcome(steps=steps), device.type == "cpu"
    runner = Runner(torch, device, requests, steps)
    clone_ns: list[int] = []
    audit_ns: list[int] = []
    way: deque[tuple[Due | None, Any]] = deque()

    def take_result() -> None:
        due, event = way.popleft()
        if event is not None:
            event.synchronize()
        began = perf_counter_ns()
        if due is not None:
            due.settle()
            audit_ns.append(perf_counter_ns() - began)

    with tempfile.TemporaryDirectory(prefix="kvscope-device-audit-") as folder:
        engine = Engine(runner, audit, Path(folder))
        replay = _graph(torch, device, runner, engine, outcome)
        began = perf_counter_ns()
        for step in range(1, steps + 1):
            computed, each = (0, PROMPT_TOKENS) if step == 1 else (PROMPT_TOKENS + step - 2, 1)
            engine.declare(computed, each)
            tokens = runner.prepare(computed, each)
            if step == planted_at:
                runner.slots[1] += 1
            before = perf_counter_ns()
            engine.hand_over(tokens)
            clone_ns.append(perf_counter_ns() - before)
            if step == 1:
                runner.forward(tokens)
            else:
                replay()
                outcome.replayed += not host
            runner.speculate()
            event = None if host else torch.accelerator.current_stream(device).record_event()
            outcome.busy_steps += event is not None and not event.query()
            way.append((engine.launched(), event))
            if len(way) > STEPS_ON_THEIR_WAY:
                take_result()
        while way:
            take_result()
        outcome.total_s = (perf_counter_ns() - began) / 1e9
        engine.close(outcome)
    outcome.clone_us, outcome.audit_us = median(clone_ns) / 1e3, median(audit_ns or [0]) / 1e3
    outcome.checksum = float(runner.cache.double().sum() + runner.given.double().sum())
    return outcome


def _graph(torch: Any, device: Any, runner: Runner, engine: Engine, outcome: Outcome) -> Callable[[], None]:
    """The decoding forward, captured while nothing of it counts; a plan that is handed over meanwhile is skipped."""
    requests = runner.input_batch.num_reqs
    cause: list[str] = []
    seam = SimpleNamespace(
        expects_no_plan=False, reads_host_tensors=False, on_plan_skipped=cause.append, make_room=lambda: None
    )

    def inside() -> None:
        if engine.observer is not None:
            result = ({0: runner.slots[:requests]}, None)
            runner_v1.after_slot_mappings(seam, runner, (), {"num_tokens_unpadded": requests}, result)

    runner.prepare(PROMPT_TOKENS, 1)
    runner.forward(requests)  # libraries choose their kernels in the first call, which no graph may hold
    replay = capture(torch, device, lambda: runner.forward(requests), inside)
    runner.cache.zero_()
    runner.given.zero_()
    outcome.captures_skipped = cause.count("graph_capture")
    return replay


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and say what was measured; 0, or 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m kvscope.testing.device_audit", description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--host", action="store_true", help="without an accelerator: on host tensors, without a graph")
    options = parser.parse_args(arguments)
    import torch

    device = torch.device("cpu")
    audit: Device = HostDevice()
    if not options.host:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None:
            _say(NOT_RUN)
            return 0
        device = torch.device(accelerator.type, 0)
        audit = Accelerator(device)
    planted_at = options.steps // 2
    planted_at -= (PROMPT_TOKENS + planted_at - 2) % BLOCK_SIZE == BLOCK_SIZE - 1  # the slot behind is in the block
    audited(torch, device, audit, requests=options.requests, steps=8, planted_at=4)  # the first run of anything is slow
    with_audit = audited(torch, device, audit, requests=options.requests, steps=options.steps, planted_at=planted_at)
    without = audited(torch, device, None, requests=options.requests, steps=options.steps, planted_at=planted_at)
    _say(f"device: {_name(torch, device)}, torch {torch.__version__}", *_measured(with_audit, without))
    mistakes = _mistakes(with_audit, without, planted_at, host=options.host)
    _say(*(f"MISTAKE: {mistake}" for mistake in mistakes))
    return 1 if mistakes else 0


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _name(torch: Any, device: Any) -> str:
    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", None)
    return str(name(device.index)) if name is not None else str(device)


def _mistakes(outcome: Outcome, without: Outcome, planted_at: int, *, host: bool) -> list[str]:
    wanted = {
        f"rows audited: {outcome.rows} of {outcome.rows_scheduled}": outcome.rows == outcome.rows_scheduled > 0,
        f"skipped: {outcome.skipped}": not outcome.skipped,
        f"found {outcome.findings}, planted in step {planted_at}": outcome.findings == [(PLANTED, planted_at)],
        "the outputs differ with and without the audit": outcome.checksum == without.checksum,
        "nothing was replayed": host or outcome.replayed == outcome.steps - 1,
        "a plan inside a capture was not skipped": host or outcome.captures_skipped == 1,
    }
    return [text for text, holds in wanted.items() if not holds]


def _measured(outcome: Outcome, without: Outcome) -> list[str]:
    found = ", ".join(f"{reason} in step {step}" for reason, step in outcome.findings) or "none"
    return [
        f"clones: {outcome.clone_bytes} bytes on the device",
        f"steps: {outcome.steps}, {outcome.replayed} of them replayed from a graph",
        f"rows: {outcome.rows} audited of {outcome.rows_scheduled}, skipped {outcome.skipped or 'none'}",
        f"findings: {found}",
        f"inside a capture: {outcome.captures_skipped} counted as graph_capture",
        f"launch: {outcome.clone_us:.1f} us a step for the clone, device busy after {outcome.busy_steps} launches",
        f"audit: {outcome.audit_us:.1f} us a step, when the result was taken",
        f"time: {outcome.total_s:.3f} s with the audit, {without.total_s:.3f} s without",
        f"outputs equal with and without: {'yes' if outcome.checksum == without.checksum else 'no'}",
    ]


if __name__ == "__main__":
    sys.exit(main())
