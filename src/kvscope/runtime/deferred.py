"""Observes a worker whose tensors are on a device: takes note of what it is told, and tells it on when copies arrive.

A plan can be judged only when its copy has reached the host, by which time the worker may have been told of one or two
later steps. It is judged as if no time had passed: everything that the worker's observer is told waits in one line
behind the plan that has not arrived, so that tables, blocks and generations are those of the plan's own step when its
turn comes. Nothing is copied of them, and no rule knows the difference.

Whoever takes a step's result has the line played up to there (:meth:`DeferredJudge.settle`): a finding is made before
the result of its step goes back. A rank whose result nobody takes has a thread for it. The launch never waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, NamedTuple, Protocol

from ..errors import ViolationError
from ..facts.context_parallel import LocalLengths
from ..facts.operators import OperatorArguments
from ..facts.plans import DummyRun, Plan
from ..facts.requests import Declaration, Drafts, StepRequests, StepResult, Verification
from ..facts.topology import Topology
from .run import Run
from .worker import WorkerJudge

NOT_ARRIVED = "not_arrived"
"""Cause under which rows are counted whose copy had not reached the host when the run ended, or failed to."""

MOST_WAITING = 256
"""Calls that may wait: about fifty steps. Results are awaited two or three steps later."""
SHUTDOWN_SECONDS = 1.0
_POLL_SECONDS = 0.001


class Copy(Protocol):
    """A plan or a dummy run on its way to the host (``boundary.device.Clone``)."""

    def ready(self) -> bool: ...

    def wait(self) -> None: ...

    def read(self) -> Any: ...

    def release(self) -> None: ...


class _Call(NamedTuple):
    """What the observer is to be told; with a copy, what has arrived is what it is told. ``otherwise`` is said instead
    where it does not arrive.
    """

    number: int
    tell: Callable[..., None]
    arguments: tuple[Any, ...]
    copy: Copy | None = None
    otherwise: Callable[[str], None] | None = None


class Due:
    """Stands on an asynchronous result: when somebody takes it, its step is to be settled."""

    def __init__(self, judge: DeferredJudge, number: int) -> None:
        self._judge, self._number = judge, number

    def settle(self) -> None:
        """See :meth:`DeferredJudge.settle`."""
        self._judge.settle(self._number)

    def on_native_error(self, boundary: str, error_type: str) -> None:
        """The host could not make the result; steps that were launched since go on."""
        self._judge.on_late_error(boundary, error_type)


class DeferredJudge:
    """The observer of such a worker and its runner; ``judge`` is the one that is told later.

    Calls come from the thread that launches, but :meth:`settle` and :meth:`on_late_error` from whichever takes the
    result. ``returns_results`` says whether somebody does. ``expects_no_plan`` and ``due_result`` are about the step
    that is being launched, of which the judge may know nothing yet.
    """

    reads_host_tensors = False
    reads_operators = awaits_operators = False
    planned_tokens = 0

    def __init__(self, judge: WorkerJudge, run: Run, *, returns_results: bool) -> None:
        self.judge = judge
        self.has_begun = False
        self.expects_no_plan, self._in_step = True, False
        self.due_result: str | None = None
        self._waiting: deque[_Call] = deque()
        self._number = 0
        self._ordering = threading.Lock()
        self._playing = threading.Lock()
        self._violation: ViolationError | None = None
        self._fault: Exception | None = None
        self._arrival = None if returns_results else threading.Event()
        self._sweeper: threading.Thread | None = None
        self._has_ended = False
        run.before_close.append(self.drain)

    def bind_topology(self, topology: Topology) -> None:
        """The pool is known, or known anew."""
        self.drain()
        self.judge.bind_topology(topology)

    # What the worker is told ------------------------------------------------------------------------------------------

    def on_operators(self, arguments: OperatorArguments) -> None:
        """Nobody asks for them: they are on the device, and the plan to hold them against has yet to arrive."""
        self.judge.on_operators(arguments)

    @property
    def reads_local_lengths(self) -> bool:
        return self.judge.reads_local_lengths

    @property
    def is_warming_up(self) -> bool:
        """Whether slots made now are those of requests that the worker has made up, before the first step."""
        return not (self._in_step or self.has_begun)

    def on_input(self, declaration: Declaration, received: StepRequests, drafts: Drafts | None = None) -> None:
        self.has_begun, self._in_step, self.expects_no_plan = True, True, declaration.is_empty
        self.due_result = declaration.trace_id
        kept = received if received is declaration.requests else received.copy()
        self._tell(self.judge.on_input, declaration, kept, drafts)
        self._hold_bounds()

    def on_input_without_declaration(self, received: StepRequests) -> None:
        self._in_step, self.expects_no_plan, self.due_result = True, True, None
        self._tell(self.judge.on_input_without_declaration, received.copy())
        self._hold_bounds()

    def on_input_unobserved(self, received: StepRequests) -> None:
        self._in_step, self.expects_no_plan, self.due_result = True, True, None
        self._tell(self.judge.on_input_unobserved, received.copy())
        self._hold_bounds()

    def on_plan(self, plan: Plan) -> None:
        """A plan that the host has already; its arrays must not change any more."""
        self._tell(self.judge.on_plan, plan)

    def on_plan_clone(self, clone: Copy) -> None:
        self._tell(self.judge.on_plan, copy=clone, otherwise=self.judge.on_plan_skipped)

    def on_plan_skipped(self, cause: str) -> None:
        self._tell(self.judge.on_plan_skipped, cause)

    def on_local_lengths(self, lengths: LocalLengths | None) -> None:
        self._tell(self.judge.on_local_lengths, lengths)

    def on_launched(self) -> None:
        self._in_step, self.expects_no_plan = False, True
        self._tell(self.judge.on_launched)

    def on_dummy(self, run: DummyRun) -> None:
        self._tell(self.judge.on_dummy, run)

    def on_dummy_clone(self, clone: Copy) -> None:
        self._tell(self.judge.on_dummy, copy=clone, otherwise=self.judge.on_dummy_skipped)

    def on_dummy_skipped(self, cause: str) -> None:
        self._tell(self.judge.on_dummy_skipped, cause)

    def expect_block_work(self, clears_by: str | None, copies_by: str | None) -> None:
        self.judge.expect_block_work(clears_by, copies_by)

    def expect_drafts(self, counts_by: str | None) -> None:
        self.judge.expect_drafts(counts_by)

    def on_cleared(self, block_ids: list[int]) -> None:
        self._tell(self.judge.on_cleared, block_ids)

    def on_copied(self, copies: list[tuple[int, int]]) -> None:
        self._tell(self.judge.on_copied, copies)

    def on_verified(self, counted: Verification) -> None:
        self._tell(self.judge.on_verified, counted)

    def on_rejected(self, rejected: list[int]) -> None:
        self._tell(self.judge.on_rejected, rejected)

    def on_verification_skipped(self, cause: str, rows: int) -> None:
        self._tell(self.judge.on_verification_skipped, cause, rows)

    def on_result(self, result: StepResult | None) -> None:
        self._tell(self.judge.on_result, result)

    def on_native_error(self, boundary: str, error_type: str) -> None:
        self._in_step, self.expects_no_plan = False, True
        self._tell(self.judge.on_native_error, boundary, error_type)

    def on_late_error(self, boundary: str, error_type: str) -> None:
        """The host failed after the launch."""
        self._tell(self.judge.on_late_error, boundary, error_type)

    def on_shutdown(self) -> None:
        self.drain()
        self._has_ended = True
        if self._arrival is not None:
            self._arrival.set()
        self.judge.on_shutdown()

    # When it is judged ------------------------------------------------------------------------------------------------

    def due(self) -> Due:
        """To be settled when the result that was told last is taken."""
        return Due(self, self._number)

    def settle(self, number: int | None = None) -> None:
        """Judge everything up to a call (None: up to now), waiting for what has not arrived.

        Raises ViolationError where the judge does, and whatever else went wrong since it was last asked.
        """
        self._play(self._number if number is None else number)
        self._raise()

    def make_room(self) -> None:
        """Judge what has arrived, unless another thread is at it. Never waits, never raises a finding."""
        if self._playing.acquire(blocking=False):
            try:
                self._play_arrived(self._number)
            finally:
                self._playing.release()

    def drain(self) -> None:
        """Judge what arrives within a second, and count the rest: the run ends, or another pool begins."""
        deadline = monotonic() + SHUTDOWN_SECONDS
        while True:
            with self._playing:
                if self._play_arrived(self._number) is None:
                    return
                if monotonic() >= deadline:
                    self._give_up()
                    continue
            sleep(_POLL_SECONDS)

    def _tell(
        self,
        tell: Callable[..., None],
        *arguments: Any,
        copy: Copy | None = None,
        otherwise: Callable[[str], None] | None = None,
    ) -> None:
        with self._ordering:
            self._number += 1
            self._waiting.append(_Call(self._number, tell, arguments, copy, otherwise))
        if copy is not None and self._arrival is not None:
            if self._sweeper is None:
                self._sweeper = threading.Thread(target=self._sweep, args=(self._arrival,), name="kvscope-audit")
                self._sweeper.daemon = True
                self._sweeper.start()
            self._arrival.set()

    def _hold_bounds(self) -> None:
        """Where nobody takes results any more the line would grow for ever."""
        if self._arrival is not None:
            self._raise()
        if len(self._waiting) > MOST_WAITING // 2:
            self.make_room()
        if len(self._waiting) > MOST_WAITING:
            with self._playing:
                while len(self._waiting) > MOST_WAITING and self._play_arrived(self._number) is not None:
                    self._give_up()

    def _sweep(self, arrival: threading.Event) -> None:
        """The thread of a rank whose results nobody takes."""
        while not self._has_ended:
            arrival.wait()
            arrival.clear()
            self._play(self._number)

    def _play(self, until: int) -> None:
        while True:
            with self._playing:
                copy = self._play_arrived(until)
            if copy is None:
                return
            try:
                copy.wait()
            except Exception as error:  # noqa: BLE001 - the device failed: `_raise` has the hook count it
                self._fault = self._fault or error
                with self._playing:
                    if self._waiting and self._waiting[0].copy is copy:
                        self._give_up()

    def _play_arrived(self, until: int) -> Copy | None:
        """Tell the judge in order what can be told; the copy that the next call waits for. The lock is held."""
        waiting = self._waiting
        while waiting and waiting[0].number <= until:
            call = waiting[0]
            if call.copy is None:
                waiting.popleft()
                self._guard(call.tell, *call.arguments)
                continue
            try:
                if not call.copy.ready():
                    return call.copy
            except Exception as error:  # noqa: BLE001 - the device failed: `_raise` has the hook count it
                self._fault = self._fault or error
                self._give_up()
                continue
            waiting.popleft()
            self._guard(self._tell_copied, call.tell, call.copy)
        return None

    def _tell_copied(self, tell: Callable[..., None], copy: Copy) -> None:
        try:
            tell(copy.read())
        finally:
            copy.release()

    def _give_up(self) -> None:
        """Do without the copy at the head of the line. Its memory stays taken: it may yet arrive there."""
        call = self._waiting.popleft()
        if call.otherwise is not None:
            self._guard(call.otherwise, NOT_ARRIVED)

    def _guard(self, tell: Callable[..., None], *arguments: Any) -> None:
        """One call that fails keeps none of the others from being told; what it raised is raised where it is due."""
        try:
            tell(*arguments)
        except ViolationError as violation:
            self._violation = self._violation or violation
        except Exception as error:  # noqa: BLE001 - as above: `_raise` has the hook count it
            self._fault = self._fault or error

    def _raise(self) -> None:
        raised = self._violation or self._fault
        self._violation = self._fault = None
        if raised is not None:
            raise raised
