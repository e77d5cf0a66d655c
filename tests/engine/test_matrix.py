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
SHORT = {"v1": ("gemma3", "abort"), "v2": ("gpt-oss",)}
"""What `make test` runs with each runner; the rest of these is for `make test-long`."""
KNOWN = {
    "v1": (*SHORT["v1"], "llama4", "whisper", "qwen3-next", "mamba2", "gpt-oss", "deepseek-v3", "eagle", "samples"),
    "v2": (*SHORT["v2"], "deepseek-v3", "eagle", "samples"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    runner = metafunc.config.getoption("--runner")
    always = SHORT[runner]
    metafunc.parametrize(
        "name", [name if name in always else pytest.param(name, marks=pytest.mark.long) for name in KNOWN[runner]]
    )


def test_a_cell_of_the_matrix(name: str, runner: Runner, tmp_path: Path, cell: Any) -> None:
    result = run_cell(features()[name], runner, ROWS, tmp_path)
    cell(result.line)
    assert result.word == "ok", result.mistakes
    assert result.outputs == "equal"
    assert not result.findings
    assert result.rows == result.rows_scheduled
    assert result.rows or result.not_judged
