"""The faults that the scheduler declares and does not send: a worker would stop at most of them.

They go in behind `_update_after_schedule` (`v1/core/sched/scheduler.py`, `async_scheduler.py`), which is the last call
of `schedule()` and asks for each scheduled request, and are taken out again when an executor is given the output to
send it. `step_lost` goes further: a whole step is scheduled and never sent.
"""

from collections.abc import Callable
from typing import Any

What = dict[str, Any]
Undo = Callable[[], None]
Untold = Callable[[Any, Any, set[str]], tuple[What, Undo] | None]

LOST_STEP = "step_lost"


def _list_as_known(output: Any, request_id: str, computed: int) -> Undo:
    """As if one more request were running and got one token."""
    cached = output.scheduled_cached_reqs
    lists = [cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens]
    for entries, entry in zip(lists, (request_id, None, computed, 1), strict=True):
        entries.append(entry)
    output.num_scheduled_tokens[request_id] = 1
    output.total_num_scheduled_tokens += 1

    def undo() -> None:
        for entries in lists:
            entries.pop()
        del output.num_scheduled_tokens[request_id]
        output.total_num_scheduled_tokens -= 1

    return undo


def _unknown(_scheduler: Any, output: Any, _ended: set[str]) -> tuple[What, Undo] | None:
    request_id = "nobody-asked-for-this"
    return {"request_id": request_id}, _list_as_known(output, request_id, 32)


def _finished(scheduler: Any, output: Any, ended: set[str]) -> tuple[What, Undo] | None:
    gone = sorted(ended - scheduler.requests.keys())
    if not gone:
        return None
    return {"request_id": gone[-1]}, _list_as_known(output, gone[-1], 32)


def _preempted(scheduler: Any, output: Any, _ended: set[str]) -> tuple[What, Undo] | None:
    for request_id, request in scheduler.requests.items():
        if request.status.name == "PREEMPTED" and request_id not in output.num_scheduled_tokens:
            return {"request_id": request_id}, _list_as_known(output, request_id, 32)
    return None


def _total(_scheduler: Any, output: Any, _ended: set[str]) -> tuple[What, Undo] | None:
    output.total_num_scheduled_tokens += 1

    def undo() -> None:
        output.total_num_scheduled_tokens -= 1

    return {}, undo


UNTOLD_FAULTS: dict[str, Untold] = {
    "unknown_declared": _unknown,
    "finished_declared": _finished,
    "preempted_declared": _preempted,
    "total_declared": _total,
}
"""Each gets the scheduler, its output, and who has ended until now; it says how to take out what it put in."""


def schedule_nothing(scheduler: Any) -> Any:
    """A step without work, as the scheduler makes one while it is paused."""
    from vllm.v1.core.sched.interface import PauseState

    paused, scheduler._pause_state = scheduler._pause_state, PauseState.PAUSED_ALL
    try:
        return scheduler.schedule()
    finally:
        scheduler._pause_state = paused
