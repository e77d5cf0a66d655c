"""`unsupported: refuse` stops the start of a real engine whose cache groups cannot be judged, and says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvscope.errors import ConfigurationError
from kvscope.testing import engine
from kvscope.testing.architectures import outline

from .test_healthy import switched_on
from .traces import Trace

SETTINGS: dict[str, Any] = {"load_format": "dummy", "num_blocks": 16, "max_model_len": 128, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def mamba() -> Path:
    """A model whose one cache group holds states. Its weights do not matter here."""
    return outline("mamba2")


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


@pytest.mark.long
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
