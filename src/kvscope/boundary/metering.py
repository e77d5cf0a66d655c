"""What KV Monitor reads of a scheduler, and the seams that say when: all of it in EngineCore's own thread.

Source (0.32): ``vllm/v1/core/sched/scheduler.py`` and ``vllm/v1/core/kv_cache_manager.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..facts import allocator as facts
from .allocator import READER
from .ledger import Seam, Wrap
from .wrapping import around

METER = "_kvscope_meter"
"""Attribute by which a scheduler and its manager carry who counts."""
ADMITTED = "_kvscope_admitted"
"""Attribute of a request that was looked up in the prefix cache and counted."""


class MeteredHost:
    """A scheduler as it is asked when a snapshot is made."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._managers: Sequence[Any] = self._manager.coordinator.single_type_managers

    @property
    def usage(self) -> float:
        """``KVCacheManager.usage``: from 0.0 to 1.0, the null block left out."""
        return float(self._manager.usage)

    @property
    def is_running(self) -> bool:
        """Whether a request runs, so that another step follows this one."""
        return bool(self._scheduler.running)

    @property
    def is_aborting(self) -> bool:
        """Whether requests are being ended from outside, after which there may be no other step."""
        reader = getattr(self._scheduler, READER, None)
        return reader is not None and reader.scope[0] == facts.CAUSE_ABORT

    @property
    def block_size(self) -> int:
        """Tokens of a block, as the scheduler counts."""
        return int(self._scheduler.block_size)

    @property
    def caches_prefixes(self) -> bool:
        return bool(self._manager.enable_caching)

    def computed_tokens(self, request_id: str) -> int:
        """Tokens that a request has KV of."""
        return int(self._scheduler.requests[request_id].num_computed_tokens)

    def outcome(self, request_id: str) -> str | None:
        """Why a load that is reported as finished is of no use, None if it is."""
        request = self._scheduler.requests.get(request_id)
        if request is not None and request_id in self._scheduler.failed_recving_kv_req_ids:
            return "load_failed"
        if request is None or request.is_finished():
            return "load_failed" if request is not None and request.status.name == "FINISHED_ERROR" else "aborted"
        return None

    def is_waiting(self, request_id: str) -> bool:
        """Whether a request has not been given any block yet."""
        request = self._scheduler.requests.get(request_id)
        return request is not None and request.status.name == "WAITING"

    def unfilled_slots(self) -> list[int]:
        """By group: slots in the tables of live requests behind the tokens that each has. Walks the requests.

        Tokens count once the step that computes them is submitted; those that a load has yet to bring do not.
        """
        return [self._unfilled(manager) for manager in self._managers]

    def _unfilled(self, manager: Any) -> int:
        requests, size, unfilled = self._scheduler.requests, manager.block_size, 0
        for request_id, blocks in manager.req_to_blocks.items():
            request = requests.get(request_id)
            if request is not None and not request.is_finished():
                unfilled += max(len(blocks) * size - _stored_tokens(request), 0)
        return unfilled


def _stored_tokens(request: Any) -> int:
    if request.status.name == "WAITING_FOR_REMOTE_KVS":
        return request.prefill_stats.num_local_cached_tokens if request.prefill_stats is not None else 0
    return int(request.num_computed_tokens)


def after_lookup(meter: Any, manager: Any, args: Any, kwargs: Any, result: Any) -> None:
    """A request is admitted whose prefix was looked up; vLLM puts the same hits into ``prefill_stats``, from where they
    get into ``num_cached_tokens`` of its first output.

    A request that comes back after a preemption is passed over, as its ``prefill_stats`` are; so is one whose load has
    failed and that is looked up again.
    """
    request, hits = _lookup(*args, **kwargs)
    if request.num_preemptions or getattr(request, ADMITTED, False) or not manager.prefix_cache_lookup_enabled(request):
        return
    setattr(request, ADMITTED, True)
    meter.on_admitted(request.num_prompt_tokens, hits)


def _lookup(request: Any, num_hits: int) -> tuple[Any, int]:
    return request, num_hits


def after_arrival(meter: Any, scheduler: Any, args: Any, kwargs: Any, result: Any) -> None:
    """A request that is to be decoded here says so (``OpenAIServing`` and the proxies in front of it)."""
    request = args[0] if args else kwargs["request"]
    if meter.connector is not None and (request.kv_transfer_params or {}).get("do_remote_prefill"):
        meter.connector.on_arrival(request.request_id)


def before_transfers(meter: Any, scheduler: Any, args: Any, kwargs: Any) -> None:
    """Blocks of loads that failed were looked at before, in the same ``update_from_output``."""
    output = args[0] if args else kwargs["kv_connector_output"]
    if meter.connector is not None and (output.finished_recving or output.finished_sending):
        meter.on_transfers(sorted(output.finished_recving or ()), sorted(output.finished_sending or ()))


def after_scheduled(meter: Any, scheduler: Any, args: Any, kwargs: Any, result: Any) -> None:
    meter.on_step()


def observe_scheduler(meter: object, scheduler: Any) -> None:
    """From now on ``meter`` is told; nothing has been scheduled yet."""
    for host in (scheduler, scheduler.kv_cache_manager):
        setattr(host, METER, meter)


def metering_seams() -> tuple[Seam, ...]:
    """Wrapped only while KV Monitor is on."""
    scheduler = "vllm.v1.core.sched.scheduler:Scheduler"
    return (
        Seam(
            "monitor.lookup",
            "vllm.v1.core.kv_cache_manager:KVCacheManager.record_prefix_cache_stats",
            "monitor",
            _after(after_lookup),
            fact="how much of a prompt was in the prefix cache when its request was admitted",
            lost="hits and queries of the prefix cache",
            needs=("request", "num_hits"),
        ),
        Seam(
            "monitor.arrival",
            f"{scheduler}.add_request",
            "monitor",
            _after(after_arrival),
            fact="requests whose KV is to come from elsewhere",
            lost="how many of them wait",
            needs=("request",),
        ),
        Seam(
            "monitor.transfers",
            f"{scheduler}._update_from_kv_xfer_finished",
            "monitor",
            around(before=before_transfers, carrier=METER),
            fact="transfers that the workers' connectors report as finished",
            lost="tokens and times of transfers",
            needs=("kv_connector_output",),
        ),
        Seam(
            "monitor.scheduled",
            f"{scheduler}._update_after_schedule",
            "monitor",
            _after(after_scheduled),
            fact="that a step is made, and its blocks are handed out",
            lost="the state of the pool while a step runs",
        ),
        Seam(
            "monitor.updated",
            f"{scheduler}.make_stats",
            "monitor",
            _after(after_scheduled),
            fact="that the result of a step has taken effect",
            lost="the state of the pool after a step",
        ),
    )


def _after(hook: object) -> Wrap:
    return around(after=hook, carrier=METER)  # type: ignore[arg-type]  # hooks name what they get by its kind
