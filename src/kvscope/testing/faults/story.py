"""A fault of the allocator as a story: it waits for a moment in the scheduler's life, acts, and waits for another.

    def evict_referenced(books: Books) -> Story:
        request = yield from waits(books, lambda: next(books.decoding(), None))
        books.fire(request, books.table(request)[0])
        books.kv.evict_blocks({books.table(request)[0].block_id})

`MOMENTS` are places of vLLM 0.32 (`v1/core/sched/scheduler.py`, `v1/core/kv_cache_manager.py`,
`v1/core/single_type_kv_cache_manager.py`, `v1/engine/core.py`). A story that has ended is over, or with `once=False`
begins again.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from kvscope.testing.faults.books import Books
from kvscope.testing.faults.hooks import Around
from kvscope.testing.faults.injection import Injection
from kvscope.testing.faults.plan import Plan
from kvscope.testing.faults.plan_sites import Sites, Stage, plan_sites

Moment = Literal[
    "between",
    "scheduled",
    "running",
    "admitting",
    "adopting",
    "allocating",
    "zeroing",
    "popping",
    "freeing",
    "deferring",
    "resetting",
    "reset",
    "computing",
    "counting",
    "planned",
    "matching",
    "telling",
    "reporting",
    "lacking",
    "failing",
    "invalidating",
    "evicting",
    "completing",
]
"""`between`: a step with work is over. `scheduled`: an output with work is complete, and about to be declared.
`running`: the worker has the step, its result is not back. `admitting`: what a waiting request finds in the cache is
known. `adopting`: a request is about to take references to what it found. `allocating`: a request has got the blocks
that it needs. `zeroing`: the list of blocks to be zeroed is known. `popping`: a request's table has been given up, and
its blocks are about to be freed. `freeing`: a request is about to be freed. `deferring`: whether a request's blocks may
be freed at once is known. `resetting`, `reset`: before and after a reset of the prefix cache. `counting`: a V2 runner
knows how many tokens are computed. `planned`: tables and slots of a worker are final, and can still be changed.
`computing`: a worker is about to compute. `matching`: the offload has said how many tokens of a request it has;
`telling`: a connector is about to be told the table of a request. `reporting`, `lacking`: a worker's connector has said
which transfers are over, and which blocks could not be loaded. When the scheduler has the result, `failing` and
`invalidating`: it is about to take up that loads of requests, or (twice) of blocks, have failed; `evicting`: hashes of
blocks are about to be dropped; `completing`: what is over is about to be taken up."""


@dataclass(slots=True)
class Call:
    """The host's call at a moment. A story may replace the `result` (at `computing`: by what is to be raised), have
    `freeing`, `failing`, `invalidating` and `evicting` `skipped`, and `adopting` leave the blocks `untouched`."""

    args: tuple[Any, ...]
    result: Any = None
    skipped: bool = False
    untouched: bool = False


Story = Generator[Moment, Call, None]
Found = TypeVar("Found")


class Told(NamedTuple):
    """A story and the moments that it waits for, beside `between` and `scheduled`."""

    tell: Callable[[Books], Story]
    moments: tuple[Moment, ...] = ()


def waits(books: Books, find: Callable[[], Found | None], moment: Moment = "between") -> Generator[Moment, Call, Found]:
    """Wait for a moment at which the fault is due and `find` finds something."""
    while True:
        yield moment
        if books.due and (found := find()) is not None:
            return found


def until_scheduled(books: Books, request: Any) -> Generator[Moment, Call, Any]:
    """Wait for a step in which the request has work; the SchedulerOutput, or None if the request ended before."""
    while True:
        call = yield "scheduled"
        if request.request_id in call.args[1].num_scheduled_tokens:
            return call.args[1]
        if books.request(request.request_id) is None:
            return None


class Telling:
    """Tells one story, at the moments that the hooks of `sites` report."""

    def __init__(self, injection: Injection, told: Told) -> None:
        self._injection, self._told = injection, told
        self.books: Books | None = None
        self._story: Story | None = None
        self._awaited: Moment | None = None
        self._inside = False

    def reached(self, moment: Moment, call: Call, scheduler: Any = None) -> None:
        """The host is at a moment. What a story itself makes the host do is no moment."""
        if self._inside or (self.books is None and scheduler is None):
            return
        if self.books is None:
            self.books = Books(self._injection, scheduler)
        if scheduler is not None and scheduler is not self.books.scheduler:
            return
        if moment == "scheduled":
            self._injection.steps += 1
        self._inside = True
        try:
            if self._story is None:
                self._begin()
            if self._story is not None and self._awaited == moment:
                self._awaited = self._story.send(call)
        except StopIteration:
            self._begin()
        finally:
            self._inside = False

    def _begin(self) -> None:
        assert self.books is not None
        self._story = self._awaited = None
        if self._injection.once and self._injection.fired:
            return
        self._story = self._told.tell(self.books)
        self._awaited = next(self._story)


class _Forgetful:
    """The block pool for `add_local_computed_blocks`, which asks it only for `touch`."""

    def touch(self, blocks: Any) -> None:
        """Take no reference."""


def story_sites(injection: Injection, told: Told) -> Sites:
    """What to wrap for a story."""
    telling, moments = Telling(injection, told), {"between", "scheduled", *told.moments}
    sites = [site for moment, places in _scheduler_places(telling).items() if moment in moments for site in places]
    if "computing" in moments:
        sites += _forward_sites(telling)
    if "counting" in moments:
        sites += _counting_sites(telling)
    if "matching" in moments:
        sites += _matching_sites(telling)
    if "reporting" in moments:
        sites += _reporting_sites(telling)
    if "zeroing" in moments:
        sites += _zeroing_sites()
    if "planned" in moments:
        sites += plan_sites(injection, partial(_visit, telling))
    return sites


def _visit(telling: Telling, plan: Plan, stage: Stage) -> None:
    if stage == "final":
        telling.reached("planned", Call((plan,)))


def _scheduler_places(telling: Telling) -> dict[Moment, Sites]:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.engine.core import EngineCore

    def between(original: Any, core: Any, model_executed: bool) -> Any:
        result = original(core, model_executed)
        if model_executed:
            telling.reached("between", Call((core,)), core.scheduler)
        return result

    def scheduled(original: Any, scheduler: Any, output: Any) -> Any:
        if output.total_num_scheduled_tokens:
            telling.reached("scheduled", Call((scheduler, output)), scheduler)
        return original(scheduler, output)

    def before(moment: Moment) -> Around:
        def around(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            telling.reached(moment, Call((scheduler, *args)), scheduler)
            return original(scheduler, *args, **kwargs)

        return around

    def after(moment: Moment) -> Around:
        def around(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            call = Call((scheduler, *args), original(scheduler, *args, **kwargs))
            telling.reached(moment, call, scheduler)
            return call.result

        return around

    def resetting(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        telling.reached("resetting", Call((scheduler, *args)), scheduler)
        call = Call((scheduler, *args), original(scheduler, *args, **kwargs))
        telling.reached("reset", call, scheduler)
        return call.result

    def ours(manager: Any) -> bool:
        return telling.books is not None and manager is telling.books.manager

    def adopting(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
        call = Call((manager, *args))
        if ours(manager):
            telling.reached("adopting", call)
        if not call.untouched:
            return original(manager, *args, **kwargs)
        pool, manager.block_pool = manager.block_pool, _Forgetful()
        try:
            return original(manager, *args, **kwargs)
        finally:
            manager.block_pool = pool

    def manager_after(moment: Moment) -> Around:
        def around(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
            call = Call((manager, *args), original(manager, *args, **kwargs))
            if ours(manager):
                telling.reached(moment, call)
            return call.result

        return around

    def of_kv_after(moment: Moment) -> Around:
        def around(original: Any, kv: Any, *args: Any, **kwargs: Any) -> Any:
            call = Call((kv, *args), original(kv, *args, **kwargs))
            if telling.books is not None and kv is telling.books.kv:
                telling.reached(moment, call)
            return call.result

        return around

    def unless_skipped(moment: Moment, instead: Callable[[], Any] = lambda: None) -> Around:
        def around(original: Any, host: Any, *args: Any, **kwargs: Any) -> Any:
            call = Call((host, *args))
            if telling.books is not None and host in (telling.books.scheduler, telling.books.kv):
                telling.reached(moment, call)
            return instead() if call.skipped else original(host, *args, **kwargs)

        return around

    return {
        "between": [(EngineCore, "post_step", between)],
        "scheduled": [(Scheduler, "_update_after_schedule", scheduled)],
        "running": [(Scheduler, "get_grammar_bitmask", before("running"))],
        "admitting": [(Scheduler, "_get_local_prefix_cache_hit", after("admitting"))],
        "adopting": [(SingleTypeKVCacheManager, "add_local_computed_blocks", adopting)],
        "allocating": [(SingleTypeKVCacheManager, "allocate_new_blocks", manager_after("allocating"))],
        "zeroing": [(Scheduler, "_get_new_block_ids_to_zero", after("zeroing"))],
        "popping": [(SingleTypeKVCacheManager, "pop_blocks_for_free", manager_after("popping"))],
        "freeing": [(KVCacheManager, "free", unless_skipped("freeing"))],
        "deferring": [(Scheduler, "_request_blocks_can_be_freed", after("deferring"))],
        "resetting": [(Scheduler, "reset_prefix_cache", resetting)],
        "telling": [(KVCacheManager, "get_blocks", of_kv_after("telling"))],
        "failing": [(Scheduler, "_handle_failed_recving", unless_skipped("failing", set))],
        "invalidating": [
            (Scheduler, "_update_requests_with_invalid_blocks", unless_skipped("invalidating", _nothing_invalid))
        ],
        "evicting": [(KVCacheManager, "evict_blocks", unless_skipped("evicting"))],
        "completing": [(Scheduler, "_update_from_kv_xfer_finished", before("completing"))],
    }


def _forward_sites(telling: Telling) -> Sites:
    """Where both runners open the context of their forward pass: tables and slots are final by then."""
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import model_runner

    def computing(original: Any, *args: Any, **kwargs: Any) -> Any:
        call = Call(args)
        telling.reached("computing", call)
        if call.result is not None:
            raise call.result
        return original(*args, **kwargs)

    return [(module, "set_forward_context", computing) for module in (gpu_model_runner, model_runner)]


def _nothing_invalid() -> tuple[set[str], int, set[int]]:
    """What `Scheduler._update_requests_with_invalid_blocks` returns when nobody has such a block."""
    return set(), 0, set()


def _matching_sites(telling: Telling) -> Sites:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    def matching(original: Any, connector: Any, *args: Any, **kwargs: Any) -> Any:
        call = Call((connector, *args), original(connector, *args, **kwargs))
        telling.reached("matching", call)
        return call.result

    return [(OffloadingConnector, "get_num_new_matched_tokens", matching)]


def _reporting_sites(telling: Telling) -> Sites:
    """Where both runners ask their connector at the end of a step."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    def after(moment: Moment) -> Around:
        def around(original: Any, connector: Any, *args: Any, **kwargs: Any) -> Any:
            call = Call((connector, *args), original(connector, *args, **kwargs))
            telling.reached(moment, call)
            return call.result

        return around

    return [
        (KVConnectorBase_V1, "get_transfer_results", after("reporting")),
        (KVConnectorBase_V1, "get_block_ids_with_load_errors", after("lacking")),
    ]


def _counting_sites(telling: Telling) -> Sites:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def counting(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        telling.reached("counting", Call((runner, *args)))
        return result

    return [(GPUModelRunner, "update_requests", counting)]


def _zeroing_sites() -> Sites:
    """The V2 runner is ready to zero blocks only for models that need it, and asserts when it is told to otherwise."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def ready(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        if runner.kv_block_zeroer is None:
            runner._init_kv_zero_meta()
        return original(runner, *args, **kwargs)

    return [(GPUModelRunner, "update_requests", ready)]
