"""What the catalog says that this version emits is what it emits: nothing more, and nothing less.

Each series that is fed must be said by the code that is to feed it, here by an engine with trace, guard and a connector
that has counted of everything; so a feeder that goes takes its series out of what is found here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import kvscope
from kvscope.boundary.ledger import OBSERVER, Hook, Ledger
from kvscope.metrics.catalog import METRICS
from kvscope.metrics.families import Values, families
from kvscope.metrics.labels import CONNECTOR, FAILURE_CAUSE, GROUP, HOOK, OTHER, SKIP_CAUSE, SKIPPED_CHECK
from kvscope.metrics.metric import Metric
from kvscope.metrics.reader import read_run
from kvscope.plugin import PluginHub
from kvscope.runtime.run import Run
from unit.boundary.test_connector_metering import Told
from unit.metrics.support import process
from unit.test_plugin_monitor import Engine

SOURCE = Path(kvscope.__file__).parent
ON = {"enabled": True}
DYNAMIC = {GROUP, CONNECTOR, HOOK}
"""Their values are names of the host's: which of them there are is up to the engine, and other takes what is new."""
FED = [metric for metric in METRICS.values() if metric.is_delivered and metric.feeder != "reader"]


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Values]:
    """What an engine in one process has said that has every part and a connector."""
    hub = PluginHub(Ledger())
    attach, faults = hub.attach_scheduler, Hook.allocator_faults[0]

    def attached(scheduler: Any) -> None:
        for run in hub._runs.values():
            run.roles.add("worker")
        scheduler.connector = Told()
        attach(scheduler)

    hub.attach_scheduler = attached  # type: ignore[method-assign]  # a scheduler makes its connector itself
    parts = dict.fromkeys(("kv_trace", "kv_guard_config"), ON)
    engine = Engine(tmp_path_factory.mktemp("run"), hub, kv_monitor=ON, **parts)
    engine.run("a", steps=2)
    run: Run = getattr(engine.scheduler, OBSERVER)._run
    assert run.monitor is not None
    count_everything(run)
    run.monitor.publish()
    engine.meter._fill_at = 0  # it was said a moment ago, when no block was used
    engine.meter.publish()
    (found,) = read_run(engine.folder).processes
    yield found.values
    run.close()
    hub.ledger.uninstall_all()
    Hook.allocator_faults[0] = faults


def count_everything(run: Run) -> None:
    coverage = run.coverage
    coverage.rows = coverage.operator_rows = coverage.handovers = coverage.dummy_runs = 1
    coverage.pool_operations = coverage.audited_blocks = 1
    for check in SKIPPED_CHECK.fed:
        for cause in SKIP_CAUSE.values:
            coverage.skipped[check, cause] += 1


@pytest.mark.parametrize("metric", FED, ids=[metric.name for metric in FED])
def test_every_series_that_is_fed_is_emitted_and_no_other(metric: Metric, emitted: Values) -> None:
    found = set(emitted.get(metric.name, {}))
    if DYNAMIC & set(metric.labels):
        assert found
        assert found <= set(metric.fed())
    else:
        assert found == set(metric.fed())


def test_what_nothing_feeds_is_not_emitted(emitted: Values) -> None:
    assert emitted.keys() == {metric.name for metric in FED}
    assert [metric.name for metric in METRICS.values() if bool(metric.fed()) != metric.is_delivered] == []


def test_who_reads_adds_the_age() -> None:
    assert [metric.name for metric in METRICS.values() if metric.feeder == "reader"] == ["snapshot_age_seconds"]
    assert [family.name for family in families([process()], prefix="p_")] == ["p_snapshot_age_seconds"]


# What is counted apart from the metrics, and where -------------------------------------------------------------------


def texts(*folders: str) -> set[str]:
    """All texts in the source of these stations, and the parts of those that something is filled into."""
    paths = [path for folder in folders for path in (SOURCE / folder).rglob("*.py")]
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_cause_of_a_skipped_check_is_given_somewhere() -> None:
    said = {text.partition(":")[0] for text in texts("boundary", "runtime")}
    assert set(SKIP_CAUSE.fed) - said <= {OTHER}
    assert SKIP_CAUSE.closed("allocator_hook_fault") == OTHER
    assert "allocator_hook_fault" in said


def test_the_checks_that_skip_are_those_whose_skipping_is_counted() -> None:
    counted = set()
    for path in (SOURCE / "runtime").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("coverage.skipped"):
                assert isinstance(node.slice, ast.Tuple), f"{path.name}:{node.lineno}"
                counted.add(ast.literal_eval(node.slice.elts[0]))
    assert counted == set(SKIPPED_CHECK.fed)


def test_the_causes_of_failed_transfers_are_those_that_are_counted() -> None:
    """``unit.boundary.test_connector_metering`` sees each of them happen."""
    from kvscope.runtime.connector_meter import ABORTED, HOST_SHUTDOWN, LOAD_FAILED

    assert set(FAILURE_CAUSE.fed) == {ABORTED, HOST_SHUTDOWN, LOAD_FAILED}
    seen = (Path(__file__).parents[1] / "boundary" / "test_connector_metering.py").read_text(encoding="utf-8")
    assert all(f'"pd_transfer_failures_total", "{cause}"' in seen for cause in FAILURE_CAUSE.fed)
