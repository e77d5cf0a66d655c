from __future__ import annotations

import pytest

from kvscope.events import codec
from kvscope.events.names import PLAIN
from kvscope.sinks.kinds import make_records
from unit.events.samples import agreed_decode_batch, same


@pytest.mark.parametrize("full", [False, True])
def test_a_plan_becomes_the_same_records_whether_or_not_it_was_spelled_out(full: bool) -> None:
    plan, sizes = agreed_decode_batch(), {0: 16, 1: 16}
    short = make_records("plan", plan, PLAIN, full=full, block_sizes=sizes)
    long = make_records("plan", plan.snapshot(), PLAIN, full=full, block_sizes=sizes)
    assert same(list(short), list(long))
    assert (b"last_position" in codec.encode(short[0])) is full
