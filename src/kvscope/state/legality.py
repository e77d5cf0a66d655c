"""Whether what a step declares may be done with the blocks as the pool has handed them out.

The same object stands in EngineCore, in every worker and in a replay: it takes the pool's operations and then the
declaration that they led to, and notes what does not fit. In a healthy step it costs a few passes over lists of the
batch; blocks are looked at where they change hands, and requests where they come in.

What a step writes is declared block by block only when a block gets full. The part of a request's last block is known
from its number of tokens, and is put into the ledger when somebody is about to look at the block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import add, floordiv

import numpy as np

from ..facts import allocator as facts
from ..facts.allocator import PoolOperation
from ..facts.requests import Declaration, StepRequests, StepResult
from ..facts.topology import Group, Topology
from .bindings import Bindings, Table
from .blocks import BlockLedger
from .doubts import Exceeded, SharedWrite, Unwritten, shared_write, unwritten_from
from .hits import Hits
from .invalid_blocks import InvalidBlocks
from .progress import Progress
from .releases import Releases
from .visibility import relied_on

__all__ = ["Exceeded", "Legality", "SharedWrite", "Unwritten"]

_REMEMBERED_ABORTED, _REMEMBERED_STEPS, _NOTHING = 4096, 64, frozenset[int]()
_FLUSHES = frozenset({facts.FREE, facts.HOLD, facts.CACHE})
_OF_RUNNING_REQUESTS = frozenset({facts.ALLOC, facts.CACHE})


class Legality:
    """See the module. In order: :meth:`take` every operation, bind the declaration, :meth:`advance`, let the rules
    look, :meth:`end_finished`; and :meth:`confirm` when the step's result is there.

    ``stale`` has, by request, the blocks of its declared tables that it released while it goes on with them, and the
    generation that it knew; it lasts until the request is bound anew or gone. All else is about the step that was
    advanced to last: ``unwritten`` (a request that comes in relies on what nobody wrote), ``gaps`` (a request goes on
    behind what it wrote), ``shared``, ``exceeded``, ``hits``, ``interval`` (the operations since the step before).
    ``doubtful``: a plan of this step cannot be right, however well it agrees with its declaration.

    ``aborted`` has blocks, with their generation, that a step was to write whose result never came; ``invalid`` those
    that a connector could not load, where somebody tells it.
    """

    def __init__(self, topology: Topology, ledger: BlockLedger, bindings: Bindings) -> None:
        self.ledger = ledger
        self.step = 0
        self.stale: dict[str, dict[int, int]] = {}
        self.unwritten: list[Unwritten] = []
        self.gaps: list[Unwritten] = []
        self.shared: list[SharedWrite] = []
        self.exceeded: list[Exceeded] = []
        self.interval: Sequence[PoolOperation] = ()
        self.aborted: dict[int, int] = {}
        self._bindings = bindings
        self._groups: list[tuple[int, Group]] = [(i, g) for i, g in enumerate(topology.groups) if g.judged]
        self.block_sizes = {index: group.block_size for index, group in self._groups}
        self._progress = Progress(self.block_sizes.values())
        self._releases = Releases(self._groups, ledger, bindings, self._progress)
        self.hits = Hits(ledger, self._releases)
        self.invalid = InvalidBlocks(ledger)
        self._loaded: dict[str, int] = {}
        self._taken: list[PoolOperation] = []
        self._has_others = self.doubtful = self._examined = False
        self._finished: Collection[str] = ()
        self._returned = 0
        self._on_their_way: deque[tuple[int, dict[str, int]]] = deque(maxlen=_REMEMBERED_STEPS)
        self._tables: list[Table] | None = None
        self._is_forgiven = False

    def loaded_tokens(self, request_id: str) -> int:
        """How many tokens a receive has brought to a request, from its first one on."""
        return self._loaded.get(request_id, 0)

    def take(self, operation: PoolOperation) -> None:
        """Take over one operation of the pool, before the declaration that it led to is bound."""
        if operation.request_id is not None and operation.kind in _FLUSHES:
            self.flush(operation.request_id)
        self.hits.take(operation)
        self._releases.apply(operation)
        self._taken.append(operation)
        self._has_others |= operation.kind not in _OF_RUNNING_REQUESTS

    def advance(self, declaration: Declaration) -> bool:
        """Take over a declaration that the bindings have just taken over.

        False: there is nothing for the rules to look at. The same requests go on by one token each and have all that
        they need for it, and the pool did nothing but give them blocks and hash what they filled.
        """
        has_others = self._has_others
        if self._taken:
            self.interval, self._taken, self._has_others = self._taken, [], False
        elif self.interval:
            self.interval = ()
        examined, self._examined = self._examined, False
        if examined or self.exceeded:
            self.unwritten, self.gaps, self.shared, self.exceeded = [], [], [], []
            self.doubtful = bool(self.stale)
        requests = declaration.requests
        if self.invalid.any:
            self.invalid.advance(requests, self.interval, self._bindings, self._groups)
        if requests.scheduled:
            self.step = declaration.step
            self._on_their_way.append((declaration.step, requests.scheduled))
        bindings = self._bindings
        if (
            bindings.ones is not None
            and not has_others
            and not (declaration.copies or declaration.zero_blocks)
            and self._progress.goes_on(declaration, bindings.ends)
        ):
            if examined:
                self.hits.advance()
            if self._progress.filled:
                self._declare_filled(declaration.step)
            return bool(self.stale or self.exceeded or self.aborted or self.invalid.any)
        self._advance(declaration)
        self._examined = True
        self.doubtful = bool(self.stale or self.unwritten or self.gaps or self.shared)
        return True

    def _advance(self, declaration: Declaration) -> None:
        requests, self._tables = declaration.requests, None
        fresh: Collection[str] = {*requests.new_ids, *requests.resumed} if requests.new_ids or requests.resumed else ()
        self._finished = [r for r in requests.finished if r not in fresh] if fresh else requests.finished
        self.hits.advance()
        for request_id in (*requests.preempted, *(requests.finished.intersection(fresh) if fresh else ())):
            self._loaded.pop(request_id, None)
        if self._is_forgiven:
            self._is_forgiven = False
            self.ledger.assume_written()
        elif self.interval:
            for request_id, blocks in self._releases.still_used(self.interval, requests, fresh):
                self.stale.setdefault(request_id, {}).update(blocks)
        if requests.new_ids:
            self._flush_sessions(requests)
        if requests.finished or requests.preempted or fresh:
            gone = (*requests.finished, *requests.preempted, *fresh)
            self._progress.forget(gone)
            self._releases.forget(gone)
            for request_id in gone:
                self.stale.pop(request_id, None)
        self._note_loads()
        for source, destination in declaration.copies or ():
            self._copy(source, destination, declaration)
        tails = dict(self._tails(requests)) if fresh else {}
        if requests.scheduled:
            self._declare(requests, declaration.step)
        if fresh:
            self._examine(requests, tails)

    def forgive(self) -> None:
        """A step passed unseen, and what it wrote. With the next declaration, before which what the pool did in it is
        told as well, everything in use counts as written; and what was released until then may belong to requests that
        were said to be over.
        """
        self._progress.clear()
        self._is_forgiven = True

    def end_finished(self) -> None:
        """Whoever finished before the step holds what it has not released."""
        for request_id in self._finished:
            self._loaded.pop(request_id, None)
            self.ledger.request_ended(request_id)
        self._finished = ()

    def unreleased(self) -> list[str]:
        """Requests that finished before this step and still have blocks that they neither released nor gave up."""
        return [request_id for request_id in self._finished if self.ledger.has_live(request_id)]

    def confirm(self, declaration: Declaration, result: StepResult | None) -> None:
        """The result of a step has come, and those of the steps before it will not come any more."""
        ledger, step = self.ledger, declaration.step
        self._returned = step
        while self._on_their_way and self._on_their_way[0][0] <= step:
            self._on_their_way.popleft()
        pending = ledger.pending_steps
        if pending:
            for lost in [earlier for earlier in pending if earlier < step]:
                self._abandon(lost)
            ledger.confirm(step)
        if declaration.spec_tokens and result is not None:
            self._roll_back_rejected(declaration, result)

    def flush(self, request_id: str, *, before: int | None = None) -> None:
        """Put into the ledger what the request has written of its last block, by steps before this one."""
        end, bound = self._progress.end_of(request_id), self._bindings.table_of(request_id)
        if end is None or bound is None:
            return
        step = None
        for earlier, scheduled in reversed(self._on_their_way):
            if request_id in scheduled and (before is None or earlier < before):
                step = earlier
                break
        for group_index, group in self._groups:
            index, filled = divmod(end, group.block_size)
            blocks = bound.blocks[group_index]
            if not filled or index >= len(blocks):
                continue
            if step is not None:
                self.ledger.declare_written([blocks[index]], [filled], step)
            else:
                self.ledger.confirm_block(blocks[index], filled, self._returned)

    def _flush_sessions(self, requests: StepRequests) -> None:
        """The next turn of a session is declared as a new request, and goes on in the table that it has."""
        for request_id in requests.new_ids:
            if request_id not in requests.finished and request_id not in requests.preempted:
                self.flush(request_id, before=self.step)

    # What a step writes -----------------------------------------------------------------------------------------------

    def _declare(self, requests: StepRequests, step: int) -> None:
        """Everything is compared as whole lists; rows are gone through where they fill a block."""
        ids, starts = requests.cached_ids, requests.cached_computed
        if requests.new_ids:
            ids, starts = [*ids, *requests.new_ids], [*starts, *requests.new_computed]
        ends = list(map(add, starts, map(requests.scheduled.get, ids, repeat(0))))
        if self._progress.lags(ids, starts):
            self._note_gaps(ids, starts)
        self._progress.set(ids, ends)
        tables = self._bindings.bound(ids)
        if tables is None:
            return
        for group_index, group in self._groups:
            size = group.block_size
            first = list(map(floordiv, starts, repeat(size)))
            last = list(map(floordiv, ends, repeat(size)))
            if first != last:
                rows = [row for row, (a, b) in enumerate(zip(first, last, strict=True)) if a != b]
                full = [block for row in rows for block in tables[row].blocks[group_index][first[row] : last[row]]]
                self.ledger.declare_written(full, [size] * len(full), step)
                for row in rows:
                    self._note_exceeded(ids[row], group_index, size, ends[row])

    def _note_gaps(self, ids: Sequence[str], starts: Sequence[int]) -> None:
        for request_id, start in zip(ids, starts, strict=True):
            written, bound = self._progress.end_of(request_id), self._bindings.table_of(request_id)
            if written is not None and start > written and bound is not None:
                self.gaps += unwritten_from(request_id, bound, self._groups, start, written)

    def _declare_filled(self, step: int) -> None:
        """The same batch goes on by one token each, and these of its rows fill a block."""
        ids, filled = self._progress.batch, self._progress.filled
        if self._tables is None:
            self._tables = self._bindings.bound(ids)
        if self._tables is None:
            return
        for group_index, group in self._groups:
            size, full = group.block_size, list[int]()
            for row in filled.get(size, ()):
                end = self._progress.end_at(row)
                full += self._tables[row].blocks[group_index][end // size - 1 : end // size]
                self._note_exceeded(ids[row], group_index, size, end)
            if full:
                self.ledger.declare_written(full, [size] * len(full), step)

    def _note_exceeded(self, request_id: str, group_index: int, size: int, end: int) -> None:
        allocated = self.ledger.allocated_blocks(request_id, group_index)
        if allocated is not None and allocated * size < end:
            self.exceeded.append(
                Exceeded(request_id=request_id, group_index=group_index, tokens=end, allocated=allocated * size)
            )

    def _copy(self, source: int, destination: int, declaration: Declaration) -> None:
        """The step begins with a copy of what is in one block by then. For one without work no result will come."""
        for share in self.ledger.owners(source):
            self.flush(share.request_id)
        note = self.ledger.confirm_written if declaration.is_empty else self.ledger.declare_written
        note([destination], self.ledger.written_of([source])[0], declaration.step)

    # Who comes in -----------------------------------------------------------------------------------------------------

    def _arriving(self, requests: StepRequests) -> Iterator[tuple[str, Table, int]]:
        """Requests that come or come back, with their tables and the tokens that they have."""
        computed = requests.computed()
        for request_id in (*requests.new_ids, *(r for r in requests.cached_ids if r in requests.resumed)):
            bound = self._bindings.table_of(request_id)
            if bound is not None and request_id not in self._bindings.partial:
                yield request_id, bound, computed[request_id]

    def _tails(self, requests: StepRequests) -> Iterator[tuple[tuple[str, int], int]]:
        """What is written of the block in which a request goes on that comes in, before it does so itself."""
        for request_id, bound, start in self._arriving(requests):
            for group_index, group in self._groups:
                index, filled = divmod(start, group.block_size)
                if filled and index < len(bound.blocks[group_index]):
                    written = self.ledger.written_of([bound.blocks[group_index][index]])[0]
                    yield (request_id, group_index), int(written[0])

    def _examine(self, requests: StepRequests, tails: Mapping[tuple[str, int], int]) -> None:
        hits: dict[str | None, set[int]] = {}
        external: dict[str | None, set[int]] = {}
        for operation in self.interval:
            if operation.kind == facts.TOUCH:
                hits.setdefault(operation.request_id, set()).update(operation.block_ids)
            elif operation.cause == facts.CAUSE_EXTERNAL and operation.kind == facts.ALLOC and not operation.reserved:
                external.setdefault(operation.request_id, set()).update(operation.block_ids)
        if external:
            self._declare_loads(requests, external)
        for request_id, bound, start in self._arriving(requests):
            if not start and not self._loaded.get(request_id):
                continue
            for group_index, group in self._groups:
                blocks, tail = bound.blocks[group_index], tails.get((request_id, group_index))
                self.hits.arrive(request_id, group.group_id, blocks[: -(-start // group.block_size)])
                self._examine_prefix(
                    request_id, group_index, group, blocks, start, tail, external.get(request_id, _NOTHING)
                )
                index, offset = divmod(start, group.block_size)
                # The last token of a prompt that was loaded whole is computed again, in place (vLLM, Scheduler.
                # _update_waiting_for_remote_kv).
                overwrites = start < self.loaded_tokens(request_id) - 1 and group.visible_tokens is None
                if index < len(blocks) and (overwrites or blocks[index] in hits.get(request_id, _NOTHING)):
                    place = (request_id, group_index, index, blocks[index])
                    self.shared.append(shared_write(*place, offset, self.ledger, loaded=overwrites))

    def _declare_loads(self, requests: StepRequests, external: Mapping[str | None, Collection[int]]) -> None:
        """A load inside the step fills the blocks before attention looks (``KVConnectorBase.start_load_kv``,
        ``wait_for_layer_load``), for whoever hits them in the same step as well.
        """
        for request_id, bound, start in self._arriving(requests):
            if request_id in external:
                for group_index, group in self._groups:
                    _, relied, needed = relied_on(group, bound.blocks[group_index], start)
                    loaded = np.isin(relied, list(external[request_id]))
                    self.ledger.declare_written(relied[loaded], needed[loaded], self.step)

    def _examine_prefix(
        self,
        request_id: str,
        group_index: int,
        group: Group,
        blocks: Iterable[int],
        start: int,
        tail: int | None,
        external: Collection[int],
    ) -> None:
        """Hold what attention will read of the blocks against what has ever been declared written; of the last block
        ``tail`` tokens were before the step.
        """
        first, relied, needed = relied_on(group, blocks, start)
        if not relied.size:
            return
        declared = self.ledger.written_of(relied)[0]
        if tail is not None and needed[-1] < group.block_size and relied[-1] not in external:
            declared[-1] = min(declared[-1], tail)
        short = np.flatnonzero(declared < needed)
        if short.size:
            at = int(short[0])
            self.unwritten.append(
                Unwritten(
                    request_id=request_id,
                    group_index=group_index,
                    index=first + at,
                    block_id=int(relied[at]),
                    needed=int(needed[at]),
                    declared=int(declared[at]),
                )
            )

    def _note_loads(self) -> None:
        for operation in self.interval:
            if operation.kind == facts.RECEIVE and operation.request_id is not None and operation.group_id in {0, None}:
                self._loaded[operation.request_id] = sum(operation.filled or ())

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
        for request_id, drafts in declaration.spec_tokens.items():
            tokens, bound = sampled.get(request_id), self._bindings.table_of(request_id)
            end = computed.get(request_id, 0) + declaration.requests.scheduled.get(request_id, 0)
            if not tokens or tokens > drafts or bound is None or self._progress.end_of(request_id) != end:
                continue
            accepted = end - (drafts - (tokens - 1))
            self._progress.correct(request_id, accepted)
            for group_index, group in self._groups:
                first, filled = divmod(accepted, group.block_size)
                blocks = bound.blocks[group_index][first : -(-end // group.block_size)]
                if blocks:
                    self.ledger.roll_back(blocks, [filled] + [0] * (len(blocks) - 1))
