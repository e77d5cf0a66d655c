"""Where a worker's plan can be seen and changed, for both model runners.

V1 (`v1/worker/gpu_model_runner.py`, `GPUModelRunner`): after `_prepare_inputs`. V2 (`v1/worker/gpu/model_runner.py` and
`block_table.py`): after `GPUModelRunner.prepare_inputs` and after `BlockTables.compute_slot_mappings`. The step is over
when the next one begins, with `_update_states` (V1) or `finish_requests` (V2).
"""

from collections.abc import Callable
from typing import Any, Literal

from kvscope.testing.faults.hooks import Around
from kvscope.testing.faults.injection import Injection
from kvscope.testing.faults.plan import Plan, PlanV1, PlanV2

Sites = list[tuple[Any, str, Around]]
Stage = Literal["inputs", "final"]
"""`inputs`: positions and lengths are fixed, and V2 has yet to gather tables and slots. `final`: all of it is."""


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


def plan_sites(injection: Injection, visit: Callable[[Plan, Stage], None]) -> Sites:
    """`visit` is called with each real step's plan at both stages, on the ranks that the injection concerns."""
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    # Between the two places of the V2 runner: whose step it is.
    open_step: list[tuple[Any, Any, Any]] = []

    def around_v1(original: Any, runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, scheduler_output, *args, **kwargs)
        if injection.concerns(rank_of(runner)) and not is_warm_up(scheduler_output):
            plan = PlanV1(runner, scheduler_output, injection.group_id, injection.undo)
            visit(plan, "inputs")
            visit(plan, "final")
        return result

    def around_inputs_v2(original: Any, runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        batch = original(runner, scheduler_output, *args, **kwargs)
        open_step.clear()
        if injection.concerns(rank_of(runner)) and not is_warm_up(scheduler_output):
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
            if plan.handed_slots is not None:
                result = result[:, : plan.handed_slots]
        return result

    return [
        (RunnerV1, "_prepare_inputs", around_v1),
        (RunnerV2, "prepare_inputs", around_inputs_v2),
        (BlockTables, "compute_slot_mappings", around_slots_v2),
    ]
