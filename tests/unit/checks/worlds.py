"""A scheduler and a runner in plain Python: they say and do what vLLM's would, so that every rule must stay silent.

Nothing in here uses the code under test but its fact types; all loops are over single tokens and blocks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from kvscope.facts.allocator import ALLOC, CACHE, FREE, TOUCH, PoolOperation
from kvscope.facts.plans import GroupPlan, Plan
from kvscope.facts.requests import Declaration, StepRequests
from kvscope.facts.topology import CHUNKED_LOCAL, FULL_ATTENTION, MLA, SLIDING_WINDOW, Group, Topology

NULL = 0


def group(group_id: int, kind: str = FULL_ATTENTION, block_size: int = 16, visible: int | None = None) -> Group:
    return Group(
        group_id=group_id,
        kind=kind,
        block_size=block_size,
        kernel_block_size=block_size,
        layers=1,
        visible_tokens=visible,
    )


def pool(*groups: Group, num_blocks: int = 64) -> Topology:
    return Topology(num_blocks=num_blocks, null_block_id=NULL, groups=groups)


LAYOUTS = {
    "full": (group(0),),
    "mla": (group(0, MLA, 32),),
    "window": (group(0, SLIDING_WINDOW, 16, 20),),
    "chunks": (group(0, CHUNKED_LOCAL, 16, 48),),
    "full and window": (group(0), group(1, SLIDING_WINDOW, 16, 33)),
    "three": (group(0, MLA, 32), group(1, SLIDING_WINDOW, 16, 40), group(2, CHUNKED_LOCAL, 32, 64)),
}


def first_visible(of: Group, computed: int) -> int:
    """The block of the oldest token that the next query attends to."""
    oldest = 0
    if of.visible_tokens is not None and of.kind == SLIDING_WINDOW:
        oldest = max(computed - of.visible_tokens + 1, 0)
    elif of.visible_tokens is not None and of.kind == CHUNKED_LOCAL:
        while oldest + of.visible_tokens <= computed:
            oldest += of.visible_tokens
    return oldest // of.block_size


def blocks_for(tokens: int, block_size: int) -> int:
    count = 0
    while count * block_size < tokens:
        count += 1
    return count


@dataclass
class Request:
    """``tables`` is what the workers were told, entry by entry; ``held`` what the manager still holds for it.

    ``computed`` and ``declared`` are the tokens before and after the last step that scheduled it.
    """

    prompt: int
    tables: list[list[int]]
    held: list[list[int]]
    computed: int = 0
    declared: int = 0


@dataclass
class World:
    """``chunk`` is how much of a prompt a step takes at most; with 1 all batches look like decoding.

    ``calls`` is what the pool did for the step that was declared last.
    """

    seed: int
    groups: tuple[Group, ...]
    num_blocks: int = 160
    chunk: int = 48
    live: dict[str, Request] = field(default_factory=dict)
    step_number: int = 0
    calls: list[PoolOperation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.topology = pool(*self.groups, num_blocks=self.num_blocks)
        self.free = list(range(1, self.num_blocks))
        self.random.shuffle(self.free)
        self.references: dict[int, int] = {}
        self.waiting: dict[str, int] = {}
        self.names = 0

    # The scheduler ----------------------------------------------------------------------------------------------------

    def step(self, *, decode_only: bool = False) -> Declaration:
        """The next declaration. With ``decode_only`` the same requests come back with one token each."""
        rng = self.random
        said = StepRequests(
            new_ids=[],
            new_blocks=[],
            new_computed=[],
            cached_ids=[],
            cached_blocks=[],
            cached_computed=[],
            resumed=set(),
            scheduled={},
            finished=set(),
            preempted=set(),
        )
        self.step_number += 1
        self.calls = []
        if not decode_only:
            self._end_some(said)
            self._admit_some(said)
        for name in list(self.live):
            if name not in said.scheduled and (decode_only or rng.random() < 0.85):
                self._go_on(name, said, decode_only=decode_only)
        if not decode_only:
            self._resume_some(said)
        return Declaration(
            step=self.step_number,
            trace_id=f"t{self.step_number}",
            requests=said,
            new_prompt_tokens=[self.live[name].prompt for name in said.new_ids],
            cached_output_tokens=[0] * len(said.cached_ids),
            spec_tokens={},
            invalid_spec_tokens={},
            total_num_scheduled_tokens=sum(said.scheduled.values()),
            token_budget=None,
            zero_blocks=None,
            copies=None,
            connector_plan=None,
        )

    def _end_some(self, said: StepRequests) -> None:
        for name in list(self.live):
            chance = self.random.random()
            if chance < 0.08:
                said.finished.add(name)
            elif chance < 0.14:
                said.preempted.add(name)
                self.waiting[name] = self.live[name].prompt
            else:
                continue
            for index, held in enumerate(self.live.pop(name).held):
                self._give_back(held[::-1], name, index, "finish" if name in said.finished else "preempt")

    def _leave_window(self, name: str, request: Request) -> None:
        """The managers take back what no query can see any more, and tell nobody."""
        for of, held in zip(self.groups, request.held, strict=True):
            for index in range(min(first_visible(of, request.computed), len(held))):
                if held[index] != NULL:
                    self._give_back([held[index]], name, of.group_id, "window")
                    held[index] = NULL

    def _admit_some(self, said: StepRequests) -> None:
        for _ in range(self.random.choice([0, 0, 1, 1, 2])):
            prompt = self.random.randint(2, 150)
            hit, tables = self._prefix_hit(prompt, said)
            scheduled = self.random.randint(1, min(prompt - hit, self.chunk))
            name = f"r{self.names + 1}"
            if not self._fits(tables, hit + scheduled):
                continue
            for index, table in enumerate(tables):
                found = [block for block in table if block != NULL]
                # Whoever filled them has hashed them; here that comes late, and in nobody's name.
                self._tell(CACHE, found, None, index, None, "allocate")
                self._take(found, TOUCH, name, index, table.count(NULL), "hit")
            grown = self._grow(name, tables, hit + scheduled)
            self.names += 1
            told = [table + more for table, more in zip(tables, grown, strict=True)]
            self.live[name] = Request(prompt, told, [list(table) for table in told], hit, hit + scheduled)
            said.new_ids.append(name)
            said.new_blocks.append(tuple(list(table) for table in told))
            said.new_computed.append(hit)
            said.scheduled[name] = scheduled

    def _prefix_hit(self, prompt: int, said: StepRequests) -> tuple[int, list[list[int]]]:
        """Tokens found in the cache, a whole number of blocks in every group, and the tables that hold them."""
        unit = max(of.block_size for of in self.groups)
        for name in self.random.sample(list(self.live), len(self.live)):
            donor = self.live[name]
            computed = donor.computed if name in said.scheduled else donor.declared
            hit = min(prompt - 1, computed) // unit * unit
            tables = []
            for of, held in zip(self.groups, donor.held, strict=True):
                seen = first_visible(of, hit)
                tables.append([NULL] * seen + held[seen : hit // of.block_size])
            visible = [
                block
                for of, table in zip(self.groups, tables, strict=True)
                for block in table[first_visible(of, hit) :]
            ]
            if hit and NULL not in visible and self.random.random() < 0.7:
                return hit, tables
        return 0, [[] for _ in self.groups]

    def _go_on(self, name: str, said: StepRequests, *, decode_only: bool) -> None:
        request = self.live[name]
        if len(self.free) < 20:  # more than a step can need, so that nothing is taken back in vain
            return
        request.computed = request.declared
        self._leave_window(name, request)
        left = request.prompt - request.computed
        scheduled = 1 if decode_only or left <= 0 else self.random.randint(1, min(left, self.chunk))
        grown = self._grow(name, request.tables, request.computed + scheduled)
        for told, held, more in zip(request.tables, request.held, grown, strict=True):
            told.extend(more)
            held.extend(more)
        request.declared = request.computed + scheduled
        said.cached_ids.append(name)
        said.cached_blocks.append(tuple(grown) if any(grown) else None)
        said.cached_computed.append(request.computed)
        said.scheduled[name] = scheduled

    def _resume_some(self, said: StepRequests) -> None:
        for name, prompt in list(self.waiting.items()):
            if name in said.preempted or self.random.random() < 0.5:
                continue
            scheduled = self.random.randint(1, min(prompt, self.chunk))
            if not self._fits([[] for _ in self.groups], scheduled):
                continue
            tables = self._grow(name, [[] for _ in self.groups], scheduled)
            del self.waiting[name]
            self.live[name] = Request(prompt, tables, [list(table) for table in tables], 0, scheduled)
            said.cached_ids.append(name)
            said.cached_blocks.append(tuple(list(table) for table in tables))
            said.cached_computed.append(0)
            said.resumed.add(name)
            said.scheduled[name] = scheduled

    def _fits(self, tables: list[list[int]], tokens: int) -> bool:
        """Whether the pool has the blocks that are missing, and one more for each group."""
        missing = [
            blocks_for(tokens, of.block_size) - len(table) for of, table in zip(self.groups, tables, strict=True)
        ]
        return sum(missing) + len(missing) <= len(self.free)

    def _grow(self, name: str, tables: list[list[int]], tokens: int) -> list[list[int]]:
        """Fresh blocks for each group, now and then one more than needed."""
        grown = []
        for index, (of, table) in enumerate(zip(self.groups, tables, strict=True)):
            count = max(blocks_for(tokens, of.block_size) + (self.random.random() < 0.1) - len(table), 0)
            taken, self.free = self.free[:count], self.free[count:]
            self._take(taken, ALLOC, name, index, len(table), "allocate")
            grown.append(taken)
        return grown

    def _take(self, blocks: list[int], kind: str, name: str, group_index: int, first: int, cause: str) -> None:
        for block in blocks:
            self.references[block] = self.references.get(block, 0) + 1
        self._tell(kind, blocks, name, group_index, first, cause)

    def _give_back(self, blocks: list[int], name: str, group_index: int, cause: str) -> None:
        blocks = [block for block in blocks if block != NULL]
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                self.free.insert(self.random.randint(0, len(self.free)), block)
        self._tell(FREE, blocks, name, group_index, None, cause)

    def _tell(
        self, kind: str, blocks: list[int], name: str | None, group_index: int, first: int | None, cause: str
    ) -> None:
        if blocks:
            self.calls.append(
                PoolOperation(
                    kind=kind,
                    block_ids=blocks,
                    step=self.step_number,
                    scheduling=True,
                    cause=cause,
                    request_id=name,
                    group_id=group_index,
                    first_index=first,
                    ref_counts=[self.references[block] for block in blocks],
                )
            )

    # The runner -------------------------------------------------------------------------------------------------------

    def plan(self, declaration: Declaration, *, shuffle: bool = True) -> Plan:
        """What attention is handed: own batch order, padding, and rubbish wherever nothing looks."""
        names = list(declaration.requests.scheduled)
        if shuffle:
            self.random.shuffle(names)
        positions: list[int] = []
        query_start = [0]
        for name in names:
            request = self.live[name]
            positions += range(request.computed, request.declared)
            query_start.append(len(positions))
        padding = self.random.choice([0, 0, 3, 7])
        return Plan(
            request_ids=names,
            query_start=np.array(query_start, np.int32),
            positions=np.array(positions, np.int64),
            seq_lens=np.array([self.live[name].declared for name in names], np.int32),
            num_tokens=len(positions),
            groups=[self._group_plan(index, names, padding) for index in range(len(self.groups))],
        )

    def _group_plan(self, index: int, names: list[str], padding: int) -> GroupPlan:
        of, rng = self.groups[index], self.random
        told = [self.live[name].tables[index] for name in names]
        width = max(len(table) for table in told) + rng.choice([0, 1, 5])
        tables = [[rng.randint(-3, self.num_blocks + 3) for _ in range(width)] for _ in names]
        slots: list[int] = []
        for row, name in enumerate(names):
            request = self.live[name]
            for logical in range(first_visible(of, request.computed), len(told[row])):
                tables[row][logical] = told[row][logical]
            slots += [
                told[row][position // of.block_size] * of.block_size + position % of.block_size
                for position in range(request.computed, request.declared)
            ]
        return GroupPlan(
            group_id=of.group_id,
            tables=np.array(tables, np.int32),
            table_blocks=np.array([len(table) for table in told], np.int32),
            slots=np.array(slots + [-1] * padding, np.int64),
        )


def copied(plan: Plan) -> Plan:
    """The same plan with arrays of its own."""
    return Plan(
        request_ids=list(plan.request_ids),
        query_start=plan.query_start.copy(),
        positions=plan.positions.copy(),
        seq_lens=plan.seq_lens.copy(),
        num_tokens=plan.num_tokens,
        groups=[
            GroupPlan(
                group_id=of.group_id,
                tables=of.tables.copy(),
                table_blocks=of.table_blocks.copy(),
                slots=of.slots.copy(),
            )
            for of in plan.groups
        ],
        graph_mode=plan.graph_mode,
        exact=plan.exact,
    )
