"""Speculative decoding: the plans of a runner that verifies drafts are read and judged, and nothing is found."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvscope.testing import engine, models
from kvscope.testing.storm import forced_async

from .test_healthy import CROWDED, answers, assert_clean, prompts, switched_on
from .traces import Trace


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
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
    cell(f"drafts: {trace.rows_audited()} rows, 0 findings")
