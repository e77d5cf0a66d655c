"""Whether what a step declares may be done with the blocks as the pool has handed them out.

The same object stands in EngineCore, in every worker and in a replay: it takes the pool's operations and then the
declaration that they led to, and notes what does not fit. In a healthy step it costs a few passes over lists of the
batch; blocks are looked at where they change hands, and requests where they come in.

What a step writes is declared block by block only when a block gets full. The part of a request's last block is known
from its number of tokens, and is put into the ledger when somebody is about to look at the block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import repeat
from operator import add, floordiv, gt, mod

import msgspec
import numpy as np

from ..facts import allocator as facts
from ..facts.allocator import PoolOperation
from ..facts.requests import Declaration, StepRequests, StepResult
from ..facts.topology import Group, Topology
from .bindings import Bindings, Table
from .blocks import BlockLedger
from .visibility import first_visible_block

_REMEMBERED_ABORTED = 4096
_NOT_A_REQUESTS = frozenset({facts.CAUSE_DEFERRED, facts.CAUSE_COPY, facts.CAUSE_PIN, facts.CAUSE_UNPIN})


class Unwritten(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Logical block ``index`` of a request's table in a group (by its place in the topology).

    ``needed`` tokens of it are relied on, and ``declared`` were ever declared written since it was handed out.
    """

    request_id: str
    group_index: int
    index: int
    block_id: int
    needed: int
    declared: int


