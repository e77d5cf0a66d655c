"""What can become of blocks: a scheduler of a few lines, what it makes of a pool, and what a ledger must then say.

The scheduler keeps its own books (tables, what was given up, generations, tokens written) in plain dicts and says what
the pool did as facts. The ledger hears the facts alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvscope.facts import allocator as facts
from kvscope.facts.allocator import PoolOperation
from kvscope.state.block_columns import Status
from kvscope.state.blocks import BlockLedger
from unit.state.pools import NULL, Pool

NUM_BLOCKS = 24
GROUPS = 2
BLOCK_SIZE = 16
NAMES = ["a", "b", "c", "d", "e"]

Place = tuple[str, int, int, int]
"""Request, group, index, block."""


class Said:
    """The ledger, and everything that it was told, so that it can be told again."""

    def __init__(self, ledger: BlockLedger) -> None:
        self.ledger = ledger
        self.log: list[tuple[str, tuple[Any, ...]]] = []

    def __call__(self, method: str, *arguments: Any) -> None:
        self.log.append((method, arguments))
        getattr(self.ledger, method)(*arguments)

    def again(self) -> BlockLedger:
        """Another ledger that was told the same, from records."""
        ledger = BlockLedger(NUM_BLOCKS, NULL)
        for method, arguments in self.log:
            records = [msgspec.json.decode(msgspec.json.encode(a), type=type(a)) for a in arguments]
            getattr(ledger, method)(*records)
        return ledger


class BlockLives(RuleBasedStateMachine):
    """``make_pool`` is set by who runs it, and ``make_ledger`` by who has another ledger."""

    make_pool: Callable[[int], Pool]

    @staticmethod
    def make_ledger() -> BlockLedger:
        return BlockLedger(NUM_BLOCKS, NULL)

    @initialize()
    def start(self) -> None:
        self.pool = type(self).make_pool(NUM_BLOCKS)
        self.said = Said(self.make_ledger())
        self.tables: dict[str, list[list[int]]] = {}  # the host's, of requests that are live or wait for a connector
        self.ended: set[str] = set()  # those of them that wait
        self.given_up: list[tuple[str, list[Place]]] = []  # popped tables, to be freed later
        self.nobodys: list[list[int]] = []  # both ends of copies, pins
        self.receiving: dict[str, list[int]] = {}
        self.generations: Counter[int] = Counter()
        self.declared: Counter[int] = Counter()
        self.confirmed: Counter[int] = Counter()
        self.steps: list[tuple[int, list[tuple[int, int, int]]]] = []  # step, (block, generation, filled)
        self.step = 1
        self.contents = 0

    # Saying it --------------------------------------------------------------------------------------------------------

    def tell(self, kind: str, block_ids: list[int], **fields: Any) -> None:
        counts = self.pool.ref_counts()
        operation = PoolOperation(
            kind=kind, block_ids=block_ids, ref_counts=[counts[block] for block in block_ids], **fields
        )
        self.said("apply", operation, self.step)
        assert self.said.ledger.references_of(block_ids).tolist() == operation.ref_counts

    def allocate(self, name: str | None, group: int, index: int, count: int, **fields: Any) -> list[int]:
        block_ids = self.pool.allocate(count)
        for block in block_ids:
            self.generations[block] += 1
            self.declared[block] = self.confirmed[block] = 0
        if block_ids:
            fields = {"cause": facts.CAUSE_ALLOCATE, "request_id": name, "group_id": group, **fields}
            self.tell(facts.ALLOC, block_ids, first_index=index, **fields)
        return block_ids

    def release(self, block_ids: list[int], name: str | None, group: int | None, cause: str) -> None:
        if block_ids:
            self.pool.free(block_ids)
            self.tell(facts.FREE, block_ids, request_id=name, group_id=group, cause=cause)

    def places(self, name: str) -> list[Place]:
        return [
            (name, group, index, block)
            for group, table in enumerate(self.tables[name])
            for index, block in enumerate(table)
            if block != NULL
        ]

    def live(self) -> list[str]:
        return [name for name in self.tables if name not in self.ended and name not in self.receiving]

    def free_count(self) -> int:
        return len(self.pool.free_ids())

    # Requests come and grow -------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.tables) < len(NAMES))
    @rule(data=st.data(), counts=st.lists(st.integers(0, 3), min_size=GROUPS, max_size=GROUPS))
    def admit(self, data: st.DataObject, counts: list[int]) -> None:
        """A new request, or a preempted one again, with or without a prefix that somebody else has or had."""
        name = data.draw(st.sampled_from([name for name in NAMES if name not in self.tables]))
        hashes = self.pool.hash_counts()
        tables: list[list[int]] = [[] for _ in range(GROUPS)]
        donors = [donor for donor in self.live() if any(hashes[place[3]] for place in self.places(donor))]
        donor = data.draw(st.none() | st.sampled_from(donors)) if donors else None
        for group in range(GROUPS):
            hit = [] if donor is None else self.tables[donor][group]
            skipped = next((i for i, block in enumerate(hit) if block != NULL), len(hit))
            hit = hit[skipped:]
            hit = hit[: next((i for i, block in enumerate(hit) if block == NULL or not hashes[block]), len(hit))]
            if hit:
                tables[group] = [NULL] * skipped + hit
                self.pool.touch(hit)
                self.tell(facts.TOUCH, hit, request_id=name, group_id=group, first_index=skipped, cause=facts.CAUSE_HIT)
        self.tables[name] = tables
        for group, count in enumerate(counts):
            self.grow(name, group, count)

    def grow(self, name: str, group: int, count: int) -> None:
        table = self.tables[name][group]
        table += self.allocate(name, group, len(table), min(count, self.free_count()))

    @precondition(lambda self: self.live())
    @rule(data=st.data(), counts=st.lists(st.integers(0, 3), min_size=GROUPS, max_size=GROUPS))
    def append(self, data: st.DataObject, counts: list[int]) -> None:
        name = data.draw(st.sampled_from(self.live()))
        for group, count in enumerate(counts):
            self.grow(name, group, count)

    @precondition(lambda self: len(self.tables) < len(NAMES) and self.free_count() > 1)
    @rule(data=st.data())
    def hit_a_free_block(self, data: st.DataObject) -> None:
        """What a finished request left behind, hashed, is found again."""
        hashes = self.pool.hash_counts()
        cached = [block for block in self.pool.free_ids() if hashes[block]]
        if cached:
            name = data.draw(st.sampled_from([name for name in NAMES if name not in self.tables]))
            block = data.draw(st.sampled_from(cached))
            self.pool.touch([block])
            self.tell(facts.TOUCH, [block], request_id=name, group_id=0, first_index=0, cause=facts.CAUSE_HIT)
            self.tables[name] = [[block], *([] for _ in range(GROUPS - 1))]

    @precondition(lambda self: len(self.tables) < len(NAMES) and self.free_count() > 1)
    @rule(data=st.data(), count=st.integers(1, 2))
    def begin_receive(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from([name for name in NAMES if name not in self.tables]))
        blocks = self.allocate(name, 0, 0, count, cause=facts.CAUSE_EXTERNAL, reserved=True)
        self.tables[name] = [list(blocks), *([] for _ in range(GROUPS - 1))]
        self.receiving[name] = blocks

    @precondition(lambda self: self.receiving)
    @rule(data=st.data(), filled=st.integers(0, BLOCK_SIZE), valid=st.booleans())
    def end_receive(self, data: st.DataObject, filled: int, valid: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.receiving)))
        blocks = self.receiving.pop(name)
        assert set(self.said.ledger.status_of(blocks).tolist()) == {Status.RESERVED}
        if valid:
            self.said("receive", blocks, filled, self.step)
        else:
            self.said("cut", blocks, 0)
        for block in blocks if valid else ():
            self.declared[block] = max(self.declared[block], filled)
            self.confirmed[block] = max(self.confirmed[block], filled)

    # Requests lose blocks ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.live())
    @rule(data=st.data(), cause=st.sampled_from([facts.CAUSE_FINISH, facts.CAUSE_PREEMPT, facts.CAUSE_ABORT]))
    def leave(self, data: st.DataObject, cause: str) -> None:
        """All blocks are released at once, those of each group from the end."""
        name = data.draw(st.sampled_from(self.live()))
        for group, table in enumerate(self.tables.pop(name)):
            self.release([block for block in reversed(table) if block != NULL], name, group, cause)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), cause=st.sampled_from([facts.CAUSE_FINISH, facts.CAUSE_PREEMPT]), as_a_fact=st.booleans())
    def give_up(self, data: st.DataObject, cause: str, as_a_fact: bool) -> None:
        """The table is popped and freed by a later step. The request may be back before that."""
        name = data.draw(st.sampled_from(self.live()))
        places = self.places(name)
        del self.tables[name]
        self.given_up.append((name, places))
        if as_a_fact and places:
            self.tell(facts.HOLD, [place[3] for place in places], request_id=name, cause=cause)
        else:
            self.said("request_ended", name)

    @precondition(lambda self: self.given_up)
    @rule(named=st.booleans())
    def drain(self, named: bool) -> None:
        name, places = self.given_up.pop(0)
        blocks = [place[3] for place in reversed(places)]
        waiting = {place[3] for ended in self.ended for place in self.places(ended)}
        if waiting.isdisjoint(blocks) and not named:  # else it cannot be told whose references these are
            self.release(blocks, None, None, facts.CAUSE_DEFERRED)
        else:
            self.release(blocks, name, None, facts.CAUSE_DEFERRED)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def wait_for_connector(self, data: st.DataObject) -> None:
        """A finished request keeps its table until everything is sent."""
        name = data.draw(st.sampled_from(self.live()))
        self.ended.add(name)
        self.said("request_ended", name)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def all_sent(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.ended)))
        self.ended.discard(name)
        for group, table in enumerate(self.tables.pop(name)):
            blocks = [block for block in reversed(table) if block != NULL]
            self.release(blocks, name, group, facts.CAUSE_FINISH)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), group=st.integers(0, GROUPS - 1), end=st.integers(0, 4))
    def leave_window(self, data: st.DataObject, group: int, end: int) -> None:
        name = data.draw(st.sampled_from(self.live()))
        table = self.tables[name][group]
        gone = [block for block in table[:end] if block != NULL]
        table[:end] = [NULL] * len(table[:end])
        self.release(gone[::-1], name, group, facts.CAUSE_WINDOW)

    @precondition(lambda self: self.live() and self.free_count())
    @rule(data=st.data())
    def copy_on_write(self, data: st.DataObject) -> None:
        """The last block of a request becomes a private copy; both ends stay until the copy has run (_apply_cow)."""
        name = data.draw(st.sampled_from(self.live()))
        for group, table in enumerate(self.tables[name]):
            if table and table[-1] != NULL and self.free_count():
                source, index = table[-1], len(table) - 1
                (copy,) = self.allocate(name, group, index, 1, cause=facts.CAUSE_COPY)
                table[-1] = copy
                self.tell(facts.HOLD, [source], request_id=name, group_id=group, cause=facts.CAUSE_COPY)
                self.pool.retain(copy)
                self.tell(facts.TOUCH, [copy], cause=facts.CAUSE_COPY)
                self.nobodys.append([source, copy])

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        blocks = [place[3] for place in self.places(data.draw(st.sampled_from(self.live())))][:2]
        if blocks:
            self.pool.touch(blocks)
            self.tell(facts.TOUCH, blocks, cause=facts.CAUSE_PIN)
            self.nobodys.append(blocks)

    @precondition(lambda self: self.nobodys)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        blocks = self.nobodys.pop(data.draw(st.integers(0, len(self.nobodys) - 1)))
        self.release(blocks, None, None, facts.CAUSE_UNPIN)

    # Hashes -----------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.live())
    @rule(data=st.data(), same=st.booleans())
    def become_full(self, data: st.DataObject, same: bool) -> None:
        hashes = self.pool.hash_counts()
        blocks = [place[3] for place in self.places(data.draw(st.sampled_from(self.live())))]
        blocks = sorted({block for block in blocks if not hashes[block]})
        if blocks:
            self.contents += 1
            contents = [f"same {i}" if same else f"{self.contents} {i}" for i in range(len(blocks))]
            self.pool.cache(blocks, contents)
            counts = [1] * len(blocks)
            tokens = [BLOCK_SIZE] * len(blocks)
            self.tell(facts.CACHE, blocks, cause=facts.CAUSE_ALLOCATE, hash_counts=counts, hash_tokens=tokens)
            assert self.said.ledger.hash_tokens_of(blocks).tolist() == tokens

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        hashed = [block for block, count in enumerate(self.pool.hash_counts()) if count]
        if hashed:
            blocks = sorted(data.draw(st.sets(st.sampled_from(hashed), min_size=1)))
            self.pool.evict(blocks)
            self.tell(facts.EVICT, blocks, cause=facts.CAUSE_LOAD_FAILED)

    @rule(data=st.data())
    def move_hashes(self, data: st.DataObject) -> None:
        hashes, references = self.pool.hash_counts(), self.pool.ref_counts()
        sources = [block for block, count in enumerate(hashes) if count]
        targets = [block for block, count in enumerate(hashes) if block and not count and references[block]]
        if sources and targets:
            source, target = data.draw(st.sampled_from(sources)), data.draw(st.sampled_from(targets))
            self.pool.move(source, target)
            counts = [0, hashes[source]]
            self.tell(facts.CACHE, [source, target], cause=facts.CAUSE_COPY, hash_counts=counts)

    @rule()
    def reset(self) -> None:
        if self.pool.reset():
            self.said("apply", PoolOperation(kind=facts.RESET, block_ids=[], cause=facts.CAUSE_RESET), self.step)

    # Steps ------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.live() and len(self.steps) < 2)
    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        """A step writes into some blocks of some requests; at most two are on their way."""
        self.step += 1
        blocks = [place[3] for name in self.live() for place in self.places(name)]
        written = sorted(data.draw(st.sets(st.sampled_from(blocks)))) if blocks else []
        filled = [data.draw(st.integers(self.declared[block], BLOCK_SIZE)) for block in written]
        self.said("declare_written", written, filled, self.step)
        self.steps.append((self.step, [(b, self.generations[b], f) for b, f in zip(written, filled, strict=True)]))
        for block, tokens in zip(written, filled, strict=True):
            self.declared[block] = tokens

    @precondition(lambda self: self.steps)
    @rule()
    def complete(self) -> None:
        step, written = self.steps.pop(0)
        self.said("confirm", step)
        for block, generation, filled in written:
            if generation == self.generations[block]:
                self.confirmed[block] = max(self.confirmed[block], min(filled, self.declared[block]))

    @precondition(lambda self: self.steps)
    @rule()
    def abandon(self) -> None:
        step, written = self.steps.pop()
        self.said("abandon", step)
        for block, generation, _ in written:
            if generation == self.generations[block]:
                others = [f for _, later in self.steps for b, g, f in later if (b, g) == (block, generation)]
                still = max([self.confirmed[block], *others])
                self.declared[block] = min(self.declared[block], still)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        """Drafts are rejected: a last block loses some of its tokens, now and after what is on its way."""
        places = self.places(data.draw(st.sampled_from(self.live())))
        if places:
            block = places[-1][3]
            declared = data.draw(st.integers(0, self.declared[block]))
            confirmed = data.draw(st.integers(0, min(declared, self.confirmed[block])))
            self.said("roll_back", [block], [declared], [confirmed])
            self.declared[block], self.confirmed[block] = declared, confirmed

    # What must hold ---------------------------------------------------------------------------------------------------

    @invariant()
    def agrees_with_the_host(self) -> None:
        if not hasattr(self, "pool"):
            return
        ledger, pool = self.said.ledger, self.pool
        everything = np.arange(NUM_BLOCKS)
        assert ledger.references_of(everything).tolist() == pool.ref_counts()
        assert ledger.hashes_of(everything).tolist() == pool.hash_counts()
        assert ledger.generation_of(everything).tolist() == [self.generations[b] for b in range(NUM_BLOCKS)]
        assert ledger.differences(pool.ref_counts(), pool.free_ids(), self.tables, pool.hash_counts()) == []

    @invariant()
    def knows_who_has_what(self) -> None:
        if not hasattr(self, "pool"):
            return
        ledger = self.said.ledger
        live: list[Place] = [p for name in self.tables if name not in self.ended for p in self.places(name)]
        held: list[Place] = [p for _, places in self.given_up for p in places]
        held += [p for name in self.ended for p in self.places(name)]
        shares = [share for block in range(NUM_BLOCKS) for share in ledger.owners(block)]
        said = Counter((s.request_id, s.group_id, s.index, s.block_id) for s in shares if s.live)
        assert said == Counter(live)
        given_up: Counter[Any] = Counter()  # without the index: two tables of one request may have been given up
        for share in shares:
            if not share.live:
                given_up[share.request_id, share.group_id, share.block_id] += share.count
        assert given_up == Counter((name, group, block) for name, group, _, block in held)
        for name in NAMES:
            mine = {place[3] for place in live if place[0] == name}
            assert ledger.is_owner(name, np.arange(NUM_BLOCKS)).tolist() == [b in mine for b in range(NUM_BLOCKS)]
            assert {share.block_id for share in ledger.owned_by(name)} == {p[3] for p in live + held if p[0] == name}
        reserved = {block for blocks in self.receiving.values() for block in blocks}
        references = self.pool.ref_counts()
        for block, status in enumerate(ledger.status_of(range(NUM_BLOCKS)).tolist()):
            if block == NULL:
                assert status == Status.NULL
            elif block in reserved:
                assert status == Status.RESERVED
            elif not references[block]:
                assert status == Status.FREE
            else:
                assert status == (Status.ACTIVE if any(p[3] == block for p in live) else Status.HELD)

    @invariant()
    def knows_what_is_written(self) -> None:
        if hasattr(self, "pool"):
            declared, confirmed = self.said.ledger.written_of(range(NUM_BLOCKS))
            assert declared.tolist() == [self.declared[block] for block in range(NUM_BLOCKS)]
            assert confirmed.tolist() == [self.confirmed[block] for block in range(NUM_BLOCKS)]

    def teardown(self) -> None:
        if hasattr(self, "said"):
            again = self.said.again()
            assert again.equals(self.said.ledger)
            again.apply(PoolOperation(kind=facts.ALLOC, block_ids=[1]), 1)
            assert not again.equals(self.said.ledger)
