"""What the boundary asks of whoever observes: the protocols that adapters call, and nothing of who implements them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..facts.allocator import PoolOperation
from ..facts.connector import ConnectorPlan, ConnectorResult, TakenUp
from ..facts.context_parallel import LocalLengths
from ..facts.operators import OperatorArguments
from ..facts.plans import DummyRun, Plan
from ..facts.requests import Admission, Declaration, Drafts, StepRequests, StepResult
from .device import Clone


class Observer(Protocol):
    """Common to all: told that the host raised, and that it ends."""

    def on_native_error(self, boundary: str, error_type: str) -> None: ...

    def on_shutdown(self) -> None: ...


class FrontendObserver(Observer, Protocol):
    """Observes one OutputProcessor."""

    def on_admission(self, admission: Admission) -> None: ...


class EngineObserver(Observer, Protocol):
    """Observes one Scheduler. ``on_schedule*`` and ``on_update*`` may raise ViolationError.

    ``on_pool`` and ``on_handing_out`` may not: the pool's books would be left half written."""

    answers: Callable[[object], None] | None

    def next_step(self) -> tuple[int, str]: ...

    def on_schedule_begin(self) -> None: ...

    def on_pool(self, operation: PoolOperation, boundary: str) -> None: ...

    def on_handing_out(self, operation: PoolOperation, boundary: str) -> None: ...

    def on_schedule(self, declaration: Declaration) -> None: ...

    def on_connector_plan(self, plan: ConnectorPlan) -> None: ...

    def on_connector_result(self, declaration: Declaration | None, result: ConnectorResult) -> None: ...

    @property
    def failed_loads(self) -> list[str]: ...

    def on_taken_up(self, declaration: Declaration | None, taken_up: list[TakenUp]) -> None: ...

    def on_update(self, declaration: Declaration | None, result: StepResult | None) -> None: ...

    def on_updated(self) -> None: ...

    def on_reset(self) -> None: ...


class WorkerObserver(Observer, Protocol):
    """Observes one worker and its runner. ``on_plan`` and ``on_operators`` may raise ViolationError, which keeps the
    step from being launched.
    """

    reads_host_tensors: bool
    reads_operators: bool
    planned_tokens: int

    @property
    def reads_local_lengths(self) -> bool: ...

    @property
    def expects_no_plan(self) -> bool: ...

    @property
    def due_result(self) -> str | None: ...

    @property
    def is_warming_up(self) -> bool: ...

    def on_input(self, declaration: Declaration, received: StepRequests, drafts: Drafts | None) -> None: ...

    def on_input_without_declaration(self, received: StepRequests) -> None: ...

    def on_input_unobserved(self, received: StepRequests) -> None: ...

    def on_plan(self, plan: Plan) -> None: ...

    def on_local_lengths(self, lengths: LocalLengths | None) -> None: ...

    def on_plan_skipped(self, cause: str) -> None: ...

    @property
    def awaits_operators(self) -> bool: ...

    def on_operators(self, arguments: OperatorArguments) -> None: ...

    def on_launched(self) -> None: ...

    def on_dummy(self, run: DummyRun) -> None: ...

    def on_dummy_skipped(self, cause: str) -> None: ...

    def on_result(self, result: StepResult | None) -> None: ...


class DeferringObserver(WorkerObserver, Protocol):
    """Observes a worker whose tensors are on a device; ``reads_host_tensors`` is False.

    ``settle`` and what ``due`` returns, an object with a ``settle``, may raise ViolationError.
    """

    has_begun: bool

    def on_plan_clone(self, clone: Clone[Plan]) -> None: ...

    def on_dummy_clone(self, clone: Clone[DummyRun]) -> None: ...

    def make_room(self) -> None: ...

    def settle(self, number: int | None = None) -> None: ...

    def due(self) -> Any: ...


class Hub(Protocol):
    """Makes observers and decides what is wrapped, as configurations are read."""

    def configure_frontend(self, vllm_config: Any) -> None: ...

    def configure_engine(self, vllm_config: Any) -> None: ...

    def configure_worker(self, vllm_config: Any) -> None: ...

    def attach_frontend(self, processor: Any) -> None: ...

    def attach_scheduler(self, scheduler: Any) -> None: ...

    def attach_worker(self, worker: Any) -> None: ...

    def attach_runner(self, worker: Any, kv_cache_config: Any) -> None: ...

    def close_engine(self, core: Any) -> None: ...
