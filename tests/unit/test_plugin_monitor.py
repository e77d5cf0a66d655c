"""KV Monitor in a process, around a real scheduler of vLLM: alone, beside trace and guard, and not at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from kvscope.boundary.allocator import READER
from kvscope.boundary.ledger import OBSERVER, Hook, Ledger
from kvscope.boundary.metering import METER
from kvscope.checks.finding import Finding
from kvscope.metrics.families import Values
from kvscope.metrics.reader import read_run
from kvscope.plugin import PluginHub
from kvscope.runtime.pool_meter import PoolMeter
from kvscope.testing.metering import blocks_by_state
from unit.boundary.schedulers import make_scheduler, request

ON = {"enabled": True}
MONITOR = {"enabled": True, "window": 0.5}  # its thread publishes 20 times a second


class Engine:
    """An EngineCore and a worker, as far as the hub sees them; the scheduler is vLLM's."""

    def __init__(self, folder: Path, hub: PluginHub, *, missing: str | None = None, **parts: Any) -> None:
        parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1)
        self.config = SimpleNamespace(
            additional_config={**parts, "kv_output": {"dir": str(folder), "log": "off"}},
            instance_id="one",
            parallel_config=parallel,
            use_v2_model_runner=False,
            speculative_config=None,
        )
        self.folder, self.hub = folder / "one", hub
        self.scheduler: Any = make_scheduler()  # before anything is wrapped: it has a configuration of its own
        self.scheduler.vllm_config = self.config
        hub.configure_engine(self.config)
        if missing is not None:
            hub.ledger.uninstall(missing)
        hub.attach_scheduler(self.scheduler)
        self.scheduler.connector = None

    @property
    def meter(self) -> PoolMeter:
        meter: PoolMeter = getattr(self.scheduler, METER)
        return meter

    def run(self, name: str, *, steps: int = 1, tokens: int = 40) -> None:
        self.scheduler.add_request(request(name, range(tokens)))
        for _ in range(steps):
            scheduled = self.scheduler.schedule()
            names = list(scheduled.num_scheduled_tokens)
            rows = {each: row for row, each in enumerate(names)}
            result = ModelRunnerOutput(req_ids=names, req_id_to_index=rows, sampled_token_ids=[[7] for _ in names])
            self.scheduler.update_from_output(scheduled, result)

    def values(self) -> Values:
        self.meter.publish()
        for _ in range(100):
            (process,) = read_run(self.folder).processes
            if "kvscope_info" in process.values:
                break
            time.sleep(0.02)
        return process.values

    def states(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for (state, _), count in self.values()["kv_blocks"].items():
            assert isinstance(count, float)
            found[state] = found.get(state, 0) + count
        return found

    def close(self) -> None:
        self.hub.close_engine(SimpleNamespace(scheduler=self.scheduler))


@pytest.fixture
def hub() -> Iterator[PluginHub]:
    hub = PluginHub(Ledger())
    faults = Hook.allocator_faults[0]
    yield hub
    for run in hub._runs.values():
        run.close()
    hub.ledger.uninstall_all()
    Hook.allocator_faults[0] = faults


PARTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "with trace": {"kv_trace": ON},
    "with guard": {"kv_guard_config": ON},
    "with both": {"kv_trace": ON, "kv_guard_config": ON},
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_with_whatever_other_parts_the_pool_is_counted(parts: dict[str, Any], hub: PluginHub, tmp_path: Path) -> None:
    engine = Engine(tmp_path, hub, kv_monitor=MONITOR, **parts)
    engine.run("a", steps=2)
    engine.run("b", steps=2)
    assert engine.states() == blocks_by_state(engine.scheduler)
    assert engine.values()["prefix_cache_hits_total"]["token",] == 32
    assert engine.values()["kvscope_info"] == {("none",): 1}
    engine.scheduler.finish_requests(["a", "b"], RequestStatus.FINISHED_ABORTED)
    assert engine.states()["used"] == 0
    assert {name: hook.faults for name, hook in hub.ledger.hooks.items() if hook.faults} == {}
    if "kv_guard_config" in parts:
        pool = getattr(engine.scheduler, OBSERVER).pool
        assert (pool.ledger is engine.meter.ledger, pool.lost) == (True, None)
    engine.close()
    (process,) = read_run(engine.folder).processes
    assert process.has_ended
    assert not hub._runs or all(run.is_closed for run in hub._runs.values())


def test_alone_it_wraps_nothing_in_a_worker_and_observes_no_step(hub: PluginHub, tmp_path: Path) -> None:
    engine = Engine(tmp_path, hub, kv_monitor=MONITOR)
    hub.configure_worker(engine.config)
    worker = SimpleNamespace(vllm_config=engine.config, rank=0)
    hub.attach_worker(worker)
    assert not hasattr(worker, OBSERVER)
    assert not hasattr(engine.scheduler, OBSERVER)
    assert {seam.role for name, seam in ((s.name, s) for s in hub.table) if name in hub.ledger.installed} <= {
        *("bootstrap", "engine", "allocator", "monitor")
    }
    engine.run("a", steps=3)
    scheduled = engine.scheduler.schedule()
    assert not hasattr(scheduled, "_kvscope_declaration")


def test_without_it_nobody_counts(hub: PluginHub, tmp_path: Path) -> None:
    engine = Engine(tmp_path, hub, kv_guard_config=ON)
    assert not hasattr(engine.scheduler, METER)
    assert not [name for name in hub.ledger.installed if name.startswith("monitor.")]
    assert getattr(engine.scheduler, READER).observer is getattr(engine.scheduler, OBSERVER)
    assert type(getattr(engine.scheduler, OBSERVER).pool.ledger).__name__ == "BlockLedger"
    engine.run("a")
    assert not list(tmp_path.rglob("*.metrics"))


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_without_one_of_the_pools_seams_states_are_absent_and_the_usage_is_there(
    parts: dict[str, Any], hub: PluginHub, tmp_path: Path
) -> None:
    engine = Engine(tmp_path, hub, missing="pool.free", kv_monitor=MONITOR, **parts)
    engine.run("a")
    found = engine.values()
    assert "kv_blocks" not in found
    assert "kv_block_alloc_total" not in found
    assert found["kv_cache_usage_percent"] == {(): engine.scheduler.get_kv_cache_usage() * 100}
    assert found["prefix_cache_queries_total"]["token",] == 40


@pytest.mark.parametrize("parts", [{}, {"kv_guard_config": ON}], ids=["alone", "with guard"])
def test_after_a_fault_of_one_of_the_pools_hooks_states_are_absent(
    parts: dict[str, Any], hub: PluginHub, tmp_path: Path
) -> None:
    engine = Engine(tmp_path, hub, kv_monitor=MONITOR, **parts)
    engine.run("a")
    assert "kv_blocks" in engine.values()
    Hook.allocator_faults[0] += 1
    engine.run("b")
    found = engine.values()
    assert "kv_blocks" not in found
    assert found["kv_block_alloc_total"] == {(): 3}
    assert found["kv_cache_usage_percent"] == {(): engine.scheduler.get_kv_cache_usage() * 100}


def test_what_isolate_holds_back_is_held_because_of_it(hub: PluginHub, tmp_path: Path) -> None:
    engine = Engine(tmp_path, hub, kv_monitor=MONITOR, kv_trace={"enabled": True, "action": "isolate"})
    engine.run("a", steps=2)
    isolation = getattr(engine.scheduler, OBSERVER).isolation
    isolation._most = 20
    finding = Finding(reason="write_target_mismatch", step=2, trace_id="t", request_id="a", group_id=0)
    assert isolation.act(finding) is None
    assert engine.values()["kv_blocks"]["held", "isolated"] == 3
    assert engine.states() == blocks_by_state(engine.scheduler)
    assert engine.scheduler.reset_prefix_cache()
    assert engine.values()["kv_blocks"]["held", "isolated"] == 0
    assert engine.states() == blocks_by_state(engine.scheduler)


class NixlConnector:
    def update_state_after_alloc(self, *_: Any) -> None:
        """It is told."""


class OffloadingConnector(NixlConnector):
    """Has it from its base."""


@pytest.mark.parametrize(("kind", "is_counted"), [(NixlConnector, True), (OffloadingConnector, False)])
@pytest.mark.parametrize("parts", [{}, {"kv_trace": ON}], ids=["alone", "with trace"])
def test_a_connector_is_named_and_its_transfers_counted_if_they_are_between_engines(
    kind: type, is_counted: bool, parts: dict[str, Any], hub: PluginHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = hub.attach_scheduler

    def attached(scheduler: Any) -> None:
        scheduler.connector = kind()
        attach(scheduler)

    monkeypatch.setattr(hub, "attach_scheduler", attached)
    engine = Engine(tmp_path, hub, kv_monitor=MONITOR, **parts)
    found = engine.values()
    assert found["kvscope_info"] == {(kind.__name__,): 1}
    assert ("pd_transfer_in_flight" in found, "pd_transfer_tokens_total" in found) == (is_counted, is_counted)
    if parts:
        assert getattr(engine.scheduler, OBSERVER).connector is not None
