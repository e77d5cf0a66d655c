"""Cache groups that rules cannot judge, in real models: that group alone is left out, and it is said and counted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.inputs import TokensPrompt

from kvscope.errors import ConfigurationError
from kvscope.testing import engine, models, selftest
from kvscope.testing.architectures import outline
from kvscope.testing.faults import SETTINGS, workload
from kvscope.testing.live import LiveTrace, findings_in
from kvscope.testing.random_weights import RANDOM_WEIGHTS, register_random_weights

from .test_healthy import switched_on
from .traces import Trace

# A state beside attention in every layer; vLLM caches no prefixes of it, and sizes its blocks by the state.
HYBRID: dict[str, Any] = SETTINGS | {
    "load_format": RANDOM_WEIGHTS,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 256,
}
BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "hidden_act": "gelu",
    "vocab_size": models.VOCABULARY,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "torch_dtype": "float32",
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def observed(runner: engine.Runner) -> Iterator[tuple[Any, LiveTrace]]:
    register_random_weights()
    with selftest.observed("log", HYBRID | {"model": outline("falcon-h1")}) as pair:
        yield pair


def test_only_the_group_of_states_is_left_out(observed: tuple[Any, LiveTrace], cell: Any) -> None:
    llm, trace = observed
    trace.mark()
    assert all(len(tokens) == 6 for tokens in workload(llm, max_tokens=6, dummy_every=4))
    assert findings_in(trace.records()) == []
    run = trace.run
    assert run.topology is not None
    assert [(group.kind, group.judged) for group in run.topology.groups] == [("full_attention", True), ("mamba", False)]
    said = [(of.check, of.cause, of.group_id) for of in run.enabled().checks_inactive if of.cause.startswith("sem")]
    assert said == [("plan", "semantics:mamba", 1)]
    coverage = run.coverage
    # Every row of the one group is audited, every row of the other is counted.
    assert coverage.rows == coverage.rows_scheduled > 0
    assert coverage.skipped == {("plan", "semantics:mamba"): coverage.rows}
    cell(f"a state beside attention: {coverage.rows} rows audited, as many left out and counted, 0 findings")


@pytest.mark.long_v2
@pytest.mark.parametrize("name", ["slot_plus_one", "table_foreign_block", "dummy_slot"])
def test_beside_it_faults_are_found_as_ever(name: str, observed: tuple[Any, LiveTrace]) -> None:
    llm, trace = observed
    outcome = selftest.inject(llm, trace, name)
    assert outcome.injected
    assert outcome.mistakes == []


@pytest.mark.parametrize(
    ("part", "checks"), [("kv_trace", "checks C1, C4, C6"), ("kv_guard_config", "checks C2, C3, C5")]
)
def test_who_refuses_is_told_the_group_its_semantics_and_the_checks(
    part: str, checks: str, runner: engine.Runner, tmp_path: Path
) -> None:
    register_random_weights()
    config: dict[str, Any] = {part: {"enabled": True, "unsupported": "refuse"}, "kv_output": {"dir": str(tmp_path)}}
    with pytest.raises(ConfigurationError) as refused:
        engine.start(outline("falcon-h1"), additional_config=config, **HYBRID)
    said = f"additional_config.{part}.unsupported: 'refuse', and {checks} cannot run on group 1 (mamba)"
    assert str(refused.value) == said


def test_a_model_that_caches_nothing_is_no_fault_of_ours(runner: engine.Runner, tmp_path: Path) -> None:
    """Encoder-only attention has slots and no table."""
    folder = tmp_path / "bert"
    folder.mkdir()
    for path in models.build("qwen3").glob("tokenizer*.json"):
        shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(BERT))
    settings = {"load_format": "dummy", "runner": "pooling", "num_blocks": None, "max_model_len": 256}
    with engine.running(folder, additional_config=switched_on(tmp_path / "out", "log", log="off"), **settings) as llm:
        trace = LiveTrace(llm)
        assert len(llm.embed([TokensPrompt(prompt_token_ids=[5, 6, 7, 8])] * 3, use_tqdm=False)) == 3
        assert findings_in(trace.records()) == []
    assert Trace(tmp_path / "out").faults() == {}
