"""The faults between the plan and attention: a builder of metadata makes something else of what it is given, or the
runner's buffers are written once more.

Those of builders go into `AttentionGroup.build_metadata` (`v1/worker/utils.py`), which both runners call for each group
and step after the plan is final. It is given the common metadata, whose tensors are the runner's own: so it gets a copy
with other contents, and nothing has to be put back afterwards. The slots by which layers write the cache are those of
the forward context, and still right.
"""

import copy
from collections.abc import Callable
from typing import Any

from kvscope.testing.faults.injection import Injection
from kvscope.testing.faults.plan import Plan, Row
from kvscope.testing.faults.plan_sites import Sites, Stage, plan_sites, rank_of

What = dict[str, Any]


def _note(row: Row, **fields: Any) -> What:
    return {"request_id": row.request_id, "row": row.index, **fields}


def _another_block(plan: Plan, row: Row) -> int | None:
    """A block that only another row reads."""
    own = {0, *plan.visible(row)}
    return next((block for other in plan.rows for block in plan.visible(other) if block not in own), None)


def _table(plan: Plan, common: Any) -> What | None:
    for row in plan.decoding():
        block = _another_block(plan, row)
        if block is not None:
            index = plan.needed(row) - 1
            common.block_table_tensor = common.block_table_tensor.clone()
            before = int(common.block_table_tensor[row.index, index])
            common.block_table_tensor[row.index, index] = block
            return _note(row, logical_index=index, block_id=block, expected_block_id=before)
    return None


def _slot(plan: Plan, common: Any) -> What | None:
    for row in plan.decoding():
        slot = int(common.slot_mapping[row.first_token])
        if (slot + 1) % plan.block_size:
            common.slot_mapping = common.slot_mapping.clone()
            common.slot_mapping[row.first_token] = slot + 1
            token = {"token_index": row.first_token, "position": row.num_computed}
            return _note(row, slot=slot + 1, expected_slot=slot, block_id=(slot + 1) // plan.block_size, **token)
    return None


def _length(plan: Plan, common: Any) -> What | None:
    for row in plan.decoding():
        common.seq_lens = common.seq_lens.clone()
        common.seq_lens[row.index] -= 1
        return _note(row, seq_len=row.seq_len - 1, expected_seq_len=row.seq_len)
    return None


def _rewrite(plan: Plan) -> What | None:
    for row in plan.decoding():
        slot = int(plan.slots[row.first_token])
        if (slot + 1) % plan.block_size:
            plan.slots[row.first_token] = slot + 1
            token = {"token_index": row.first_token, "position": row.num_computed}
            return _note(row, slot=slot + 1, expected_slot=slot, block_id=(slot + 1) // plan.block_size, **token)
    return None


BUILDER_FAULTS: dict[str, Callable[[Plan, Any], What | None]] = {
    "operator_table_row": _table,
    "operator_slot": _slot,
    "operator_length": _length,
}
REWRITE_FAULT = "operator_slot_rewritten"
OPERATOR_FAULTS = frozenset({*BUILDER_FAULTS, REWRITE_FAULT})


def operator_sites(injection: Injection) -> Sites:
    return _rewrite_sites(injection) if injection.fault.name == REWRITE_FAULT else _builder_sites(injection)


def _rewrite_sites(injection: Injection) -> Sites:
    """Each runner gathers the model's other inputs when metadata is built and the forward has yet to begin."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    open_step: list[Plan] = []

    def visit(plan: Plan, stage: Stage) -> None:
        if stage == "inputs":
            injection.steps += 1
        open_step[:] = [plan] if stage == "final" else []

    def inputs(original: Any, *args: Any, **kwargs: Any) -> Any:
        if open_step and injection.due:
            plan = open_step.pop()
            injection.fire(_rewrite(plan), rank=rank_of(plan.runner), runner=plan.name)
        return original(*args, **kwargs)

    return [
        *plan_sites(injection, visit),
        (RunnerV1, "_preprocess", inputs),
        (DefaultModelState, "prepare_inputs", inputs),
    ]


def _builder_sites(injection: Injection) -> Sites:
    from vllm.v1.worker.utils import AttentionGroup

    inject = BUILDER_FAULTS[injection.fault.name]
    open_step: list[Plan] = []

    def visit(plan: Plan, stage: Stage) -> None:
        if stage == "inputs":
            injection.steps += 1
        open_step[:] = [plan] if stage == "final" else []

    def build(original: Any, group: Any, common: Any, *args: Any, **kwargs: Any) -> Any:
        # A speculator's groups are built later in the step, with metadata of their own.
        if open_step and group.kv_cache_group_id == injection.group_id and injection.due:
            plan = open_step.pop()
            common = copy.copy(common)
            injection.fire(inject(plan, common), rank=rank_of(plan.runner), runner=plan.name)
        return original(group, common, *args, **kwargs)

    return [*plan_sites(injection, visit), (AttentionGroup, "build_metadata", build)]
