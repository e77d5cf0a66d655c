"""Two ranks that share out every sequence: vLLM's own scheduler, tables, slots and lengths, on both runners."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvscope.testing import engine
from kvscope.testing.context_parallel import context_parallel_environment, model
from kvscope.testing.context_parallel.faults import EXPECTED

from .test_healthy import switched_on
from .traces import Trace

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(900)]  # three processes and an interpreter

SETTINGS: dict[str, Any] = {"num_blocks": 20, "max_num_seqs": 4, "max_num_batched_tokens": 64}
TWO_RANKS = SETTINGS | {
    "in_process": False,
    "tensor_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "disable_custom_all_reduce": True,
}
LONG = [[(17 * row + token) % 200 + 10 for token in range(length)] for row, length in enumerate((70, 33, 100, 20))]


def generate(interleave: int, tokens: int, **config: Any) -> list[list[int]]:
    with (
        context_parallel_environment(),
        engine.running(model(), additional_config=config, cp_kv_cache_interleave_size=interleave, **TWO_RANKS) as llm,
    ):
        return engine.generate(llm, LONG, max_tokens=tokens)


def violations(folder: Path) -> list[Any]:
    return Trace(folder).violations


@pytest.mark.parametrize(
    "interleave", [pytest.param(1, marks=pytest.mark.long), pytest.param(16, marks=pytest.mark.once)]
)
def test_ranks_that_share_out_sequences_are_judged_and_clean(
    runner: engine.Runner, tmp_path: Path, cell: Any, interleave: int
) -> None:
    tokens = 8 if runner == "v1" else 3
    with engine.running(model(), **SETTINGS) as llm:
        expected = engine.generate(llm, LONG, max_tokens=tokens)
    found = generate(interleave, tokens, **switched_on(tmp_path))
    trace = Trace(tmp_path)
    assert found == expected  # each token was attended to, wherever it is stored
    assert trace.violations == []
    ranks = [record for record in trace.enabled if record.process == "worker"]
    assert {record.dcp_rank for record in ranks} == {0, 1}
    for record in ranks:
        assert record.context_parallel is not None
        assert (record.context_parallel.dcp_size, record.groups[0].shards) == (2, 2)
        assert "plan" not in {inactive.check for inactive in record.checks_inactive}
    assert trace.rows_audited() == trace.rows_scheduled() * 2
    cell(f"decode context parallel 2, interleave {interleave}: {trace.rows_audited()} rows, 0 findings")


@pytest.mark.long
@pytest.mark.parametrize("name", EXPECTED)
def test_a_fault_of_one_rank_is_found_as_that(runner: engine.Runner, name: str, tmp_path: Path, cell: Any) -> None:
    """What a rank stores nowhere, or in another's place, may be found by other rules in later steps as well."""
    report = tmp_path / "injected.json"
    fault = {"name": name, "rank": 1, "report": str(report), "after_steps": 1}
    tokens = 8 if runner == "v1" else 3
    generate(4, tokens, **switched_on(tmp_path / "out", action="log"), kvscope_context_fault=fault)
    injected = json.loads(report.read_text())
    first = violations(tmp_path / "out")[0]
    assert (first.reason, first.tp_rank) == (EXPECTED[name], 1)
    for field in ("slot", "token_index", "position", "row"):
        assert field not in injected or getattr(first, field) == injected[field]
    cell(f"decode context parallel 2, log: {first.reason} on rank 1")


@pytest.mark.long
def test_a_fault_of_one_rank_stops_the_engine(tmp_path: Path, cell: Any) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    fault = {"name": "cp_slot_missing", "rank": 1, "report": str(tmp_path / "injected.json"), "after_steps": 1}
    with pytest.raises(EngineDeadError):
        generate(4, 8, **switched_on(tmp_path / "out"), kvscope_context_fault=fault)
    assert [record.reason for record in violations(tmp_path / "out")] == ["cp_slot_owner_mismatch"]
    cell("decode context parallel 2, raise: cp_slot_owner_mismatch on rank 1 stopped the engine")
