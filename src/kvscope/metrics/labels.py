"""The closed sets that labels take their values from. Nothing else ever becomes a label: no request, no block."""

from __future__ import annotations

import msgspec

from ..checks.catalog import RULES
from ..checks.rule import CHECKS
from ..state.tails import STATES as TAIL_STATES

ENGINE = "engine"
"""On every series: the data-parallel rank of the engine, or ``frontend`` for what belongs to no engine."""
FRONTEND = "frontend"

OTHER = "other"
"""Where a set has it, it takes what the set does not name. So nothing is lost and no label gets new values."""

MOST_GROUPS = 32
"""KV-cache groups beyond it are ``other``: the space of every series is taken when a process starts."""


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """A label's name, and all values that it can have with one metric. ``unfed`` are those of them that nothing in this
    version gives: they have their place, and nothing may draw them or wait for them.
    """

    name: str
    values: tuple[str, ...]
    unfed: tuple[str, ...] = ()

    @property
    def fed(self) -> tuple[str, ...]:
        """The values that some process of this version can give."""
        return tuple(value for value in self.values if value not in self.unfed)

    def closed(self, value: str) -> str:
        """The value as the label has it: what stands behind a colon is left out, an unknown one is ``other``.

        Raises:
            KeyError: the value is unknown, and this set has no ``other``.
        """
        if value in self.values:
            return value
        family = value.partition(":")[0]
        if family in self.values:
            return family
        if OTHER in self.values:
            return OTHER
        raise KeyError(f"{value!r} is no value of label {self.name!r}")


GROUP = Label(name="group", values=(*map(str, range(MOST_GROUPS)), OTHER))
REASON = Label(name="reason", values=tuple(RULES))
CHECK = Label(name="check", values=(*CHECKS, "operators", "audit", "dummy"), unfed=("T",))
"""The checks, and three kinds of work beside them: operators' arguments compared, blocks audited, dummy runs read."""
SKIPPED_CHECK = Label(name="check", values=(*CHECKS, "plan", "dummy"), unfed=("C3", "C5", "C6", "T"))
"""``plan`` is where all checks of a plan fell away together; C3, C5 and C6 never do so alone."""
UNIT = Label(name="unit", values=("token", "block"))
BLOCK_STATE = Label(name="state", values=("free", "used", "cached", "null", "held"))
TAIL_STATE = Label(name="state", values=TAIL_STATES)
PD_DIRECTION = Label(name="direction", values=("sent", "received"))
OFFLOAD_DIRECTION = Label(name="direction", values=("d2h", "h2d"))
HOLD_CAUSE = Label(name="cause", values=("deferred", "connector", "isolated", OTHER))
DROP_CAUSE = Label(name="cause", values=("queue_records", "queue_bytes", "write_error", "encode_error", "closed"))
"""As ``sinks.shared`` has them, which a test compares: this station may not import that one."""
FAILURE_CAUSE = Label(
    name="cause",
    values=(
        "load_failed",
        "submit_failed",
        "result_failed",
        "aborted",
        "lease_expired",
        "cache_reset",
        "host_shutdown",
        OTHER,
    ),
    unfed=("submit_failed", "result_failed", "lease_expired", "cache_reset", OTHER),
)
"""``KVConnectorBase_V1`` (vLLM 0.32, ``kv_connector/v1/base.py``) lets nobody see the unfed ones. A receive that failed
is reported as such (``failed_recving``, or blocks with load errors), not whether in being submitted or in its result; a
lease that ran out is reported as a send that is done; resetting the cache ends no transfer that has been planned.
"""
SKIP_CAUSE = Label(
    name="cause",
    values=(
        "admission_unseen",
        "allocator_gap",
        "block_work_not_observed",
        "clone_too_large",
        "connector_hook_fault",
        "cp_coordinates_missing",
        "cp_rank_invalid",
        "device_tensors",
        "device_tensors_of_a_part",
        "estimated_lengths",
        "graph_capture",
        "group_missing",
        "local_lengths_unread",
        "no_operator_arguments",
        "no_plan",
        "not_arrived",
        "not_in_batch",
        "operator_arguments",
        "prefill_context_parallel",
        "result_without_trace",
        "ring_full",
        "semantics",
        "table_unknown",
        "unobserved",
        "warm_up",
        OTHER,
    ),
)
OUTCOME = Label(name="outcome", values=("resumed", "failed", "cancelled", "incomplete"))
FOREIGN = ("extensions", "subscribers", "collectors")
"""Code of others that runs in our threads: modules that are imported, and callbacks by what they registered as."""
HOOK = Label(
    name="hook",
    values=(
        "config.create",
        "config.executor",
        "config.worker",
        "frontend.create",
        "frontend.admit",
        "scheduler.create",
        "scheduler.schedule",
        "scheduler.update",
        "scheduler.reset",
        "engine.shutdown",
        "pool.alloc",
        "pool.queue",
        "pool.touch",
        "pool.free",
        "pool.unpin",
        "pool.cache",
        "pool.cache_partial",
        "pool.move_hashes",
        "pool.evict",
        "pool.reset",
        "pool.copy_on_write",
        "manager.allocate",
        "manager.pop",
        "manager.window",
        "scheduler.preempt",
        "scheduler.finish",
        "scheduler.free",
        "scheduler.finished",
        "scheduler.drain",
        "scheduler.free_copied",
        "scheduler.invalid",
        "scheduler.loaded",
        "connector.alloc",
        "connector.plan",
        "connector.finished",
        "monitor.lookup",
        "monitor.arrival",
        "monitor.transfers",
        "monitor.scheduled",
        "monitor.updated",
        "worker.cache",
        "worker.execute",
        "worker.sample",
        "worker.shutdown",
        "runner_v1.zero",
        "runner_v1.zero_cpu",
        "runner_v1.copy",
        "runner_v1.slots",
        "runner_v1.dummy",
        "runner_v1.forward",
        "runner_v1.output",
        "runner_v1.pooled",
        "runner_v1.verify",
        "runner_v1.rejected",
        "runner_v1.graph",
        "runner_v2.zero",
        "runner_v2.copy",
        "runner_v2.attn",
        "runner_v2.dummy",
        "runner_v2.capture",
        "runner_v2.metadata",
        "runner_v2.metadata_hybrid",
        "runner_v2.metadata_encoder_decoder",
        "runner_v2.micro_batches",
        "runner_v2.forward",
        "runner_v2.output",
        "runner_v2.pooled",
        "runner_v2.verify",
        "runner_v2.graph",
        *FOREIGN,
        OTHER,
    ),
)
"""As ``boundary.seams`` names them, which a test compares as well; then code that is no hook of ours."""
CONNECTOR = Label(
    name="connector",
    values=(
        "none",
        "DecodeBenchConnector",
        "ExampleConnector",
        "ExampleHiddenStatesConnector",
        "FlexKVConnectorV1",
        "HiSparseConnector",
        "LMCacheConnectorV1",
        "LMCacheMPConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "MoRIIOConnector",
        "MultiConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
        OTHER,
    ),
)
"""Names that ``vllm/distributed/kv_transfer/kv_connector/factory.py`` (0.32) registers; anybody else's is ``other``."""
