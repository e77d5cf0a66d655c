"""A short form of the feature matrix: the architectures that no other engine test starts, and a few requests each.

`make matrix` runs all of it, each cell in a process of its own and with more to do.
"""

from pathlib import Path
from typing import Any

import pytest

from kvscope.testing.environment import Runner
from kvscope.testing.matrix.cell import run_cell
from kvscope.testing.matrix.features import features

ROWS = 400
# What runner V2 does in Triton's interpreter takes seconds a step where a model has many groups.
SHORT = ("gemma3", "gpt-oss", "llama4", "deepseek-v3", "qwen3-next", "mamba2", "whisper", "eagle", "abort", "samples")
ALSO_V2 = ("gpt-oss", "deepseek-v3", "eagle", "samples")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("name", ALSO_V2 if metafunc.config.getoption("--runner") == "v2" else SHORT)


def test_a_cell_of_the_matrix(name: str, runner: Runner, tmp_path: Path, cell: Any) -> None:
    result = run_cell(features()[name], runner, ROWS, tmp_path)
    cell(result.line)
    assert result.word == "ok", result.mistakes
    assert result.outputs == "equal"
    assert not result.findings
    assert result.rows == result.rows_scheduled
    assert result.rows or result.not_judged
