"""`unsupported: refuse` stops the start of a real engine whose cache groups cannot be judged, and says which."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvscope.errors import ConfigurationError
from kvscope.testing import engine, models

from .test_healthy import switched_on
from .traces import Trace

MAMBA: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "n_groups": 1,
    "chunk_size": 16,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "rms_norm": True,
    "residual_in_fp32": True,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 512,
    "torch_dtype": "float32",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SETTINGS: dict[str, Any] = {"load_format": "dummy", "num_blocks": 16, "max_model_len": 128, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose one cache group holds states, with the tokenizer of another. Its weights do not matter here."""
    folder = tmp_path_factory.mktemp("mamba2")
    for path in models.build("qwen3").glob("tokenizer*.json"):
        shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(MAMBA))
    return folder


def refusing(folder: Path) -> dict[str, Any]:
    config = switched_on(folder, "log", log="off")
    config["kv_trace"] = {**config["kv_trace"], "unsupported": "refuse"}
    return config


REFUSED = "additional_config.kv_trace.unsupported: 'refuse', and checks C1, C4, C6 cannot run on group 0 (mamba)"


@pytest.mark.once
def test_a_group_that_cannot_be_judged_stops_the_start(mamba: Path, tmp_path: Path, cell: Any) -> None:
    with pytest.raises(ConfigurationError) as raised:
        engine.start(mamba, additional_config=refusing(tmp_path / "out"), **SETTINGS)
    assert str(raised.value) == REFUSED
    cell("in-process: a start with a Mamba group is refused")


@pytest.mark.once
def test_without_refusing_it_starts_and_says_what_is_skipped(mamba: Path, tmp_path: Path) -> None:
    with engine.running(mamba, additional_config=switched_on(tmp_path / "out", "log", log="off"), **SETTINGS) as llm:
        assert [len(tokens) for tokens in engine.generate(llm, [[5, 6, 7]], max_tokens=4)] == [4]
    inactive = {(said.check, said.cause, said.group_id) for said in Trace(tmp_path / "out").enabled[0].checks_inactive}
    assert ("plan", "semantics:mamba", 0) in inactive


@pytest.mark.once
@pytest.mark.multiprocess
def test_in_processes_of_its_own_the_log_has_one_line_that_says_why(
    mamba: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], cell: Any
) -> None:
    with pytest.raises(RuntimeError, match="Engine core initialization failed"):
        engine.start(mamba, in_process=False, additional_config=refusing(tmp_path / "out"), **SETTINGS)
    captured = capfd.readouterr()
    lines = [line for line in (captured.out + captured.err).splitlines() if f"kvscope: {REFUSED}" in line]
    assert len(lines) == 1
    assert "EngineCore" in lines[0]
    assert "ERROR" in lines[0]
    cell("multi-process: a start with a Mamba group is refused, EngineCore's log says why")
