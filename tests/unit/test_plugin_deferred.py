"""Which workers are judged from copies, and what that takes: only those whose tensors are on a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET

from kvscope.boundary.device import CLONES, CloneRing, HostDevice
from kvscope.boundary.ledger import OBSERVER, Ledger, Role, Seam
from kvscope.boundary.wrapping import around
from kvscope.config import DIR_VARIABLE, DISABLE_VARIABLE
from kvscope.plugin import PluginHub
from kvscope.runtime.deferred import DeferredJudge
from kvscope.runtime.worker import WorkerJudge
from kvscope.testing.deferral import deferring
from unit.boundary.fakes import MODULE, make_host
from unit.boundary.test_device import DeviceV1, v2_runner
from unit.test_plugin import cache_config, runner, vllm_config

torch = pytest.importorskip("torch")

ROLES: tuple[Role, ...] = ("deferred_v1", "deferred_v2")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PluginHub]:
    """Of a process whose host has nothing but asynchronous results."""
    for name in (DISABLE_VARIABLE, DIR_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    make_host(monkeypatch)
    hub = PluginHub(Ledger())
    hub.table = tuple(Seam(role, f"{MODULE}:Engine.step", role, around(), fact="f", lost="l") for role in ROLES)
    yield hub
    for run in hub._runs.values():
        run.close()


def attach(hub: PluginHub, model_runner: Any, *, rank: int = 0, **config: Any) -> Any:
    of = vllm_config(**config)
    of.max_concurrent_batches = 2
    hub.configure_worker(of)
    worker = SimpleNamespace(vllm_config=of, rank=rank, model_runner=model_runner)
    hub.attach_worker(worker)
    hub.attach_runner(worker, cache_config())
    return worker


@pytest.mark.parametrize(("v2", "role"), [(False, "deferred_v1"), (True, "deferred_v2")])
def test_a_device_is_judged_from_copies_and_its_memory_is_announced(hub: PluginHub, v2: bool, role: str) -> None:
    device = HostDevice()
    model_runner = v2_runner(device) if v2 else DeviceV1(device)
    model_runner.device = SimpleNamespace(type="npu")
    with deferring(device):
        worker = attach(hub, model_runner, v2=v2)
    observer, ring = getattr(worker, OBSERVER), getattr(model_runner, CLONES)
    assert isinstance(observer, DeferredJudge)
    assert getattr(model_runner, OBSERVER) is observer
    assert observer.reads_host_tensors is False
    assert ring.device is device
    assert hub.run(os.getpid(), "one").enabled().device_clone_bytes == ring.device_bytes
    assert list(hub.ledger.installed) == [role]


def test_on_the_host_there_is_none_of_it(hub: PluginHub) -> None:
    worker = attach(hub, runner("cpu"))
    assert isinstance(getattr(worker, OBSERVER), WorkerJudge)
    assert not hasattr(worker.model_runner, CLONES)
    assert not hub.ledger.installed
    assert hub.run(os.getpid(), "one").enabled().device_clone_bytes is UNSET


def test_a_device_that_cannot_be_used_is_said_and_its_plans_are_counted(
    hub: PluginHub, caplog: pytest.LogCaptureFixture
) -> None:
    worker = attach(hub, runner("a_device_that_torch_has_never_heard_of"))
    observer = getattr(worker, OBSERVER)
    assert isinstance(observer, WorkerJudge)
    assert observer.reads_host_tensors is False
    assert hub.run(os.getpid(), "one").device_clone_bytes is None
    assert any("plans on this device are not judged" in record.getMessage() for record in caplog.records)


def test_a_cache_that_is_laid_out_anew_keeps_its_observer_and_gets_new_memory(hub: PluginHub) -> None:
    model_runner = DeviceV1(HostDevice())
    model_runner.device = SimpleNamespace(type="npu")  # type: ignore[assignment]  # as vLLM has it
    with deferring():
        worker = attach(hub, model_runner)
        observer, ring = getattr(worker, OBSERVER), getattr(model_runner, CLONES)
        hub.attach_runner(worker, cache_config())
    assert getattr(worker, OBSERVER) is getattr(model_runner, OBSERVER) is observer
    assert isinstance(getattr(model_runner, CLONES), CloneRing)
    assert getattr(model_runner, CLONES) is not ring
    assert isinstance(observer.judge, WorkerJudge)


@pytest.mark.parametrize(("rank", "has_thread"), [(0, False), (1, True)])
def test_only_a_rank_whose_results_nobody_takes_has_a_thread_to_judge_in(
    hub: PluginHub, rank: int, has_thread: bool
) -> None:
    with deferring():
        worker = attach(hub, DeviceV1(), rank=rank, parallel={"tensor_parallel_size": 2, "world_size": 2})
    assert (getattr(worker, OBSERVER)._arrival is not None) is has_thread