class SharedWrite(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request's first write of a step goes to token ``offset`` of a block that holds what others rely on.

    ``owners`` counts who has it, ``hashed_tokens`` what its hash covers. ``loaded``: a receive has filled it.
    """

    request_id: str
    group_index: int
    index: int
    block_id: int
    offset: int
    owners: int
    hashed_tokens: int
    loaded: bool = False


class Exceeded(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request is declared to have ``tokens``, and the pool has handed out blocks for ``allocated`` of them."""

    request_id: str
    group_index: int
    tokens: int
    allocated: int


class Legality:
    """See the module. In order: :meth:`take` every operation, bind the declaration, :meth:`advance`, let the rules
    look, :meth:`end_finished`; and :meth:`confirm` when the step's result is there.

    ``stale`` has, by request, the blocks of its declared tables that it released while it goes on with them, and the
    generation that it knew; it lasts until the request is bound anew or gone. All else is about the step that was
    advanced to last: ``unwritten`` (a request that comes in relies on what nobody wrote), ``gaps`` (a request goes on
    behind what it wrote), ``shared``, ``exceeded``, ``interval`` (the operations since the step before).

    ``aborted`` has blocks, with their generation, that a step was to write whose result never came.
    """

    def __init__(self, topology: Topology, ledger: BlockLedger, bindings: Bindings) -> None:
        self.ledger = ledger
        self.step = 0
        self.stale: dict[str, dict[int, int]] = {}
        self.unwritten: list[Unwritten] = []
        self.gaps: list[Unwritten] = []
        self.shared: list[SharedWrite] = []
        self.exceeded: list[Exceeded] = []
        self.interval: list[PoolOperation] = []
        self.aborted: dict[int, int] = {}
        self._bindings = bindings
        self._groups: list[tuple[int, Group]] = [(i, g) for i, g in enumerate(topology.groups) if g.judged]
        self.block_sizes = {index: group.block_size for index, group in self._groups}
        self._ends: dict[str, int] = {}
        self._loaded: dict[str, int] = {}
        self._taken: list[PoolOperation] = []
        self._finished: Collection[str] = ()
        self._returned = 0
        self._ids: list[str] = []
        self._next: list[int] = []
        self._quiet_steps = 0
        self._unsettled = 0

    def loaded_tokens(self, request_id: str) -> int:
        """How many tokens a receive has brought to a request, from its first one on."""
        return self._loaded.get(request_id, 0)

    @property
    def doubtful(self) -> bool:
        """Whether a plan of this step cannot be right, however well it agrees with its declaration."""
        return bool(self.stale or self.unwritten or self.gaps or self.shared)

    def take(self, operation: PoolOperation) -> None:
        """Take over one operation of the pool, before the declaration that it led to is bound."""
        if operation.request_id is not None and operation.kind in {facts.FREE, facts.HOLD, facts.CACHE}:
            self.flush(operation.request_id)
        self.ledger.apply(operation, operation.step)
        self._taken.append(operation)

    def advance(self, declaration: Declaration) -> bool:
        """Take over a declaration that the bindings have just taken over.

        False: there is nothing for the rules to look at. The same requests go on by one token each, none of them fills
        a block, and the pool did nothing; of such a step only its number is noted.
        """
        requests = declaration.requests
        self.step = declaration.step
        if (
            self._quiet_steps > 1
            and self._bindings.went_on
            and not self._taken
            and requests.cached_computed == self._next
            and declaration.total_num_scheduled_tokens == len(self._next)
            and not (declaration.copies or declaration.zero_blocks)
        ):
            self._quiet_steps -= 1
            self._unsettled += 1
            self._next = list(map(add, self._next, repeat(1)))
            return self.doubtful or bool(self.exceeded)
        self._settle()
        self._advance(declaration)
        return True

    def _settle(self) -> None:
        """Note how far the requests of the quiet steps have come."""
        if self._unsettled:
            self._unsettled = 0
            self._ends.update(zip(self._ids, self._next, strict=True))

    def _advance(self, declaration: Declaration) -> None:
        requests = declaration.requests
        self.interval, self._taken = self._taken, []
        if self.unwritten or self.gaps or self.shared or self.exceeded:
            self.unwritten, self.gaps, self.shared, self.exceeded = [], [], [], []
        fresh: Collection[str] = [*requests.new_ids, *requests.resumed] if requests.new_ids or requests.resumed else ()
        self._finished = requests.finished
        for request_id in (*requests.finished, *requests.preempted, *fresh):
            self._ends.pop(request_id, None)
            self.stale.pop(request_id, None)
        if self.interval:
            self._note_releases(requests, fresh)
            self._note_loads()
        for source, destination in declaration.copies or ():
            self.ledger.declare_written([destination], self.ledger.written_of([source])[0], declaration.step)
        if requests.scheduled:
            self._declare(requests, declaration.step)
        if fresh:
            self._examine(requests, fresh)
        self._expect(declaration)

    def _expect(self, declaration: Declaration) -> None:
        """Work out for how many steps the same requests could go on without filling a block."""
        requests = declaration.requests
        self._quiet_steps = 0
        if len(requests.scheduled) != declaration.total_num_scheduled_tokens or not requests.scheduled:
            return
        self._ids = [*requests.cached_ids, *requests.new_ids]
        self._next = list(map(self._ends.__getitem__, self._ids))
        left = [
            size - max(map(mod, self._next, repeat(size))) for size in {group.block_size for _, group in self._groups}
        ]
        self._quiet_steps = min(left, default=0)

    def forgive(self) -> None:
        """A step passed unseen, and what it wrote: everything in use counts as written from here on."""
        self._settle()
        self._quiet_steps = 0
        self._ends.clear()
        self.ledger.assume_written()

    def end_finished(self) -> None:
        """Whoever finished before the step holds what it has not released."""
        for request_id in self._finished:
            self._loaded.pop(request_id, None)
            self.ledger.request_ended(request_id)
        self._finished = ()

    def unreleased(self) -> list[str]:
        """Requests that finished before this step and still have blocks that they neither released nor gave up."""
        return [r for r in self._finished if any(share.live for share in self.ledger.owned_by(r))]

    def confirm(self, declaration: Declaration, result: StepResult | None) -> None:
        """The result of a step has come, and those of the steps before it will not come any more."""
        ledger, step = self.ledger, declaration.step
        self._returned = step
        if not ledger.is_pending:
            return
        for lost in [earlier for earlier in ledger.pending_steps if earlier < step]:
            self._abandon(lost)
        ledger.confirm(step)
        if declaration.spec_tokens and result is not None:
            self._roll_back_rejected(declaration, result)

    def flush(self, request_id: str) -> None:
        """Put into the ledger what the request has written of its last block."""
        self._settle()
        end = self._ends.get(request_id)
        if end is None:
            return
        bound = self._bindings.table_of(request_id)
        if bound is None:
            return
        for group_index, group in self._groups:
            index, filled = divmod(end, group.block_size)
            blocks = bound.blocks[group_index]
            if filled and index < len(blocks):
                if self.step > self._returned:
                    self.ledger.declare_written([blocks[index]], [filled], self.step)
                else:
                    self.ledger.confirm_block(blocks[index], filled, self.step)

    # What a step writes -----------------------------------------------------------------------------------------------

    def _declare(self, requests: StepRequests, step: int) -> None:
        """Everything is compared as whole lists; rows are gone through where they fill a block."""
        ids, starts = requests.cached_ids, requests.cached_computed
        if requests.new_ids:
            ids, starts = [*ids, *requests.new_ids], [*starts, *requests.new_computed]
        counts = map(requests.scheduled.get, ids, repeat(0))
        ends = list(map(add, starts, counts))
        if any(map(gt, starts, map(self._ends.get, ids, starts))):
            self._note_gaps(ids, starts)
        self._ends.update(zip(ids, ends, strict=True))
        tables = self._bindings.bound(ids)
        if tables is None:
            return
        for group_index, group in self._groups:
            size = group.block_size
            first = list(map(floordiv, starts, repeat(size)))
            last = list(map(floordiv, ends, repeat(size)))
            if first != last:
                full = [
                    block
                    for table, a, b in zip(tables, first, last, strict=True)
                    if a != b
                    for block in table.blocks[group_index][a:b]
                ]
                self.ledger.declare_written(full, [size] * len(full), step)
                self._note_exceeded(group_index, size, ids, first, last, ends)

    def _note_gaps(self, ids: list[str], starts: list[int]) -> None:
        for request_id, start in zip(ids, starts, strict=True):
            written = self._ends.get(request_id, start)
            bound = self._bindings.table_of(request_id)
            if start > written and bound is not None:
                self.gaps += _unwritten(request_id, bound, self._groups, start, written)

    def _note_exceeded(
        self, group_index: int, size: int, ids: list[str], first: list[int], last: list[int], ends: list[int]
    ) -> None:
        for request_id, a, b, end in zip(ids, first, last, ends, strict=True):
            if a == b:
                continue
            allocated = self.ledger.allocated_blocks(request_id, group_index)
            if allocated is not None and allocated * size < end:
                self.exceeded.append(
                    Exceeded(request_id=request_id, group_index=group_index, tokens=end, allocated=allocated * size)
                )

    # Who comes in -----------------------------------------------------------------------------------------------------

    def _examine(self, requests: StepRequests, fresh: Collection[str]) -> None:
        computed = requests.computed()
        for request_id in fresh:
            bound = self._bindings.table_of(request_id)
            start = computed.get(request_id, 0)
            if bound is None or request_id in self._bindings.partial:
                continue
            hits = {
                b for o in self.interval if o.kind == facts.TOUCH and o.request_id == request_id for b in o.block_ids
            }
            for group_index, group in self._groups:
                blocks = bound.blocks[group_index]
                self._examine_prefix(request_id, group_index, group, blocks, start)
                index, offset = divmod(start, group.block_size)
                loaded = self._loaded.get(request_id, 0)
                # The last token of a prompt that was loaded whole is computed again, in place (vLLM, Scheduler.
                # _update_waiting_for_remote_kv).
                overwrites = start < loaded - 1 and group.visible_tokens is None
                if index < len(blocks) and (blocks[index] in hits or overwrites):
                    self.shared.append(
                        SharedWrite(
                            request_id=request_id,
                            group_index=group_index,
                            index=index,
                            block_id=blocks[index],
                            offset=offset,
                            owners=int(self.ledger.references_of([blocks[index]])[0]),
                            hashed_tokens=int(self.ledger.hash_tokens_of([blocks[index]])[0]),
                            loaded=overwrites,
                        )
                    )

    def _examine_prefix(
        self, request_id: str, group_index: int, group: Group, blocks: Iterable[int], start: int
    ) -> None:
        """Hold what attention will read of the blocks against what has ever been declared written."""
        size = group.block_size
        count = -(-start // size)
        visible = int(first_visible_block(group, np.array([start], np.int64))[0])
        relied = np.array(blocks, np.int64)[visible:count]
        if not relied.size:
            return
        needed = np.full(relied.size, size, np.int32)
        if start % size and count - visible == relied.size:
            needed[-1] = start % size
        external = [
            block
            for operation in self.interval
            if operation.cause == facts.CAUSE_EXTERNAL and not operation.reserved
            for block in operation.block_ids
            if operation.kind == facts.ALLOC and operation.request_id == request_id
        ]
        if external:
            # A load inside the step fills them before attention looks (KVConnectorBase.start_load_kv, wait_for_layer).
            loaded = np.isin(relied, external)
            self.ledger.declare_written(relied[loaded], needed[loaded], self.step)
        declared = self.ledger.written_of(relied)[0]
        short = np.flatnonzero(declared < needed)
        if short.size:
            at = int(short[0])
            self.unwritten.append(
                Unwritten(
                    request_id=request_id,
                    group_index=group_index,
                    index=visible + at,
                    block_id=int(relied[at]),
                    needed=int(needed[at]),
                    declared=int(declared[at]),
                )
            )

    def _note_loads(self) -> None:
        for operation in self.interval:
            if operation.kind == facts.RECEIVE and operation.request_id is not None and operation.group_id in {0, None}:
                self._loaded[operation.request_id] = sum(operation.filled or ())

    # Who lets go ------------------------------------------------------------------------------------------------------

    def _note_releases(self, requests: StepRequests, fresh: Collection[str]) -> None:
        """A request that goes on must not have released what attention will still look at."""
        for position, operation in enumerate(self.interval):
            if operation.kind != facts.FREE:
                continue
            if operation.request_id is not None:
                users: Iterable[str] = (operation.request_id,)
            elif operation.cause in _NOT_A_REQUESTS:
                continue
            else:
                users = list(self._bindings.live)
            for request_id in users:
                if request_id in self._bindings and request_id not in fresh:
                    released = self._still_used(request_id, operation, requests)
                    if released:
                        known = self.stale.setdefault(request_id, {})
                        known.update(self._generations_at(released, position))

    def _still_used(self, request_id: str, operation: PoolOperation, requests: StepRequests) -> set[int]:
        """Which of the released blocks stand in the request's tables where attention still looks."""
        bound = self._bindings.table_of(request_id)
        if bound is None:
            return set()
        used: set[int] = set()
        released = set(operation.block_ids)
        computed = next(
            (c for r, c in zip(requests.cached_ids, requests.cached_computed, strict=True) if r == request_id), 0
        )
        for group_index, group in self._groups:
            visible = int(first_visible_block(group, np.array([computed], np.int64))[0])
            used |= released.intersection(bound.blocks[group_index][visible:])
        # It may have been given the block again, at another index or by a hit.
        return {block for block in used if not self.ledger.owns(request_id, block)}

    def _generations_at(self, block_ids: set[int], position: int) -> Iterator[tuple[int, int]]:
        """The generation that each block had at an operation of this interval."""
        later = [o.block_ids for o in self.interval[position + 1 :] if o.kind == facts.ALLOC]
        for block in block_ids:
            again = sum(ids.count(block) for ids in later)
            yield block, int(self.ledger.generation_of([block])[0]) - again

    # What comes back --------------------------------------------------------------------------------------------------

    def _abandon(self, step: int) -> None:
        for block, generation, _ in self.ledger.pending()[step]:
            self.aborted[block] = generation
        self.ledger.abandon(step)
        while len(self.aborted) > _REMEMBERED_ABORTED:
            del self.aborted[next(iter(self.aborted))]

    def _roll_back_rejected(self, declaration: Declaration, result: StepResult) -> None:
        """Drafts that were rejected are written again. A later step that was declared meanwhile has them in it."""
        sampled = dict(zip(result.request_ids, result.sampled_tokens, strict=True))
        computed = declaration.requests.computed()
        self._settle()
        for request_id, drafts in declaration.spec_tokens.items():
            tokens, bound = sampled.get(request_id), self._bindings.table_of(request_id)
            end = computed.get(request_id, 0) + declaration.requests.scheduled.get(request_id, 0)
            if not tokens or tokens > drafts or bound is None or self._ends.get(request_id) != end:
                continue
            accepted = end - (drafts - (tokens - 1))
            self._ends[request_id] = accepted
            self._quiet_steps = 0
            for group_index, group in self._groups:
                first, filled = divmod(accepted, group.block_size)
                blocks = bound.blocks[group_index][first : -(-end // group.block_size)]
                if blocks:
                    self.ledger.roll_back(blocks, [filled] + [0] * (len(blocks) - 1))


def _unwritten(
    request_id: str, table: Table, groups: list[tuple[int, Group]], needed: int, written: int
) -> Iterator[Unwritten]:
    """Where a request that has ``written`` tokens and claims ``needed`` of them begins to lack them, in each group."""
    for group_index, group in groups:
        index, declared = divmod(written, group.block_size)
        blocks = table.blocks[group_index]
        if index < len(blocks):
            yield Unwritten(
                request_id=request_id,
                group_index=group_index,
                index=index,
                block_id=blocks[index],
                needed=min(group.block_size, needed - index * group.block_size),
                declared=declared,
            )
