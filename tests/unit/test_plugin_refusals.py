"""When a start is refused under `unsupported: refuse`, and in which process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope.boundary.ledger import OBSERVER, Ledger, Role, Seam
from kvscope.boundary.wrapping import around
from kvscope.config import DIR_VARIABLE, DISABLE_VARIABLE
from kvscope.errors import ConfigurationError
from kvscope.plugin import PluginHub
from unit.boundary.fakes import MODULE, make_host
from unit.test_plugin import cache_config, runner, vllm_config

REFUSED = "additional_config.kv_trace.unsupported: 'refuse', and checks C1, C4, C6 cannot run "


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PluginHub]:
    """Of a process whose host has no function that would be wrapped."""
    for name in (DISABLE_VARIABLE, DIR_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    hub = PluginHub(Ledger())
    hub.table = ()
    yield hub
    for run in hub._runs.values():
        run.close()


def strict(unsupported: str = "refuse", **config: Any) -> Any:
    of = vllm_config(**config)
    of.additional_config["kv_trace"]["unsupported"] = unsupported
    return of


class MambaSpec:
    block_size = 16


def with_mamba() -> Any:
    config = cache_config()
    config.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=MambaSpec(), layer_names=["m"]))
    return config


def scheduler(of: Any, groups: Any) -> Any:
    return SimpleNamespace(vllm_config=of, kv_cache_config=groups)


def test_a_group_that_cannot_be_judged_stops_the_start_where_the_scheduler_is_made(
    hub: PluginHub, caplog: pytest.LogCaptureFixture
) -> None:
    of = strict()
    hub.configure_engine(of)
    host = scheduler(of, with_mamba())
    with pytest.raises(ConfigurationError) as raised:
        hub.attach_scheduler(host)
    assert str(raised.value) == f"{REFUSED}on group 1 (mamba)"
    assert not hasattr(host, OBSERVER)
    # What the front end of another process is told is that it should look here.
    assert [(r.levelname, r.getMessage()) for r in caplog.records if r.levelname == "ERROR"] == [
        ("ERROR", f"kvscope: {raised.value}")
    ]


@pytest.mark.parametrize(("unsupported", "groups"), [("skip", with_mamba()), ("refuse", cache_config())])
def test_otherwise_it_starts(hub: PluginHub, unsupported: str, groups: Any) -> None:
    of = strict(unsupported)
    hub.configure_engine(of)
    host = scheduler(of, groups)
    hub.attach_scheduler(host)
    assert hasattr(host, OBSERVER)


def test_prefill_context_parallelism_stops_runner_v1_as_well(hub: PluginHub) -> None:
    of = strict(parallel={"prefill_context_parallel_size": 2})
    hub.configure_engine(of)
    with pytest.raises(ConfigurationError, match=r"on group 0 \(full_attention, prefill_context_parallel\)"):
        hub.attach_scheduler(scheduler(of, cache_config()))


@pytest.mark.parametrize(("device", "refused"), [("cpu", False), ("cuda", True)])
def test_tensors_on_a_device_stop_the_worker(hub: PluginHub, device: str, refused: bool) -> None:
    of = strict()
    hub.configure_worker(of)
    worker = SimpleNamespace(vllm_config=of, rank=0, model_runner=runner(device))
    hub.attach_worker(worker)
    if not refused:
        hub.attach_runner(worker, cache_config())
        return
    with pytest.raises(ConfigurationError) as raised:
        hub.attach_runner(worker, cache_config())
    assert str(raised.value) == f"{REFUSED}on group 0 (full_attention, device_tensors)"


@pytest.mark.parametrize(
    ("role", "configure", "v2"),
    [
        ("engine", "configure_engine", False),
        ("worker", "configure_worker", False),
        ("worker_v1", "configure_worker", False),
        ("worker_v2", "configure_worker", True),
        ("worker_v1", "configure_worker", True),  # the other runner's: not looked for
        ("allocator", "configure_engine", False),  # guard's: not looked for
    ],
)
def test_a_function_that_a_check_needs_and_this_vllm_lacks(
    hub: PluginHub, role: Role, configure: str, v2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host(monkeypatch)
    hub.table = (Seam("some.seam", f"{MODULE}:Engine.gone", role, around(), fact="f", lost="l"),)
    getattr(PluginHub, configure)(hub, strict("skip", v2=v2, instance_id="lenient"))
    if role == "allocator" or (role, v2) == ("worker_v1", True):
        getattr(hub, configure)(strict(v2=v2))
        return
    with pytest.raises(ConfigurationError, match=r"cannot run without some\.seam \(Engine has no method gone of its"):
        getattr(hub, configure)(strict(v2=v2))


def test_a_runner_that_goes_another_way(hub: PluginHub, monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_host(monkeypatch)
    host.slots = lambda _self: None

    class OwnSlots(host):  # type: ignore[misc, valid-type]  # the host is made by a fixture
        device = SimpleNamespace(type="cpu")

        def slots(self) -> None:
            """Without the host's."""

    hub.table = (Seam("runner.slots", f"{MODULE}:Engine.slots", "worker_v1", around(), fact="f", lost="l"),)
    of = strict()
    hub.configure_worker(of)
    worker = SimpleNamespace(vllm_config=of, rank=0, model_runner=OwnSlots())
    hub.attach_worker(worker)
    with pytest.raises(ConfigurationError, match=r"without runner\.slots \(OwnSlots has its own slots\)"):
        hub.attach_runner(worker, cache_config())
