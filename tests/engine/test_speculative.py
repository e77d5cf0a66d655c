"""Speculative decoding: the plans of a runner that verifies drafts are read and judged, and nothing is found."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from msgspec import UnsetType

from kvscope.events.schema import BindRecord, BoundaryRecord, BoundRequest
from kvscope.testing import engine, models
from kvscope.testing.storm import forced_async

from .test_healthy import CROWDED, answers, assert_clean, prompts, switched_on
from .traces import Trace


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.long_v2)], ids=["sync", "async"])
def test_drafts_of_the_model_itself(runner: engine.Runner, asynchronous: bool, tmp_path: Path, cell: Any) -> None:
    draft = {"method": "draft_model", "model": str(models.build("qwen3")), "num_speculative_tokens": 3}
    settings = CROWDED | {"num_blocks": 30, "max_num_seqs": 8, "async_scheduling": asynchronous}
    with (
        forced_async() if asynchronous else nullcontext(),
        engine.running(additional_config=switched_on(tmp_path), speculative_config=draft, **settings) as llm,
    ):
        _, client_ids, _ = answers(llm, prompts(12), 24)
    trace = Trace(tmp_path)
    if asynchronous:  # lengths are estimates then, and what that leaves out is said
        assert not trace.violations
        assert not trace.faults()
        assert trace.rows_audited() == trace.rows_scheduled() > 0
    else:
        assert_clean(trace, client_ids)
    counted = [record for record in trace.of(BoundaryRecord) if record.kind == "spec_post"]
    drafted = sum(bind.spec_tokens for bind in bound(trace) if not isinstance(bind.spec_tokens, UnsetType))
    accepted = sum(number or 0 for record in counted for number in record.accepted or ())
    assert drafted == sum(number for record in counted for number in record.drafted or ()) > 0
    assert accepted > drafted // 2
    cell(f"drafts: {trace.rows_audited()} rows, {accepted} of {drafted} drafts accepted, 0 findings")


def bound(trace: Trace) -> list[BoundRequest]:
    """Every request of every declaration."""
    return [request for record in trace.of(BindRecord) for request in record.requests]
