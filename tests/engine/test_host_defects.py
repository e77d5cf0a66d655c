"""Defects of vLLM itself: found as long as they are there. One that is mended fails here, and its entry can go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvscope.testing import engine
from kvscope.testing.host_defects import example_connector, failed_load, recompute


def test_a_failed_load_that_nobody_repeats_is_hit(tmp_path: Path, cell: Any) -> None:
    outcome = failed_load(tmp_path)
    assert {finding.reason for finding in outcome.findings} == {"connector_invalid_block_reused", "read_uninitialized"}
    assert outcome.wrong != outcome.right
    cell(f"failed load: {len(outcome.findings)} findings")


def test_only_runner_v2_does_not_repeat_a_failed_load(runner: engine.Runner, tmp_path: Path, cell: Any) -> None:
    outcome = recompute(tmp_path)
    assert (outcome.wrong == outcome.right) == (not outcome.findings) == (runner == "v1")
    cell(f"repeated load: {len(outcome.findings)} findings")


@pytest.mark.long_v2
def test_a_connector_that_counts_below_zero_has_shared_blocks_written(tmp_path: Path, cell: Any) -> None:
    outcome = example_connector(tmp_path)
    assert {finding.reason for finding in outcome.findings} == {"write_shared_block"}
    cell(f"ExampleConnector: {len(outcome.findings)} findings")
