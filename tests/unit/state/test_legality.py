"""What a follower of the pool takes from a step."""

from __future__ import annotations

from kvscope.facts.allocator import ALLOC, FREE, PoolOperation
from kvscope.facts.requests import Declaration, StepRequests, StepResult
from kvscope.state.bindings import Bindings
from kvscope.state.blocks import BlockLedger
from kvscope.state.legality import Legality
from kvscope.testing.trace import TOPOLOGY


def a_step(number: int, scheduled: dict[str, int], *, new: bool = False) -> Declaration:
    return Declaration(
        step=number,
        trace_id=str(number),
        requests=StepRequests(
            new_ids=["a"] if new else [],
            new_blocks=[([1, 2],)] if new else [],
            new_computed=[0] if new else [],
            cached_ids=[],
            cached_blocks=[],
            cached_computed=[],
            resumed=set(),
            scheduled=scheduled,
            finished=set(),
            preempted=set(),
        ),
        new_prompt_tokens=[20] if new else [],
        cached_output_tokens=[],
        spec_tokens={},
        invalid_spec_tokens={},
        total_num_scheduled_tokens=sum(scheduled.values()),
        token_budget=None,
        zero_blocks=None,
        copies=None,
        connector_plan=None,
    )


def test_a_step_without_work_writes_nothing_and_no_result_of_it_is_waited_for() -> None:
    """An abort while nothing can be scheduled releases blocks that the step before has written."""
    bindings, ledger = Bindings(TOPOLOGY), BlockLedger(TOPOLOGY.num_blocks, TOPOLOGY.null_block_id)
    legality = Legality(TOPOLOGY, ledger, bindings)
    legality.take(PoolOperation(kind=ALLOC, block_ids=[1, 2], request_id="a", group_id=0, first_index=0, step=1))
    for declaration in (a_step(1, {"a": 20}, new=True), a_step(2, {})):
        bindings.apply(declaration.requests)
        legality.advance(declaration)
        legality.end_finished()
        if not declaration.is_empty:
            legality.confirm(declaration, StepResult(request_ids=("a",), sampled_tokens=(1,)))
    legality.take(PoolOperation(kind=FREE, block_ids=[2, 1], request_id="a", group_id=0, step=2))
    assert ledger.pending() == {}
    declared, confirmed = ledger.written_of([1, 2])
    assert (declared.tolist(), confirmed.tolist()) == ([16, 4], [16, 4])
    history = ledger.history(2)
    assert history is not None
    assert history.written_step == 1
