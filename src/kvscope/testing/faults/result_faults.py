"""The faults that change what comes back for a step, after the worker has given it and before the scheduler gets it.

They run around `sample_tokens` of the executors (`v1/executor`), where EngineCore waits for the result. Where batches
are queued (asynchronous scheduling, pipeline stages) it gets a promise there, and the fault finds no occasion.
"""

import copy
from collections.abc import Callable
from typing import Any

What = dict[str, Any]


def _alike(result: Any) -> list[int]:
    """The rows that got one token each: for the scheduler one is as good as the other."""
    return [row for row, tokens in enumerate(result.sampled_token_ids) if len(tokens) == 1]


def _rows_exchanged(result: Any, _before: Any) -> tuple[Any, What | None]:
    rows = _alike(result)
    if len(rows) < 2:
        return result, None
    one, other = (result.req_ids[row] for row in rows[:2])
    changed = copy.copy(result)
    changed.req_id_to_index = dict(result.req_id_to_index) | {one: rows[1], other: rows[0]}
    return changed, {"request_id": one, "other_request_id": other, "row": rows[0]}


def _row_added(result: Any, _before: Any) -> tuple[Any, What | None]:
    if not result.sampled_token_ids:
        return result, None
    changed = copy.copy(result)
    changed.sampled_token_ids = [*result.sampled_token_ids, list(result.sampled_token_ids[-1])]
    return changed, {"counted": len(changed.sampled_token_ids), "expected_counted": len(result.req_ids)}


def _result_repeated(result: Any, before: Any) -> tuple[Any, What | None]:
    # With other requests, or a chunk of a prompt among them, the scheduler itself would notice.
    same = before is not None and before.req_ids == result.req_ids
    if not same or not len(_alike(before)) == len(_alike(result)) == len(result.req_ids):
        return result, None
    return before, {}


RESULT_FAULTS: dict[str, Callable[[Any, Any], tuple[Any, What | None]]] = {
    "result_rows_exchanged": _rows_exchanged,
    "result_row_added": _row_added,
    "result_repeated": _result_repeated,
}
"""Each gets the result of a step and that of the step before, and gives the one that is to arrive."""
