"""Random lives of blocks: nothing is found while the pool is sound, and one changed fact is found as what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from tests.budget import examples

from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_audit, judge_pool, judge_settled
from kvscope.checks.lifetime import LifetimeView, leak_after_finish
from kvscope.facts import allocator as facts
from kvscope.facts.allocator import PoolOperation
from unit.checks.scenes import PARTS
from unit.state.block_lives import NUM_BLOCKS, BlockLives, Said
from unit.state.pools import NULL, DictPool


class Judged(Said):
    """Every call is judged before and after the ledger takes it over, and has no finding."""

    def __call__(self, method: str, *arguments: Any) -> None:
        if method != "apply":
            super().__call__(method, *arguments)
            return
        operation = arguments[0]
        assert judge_pool(operation, self.ledger, "t", PARTS) == []
        super().__call__(method, *arguments)
        assert judge_settled(operation, self.ledger, "t", PARTS) == []


Wrong = tuple[PoolOperation, str, int]
"""A call that a sound pool would not make, and the reason and the block that it must be found under."""


class JudgedLives(BlockLives):
    make_pool = DictPool

    @initialize()
    def start(self) -> None:
        super().start()
        self.said = Judged(self.make_ledger())

    # What a sound pool would not do -----------------------------------------------------------------------------------

    def used(self) -> list[int]:
        return [block for block, count in enumerate(self.pool.ref_counts()) if count and block != NULL]

    def unused(self) -> list[int]:
        return sorted(self.pool.free_ids())

    def wrong_calls(self, pick: Callable[[list[int]], int]) -> Iterator[Wrong]:
        """One call of each kind that is possible at the moment; counts are those that a host would have then."""
        references = self.pool.ref_counts()
        handed_out = [block for block in self.unused() if self.generations[block]]
        fresh = [block for block in self.unused() if not self.generations[block]]
        used, unused = self.used(), self.unused()

        def call(kind: str, blocks: list[int], change: int, **fields: Any) -> PoolOperation:
            counts = [references[block] + change * blocks.count(block) for block in blocks]
            return PoolOperation(kind=kind, block_ids=blocks, ref_counts=counts, step=self.step, **fields)

        yield call(facts.ALLOC, [NULL], 1, request_id="x", group_id=0), "alloc_null_block", NULL
        if used:
            block = pick(used)
            yield call(facts.ALLOC, [block], 1, request_id="x", group_id=0), "alloc_live_block", block
            yield call(facts.FREE, [block] * (references[block] + 1), -1, request_id="x"), "double_free", block
            yield call(facts.EVICT, [block], 0), "evict_referenced", block
            yield call(facts.CACHE, [block], -references[block] - 1), "ref_underflow", block
            yield call(facts.RESET, [], 0), "evict_referenced", used[0]
        if unused:
            block = pick(unused)
            yield call(facts.ALLOC, [block, block], 1, request_id="x", group_id=0), "alloc_live_block", block
        if handed_out:
            block = pick(handed_out)
            yield call(facts.FREE, [block], -1, request_id="x"), "double_free", block
        if fresh:
            block = pick(fresh)
            yield call(facts.FREE, [block], -1, request_id="x"), "free_unallocated", block

    @rule(data=st.data())
    def a_call_that_does_not_fit(self, data: st.DataObject) -> None:
        wrong = list(self.wrong_calls(lambda blocks: data.draw(st.sampled_from(blocks))))
        operation, reason, block = data.draw(st.sampled_from(wrong))
        found = judge_pool(operation, self.said.ledger, "t", PARTS)
        assert (found[0].reason, found[0].block_id) == (reason, block)
        assert len(found) == 1 or operation.kind == facts.RESET
        for finding in found:
            assert finding.also in {(), ("ref_underflow",)}
            assert (finding.request_id, finding.step) == (operation.request_id, self.step)

    @precondition(lambda self: self.unused())
    @rule(data=st.data(), reserved=st.booleans(), running=st.booleans())
    def a_block_of_a_running_step_is_handed_out(self, data: st.DataObject, reserved: bool, running: bool) -> None:
        block = data.draw(st.sampled_from(self.unused()))
        operation = PoolOperation(kind=facts.ALLOC, block_ids=[block], ref_counts=[1], reserved=reserved)
        in_flight = {block if running else NUM_BLOCKS: 7}
        found = judge_pool(operation, self.said.ledger, "t", PARTS, in_flight)
        assert [f.reason for f in found] == ["free_inflight_step"] * (reserved and running)

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def a_block_is_freed_under_its_owners(self, data: st.DataObject) -> None:
        """By somebody who never had it: the references still add up, the owners do not."""
        block = data.draw(st.sampled_from(self.used()))
        count = self.pool.ref_counts()[block] - 1
        operation = PoolOperation(kind=facts.FREE, block_ids=[block], request_id="x", ref_counts=[count])
        ledger = self.said.again()
        assert judge_pool(operation, ledger, "t", PARTS) == []
        ledger.apply(operation, self.step)
        owners = [share.request_id for share in ledger.owners(block) if share.live]
        found = judge_settled(operation, ledger, "t", PARTS)
        assert [(f.reason, f.block_id, f.request_id) for f in found] == [("alias_owner_mismatch", block, "x")] * (
            len(owners) > count
        )
        assert not found or found[0].other_request_id == owners[0]

    @precondition(lambda self: self.used())
    @rule(data=st.data(), by=st.sampled_from([-1, 1, 2]))
    def a_count_is_changed_past_the_pool(self, data: st.DataObject, by: int) -> None:
        """Seen when the block is next in a call, and in an audit."""
        block, counts = data.draw(st.sampled_from(self.used())), self.pool.ref_counts()
        counts[block] += by
        operation = PoolOperation(kind=facts.CACHE, block_ids=[block], ref_counts=[counts[block]])
        found = judge_settled(operation, self.said.ledger, "t", PARTS)
        assert [(f.reason, f.block_id) for f in found] == [("ledger_pool_mismatch", block)]
        assert [(f.reason, f.block_id) for f in self.audited(counts)] == [("ledger_pool_mismatch", block)]

    @rule(data=st.data())
    def the_free_queue_is_damaged(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, NUM_BLOCKS))
        queue = self.unused()
        if block in queue and data.draw(st.booleans()):
            queue.remove(block)
        else:
            queue.append(block)
        found = self.audited(self.pool.ref_counts(), queue)
        assert [(f.reason, f.block_id) for f in found] == [("free_list_damaged", block)]

    def audited(self, *books: list[int]) -> list[Finding]:
        return judge_audit(self.said.ledger.differences(*books), self.step, "t", self.said.ledger, PARTS)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def a_request_finishes_without_a_word(self, data: st.DataObject) -> None:
        """Found for each group in which it has blocks; those who gave theirs up, or have none, are not."""
        name = data.draw(st.sampled_from(self.live()))
        others = sorted(self.ended)
        view = LifetimeView(step=self.step, trace_id="t", ledger=self.said.ledger, ended=[name, *others, "nobody"])
        groups = sorted({group for _, group, _, _ in self.places(name)})
        found = sorted((f.request_id, f.group_id) for f in leak_after_finish(view))
        assert found == [(name, group) for group in groups]

    @rule()
    def an_audit(self) -> None:
        assert self.audited(self.pool.ref_counts(), self.unused()) == []


TestJudgedLives = JudgedLives.TestCase
TestJudgedLives.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_findings_do_not_depend_on_the_pretest_of_a_call() -> None:
    """A call that agrees is one about which no rule says anything, also when the counts are not known."""
    lives = JudgedLives()
    lives.start()
    lives.tell(facts.ALLOC, lives.pool.allocate(3), request_id="a", group_id=0, first_index=0)
    known = PoolOperation(kind=facts.FREE, block_ids=[1, 2], request_id="a", group_id=0, ref_counts=[0, 0])
    for operation in (known, msgspec.structs.replace(known, ref_counts=None)):
        assert judge_pool(operation, lives.said.ledger, "t", PARTS) == []
