"""The faults that change what the scheduler says: before it is declared, or on the way to a worker.

`DECLARATION_FAULTS` run before `Scheduler._update_after_schedule` (`v1/core/sched/scheduler.py`), the last call of
`schedule()`: the output is complete, and the lists of ids in it are fresh copies of the manager's
(`KVCacheBlocks.get_block_ids`), so that the allocator keeps the truth. `HANDOVER_FAULTS` get a copy of the output with
every attribute that somebody attached to it: the scheduler keeps its own untouched, as if the two were apart.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvscope.testing.faults.plan_faults import FAR_BLOCKS

What = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New blocks of one request in one group. `ids` is the host's list; `held` are the blocks before and with them."""

    request_id: str
    ids: list[int]
    held: list[int]
    needed: int
    drop_if_empty: Callable[[], None]

    @property
    def last_index(self) -> int:
        return len(self.held) - 1

    def note(self, **fields: Any) -> What:
        return {"request_id": self.request_id, "logical_index": self.last_index, **fields}


def _deltas(scheduler: Any, output: Any, group_id: int) -> Iterator[Delta]:
    """Every list of new ids whose last block this step's tokens reach, growing requests first."""
    block_size = int(scheduler.kv_cache_config.kv_cache_groups[group_id].kv_cache_spec.block_size)

    def delta(request_id: str, groups: Any, drop_if_empty: Callable[[], None]) -> Delta | None:
        request = scheduler.requests[request_id]
        held = scheduler.kv_cache_manager.get_block_ids(request_id)[group_id]
        seq_len = request.num_computed_tokens + output.num_scheduled_tokens[request_id]
        needed = -(-seq_len // block_size)
        if not groups[group_id] or groups[group_id][-1] != held[-1] or len(held) != needed:
            return None
        ids = groups[group_id]
        return Delta(request_id=request_id, ids=ids, held=held, needed=needed, drop_if_empty=drop_if_empty)

    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        groups = cached.new_block_ids[index]
        if groups is None or request_id in cached.resumed_req_ids:
            continue

        def drop_if_empty(index: int = index, groups: Any = groups) -> None:
            # The host sends None, not empty lists (`get_block_ids(allow_none=True)`).
            if not any(groups):
                cached.new_block_ids[index] = None

        if (found := delta(request_id, groups, drop_if_empty)) is not None:
            yield found
    for new in output.scheduled_new_reqs:
        if (found := delta(new.req_id, new.block_ids, lambda: None)) is not None:
            yield found


def _replace_last(delta: Delta, block_id: int) -> What:
    delta.ids[-1] = block_id
    return delta.note(block_id=block_id, expected_block_id=delta.held[-1])


def _bind_out_of_pool(scheduler: Any, output: Any, group_id: int) -> What | None:
    for delta in _deltas(scheduler, output, group_id):
        return _replace_last(delta, int(scheduler.kv_cache_config.num_blocks) + FAR_BLOCKS)
    return None


def _bind_null_tail(scheduler: Any, output: Any, group_id: int) -> What | None:
    for delta in _deltas(scheduler, output, group_id):
        return _replace_last(delta, 0)
    return None


def _bind_duplicate(scheduler: Any, output: Any, group_id: int) -> What | None:
    for delta in _deltas(scheduler, output, group_id):
        if delta.last_index >= 1 and delta.held[-2] != 0:
            return _replace_last(delta, delta.held[-2]) | {"other_logical_index": delta.last_index - 1}
    return None


def _bind_shortfall(scheduler: Any, output: Any, group_id: int) -> What | None:
    for delta in _deltas(scheduler, output, group_id):
        lost = delta.ids.pop()
        delta.drop_if_empty()
        return delta.note(expected_block_id=lost, counted=delta.needed - 1, expected_counted=delta.needed)
    return None


def _bind_extra_group(_scheduler: Any, output: Any, _group_id: int) -> What | None:
    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        groups = cached.new_block_ids[index]
        if groups is not None and request_id not in cached.resumed_req_ids:
            cached.new_block_ids[index] = (*groups, [])
            return {
                "request_id": request_id,
                "group_id": None,
                "counted": len(groups) + 1,
                "expected_counted": len(groups),
            }
    return None


def _bind_computed_back(_scheduler: Any, output: Any, _group_id: int) -> What | None:
    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        computed = cached.num_computed_tokens[index]
        decodes = cached.num_output_tokens[index] > 1 and output.num_scheduled_tokens[request_id] == 1
        # 16 divides every block size: the token before lies in the same block, which nobody else has yet.
        if decodes and request_id not in cached.resumed_req_ids and computed % 16 > 1:
            cached.num_computed_tokens[index] = computed - 1
            where = {"group_id": None, "num_computed": computed - 1, "expected_num_computed": computed}
            return {"request_id": request_id, **where}
    return None


DECLARATION_FAULTS: dict[str, Callable[[Any, Any, int], What | None]] = {
    "bind_out_of_pool": _bind_out_of_pool,
    "bind_null_tail": _bind_null_tail,
    "bind_duplicate": _bind_duplicate,
    "bind_shortfall": _bind_shortfall,
    "bind_extra_group": _bind_extra_group,
    "bind_computed_back": _bind_computed_back,
}


class Handover:
    """A copy of one output on its way, and what the next output has to bring along because of the fault."""

    def __init__(self, output: Any, group_id: int, attribute: str) -> None:
        self.output, self.group_id, self.attribute = copy.copy(output), group_id, attribute
        self.late_finished: set[str] = set()

    def own_cached(self) -> Any:
        """The running requests' part, copied so that its lists can be changed."""
        cached = copy.copy(self.output.scheduled_cached_reqs)
        cached.new_block_ids = list(cached.new_block_ids)
        cached.num_computed_tokens = list(cached.num_computed_tokens)
        self.output.scheduled_cached_reqs = cached
        return cached


def _delta_dropped(handover: Handover) -> What | None:
    cached = handover.output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        groups = cached.new_block_ids[index]
        if groups is not None and groups[handover.group_id] and request_id not in cached.resumed_req_ids:
            handover.own_cached().new_block_ids[index] = None
            return {"request_id": request_id, "expected_block_id": groups[handover.group_id][0]}
    return None


def _request_dropped(handover: Handover) -> What | None:
    output = handover.output
    # With a new request in the same step the V2 runner might have no state row left for it.
    if not output.finished_req_ids or output.scheduled_new_reqs:
        return None
    lost = min(output.finished_req_ids)
    output.finished_req_ids = set(output.finished_req_ids) - {lost}
    handover.late_finished = {lost}
    return {"request_id": lost}


def _tokens_cut(handover: Handover) -> What | None:
    output = handover.output
    for new in output.scheduled_new_reqs:
        number = output.num_scheduled_tokens[new.req_id]
        # A prompt's last chunk would be followed by no further step, and the engine would wait for its token for ever.
        if number > 1 and new.num_computed_tokens + number < len(new.prompt_token_ids or ()):
            output.num_scheduled_tokens = dict(output.num_scheduled_tokens) | {new.req_id: number - 1}
            output.total_num_scheduled_tokens -= 1
            return {"request_id": new.req_id, "num_tokens": number - 1, "expected_num_tokens": number}
    return None


def _computed_shifted(handover: Handover) -> What | None:
    output, cached = handover.output, handover.output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        computed = cached.num_computed_tokens[index]
        decodes = cached.num_output_tokens[index] > 0 and output.num_scheduled_tokens[request_id] == 1
        # 16 divides every block size: the shifted position stays inside the block.
        if decodes and request_id not in cached.resumed_req_ids and (computed + 1) % 16:
            handover.own_cached().num_computed_tokens[index] = computed + 1
            return {"request_id": request_id, "num_computed": computed + 1, "expected_num_computed": computed}
    return None


def _declaration_lost(handover: Handover) -> What | None:
    if handover.attribute not in vars(handover.output):
        return None
    delattr(handover.output, handover.attribute)
    return {"attribute": handover.attribute}


def _invalid_drafts(handover: Handover) -> What | None:
    # A worker never reads this number (`update_draft_token_ids_in_output` is where the scheduler itself fills it in).
    for request_id in handover.output.scheduled_cached_reqs.req_ids:
        handover.output.num_invalid_spec_tokens = {request_id: 1}
        return {"request_id": request_id, "group_id": None}
    return None


HANDOVER_FAULTS: dict[str, Callable[[Handover], What | None]] = {
    "delta_dropped": _delta_dropped,
    "request_dropped_in_handover": _request_dropped,
    "tokens_cut_in_handover": _tokens_cut,
    "computed_shifted_in_handover": _computed_shifted,
    "declaration_lost": _declaration_lost,
    "invalid_drafts_in_handover": _invalid_drafts,
}
