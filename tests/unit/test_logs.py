"""A log collector that is down must cost vLLM nothing, and must not stand in for an error that is meant."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope.boundary.ledger import MAX_FAULTS, Hook
from kvscope.boundary.wrapping import around
from kvscope.config import DIR_VARIABLE, DISABLE_VARIABLE
from kvscope.errors import ViolationError
from kvscope.facts.plans import Plan
from kvscope.facts.requests import StepResult
from kvscope.logs import LOGGER, say
from kvscope.plugin import HUB, PluginHub, register
from unit.boundary.fakes import Told, make_host, observed
from unit.runtime.support import MADE, Live, make_run


class CollectorDown(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.asked: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.asked.append(record.levelname)
        raise OSError("the collector is down")


@pytest.fixture(params=[LOGGER, "vllm", None], ids=["own", "vllm", "root"])
def collector(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CollectorDown]:
    """Attached to kvscope's logger or to one above it."""
    logger = logging.getLogger(LOGGER)
    level = logger.level
    for name in (LOGGER, "vllm"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
    logger.setLevel(logging.DEBUG)
    handler = CollectorDown()
    monkeypatch.setattr(logging.getLogger(request.param), "handlers", [handler])
    yield handler
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _runs_end_with_their_test() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()


def outside(plan: Plan) -> None:
    plan.groups[0].slots[0] = 64 * 16


def test_an_access_outside_the_cache_is_refused_though_the_log_fails(tmp_path: Path, collector: CollectorDown) -> None:
    """The error that keeps it from being launched leaves the worker's hook, as it would with a log that works."""
    live = Live(tmp_path, trace="raise")
    live.warm()
    hook = Hook("runner")
    with pytest.raises(ViolationError, match="write_outside_cache"):
        hook.run(live.decode, 40, outside)
    assert (hook.faults, "ERROR" in collector.asked) == (0, True)


def test_a_result_is_withheld_though_the_log_fails(
    tmp_path: Path, collector: CollectorDown, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live(tmp_path, trace="raise")
    live.warm()
    declaration = live.decode(change=lambda plan: plan.groups[0].slots.__iadd__([1, 0, 0, 0, 0]))
    result = StepResult(request_ids=("a", "b"), sampled_tokens=(1, 1))
    host, hook = make_host(monkeypatch), Hook("scheduler.update")
    host.step = around(before=lambda observer, *_: observer.on_update(declaration, result))(host.step, hook)
    engine, outputs = observed(host(), live.engine), []
    with pytest.raises(ViolationError, match="write_target_mismatch"):
        outputs.append(engine.step(1))
    assert (outputs, hook.faults, "ERROR" in collector.asked) == ([], 0, True)


def test_faults_of_a_hook_are_counted_and_swallowed_though_the_log_fails(
    collector: CollectorDown, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    host, hook = make_host(monkeypatch), Hook("h")
    host.step = around(before=faulty)(host.step, hook)
    engine = observed(host(), Told())
    assert [engine.step(number) for number in range(MAX_FAULTS)] == [(number, 7) for number in range(MAX_FAULTS)]
    assert (hook.faults, hook.disabled) == (MAX_FAULTS, True)
    assert collector.asked == ["WARNING", "DEBUG"] * 2
    other = Hook("other")
    other.run(faulty)
    assert other.faults == 1


def test_plugins_load_and_settings_are_read_though_the_log_fails(
    collector: CollectorDown, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (DISABLE_VARIABLE, DIR_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(HUB, "arm", lambda: 1 // 0)
    register()
    hub = PluginHub(type(HUB.ledger)())
    hub._say_misspelled({"kv_gaurd_config": {"enabled": True}})
    assert collector.asked == ["WARNING"] * 2


def test_a_run_opens_though_the_log_fails(tmp_path: Path, collector: CollectorDown) -> None:
    run = make_run(tmp_path, "engine")
    run.open()
    assert run.stream.flush()
    assert collector.asked == ["INFO"]


def test_a_line_names_where_it_comes_from(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger=LOGGER):
        say(logging.DEBUG, "%s of %s", 1, 2, error=ValueError("why"))
    (record,) = caplog.records
    assert (record.getMessage(), record.filename, record.name) == ("1 of 2", "test_logs.py", LOGGER)
    assert record.exc_info is not None
