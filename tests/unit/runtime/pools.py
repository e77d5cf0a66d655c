"""An engine and a worker that follow a pool of dicts: what the pool does is told as the boundary tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvscope.facts.allocator import ALLOC, CACHE, FREE, HOLD, TOUCH, PoolOperation
from kvscope.facts.requests import Declaration, StepResult
from unit.runtime.support import Hooks, Live, of_event
from unit.state.pools import DictPool


class CountedHooks(Hooks):
    """Hooks of the pool that may have failed."""

    @property
    def faults(self) -> int:
        return self.allocator_faults[0]

    @faults.setter
    def faults(self, count: int) -> None:
        self.allocator_faults[0] = count


class PooledLive(Live):
    """``host`` is the pool; it answers the audit as well."""

    def __init__(self, folder: Path, *, observed: bool = True, **run: Any) -> None:
        self.hooks = CountedHooks()
        super().__init__(folder, hooks=self.hooks, **run)
        self.host = DictPool(64)
        self.tables: dict[str, list[int]] = {}
        if observed:
            assert self.engine.pool is not None
            self.engine.pool.observe(self)

    # The host's side of the audit -------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self.host.free_list)

    def counts(self, first: int, last: int) -> list[int]:
        return self.host.ref_counts()[first:last]

    def free_ids(self, limit: int) -> list[int]:
        return self.host.free_ids()[:limit]

    def table_of(self, request_id: str) -> list[list[int]]:
        return [self.tables.get(request_id, [])]

    # What the pool does -----------------------------------------------------------------------------------------------

    def tell(
        self, kind: str, block_ids: list[int], name: str | None, boundary: str = "free_blocks", **fields: Any
    ) -> None:
        counts = self.host.ref_counts()
        operation = PoolOperation(
            kind=kind,
            block_ids=list(block_ids),
            request_id=name,
            group_id=None if name is None else 0,
            ref_counts=[counts[block] for block in block_ids],
            **fields,
        )
        self.engine.on_pool(operation, boundary)

    def get(self, name: str, count: int, **fields: Any) -> list[int]:
        blocks = self.host.allocate(count)
        index = len(self.tables.setdefault(name, []))
        self.tables[name] += blocks
        self.tell(ALLOC, blocks, name, "allocate_slots", **{"first_index": index, "cause": "allocate", **fields})
        return blocks

    def hit(self, name: str, blocks: list[int]) -> None:
        self.host.touch(blocks)
        self.tables[name] = list(blocks)
        self.tell(TOUCH, blocks, name, "allocate_slots", first_index=0, cause="hit")

    def cache(self, name: str, blocks: list[int]) -> None:
        self.host.cache(blocks, [str(block) for block in blocks])
        self.tell(CACHE, blocks, name, "allocate_slots", hash_tokens=[16] * len(blocks))

    def free(self, name: str | None, blocks: list[int], cause: str = "finish") -> None:
        self.host.free(blocks)
        self.tell(FREE, blocks, name, cause=cause)

    def leave(self, name: str, cause: str = "finish") -> None:
        self.free(name, self.tables.pop(name)[::-1], cause)

    def hold(self, name: str, cause: str) -> None:
        self.tell(HOLD, self.tables.pop(name), name, "pop_blocks_for_free", cause=cause)

    # Steps ------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The scheduler is at work: what the pool does now belongs to the step."""
        self.engine.on_schedule_begin()

    def end(self, **said: Any) -> Declaration:
        step, _ = self.engine.next_step()
        declaration = self.scene.say(**said)
        assert declaration.step == step
        self.engine.on_schedule(declaration)
        return declaration

    def carry_out(self, declaration: Declaration) -> None:
        """The worker gets the step and runs it."""
        self.worker.on_input(declaration, declaration.requests.copy())
        self.worker.on_plan(self.scene.plan(declaration))
        self.worker.on_launched()

    def back(self, declaration: Declaration) -> None:
        """The result comes back. With it a load has failed: these tests schedule the same token again and again."""
        names = tuple(declaration.requests.scheduled)
        result = StepResult(request_ids=names, sampled_tokens=(1,) * len(names), load_failed=True)
        self.engine.on_update(declaration, result)
        self.engine.on_updated()

    def whole(self, **said: Any) -> Declaration:
        declaration = self.end(**said)
        self.carry_out(declaration)
        self.back(declaration)
        return declaration

    def start(self, name: str = "a", tokens: int = 40) -> Declaration:
        """A request comes in and has its first step."""
        self.begin()
        blocks = self.get(name, -(-tokens // 16))
        return self.whole(new=[(name, (blocks,), 0, tokens)])

    def idle(self, steps: int, tokens: int = 40) -> None:
        """``a`` is scheduled again and again for the same token, so that it needs no block."""
        for _ in range(steps):
            self.begin()
            self.whole(known=[("a", None, tokens, 1)])

    def found(self) -> list[tuple[str, int, int | None]]:
        """``(reason, step, block)`` of everything that was found. The run is over with that."""
        violations = of_event(self.run, "kv.violation")
        return [(v["reason"], v.get("step", v.get("after_step")), v.get("block_id")) for v in violations]
