"""Fixtures around real engines. One process runs one model runner, named on the command line: `--runner v1|v2`."""

import gc
import hashlib
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvscope.plugin import HUB
from kvscope.testing import engine


def pytest_configure(config: pytest.Config) -> None:
    # Before collection: a test module may import vLLM, and vLLM reads its environment then.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    engine.apply_environment(config.getoption("--runner"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `once` are the first runner's; those marked `long`, or so for it, run when asked for, alone."""
    first, long = config.getoption("--runner") == "v1", config.getoption("--long")
    longs = ("long", "long_v1" if first else "long_v2")
    kept = [
        item
        for item in items
        if any(map(item.get_closest_marker, longs)) == long and (first or not item.get_closest_marker("once"))
    ]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


@pytest.fixture(scope="session")
def runner(request: pytest.FixtureRequest) -> engine.Runner:
    """The model runner that this process tests."""
    name: engine.Runner = request.config.getoption("--runner")
    return name


@pytest.fixture(scope="session", autouse=True)
def imports_are_left_out_of_garbage_collection(runner: engine.Runner) -> Iterator[None]:
    """Nine times in an engine's life vLLM has all of Python's objects looked through, most of which are imports.

    That took three quarters of the time of starting and ending one. Here they are frozen once, and vLLM, which freezes
    what there is and takes that back, is kept from both; the objects of an engine are collected as ever.
    """
    host = "vllm.v1.worker"
    runners = {"v1": f"{host}.cpu_model_runner", "v2": f"{host}.cpu.model_runner"}
    gc.disable()  # an import leaves little garbage
    for name in ("vllm.entrypoints.llm", "vllm.v1.engine.core", f"{host}.cpu_worker", runners[runner]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def plain_llm(runner: engine.Runner) -> Iterator[Any]:
    """An engine in this process with kvscope's switches off, shared by all tests that do not change its settings."""
    with engine.running() as llm:
        yield llm


_CELLS: list[str] = []


@pytest.fixture
def cell(request: pytest.FixtureRequest, runner: engine.Runner) -> Callable[[str], None]:
    """Note what one run of a real engine came to; the lines are printed at the end."""

    def note(text: str) -> None:
        _CELLS.append(f"cell {runner} {request.node.name}: {text}")

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _CELLS:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def vllm_source_is_untouched() -> Iterator[None]:
    """Wrapping is done in memory: the wrapped source files hash the same before and after."""
    before = _hashes()
    yield
    assert _hashes() == before


def _hashes() -> dict[str, str]:
    import vllm

    root = Path(vllm.__file__).parent
    files = {root.parent.joinpath(*seam.module.split(".")).with_suffix(".py") for seam in HUB.table}
    assert files
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}
