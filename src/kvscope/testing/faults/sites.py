"""The places in the host where faults go in, for vLLM 0.32. None of them is a seam of kvscope.

Worker side: `plan_sites`, and for padding and dummy runs `padding`. Scheduler side: before
`Scheduler._update_after_schedule`; around `execute_model` of the executors, or, for one rank alone, around
`WorkerProc._execute_worker_rpc` (`v1/executor/multiproc_executor.py`); and around `sample_tokens` of the executors for
results. For the allocator and a connector `story`.
"""

from collections.abc import Callable
from typing import Any

from kvscope.testing.faults.connector_faults import CONNECTOR_STORIES
from kvscope.testing.faults.draft_faults import draft_sites
from kvscope.testing.faults.hooks import Around, Hook
from kvscope.testing.faults.injection import Injection
from kvscope.testing.faults.message_faults import DECLARATION_FAULTS, HANDOVER_FAULTS, Handover
from kvscope.testing.faults.operator_faults import operator_sites
from kvscope.testing.faults.plan import Plan
from kvscope.testing.faults.plan_faults import PLAN_FAULTS, History
from kvscope.testing.faults.plan_sites import Sites, Stage, plan_sites, rank_of, step_ends
from kvscope.testing.faults.result_faults import RESULT_FAULTS
from kvscope.testing.faults.stories import STORIES
from kvscope.testing.faults.story import story_sites
from kvscope.testing.faults.untold_faults import LOST_STEP, UNTOLD_FAULTS, Undo, schedule_nothing


def hooks(injection: Injection) -> list[Hook]:
    """Wrap what the fault needs. A host that lacks one of the functions is a LookupError, with nothing left wrapped."""
    name, point = injection.fault.name, injection.fault.point
    sites = (_BY_NAME.get(name) or _BY_POINT[point])(injection)
    wrapped: list[Hook] = []
    try:
        for owner, name, around in sites:
            wrapped.append(Hook(owner, name, around))
    except BaseException:
        for hook in reversed(wrapped):
            hook.remove()
        raise
    return wrapped


def _plan_sites(injection: Injection) -> Sites:
    fault = PLAN_FAULTS[injection.fault.name]
    history: History = {}

    def visit(plan: Plan, stage: Stage) -> None:
        if stage == "inputs":
            injection.steps += 1
        if stage == fault.stage and injection.due:
            injection.fire(fault.inject(plan, history), rank=rank_of(plan.runner), runner=plan.name)
        if stage == "final":
            history.update({row.request_id: plan.visible(row) for row in plan.rows})

    return [*step_ends(injection), *plan_sites(injection, visit)]


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


def _untold_sites(injection: Injection) -> Sites:
    inject = UNTOLD_FAULTS[injection.fault.name]
    ended: set[str] = set()
    put_right: list[Undo] = []

    def behind(scheduler: Any, output: Any) -> None:
        ended.update(output.finished_req_ids)
        if output.total_num_scheduled_tokens:
            injection.steps += 1
            # One token more must not be beyond the budget as well, or two things are wrong.
            has_room = output.total_num_scheduled_tokens < scheduler.max_num_scheduled_tokens
            if has_room and injection.due and (done := inject(scheduler, output, ended)) is not None:
                injection.fire({"group_id": None} | done[0])
                put_right.append(done[1])

    def around_executor(original: Any, executor: Any, *args: Any, **kwargs: Any) -> Any:
        while put_right:
            put_right.pop()()
        return original(executor, *args, **kwargs)

    return [*_scheduled(behind), *_executors("execute_model", around_executor)]


def _lost_step_sites(injection: Injection) -> Sites:
    """The step without work is scheduled while the one before it is on its way, so that nothing but its number goes."""
    schedulers: list[Any] = []
    lost: list[Any] = []

    def behind(scheduler: Any, _output: Any) -> None:
        schedulers[:] = [scheduler]

    def around_executor(original: Any, executor: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            injection.steps += 1
            if lost:
                injection.fire({"group_id": None})
                lost.clear()
            elif schedulers and injection.due:
                lost.append(schedule_nothing(schedulers[0]))
        return original(executor, scheduler_output, *args, **kwargs)

    return [*_scheduled(behind), *_executors("execute_model", around_executor)]


def _scheduled(behind: Callable[[Any, Any], None]) -> Sites:
    """`behind(scheduler, output)` is called when an output is complete, once for each."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    depth: list[None] = []

    def around(original: Any, scheduler: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        depth.append(None)
        try:
            result = original(scheduler, scheduler_output, *args, **kwargs)
        finally:
            depth.pop()
        if not depth:
            behind(scheduler, scheduler_output)
        return result

    return [(owner, "_update_after_schedule", around) for owner in (Scheduler, AsyncScheduler)]


def _handover_sites(injection: Injection) -> Sites:
    from vllm.v1.executor.multiproc_executor import WorkerProc
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

    return [*_executors("execute_model", around_executor), (WorkerProc, "_execute_worker_rpc", around_rpc)]


def _executors(name: str, around: Around) -> Sites:
    """A method of every executor that has its own: subclasses that override it do not call the base class's."""
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    owners: tuple[type, ...] = (Executor, UniProcExecutor, MultiprocExecutor)
    return [(owner, name, around) for owner in owners if name in vars(owner)]


def _result_sites(injection: Injection) -> Sites:
    from vllm.v1.outputs import ModelRunnerOutput

    inject = RESULT_FAULTS[injection.fault.name]
    before: list[Any] = [None]

    def around(original: Any, executor: Any, *args: Any, **kwargs: Any) -> Any:
        result = given = original(executor, *args, **kwargs)
        if isinstance(result, ModelRunnerOutput) and result.req_ids:
            injection.steps += 1
            if injection.due:
                given, what = inject(result, before[0])
                injection.fire(what)
            before[0] = result
        return given

    return _executors("sample_tokens", around)


def _worker_sites(injection: Injection) -> Sites:
    """What is in the runner's own hands, by the modules that know its objects."""
    from kvscope.testing.faults.group_faults import GROUP_FAULT, group_sites
    from kvscope.testing.faults.padding import PADDING_FAULT, dummy_sites, padding_sites

    if injection.fault.point == "dummy":
        return dummy_sites(injection)
    if injection.fault.name == GROUP_FAULT:
        return group_sites(injection)
    return padding_sites(injection) if injection.fault.name == PADDING_FAULT else _plan_sites(injection)


_BY_NAME: dict[str, Callable[[Injection], Sites]] = {
    LOST_STEP: _lost_step_sites,
    **dict.fromkeys(UNTOLD_FAULTS, _untold_sites),
}
_BY_POINT: dict[str, Callable[[Injection], Sites]] = {
    "plan": _worker_sites,
    "dummy": _worker_sites,
    "operator": operator_sites,
    "declaration": _declaration_sites,
    "handover": _handover_sites,
    "drafts": draft_sites,
    "result": _result_sites,
    "allocator": lambda injection: story_sites(injection, STORIES[injection.fault.name]),
    "connector": lambda injection: story_sites(injection, CONNECTOR_STORIES[injection.fault.name]),
}
