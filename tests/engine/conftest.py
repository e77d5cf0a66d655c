"""Fixtures around real engines. One process runs one model runner, named on the command line: `--runner v1|v2`."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvscope.testing import engine


def pytest_configure(config: pytest.Config) -> None:
    # Before collection: a test module may import vLLM, and vLLM reads its environment then.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    engine.apply_environment(config.getoption("--runner"))


@pytest.fixture(scope="session")
def runner(request: pytest.FixtureRequest) -> engine.Runner:
    """The model runner that this process tests."""
    name: engine.Runner = request.config.getoption("--runner")
    return name


@pytest.fixture(scope="session")
def plain_llm(runner: engine.Runner) -> Iterator[Any]:
    """An engine in this process with kvscope's switches off, shared by all tests that do not change its settings."""
    with engine.running() as llm:
        yield llm
