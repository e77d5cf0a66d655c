"""The fault in which a group of the cache is left out of what is handed to attention.

V1 makes one slot mapping for each group that it meets when it walks them (`_get_slot_mappings`), and V2 hands on one
table for each that `BlockTables.gather_block_tables` returns. With the last one gone the host fails when it builds the
metadata of that group's layers.
"""

import copy
import functools
from collections.abc import Iterator
from itertools import islice
from typing import Any

from kvscope.testing.faults.injection import Injection
from kvscope.testing.faults.plan_sites import Sites, is_warm_up, rank_of, step_ends

GROUP_FAULT = "group_missing"


class _WithoutTheLast(list[Any]):
    """The KV-cache groups, of which whoever walks them does not see the last one."""

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), len(self) - 1)


def group_sites(injection: Injection) -> Sites:
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    due_on: list[Any] = []

    def around_inputs(original: Any, runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, scheduler_output, *args, **kwargs)
        due_on.clear()
        if injection.concerns(rank_of(runner)) and not is_warm_up(scheduler_output):
            injection.steps += 1
            if injection.due:
                due_on.append(runner)
        return result

    def fire(runner: Any, name: str) -> None:
        due_on.clear()
        injection.group_id = len(runner.kv_cache_config.kv_cache_groups) - 1
        injection.fire({}, rank=rank_of(runner), runner=name)

    def around_padding_v1(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        if due_on == [runner]:
            fire(runner, "v1")
            injection.undo.later(functools.partial(setattr, runner, "kv_cache_config", runner.kv_cache_config))
            runner.kv_cache_config = copy.copy(runner.kv_cache_config)
            runner.kv_cache_config.kv_cache_groups = _WithoutTheLast(runner.kv_cache_config.kv_cache_groups)
        return original(runner, *args, **kwargs)

    def around_gathering_v2(original: Any, tables: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tables, *args, **kwargs)
        if due_on and due_on[0].block_tables is tables:
            fire(due_on[0], "v2")
            result = result[:-1]
        return result

    return [
        *step_ends(injection),
        (RunnerV1, "_prepare_inputs", around_inputs),
        (RunnerV1, "_determine_batch_execution_and_padding", around_padding_v1),
        (RunnerV2, "prepare_inputs", around_inputs),
        (BlockTables, "gather_block_tables", around_gathering_v2),
    ]
