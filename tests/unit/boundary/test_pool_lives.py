"""The ledger beside vLLM's own books while random things happen to a real scheduler, with and without a connector."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.budget import examples
from vllm.v1.request import RequestStatus

from kvscope.facts.allocator import ALLOC
from kvscope.state.shares import Share
from unit.boundary import schedulers
from unit.boundary.schedulers import Host, full, make_scheduler, sliding, state

ABORTED = RequestStatus.FINISHED_ABORTED


@pytest.fixture(scope="module", autouse=True)
def wrapped() -> Iterator[None]:
    with schedulers.seams():
        yield


EXAMPLES = examples(30)
PREFIXES = [list(range(100)), list(range(40)) + list(range(200, 260)), list(range(300, 400))]
SETTINGS = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "step", "step", "step", "overlap", "abort", "reset", "evict", "pin", "remote"]),
        st.integers(0, 7),
        st.integers(2, 90),
    ),
    min_size=8,
    max_size=50,
)


class Life:
    """Random things happen to a scheduler; :class:`Host` looks after each."""

    def __init__(self, scheduler: Any, *, connected: bool = False, deferred: bool = False, **more: Any) -> None:
        self.host = Host(scheduler)
        self.connector = self.host.connect() if connected else None
        scheduler.defer_block_free = deferred
        self.more = more
        self.pinned: list[list[Any]] = []
        self.aborted_loads: set[str] = set()
        self.count = 0

    def act(self, what: str, which: int, size: int) -> None:
        getattr(self, what)(which, size)
        self.host.agrees()

    def add(self, which: int, size: int) -> None:
        if len(self.host.scheduler.requests) == 8:
            return
        self.count += 1
        name = f"r{self.count}"
        if self.connector is not None:
            if which % 4 < 2:
                tokens = min(16 * which, size if which % 2 else (size - 1) // 16 * 16)
                self.connector.elsewhere[name] = (tokens, bool(which % 2))
            if which % 3 == 0:
                self.connector.keeps.add(name)
        self.host.add(name, PREFIXES[which % 3][:size], max_tokens=1 + which * 5, **self.more)

    def step(self, *_: int) -> None:
        self.host.step()

    def overlap(self, *_: int) -> None:
        """A step is on its way while other things happen. With loads, vLLM then has frees wait for it."""
        if self.connector is not None and not self.host.scheduler.defer_block_free:
            self.host.step()
        elif len(self.host.outputs) < 2:
            self.host.schedule()

    def remote(self, which: int, _: int) -> None:
        if self.connector is None:
            return
        self.host.schedule()
        while len(self.host.outputs) > 1:
            self.host.finish_step()
        self.host.finish_step(**self.transfers(which))

    def abort(self, which: int, _: int) -> None:
        scheduler = self.host.scheduler
        names = list(scheduler.requests)
        if names:
            name = names[which % len(names)]
            if scheduler.requests[name].status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.aborted_loads.add(name)
            scheduler.finish_requests(name, ABORTED)

    def reset(self, which: int, _: int) -> None:
        with contextlib.suppress(RuntimeError):  # of the host, where a connector or a deferred free has blocks
            self.host.scheduler.reset_prefix_cache(reset_running_requests=which == 0 and not self.pinned)

    def evict(self, which: int, _: int) -> None:
        self.host.manager.evict_blocks({which + 1, which + 2})

    def pin(self, which: int, _: int) -> None:
        """Somebody else takes references to blocks that are in use, or gives back what he took first."""
        pool = self.host.pool
        if which < 4:
            blocks = [block for block in pool.blocks[1 : 4 + which] if block.ref_cnt > 0]
            pool.touch(blocks)
            self.pinned.append(blocks)
        elif self.pinned:
            pool.free_blocks(iter(self.pinned.pop(0)))

    def transfers(self, which: int) -> dict[str, Any]:
        """What the connector has to say: some of what it loads is there or failed, and all that it sends is sent."""
        scheduler, is_one_group = self.host.scheduler, len(self.host.reader.managers) == 1
        kept = {r.request_id for r in scheduler.requests.values() if r.is_finished()}
        loading = [
            r.request_id
            for r in scheduler.kv_holding_waiting
            if r.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and r.request_id not in scheduler.finished_recving_kv_req_ids
        ]
        arrived = set(loading[: which % 3 + 1])
        said: dict[str, Any] = {
            "finished_recving": arrived | (kept & self.aborted_loads),
            "finished_sending": kept - self.aborted_loads,
        }
        if which == 7:
            said["failed_recving"] = arrived
        elif which == 6 and arrived and is_one_group:
            said["invalid_block_ids"] = set(self.host.blocks_of(min(arrived))[-1:])
        elif which == 5 and is_one_group:
            said["invalid_block_ids"] = self.loaded_in_this_step()
        return said

    def loaded_in_this_step(self) -> set[int]:
        loads = [o for o in self.host.of(ALLOC) if o.cause == "external" and not o.reserved]
        return {block for o in loads if o.step == self.host.follower.step for block in o.block_ids}

    def end(self) -> None:
        host = self.host
        while host.outputs:
            host.finish_step()
        host.scheduler.finish_requests(None, ABORTED)
        if self.connector is not None:
            host.schedule()
            host.finish_step(finished_sending=set(host.scheduler.requests))
        for blocks in self.pinned:
            host.pool.free_blocks(iter(blocks))
        for _ in range(3):
            host.step()
        ledger = host.follower.ledger
        assert ledger.references_of(range(1, ledger.num_blocks)).tolist() == [0] * (ledger.num_blocks - 1)
        shares: list[Share] = [s for b in range(ledger.num_blocks) for s in ledger.owners(b)]
        assert shares == []
        assert not host.reader.popped
        assert all(o.request_id is not None for o in host.of(ALLOC) if o.cause == "allocate")


MAKERS = {
    "one group": lambda: Life(make_scheduler(num_blocks=14)),
    "a full group and a window": lambda: Life(make_scheduler(full(), sliding(32), num_blocks=26)),
    "blocks of two sizes": lambda: Life(make_scheduler(full(32), sliding(24), num_blocks=24, hash_block_size=16)),
    "hits of parts of blocks": lambda: Life(
        make_scheduler(full(32), state(32), num_blocks=24, hash_block_size=8), hash_block_size=8
    ),
    "asynchronous": lambda: Life(make_scheduler(num_blocks=14, asynchronous=True)),
    "asynchronous, with a window": lambda: Life(make_scheduler(full(), sliding(32), num_blocks=26, asynchronous=True)),
    "frees that wait for a step": lambda: Life(
        make_scheduler(num_blocks=14, asynchronous=True), connected=True, deferred=True
    ),
    "a connector": lambda: Life(make_scheduler(num_blocks=20), connected=True),
    "a connector and a window": lambda: Life(make_scheduler(full(), sliding(32), num_blocks=32), connected=True),
    "without a prefix cache": lambda: Life(make_scheduler(num_blocks=14, caching=False)),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_the_ledger_agrees_with_the_host_whatever_happens(kind: str) -> None:
    @SETTINGS
    @given(ACTS)
    def live(acts: list[tuple[str, int, int]]) -> None:
        life = MAKERS[kind]()
        for act in acts:
            life.act(*act)
        life.end()

    live()
