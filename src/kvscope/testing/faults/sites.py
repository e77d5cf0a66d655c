"""The places in the host where faults go in, for vLLM 0.32. None of them is a seam of kvscope.

Worker side, V1 (`v1/worker/gpu_model_runner.py`, `GPUModelRunner`): after `_prepare_inputs`; padding and dummy runs in
`padding`. Worker side, V2 (`v1/worker/gpu/model_runner.py` and `block_table.py`): after `GPUModelRunner.prepare_inputs`
and after `BlockTables.compute_slot_mappings`. The step is over when the next one begins, with `_update_states` (V1) or
`finish_requests` (V2). Scheduler side: before `Scheduler._update_after_schedule`, and around `execute_model` of the
executors, or, for one rank alone, around `WorkerProc._execute_worker_rpc` (`v1/executor/multiproc_executor.py`).
"""

from typing import Any

from kvscope.testing.faults.hooks import Around, Hook
from kvscope.testing.faults.injection import Injection
from kvscope.testing.faults.message_faults import DECLARATION_FAULTS, HANDOVER_FAULTS, Handover
from kvscope.testing.faults.plan import Plan, PlanV1, PlanV2
from kvscope.testing.faults.plan_faults import PLAN_FAULTS, History


def hooks(injection: Injection) -> list[Hook]:
    """Wrap what the fault needs. A host that lacks one of the functions is a LookupError, with nothing left wrapped."""
    from kvscope.testing.faults.padding import DUMMY_FAULT, PADDING_FAULT, dummy_sites, padding_sites

    if injection.fault.name == PADDING_FAULT:
        sites = padding_sites(injection)
    elif injection.fault.name == DUMMY_FAULT:
        sites = dummy_sites(injection)
    elif injection.fault.point == "plan":
        sites = _plan_sites(injection)
    elif injection.fault.point == "declaration":
        sites = _declaration_sites(injection)
    else:
        sites = _handover_sites(injection)
    wrapped: list[Hook] = []
    try:
        for owner, name, around in sites:
            wrapped.append(Hook(owner, name, around))
    except BaseException:
        for hook in reversed(wrapped):
            hook.remove()
        raise
    return wrapped


Sites = list[tuple[Any, str, Around]]


def rank_of(runner: Any) -> int:
    """The worker's rank in its engine (`WorkerBase.__init__` stores it there)."""
    return int(runner.vllm_config.parallel_config.rank)


def is_warm_up(scheduler_output: Any) -> bool:
    """Whether the worker made this step up itself (`v1/worker/gpu/warmup.py`); those have ids of their own."""
    return any(
        request_id.startswith(("_warmup_", "_v2_mixed_")) for request_id in scheduler_output.num_scheduled_tokens
    )


def step_ends(injection: Injection) -> Sites:
    """The end of the corrupted step, as the beginning of the next one."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    def begin(original: Any, *args: Any, **kwargs: Any) -> Any:
        injection.undo.run()
        return original(*args, **kwargs)

    return [(RunnerV1, "_update_states", begin), (RunnerV2, "finish_requests", begin)]


def _plan_sites(injection: Injection) -> Sites:
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    fault = PLAN_FAULTS[injection.fault.name]
    history: History = {}
    # Between the two places of the V2 runner: whose step it is.
    open_step: list[tuple[Any, Any, Any]] = []

    def visit(plan: Plan, stage: str) -> None:
        if stage == fault.stage and injection.due:
            injection.fire(fault.inject(plan, history), rank=rank_of(plan.runner), runner=plan.name)
        if stage == "final":
            history.update({row.request_id: plan.visible(row) for row in plan.rows})

    def around_v1(original: Any, runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, scheduler_output, *args, **kwargs)
        if injection.concerns(rank_of(runner)) and not is_warm_up(scheduler_output):
            injection.steps += 1
            plan = PlanV1(runner, scheduler_output, injection.group_id, injection.undo)
            visit(plan, "inputs")
            visit(plan, "final")
        return result

    def around_inputs_v2(original: Any, runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        batch = original(runner, scheduler_output, *args, **kwargs)
        open_step.clear()
        if injection.concerns(rank_of(runner)) and not is_warm_up(scheduler_output):
            injection.steps += 1
            open_step.append((runner, scheduler_output, batch))
            plan = PlanV2(runner, scheduler_output, injection.group_id, injection.undo, batch=batch, gathered=False)
            visit(plan, "inputs")
        return batch

    def around_slots_v2(original: Any, tables: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tables, *args, **kwargs)
        # A speculator's own calls come later in the step, when it is no longer open.
        if open_step and open_step[0][0].block_tables is tables:
            runner, scheduler_output, batch = open_step.pop()
            plan = PlanV2(runner, scheduler_output, injection.group_id, injection.undo, batch=batch, gathered=True)
            visit(plan, "final")
        return result

    return [
        *step_ends(injection),
        (RunnerV1, "_prepare_inputs", around_v1),
        (RunnerV2, "prepare_inputs", around_inputs_v2),
        (BlockTables, "compute_slot_mappings", around_slots_v2),
    ]


def _declaration_sites(injection: Injection) -> Sites:
    from vllm.v1.core.sched.scheduler import Scheduler

    inject = DECLARATION_FAULTS[injection.fault.name]

    def around(original: Any, scheduler: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            injection.steps += 1
            if injection.due:
                injection.fire(inject(scheduler, scheduler_output, injection.group_id))
        return original(scheduler, scheduler_output, *args, **kwargs)

    return [(Scheduler, "_update_after_schedule", around)]


def _handover_sites(injection: Injection) -> Sites:
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    inject = HANDOVER_FAULTS[injection.fault.name]
    late_finished: set[str] = set()

    def sent(scheduler_output: Any, rank: int | None) -> Any:
        """What arrives instead of an output."""
        if late_finished:
            handover = Handover(scheduler_output, injection.group_id, injection.attribute)
            handover.output.finished_req_ids = set(scheduler_output.finished_req_ids) | late_finished
            late_finished.clear()
            scheduler_output = handover.output
        if not scheduler_output.total_num_scheduled_tokens:
            return scheduler_output
        injection.steps += 1
        if not injection.due:
            return scheduler_output
        handover = Handover(scheduler_output, injection.group_id, injection.attribute)
        what = inject(handover)
        injection.fire(what, rank=rank)
        late_finished.update(handover.late_finished)
        return scheduler_output if what is None else handover.output

    def around_executor(original: Any, executor: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        alone = isinstance(executor, UniProcExecutor) and injection.concerns(0)
        if alone or injection.rank is None:
            scheduler_output = sent(scheduler_output, 0 if alone else None)
        return original(executor, scheduler_output, *args, **kwargs)

    def around_rpc(original: Any, worker: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        method, rpc_args, *rest = request
        if injection.rank == worker.rank and method == "execute_model":
            request = (method, (sent(rpc_args[0], worker.rank), *rpc_args[1:]), *rest)
        return original(worker, request, *args, **kwargs)

    # Subclasses that override it do not call the base class's.
    executors = [owner for owner in (Executor, UniProcExecutor, MultiprocExecutor) if "execute_model" in vars(owner)]
    return [
        *((owner, "execute_model", around_executor) for owner in executors),
        (WorkerProc, "_execute_worker_rpc", around_rpc),
    ]
