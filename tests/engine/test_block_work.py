"""Blocks that are cleared and copied: a model with linear attention whose hits end inside of a block.

Such a hit gives the request a copy of its last block, and a copy keeps the state that a request goes on in (vLLM 0.32,
``SingleTypeKVCacheManager._apply_cow``, ``MambaManager.allocate_new_blocks``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import UNSET

from kvscope.events.schema import BindRecord, BoundaryRecord
from kvscope.testing import engine
from kvscope.testing.architectures import outline
from kvscope.testing.random_weights import RANDOM_WEIGHTS, register_random_weights

from .test_healthy import switched_on
from .traces import Trace

SETTINGS: dict[str, Any] = {
    "num_blocks": 64,
    "max_num_seqs": 4,
    "load_format": RANDOM_WEIGHTS,
    "dtype": "bfloat16",
    "enable_prefix_caching": True,
    "prefix_match_unit": 32,
}
"""Hits in units of 32 tokens, of blocks that hold 576."""


def test_what_a_hybrid_model_clears_and_copies_is_what_was_declared(
    runner: engine.Runner, tmp_path: Path, cell: Any
) -> None:
    register_random_weights()
    shared = [5 + 37 * index % 250 for index in range(100)]
    with engine.running(outline("qwen3-next"), additional_config=switched_on(tmp_path), **SETTINGS) as llm:
        for turn in range(2):
            tails = [[7 + (turn + tail) * 11 + index for index in range(8)] for tail in range(3)]
            assert all(len(tokens) == 5 for tokens in engine.generate(llm, [shared + tail for tail in tails], 5))
    trace = Trace(tmp_path)
    assert not trace.violations, trace.violations[:3]
    assert not trace.faults()
    declared = trace.of(BindRecord)
    cleared = [bind.step for bind in declared if bind.zero_blocks is not UNSET]
    copied = [bind.step for bind in declared if bind.copies is not UNSET]
    assert cleared
    assert copied
    done = trace.of(BoundaryRecord)
    assert [(r.step, r.as_declared) for r in done if r.kind == "zero"] == [(step, True) for step in cleared]
    assert [(r.step, r.as_declared) for r in done if r.kind == "copy"] == [(step, True) for step in copied]
    pairs = sum(len(bind.copies) for bind in declared if not isinstance(bind.copies, type(UNSET)))
    cell(f"block work: {pairs} copies in {len(copied)} steps, {len(cleared)} lists of blocks cleared, 0 findings")
