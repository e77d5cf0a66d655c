"""What kvscope reads as the arguments of attention is what the kernels are called with, on real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvscope.testing import engine
from kvscope.testing.faults import SETTINGS, workload
from kvscope.testing.faults.hooks import Hook
from kvscope.testing.live import LiveTrace
from kvscope.testing.operator_calls import watching

from .test_healthy import switched_on
from .traces import Trace

ROWS_REQUIRED = 100
LATENT: dict[str, Any] = SETTINGS | {"block_size": 16, "num_blocks": 96, "max_num_batched_tokens": 256}


@pytest.mark.parametrize(
    ("model", "settings", "kinds"),
    [
        ("qwen3", SETTINGS, {"full_attention"}),
        ("gemma3", SETTINGS | {"num_blocks": 288}, {"full_attention", "sliding_window"}),
        ("deepseek-v2", LATENT, {"mla"}),
    ],
)
def test_kernels_get_what_was_judged(
    model: Any, settings: dict[str, Any], kinds: set[str], tmp_path: Path, runner: engine.Runner, cell: Any
) -> None:
    with engine.running(model, additional_config=switched_on(tmp_path), **settings) as llm:
        with watching(llm) as calls:
            tokens = workload(llm, max_tokens=24 if runner == "v1" else 16)
        layers = {name for groups in engine.model_runner(llm).attn_groups for of in groups for name in of.layer_names}
        coverage = LiveTrace(llm).run.coverage
    assert all(tokens)
    assert calls.differences == []
    assert calls.layers == layers
    assert calls.rows.keys() == calls.tokens.keys() == kinds
    assert min(calls.rows.values()) >= ROWS_REQUIRED
    assert coverage.operator_rows == coverage.rows > 0
    trace = Trace(tmp_path)
    assert not trace.violations
    assert not trace.skipped()
    cell(f"{model}: kernels' arguments as judged, {dict(calls.rows)} rows, {dict(calls.tokens)} tokens")


@pytest.mark.long_v2
def test_a_kernel_that_gets_something_else_would_be_noticed(tmp_path: Path) -> None:
    """What is changed behind the point where kvscope looks is seen here, and only here."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    def forward(original: Any, impl: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        *inputs, metadata = args
        if metadata is not None and metadata.seq_lens.shape[0] > 1:
            metadata.block_table = metadata.block_table.flip(0)
        return original(impl, layer, *inputs, metadata, **kwargs)

    with engine.running(additional_config=switched_on(tmp_path), **SETTINGS) as llm, watching(llm) as calls:
        hook = Hook(CPUAttentionBackendImpl, "forward", forward)
        try:
            workload(llm, max_tokens=4)
        finally:
            hook.remove()
    assert calls.differences
    assert not Trace(tmp_path).violations


@pytest.mark.long_v2
@pytest.mark.parametrize("block_size", [64, pytest.param(128, marks=pytest.mark.long)])
def test_blocks_of_a_kernel_are_put_together_again(
    block_size: int, tmp_path: Path, runner: engine.Runner, monkeypatch: pytest.MonkeyPatch, cell: Any
) -> None:
    """A kernel that only knows blocks of 32 tokens: vLLM expands the manager's blocks for it, on both runners."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    monkeypatch.setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", staticmethod(lambda *_: [32]))
    settings = SETTINGS | {"block_size": block_size}
    with engine.running(additional_config=switched_on(tmp_path), **settings) as llm:
        with watching(llm) as calls:
            assert all(workload(llm, max_tokens=16))
        (group,) = [of for groups in engine.model_runner(llm).attn_groups for of in groups]
        assert group.kernel_block_size == 32
    assert calls.differences == []
    trace = Trace(tmp_path)
    assert not trace.violations
    assert not trace.skipped()
    assert trace.enabled[0].groups is not None
    assert [(of.block_size, of.kernel_block_size) for of in trace.enabled[0].groups] == [(block_size, 32)]
    cell(f"kernel blocks of 32 in blocks of {block_size}: {calls.rows['full_attention']} rows as judged")
