"""The faults in slots that no token of a request owns: behind the batch, and in a run without work.

**Padding.** Eager mode pads nothing: the descriptor's number of tokens is the batch's. So the fault first lets the host
pad, as graph sizes or other data-parallel ranks would, by a larger `num_tokens` in the batch descriptor: V1 takes it
from `_determine_batch_execution_and_padding`, V2's `prepare_inputs` as its argument. What the final objects hold then:
V1 returns `slot_mapping.gpu[:padded]` from `_get_slot_mappings`, whose tail it has just filled with -1. V2 returns
`slot_mappings[:, :padded]`, and its kernel has filled the whole persistent row behind the last token with -1. Where a
backend writes the cache in its own forward (latent attention on a CPU), V1 hands on unpadded slots: no occasion.

**Dummy.** Its token, or the last entry of the buffer behind it, goes to the last slot of a live request's last block,
which is not written yet, or to the last one of its first block once that is full (with V2 the dummy table names that
block as well). A V1 dummy run computes no slots: `_dummy_run` fills what it got from `_get_slot_mappings` with -1. V2
takes `BlockTables.get_dummy_slot_mappings`. Only `Worker.execute_dummy_batch` counts, as an idle data-parallel rank
calls it; profiling and capturing come before there is a live request.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from kvscope.testing.faults.injection import Injection
from kvscope.testing.faults.plan import Plan, PlanV1, PlanV2, Row
from kvscope.testing.faults.plan_sites import Sites, is_warm_up, rank_of, step_ends

PADDING_FAULT = "padding_slot_enabled"
DUMMY_FAULT = "dummy_slot"
PREFIX_FAULT = "dummy_writes_loaded_prefix"
PERSISTENT_FAULT = "dummy_persistent_slot"
DUMMY_FAULTS = frozenset({DUMMY_FAULT, PREFIX_FAULT, PERSISTENT_FAULT})
PADDING_TOKENS = 8


class _Groups(list[Any]):
    """The KV-cache groups, with something that happens each time somebody walks them.

    V1's `_get_slot_mappings` fills the padding and calls nothing afterwards that could be wrapped, but it does walk the
    groups once more before it returns.
    """

    def __init__(self, groups: Any, walked: Callable[[], None]) -> None:
        super().__init__(groups)
        self._walked = walked

    def __iter__(self) -> Iterator[Any]:
        self._walked()
        return super().__iter__()


def _live(plan: Plan) -> tuple[Row, int, int] | None:
    """A decoding row, the position before its newest token, and that position's slot."""
    for row in plan.decoding():
        position = row.num_computed - 1
        block = plan.visible(row)[position // plan.block_size]
        return row, position, block * plan.block_size + position % plan.block_size
    return None


def _writes_apart(runner: Any) -> bool:
    """Whether every backend writes the cache apart from its forward, as V1's `execute_model` asks before it pads."""
    return not any(group.backend.forward_includes_kv_cache_update for groups in runner.attn_groups for group in groups)


def _note(plan: Plan, live: tuple[Row, int, int], token_index: int) -> dict[str, Any]:
    row, position, slot = live
    return {
        "request_id": row.request_id,
        "row": row.index,
        "token_index": token_index,
        "position": position,
        "slot": slot,
        "block_id": slot // plan.block_size,
        "expected_slot": -1,
    }


def padding_sites(injection: Injection) -> Sites:
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    undo = injection.undo
    open_v1: list[tuple[Any, Any]] = []
    open_v2: list[tuple[Any, Any, Any, int]] = []

    def counts(runner: Any, scheduler_output: Any) -> bool:
        """Count the step; whether it can be padded."""
        if not injection.concerns(rank_of(runner)) or is_warm_up(scheduler_output):
            return False
        injection.steps += 1
        room = runner.max_num_tokens - scheduler_output.total_num_scheduled_tokens
        return injection.due and room >= PADDING_TOKENS and _writes_apart(runner)

    def around_inputs_v1(original: Any, runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, scheduler_output, *args, **kwargs)
        open_v1.clear()
        if counts(runner, scheduler_output):
            open_v1.append((runner, scheduler_output))
        return result

    def around_padding_v1(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        mode, descriptor, *rest = original(runner, *args, **kwargs)
        # A dummy run asks as well, but its inputs were not prepared.
        if open_v1 and open_v1[0][0] is runner:
            _, scheduler_output = open_v1.pop()
            plan = PlanV1(runner, scheduler_output, injection.group_id, undo)
            token = int(scheduler_output.total_num_scheduled_tokens)
            if (live := _live(plan)) is not None and descriptor.num_tokens == token:
                descriptor = dataclasses.replace(descriptor, num_tokens=token + PADDING_TOKENS)
                undo.later(functools.partial(setattr, runner, "kv_cache_config", runner.kv_cache_config))
                leaking = copy.copy(runner.kv_cache_config)
                leaking.kv_cache_groups = _Groups(
                    leaking.kv_cache_groups, lambda: plan.slots.__setitem__(token, live[2])
                )
                runner.kv_cache_config = leaking
                injection.fire(_note(plan, live, token), rank=rank_of(runner), runner="v1")
        return (mode, descriptor, *rest)

    def around_inputs_v2(
        original: Any, runner: Any, scheduler_output: Any, state: Any, descriptor: Any, *args: Any, **kwargs: Any
    ) -> Any:
        token = int(state.num_tokens)
        pads = counts(runner, scheduler_output) and descriptor.num_tokens == token and runner.pcp_manager is None
        if pads:
            descriptor = dataclasses.replace(descriptor, num_tokens=token + PADDING_TOKENS)
        batch = original(runner, scheduler_output, state, descriptor, *args, **kwargs)
        open_v2.clear()
        if pads:
            open_v2.append((runner, scheduler_output, batch, token))
        return batch

    def around_slots_v2(original: Any, tables: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tables, *args, **kwargs)
        if open_v2 and open_v2[0][0].block_tables is tables:
            runner, scheduler_output, batch, token = open_v2.pop()
            plan = PlanV2(runner, scheduler_output, injection.group_id, undo, batch=batch, gathered=True)
            if (live := _live(plan)) is not None:
                plan.slots[token] = live[2]
                injection.fire(_note(plan, live, token), rank=rank_of(runner), runner="v2")
        return result

    return [
        *step_ends(injection),
        (RunnerV1, "_prepare_inputs", around_inputs_v1),
        (RunnerV1, "_determine_batch_execution_and_padding", around_padding_v1),
        (RunnerV2, "prepare_inputs", around_inputs_v2),
        (BlockTables, "compute_slot_mappings", around_slots_v2),
    ]


def dummy_sites(injection: Injection) -> Sites:
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
    from vllm.v1.worker.gpu_worker import Worker

    # The runner of the worker that runs a dummy batch just now.
    running: list[Any] = []
    group, into_prefix = injection.group_id, injection.fault.name == PREFIX_FAULT

    def around_dummy(original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
        running.append(worker.model_runner)
        try:
            return original(worker, *args, **kwargs)
        finally:
            running.clear()

    def due(runner: Any) -> bool:
        return running == [runner] and injection.concerns(rank_of(runner)) and injection.due

    def enable(
        runner: Any, slots: Any, request_id: str, blocks: list[int], block_size: int, computed: int
    ) -> int | None:
        """Switch the dummy token's slot on; the block that it is in. `computed`: before the last step, a decode."""
        index = 0 if into_prefix else len(blocks) - 1
        position = index * block_size + block_size - 1
        if (position >= computed) if into_prefix else (position <= computed + 1):
            return None
        token = len(slots) - 1 if injection.fault.name == PERSISTENT_FAULT else 0
        slots[token] = slot = blocks[index] * block_size + block_size - 1
        fields = {"request_id": request_id, "token_index": token, "position": position, "slot": slot}
        fields |= {"block_id": blocks[index], "expected_slot": -1}
        injection.fire(fields, rank=rank_of(runner), runner="v2" if hasattr(runner, "block_tables") else "v1")
        return blocks[index]

    def around_mask_v1(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        # The first thing that `_dummy_run` calls for certain after it has filled the slots with -1.
        batch = runner.input_batch
        for row, request_id in enumerate(batch.req_ids):
            computed = int(batch.num_computed_tokens_cpu[row])
            if due(runner) and computed >= int(batch.num_prompt_tokens[row]):
                table = batch.block_table[group]
                blocks = table.block_table.gpu[row, : int(table.num_blocks_per_row[row])].tolist()
                enable(runner, table.slot_mapping.gpu, request_id, blocks, int(table.block_size), computed)
        return original(runner, *args, **kwargs)

    def around_slots_v2(original: Any, tables: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tables, *args, **kwargs)
        runner = running[0] if running else None
        if runner is None or runner.block_tables is not tables:
            return result
        states = runner.req_states
        for request_id, row in states.req_id_to_index.items():
            computed = int(states.num_computed_tokens_np[row])
            if due(runner) and computed >= int(states.prefill_len.np[row]):
                blocks = tables.block_tables[group].gpu[row, : int(tables.num_blocks.np[group, row])].tolist()
                size = int(tables.block_sizes[group])
                block = enable(runner, tables.slot_mappings[group], request_id, blocks, size, computed)
                if block is not None and into_prefix:
                    # What `prepare_dummy_attn` has just got from `get_dummy_block_tables`, and returns.
                    tables.input_block_tables[group][0, 0] = block
        return result

    def around_step(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        injection.steps += 1
        return original(runner, *args, **kwargs)

    return [
        (Worker, "execute_dummy_batch", around_dummy),
        (RunnerV1, "_prepare_padding_mask", around_mask_v1),
        (BlockTables, "get_dummy_slot_mappings", around_slots_v2),
        (RunnerV1, "_prepare_inputs", around_step),
        (RunnerV2, "prepare_inputs", around_step),
    ]
