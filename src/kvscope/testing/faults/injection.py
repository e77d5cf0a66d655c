"""`arm`: puts one fault into this process, waits for a step in which it can happen, and takes everything out again."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

from kvscope.testing.faults.catalog import FAULTS
from kvscope.testing.faults.fault import Fault
from kvscope.testing.faults.hooks import Hook, Undo

What = dict[str, Any]


class Injection:
    """One armed fault, usable as a context manager. Reading `what` is the test's interest, the rest is for the parts.

    `what` is None until the fault has happened, or can be found some other way before, and then says where, from the
    host's own objects: `fault`, `runner` (of a plan or dummy), `rank` (None where every rank sees the same), `step`
    (steps with work since the arming, from 1, counted where the fault goes in; of the allocator's faults see
    `allocator_catalog`), `group_id`, `expected` (the reason to be found), and, as far as they apply, `request_id`,
    `other_request_id`, `row`, `token_index` (in the flat batch), `position`, `logical_index`, `block_id` and `slot`:
    the wrong ones, each with the right one as `expected_*`.
    """

    def __init__(
        self,
        fault: Fault,
        *,
        rank: int | None,
        after_steps: int,
        group_id: int,
        once: bool,
        attribute: str,
        on_fire: Callable[[What], None] | None,
    ) -> None:
        self.fault, self.rank, self.after_steps = fault, rank, after_steps
        self.group_id, self.once, self.attribute = group_id, once, attribute
        self.what: What | None = None
        self.times = 0
        self.steps = 0
        self.undo = Undo()
        self._on_fire = on_fire
        self._hooks: list[Hook] = []

    @property
    def fired(self) -> bool:
        return self.times > 0

    @property
    def due(self) -> bool:
        """Whether the fault may happen in this step."""
        return self.steps > self.after_steps and not (self.once and self.fired)

    def concerns(self, rank: int | None) -> bool:
        return self.rank is None or self.rank == rank

    def fire(self, what: What | None, *, rank: int | None = None, runner: str | None = None) -> None:
        """Take note of what an injector did; None means that it found no occasion."""
        if what is None:
            return
        self.times += 1
        self.what = self._where(what, rank, runner)
        if self._on_fire is not None:
            self._on_fire(self.what)

    def announce(self, what: What) -> None:
        """Say what may be found before the fault has happened, which `fire` is going to replace."""
        self.what = self._where(what, None, None)

    def _where(self, what: What, rank: int | None, runner: str | None) -> What:
        where: What = {"fault": self.fault.name, "rank": rank, "step": self.steps, "group_id": self.group_id}
        if runner is not None:
            where["runner"] = runner
        return where | {"expected": self.fault.expected} | what

    def install(self) -> "Injection":
        """Put the fault in; twin of `remove`."""
        from kvscope.testing.faults.sites import hooks

        self._hooks = hooks(self)
        return self

    def remove(self) -> None:
        """End the corrupted step, if it is still open, and take every wrapper out."""
        self.undo.run()
        while self._hooks:
            self._hooks.pop().remove()

    def __enter__(self) -> "Injection":
        return self.install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def arm(
    name: str,
    *,
    rank: int | None = None,
    after_steps: int = 0,
    group_id: int = 0,
    once: bool = True,
    attribute: str = "_kvscope_declaration",
    on_fire: Callable[[What], None] | None = None,
) -> Injection:
    """The fault `name`, to be put in with `with`, for engines in this process.

    It happens in the first step after `after_steps` steps with work in which it can: in the group `group_id`, on the
    worker of `rank` (None: on every one in this process). With `once=False` it happens in every such step. Only
    `declaration_lost` asks for `attribute`, the name under which the declaration travels on the SchedulerOutput.
    """
    if name not in FAULTS:
        raise ValueError(f"no fault is called {name!r}; there are {', '.join(sorted(FAULTS))}")
    return Injection(
        FAULTS[name],
        rank=rank,
        after_steps=after_steps,
        group_id=group_id,
        once=once,
        attribute=attribute,
        on_fire=on_fire,
    )
