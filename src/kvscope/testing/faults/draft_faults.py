"""Drafts that are counted wrong: in the runner, between its verification and what is made of it, and in the scheduler.

Places (vLLM 0.32): V1 `GPUModelRunner._calc_spec_decode_metadata`, `RejectionSampler.forward`
(`v1/sample/rejection_sampler.py`) and `_eagle_prepare_inputs_padded` as `v1/spec_decode/llm_base_proposer.py` has it;
V2 `GPUModelRunner.gather_batch_req_state`, and `get_num_sampled_and_rejected` as
`v1/worker/gpu/spec_decode/rejection_sampler.py` has it.
"""

from collections.abc import Callable, Iterator
from typing import Any

from kvscope.testing.faults.books import Books
from kvscope.testing.faults.injection import Injection
from kvscope.testing.faults.plan_sites import Sites, is_warm_up, rank_of
from kvscope.testing.faults.story import Story, Told

DRAFT_FAULTS = frozenset({"draft_left_out", "accepted_beyond_drafts", "rejected_beyond_drafts"})
"""Faults of the runner; `accepted_draft_forgotten` is a story."""


class _OpenStep:
    """The step that a runner is about to verify, and the row that the fault is about."""

    def __init__(self, injection: Injection) -> None:
        self._injection = injection
        self._output: Any = None
        self._runner: Any = None

    def opens(self, original: Any, runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._output = None
        if self._injection.concerns(rank_of(runner)) and not is_warm_up(scheduler_output):
            self._injection.steps += 1
            self._output, self._runner = scheduler_output, runner
        return original(runner, scheduler_output, *args, **kwargs)

    def rows(self, request_ids: list[str]) -> Iterator[tuple[int, str, int]]:
        """Each row of the step, its request, and how many drafts it was given; none before the fault is due."""
        if self._output is not None and self._injection.due:
            for row, request_id in enumerate(request_ids):
                yield row, request_id, len(self._output.scheduled_spec_decode_tokens.get(request_id, ()))

    def row(self, request_ids: list[str]) -> tuple[int, str, int] | None:
        """The first row with drafts, if it is not the last one."""
        return next((found for found in self.rows(request_ids[:-1]) if found[2] > 1), None)

    def is_unfinished(self, row: int) -> bool:
        """Whether a row of a V1 runner's batch is in the middle of its prompt, so that it samples nothing."""
        return bool(self._runner.discard_request_mask.np[row])

    def fire(self, row: int, request_id: str, **fields: Any) -> None:
        what = {"request_id": request_id, "row": row, **fields}
        self._injection.fire(what, rank=rank_of(self._runner))

    @property
    def request_ids(self) -> list[str]:
        """The rows of a V1 runner's batch."""
        batch = self._runner.input_batch
        ids: list[str] = batch.req_ids[: batch.num_reqs]
        return ids


def draft_sites(injection: Injection) -> Sites:
    """What to wrap for a fault of the runner."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    step = _OpenStep(injection)
    sites: dict[str, Callable[[_OpenStep], Sites]] = {
        "draft_left_out": _left_out,
        "accepted_beyond_drafts": _accepted,
        "rejected_beyond_drafts": _rejected,
    }
    # V2 gathers the batch before it prepares it; in V1 both happen in one.
    opens: Sites = [(RunnerV1, "_prepare_inputs", step.opens), (RunnerV2, "update_requests", step.opens)]
    return [*opens, *sites[injection.fault.name](step)]


def _left_out(step: _OpenStep) -> Sites:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    def v1(original: Any, runner: Any, num_draft_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        found = step.row(step.request_ids)
        if found is not None:
            row, request_id, drafts = found
            num_draft_tokens = num_draft_tokens.copy()
            num_draft_tokens[row] = drafts - 1
            step.fire(row, request_id)
        return original(runner, num_draft_tokens, *args, **kwargs)

    def v2(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        batch = result[0]
        found = step.row(batch.req_ids) if batch is not None and batch.num_draft_tokens_np is not None else None
        if found is not None:
            row, request_id, drafts = found
            batch.num_draft_tokens_np[row] = drafts - 1
            step.fire(row, request_id)
        return result

    return [(RunnerV1, "_calc_spec_decode_metadata", v1), (RunnerV2, "gather_batch_req_state", v2)]


def _accepted(step: _OpenStep) -> Sites:
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    def v1(original: Any, sampler: Any, *args: Any, **kwargs: Any) -> Any:
        # The drafter has no room for more tokens than there are drafts in any row, but for more than there are in this.
        output = original(sampler, *args, **kwargs)
        tokens = output.sampled_token_ids
        for row, request_id, drafts in step.rows(step.request_ids):
            if drafts + 2 <= tokens.shape[1] and not step.is_unfinished(row):
                tokens[row, : drafts + 2] = int(tokens[row, 0])
                step.fire(row, request_id)
                break
        return output

    def v2(sampled: Any, rejected: Any, row: int, drafts: int) -> None:
        sampled[row], rejected[row] = drafts + 2, -1

    return [(RejectionSampler, "forward", v1), *_counted_by_v2(step, v2)]


def _rejected(step: _OpenStep) -> Sites:
    from vllm.v1.spec_decode import llm_base_proposer

    def v1(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        found = step.row(step.request_ids)
        if found is not None:
            row, request_id, drafts = found
            args[4][row] = drafts + 1
            step.fire(row, request_id)
        return result

    def v2(_: Any, rejected: Any, row: int, drafts: int) -> None:
        rejected[row] = drafts + 1

    return [(llm_base_proposer, "_eagle_prepare_inputs_padded", v1), *_counted_by_v2(step, v2)]


def _counted_by_v2(step: _OpenStep, change: Callable[[Any, Any, int, int], None]) -> Sites:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    ids: list[str] = []

    def batch(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        ids[:] = result.req_ids
        return result

    def counted(original: Any, *args: Any, **kwargs: Any) -> Any:
        sampled, rejected = original(*args, **kwargs)
        found = step.row(ids)
        if found is not None:
            row, request_id, drafts = found
            change(sampled, rejected, row, drafts)
            step.fire(row, request_id)
        return sampled, rejected

    return [(RunnerV2, "prepare_inputs", batch), (rejection_sampler, "get_num_sampled_and_rejected", counted)]


def _accepted_draft_forgotten(books: Books) -> Story:
    # A step that verified drafts is over, and the scheduler counts one token fewer as computed than it should.
    while True:
        call = yield "scheduled"
        drafted = call.args[1].scheduled_spec_decode_tokens
        yield "between"
        for request in books.scheduler.running if books.due else ():
            left, used = request.max_tokens - request.num_output_tokens, request.num_computed_tokens % books.block_size
            room = 1 < used < books.block_size - 6
            if request.request_id in drafted and left > 8 and request.spec_token_ids and room:
                request.num_computed_tokens -= 1
                yield "scheduled"
                books.fire(request)
                return


DRAFT_STORIES: dict[str, Told] = {"accepted_draft_forgotten": Told(_accepted_draft_forgotten)}
