"""C1 on runs that serve no request: profiling, warm-up, capture, an idle data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from ..facts.plans import PAD_SLOT, DummyRun
from ..state.bindings import Bindings
from . import rule as r
from .finding import Finding
from .rule import rule


class DummyView(msgspec.Struct, frozen=True, kw_only=True):
    """A dummy run after step ``after_step``, beside the tables of the requests that are alive meanwhile."""

    after_step: int
    run: DummyRun
    bindings: Bindings


@rule(
    check="C1",
    severity="error",
    rank=r.OTHER,
    title="a dummy run may write into the cache",
    fires="A slot of a dummy run is not the padding value.",
    silent="Groups that have no slot mapping; state slots, which dummy runs may use.",
    sources=(r.PLAN_SLOTS, "the rule that a dummy run writes nothing"),
    invariant=True,
)
def dummy_slot_enabled(view: DummyView) -> Iterator[Finding]:
    for group_index, group in enumerate(view.bindings.topology.groups):
        slots = view.run.slots.get(group.group_id)
        if slots is None or not group.judged:
            continue
        enabled = np.flatnonzero(slots != PAD_SLOT)
        if not enabled.size:
            continue
        slot = int(slots[enabled[0]])
        holders = view.bindings.holders(group_index, slot // group.block_size)
        yield Finding(
            reason="",
            step=view.after_step,
            trace_id="",
            other_request_id=holders[0] if holders else None,
            group_id=group.group_id,
            token_index=int(enabled[0]),
            block_id=slot // group.block_size,
            slot=slot,
            expected=PAD_SLOT,
            actual=slot,
        )


DUMMY_RULES = (dummy_slot_enabled,)
