"""What vLLM calls, and what is wrapped as configurations appear. On small hosts, and once on vLLM's own classes."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET

from kvscope import plugin
from kvscope.boundary.allocator import READER
from kvscope.boundary.ledger import OBSERVER, Ledger, Role, Seam
from kvscope.boundary.versions import host_versions
from kvscope.boundary.wrapping import around, creation
from kvscope.config import DIR_VARIABLE, DISABLE_VARIABLE
from kvscope.errors import ConfigurationError
from kvscope.plugin import LAUNCHER_VARIABLE, LedgerBook, PluginHub, probe_seams, register
from kvscope.runtime.engine import EngineJudge
from kvscope.runtime.frontend import FrontendRecorder
from kvscope.runtime.pool import NOT_OBSERVED
from kvscope.runtime.worker import WorkerJudge
from unit.boundary.fakes import MODULE, Told, make_host

ROLES: tuple[Role, ...] = ("bootstrap", "frontend", "engine", "allocator", "worker", "worker_v1", "worker_v2")
METHODS = dict(zip(ROLES, ("__init__", "admit", "schedule", "free", "execute", "slots", "attn"), strict=True))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (DISABLE_VARIABLE, DIR_VARIABLE):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """One class with a method for each role."""
    engine = make_host(monkeypatch)
    for name in METHODS.values():
        if name != "__init__":
            setattr(engine, name, lambda *args, **kwargs: (args, kwargs))
    return engine


@pytest.fixture
def hub(host: type[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginHub]:
    monkeypatch.setenv(LAUNCHER_VARIABLE, "")  # what a test leaves there goes with it
    hub = PluginHub(Ledger())
    hub.table = tuple(
        Seam(role, f"{MODULE}:Engine.{name}", role, creation() if role == "bootstrap" else around(), fact="f", lost="l",
             when_loaded=role == "bootstrap")
        for role, name in METHODS.items()
    )  # fmt: skip
    monkeypatch.setattr(plugin, "HUB", hub)
    yield hub
    for run in hub._runs.values():
        run.close()


def vllm_config(*, action: str = "log", on: bool = True, instance_id: str = "one", **more: Any) -> Any:
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "world_size": 1, **more.pop("parallel", {})}
    return SimpleNamespace(
        additional_config={"kv_trace": {"enabled": on, "action": action}, "others": 1},
        instance_id=instance_id,
        parallel_config=SimpleNamespace(**parallel),
        use_v2_model_runner=more.pop("v2", False),
    )


class FullAttentionSpec:
    block_size = 16


def cache_config() -> Any:
    group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=["l"])
    return SimpleNamespace(num_blocks=64, kv_cache_groups=[group])


def installed(hub: PluginHub) -> set[str]:
    return set(hub.ledger.installed)


# The entry point ------------------------------------------------------------------------------------------------------


def test_registering_wraps_the_bootstrap_seams_once(hub: PluginHub, host: type[Any]) -> None:
    before = dict(vars(host))
    register()
    wrapper = host.__dict__["__init__"]
    register()
    register()
    assert installed(hub) == {"bootstrap"}
    assert host.__dict__["__init__"] is wrapper
    assert wrapper.__wrapped__ is before["__init__"]
    assert [name for name, value in vars(host).items() if before.get(name) is not value] == ["__init__"]


def test_registering_imports_nothing_of_the_host(hub: PluginHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE)
    register()
    assert installed(hub) == set()
    assert MODULE not in sys.modules


@pytest.mark.parametrize("value", ["1", " 1 "])
def test_disabled_by_the_environment_nothing_is_wrapped(
    hub: PluginHub, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(DISABLE_VARIABLE, value)
    register()
    assert installed(hub) == set()


def test_disabled_by_the_environment_a_configuration_is_not_even_validated(
    hub: PluginHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DISABLE_VARIABLE, "1")
    wrong = SimpleNamespace(additional_config={"kv_trace": 3})
    hub.configure_frontend(wrong)
    hub.configure_engine(wrong)
    hub.configure_worker(wrong)
    assert (installed(hub), hub._runs) == (set(), {})


def test_whatever_goes_wrong_does_not_stop_the_host(
    hub: PluginHub, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "arm", lambda: 1 // 0)
    register()
    assert warnings == ["kvscope is off in this process: ZeroDivisionError"]


def test_a_wrong_folder_in_the_environment_is_said_where_settings_are_read(
    hub: PluginHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM calls plugins in every process, whatever is switched on: that is no place to stop it."""
    monkeypatch.setenv(DIR_VARIABLE, " ")
    register()
    assert installed(hub) == {"bootstrap"}
    with pytest.raises(ConfigurationError, match="KVSCOPE_DIR"):
        hub.configure_frontend(vllm_config())


# What is switched on --------------------------------------------------------------------------------------------------


def test_with_nothing_switched_on_the_host_is_left_as_it_was(hub: PluginHub, host: type[Any]) -> None:
    before = dict(vars(host))
    for configure in (hub.configure_frontend, hub.configure_engine, hub.configure_worker):
        register()
        assert installed(hub)
        configure(vllm_config(on=False))
        assert installed(hub) == set()
        assert all(vars(host)[name] is value for name, value in before.items())
    assert hub._runs == {}


@pytest.mark.parametrize("additional_config", [None, {}, {"others": {"enabled": True}}, SimpleNamespace(kv_trace=1)])
def test_settings_of_others_switch_nothing_on(hub: PluginHub, additional_config: Any) -> None:
    register()
    config = vllm_config()
    config.additional_config = additional_config
    hub.configure_frontend(config)
    assert installed(hub) == set()
    assert config.additional_config is additional_config


def test_each_role_wraps_what_is_its_own(hub: PluginHub) -> None:
    register()
    hub.configure_frontend(vllm_config())
    assert installed(hub) == {"bootstrap", "frontend"}
    hub.configure_engine(vllm_config())
    assert installed(hub) == {"bootstrap", "frontend", "engine"}
    hub.configure_worker(vllm_config())
    assert installed(hub) == {"bootstrap", "frontend", "engine", "worker", "worker_v1"}
    (run,) = hub._runs.values()
    assert run.process == "all"
    assert hub.run(os.getpid(), "one") is run


def test_the_block_pool_is_wrapped_for_the_guard_alone(hub: PluginHub) -> None:
    config = vllm_config()
    config.additional_config["kv_guard_config"] = {"enabled": True}
    hub.configure_engine(config)
    assert installed(hub) == {"bootstrap", "engine", "allocator"}


@pytest.mark.parametrize(("v2", "role"), [(False, "worker_v1"), (True, "worker_v2")])
def test_a_worker_wraps_the_runner_that_it_has(hub: PluginHub, v2: bool, role: str) -> None:
    hub.configure_worker(vllm_config(v2=v2))
    assert installed(hub) == {"worker", role}
    assert next(iter(hub._runs.values())).runner == ("V2" if v2 else "V1")


def test_two_engines_of_one_process_that_differ_do_not_switch_each_other_off(hub: PluginHub) -> None:
    hub.configure_engine(vllm_config(instance_id="on"))
    hub.configure_frontend(vllm_config(instance_id="off", on=False))
    assert installed(hub) == {"bootstrap", "engine"}
    off = SimpleNamespace(vllm_config=vllm_config(instance_id="off", on=False))
    hub.attach_scheduler(off)
    hub.attach_worker(off)
    hub.attach_runner(off, cache_config())
    hub.attach_frontend(off)
    assert not hasattr(off, OBSERVER)
    with pytest.raises(KeyError):
        hub.run(os.getpid(), "off")


def test_a_front_end_that_is_observed_has_its_run_exported(hub: PluginHub, monkeypatch: pytest.MonkeyPatch) -> None:
    exported: list[str] = []
    monkeypatch.setattr("kvscope.runtime.run.Run.export", lambda run: exported.append(run.run_id))
    hub.attach_frontend(SimpleNamespace())
    hub.configure_frontend(vllm_config(instance_id="one"))
    hub.attach_frontend(SimpleNamespace())
    assert exported == ["one"]


def test_data_parallel_engines_are_one_run(hub: PluginHub) -> None:
    hub.configure_frontend(vllm_config(instance_id="one"))
    hub.configure_engine(vllm_config(instance_id="one_dp0"))
    assert [run_id for _, run_id in hub._runs] == ["one"]


def test_a_forked_process_has_runs_of_its_own(hub: PluginHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.configure_engine(vllm_config())
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert hub._run_of(vllm_config()) is None
    hub.configure_worker(vllm_config())
    assert hub.run(parent + 1, "one") is not hub.run(parent, "one")
    assert hub.run(parent + 1, "one").process == "worker"
    hub._disarm_unless_running()
    assert installed(hub)


@pytest.mark.parametrize("configure", ["configure_frontend", "configure_engine", "configure_worker"])
def test_a_wrong_setting_reaches_the_user_with_its_whole_path(hub: PluginHub, configure: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        getattr(hub, configure)(vllm_config(action="warn"))
    assert str(raised.value) == ("additional_config.kv_trace.action: 'warn' is not one of 'log', 'raise', 'isolate'")


def test_a_wrong_setting_passes_through_the_seam_that_reads_it(hub: PluginHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `EngineArgs.create_engine_config` is wrapped: the error leaves the host's own call."""
    host = make_host(monkeypatch)
    seam = Seam(
        "config.create", f"{MODULE}:Engine.__init__", "bootstrap",
        creation(after=lambda engine, *_: hub.configure_frontend(engine.config)), fact="f", lost="l",
    )  # fmt: skip
    hub.ledger.install(seam)
    with pytest.raises(ConfigurationError, match=r"additional_config\.kv_trace\.action"):
        host(vllm_config(action="warn"))
    assert hub.ledger.hooks["config.create"].faults == 0


def test_the_output_folder_is_resolved_once_and_travels(hub: PluginHub, tmp_path: Path) -> None:
    config = vllm_config()
    given = config.additional_config
    hub.configure_frontend(config)
    assert config.additional_config["kv_output"]["dir"] == str(tmp_path / "kvscope-out")
    assert config.additional_config["others"] == 1
    assert "kv_output" not in given
    json.dumps(config.additional_config)
    assert DIR_VARIABLE not in os.environ


def test_a_folder_from_the_environment_travels_in_the_environment(
    hub: PluginHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(DIR_VARIABLE, "elsewhere")
    config = vllm_config()
    hub.configure_frontend(config)
    assert os.environ[DIR_VARIABLE] == str(tmp_path / "elsewhere")
    assert "kv_output" not in config.additional_config
    monkeypatch.chdir("/")
    hub.configure_engine(config)
    assert hub.run(os.getpid(), "one").config.output.dir == str(tmp_path / "elsewhere")


# Misspelled keys ------------------------------------------------------------------------------------------------------


def misspelled(*, on: bool = False) -> Any:
    config = vllm_config(on=on)
    config.additional_config["kv_gaurd_config"] = {"enabled": True}
    return config


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(plugin, "say", lambda _, text, *values: told.append(text % values))
    return told


@pytest.mark.parametrize("on", [False, True])
def test_a_misspelled_key_is_said_once_in_the_front_end(hub: PluginHub, warnings: list[str], on: bool) -> None:
    for _ in range(2):
        hub.configure_frontend(misspelled(on=on))
        hub.configure_engine(misspelled(on=on))
        hub.configure_worker(misspelled(on=on))
    assert warnings == [
        "kvscope: additional_config.kv_gaurd_config is not a key of kvscope and is left alone; "
        "did you mean kv_guard_config?"
    ]


def test_a_misspelled_key_goes_to_the_log_of_vllm(hub: PluginHub, caplog: pytest.LogCaptureFixture) -> None:
    hub.configure_frontend(misspelled())
    ((logger, level, text),) = caplog.record_tuples
    assert (logger, logging.getLevelName(level)) == ("vllm.kvscope", "WARNING")
    assert text.endswith("did you mean kv_guard_config?")


def test_a_key_that_is_not_ours_is_left_alone_without_a_word(hub: PluginHub, warnings: list[str]) -> None:
    config = vllm_config(on=False)
    config.additional_config |= {"ascend_scheduler_config": {"enabled": True}, "kv_transfer_config": {}}
    hub.configure_frontend(config)
    assert warnings == []


def test_disabled_by_the_environment_nothing_is_said(
    hub: PluginHub, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DISABLE_VARIABLE, "1")
    hub.configure_frontend(misspelled())
    assert warnings == []


# Observers ------------------------------------------------------------------------------------------------------------


class Runner(SimpleNamespace):
    """A host object, which as such can be told from others and be referred to weakly."""

    __hash__ = object.__hash__


def runner(device: str = "cpu", **more: Any) -> Any:
    return Runner(device=SimpleNamespace(type=device), **more)


def one_process(hub: PluginHub, **config: Any) -> tuple[Any, Any, Any]:
    """Front end, scheduler and worker of one engine in one process, in the order in which vLLM makes them."""
    of = vllm_config(**config)
    hub.configure_frontend(of)
    hub.configure_engine(of)
    hub.configure_worker(of)
    worker = SimpleNamespace(vllm_config=of, rank=0, model_runner=runner())
    scheduler = SimpleNamespace(vllm_config=of, kv_cache_config=cache_config())
    processor = SimpleNamespace()
    hub.attach_worker(worker)
    hub.attach_runner(worker, cache_config())
    hub.attach_scheduler(scheduler)
    hub.attach_frontend(processor)
    return processor, scheduler, worker


def test_every_host_object_gets_its_observer(hub: PluginHub) -> None:
    processor, scheduler, worker = one_process(hub)
    assert isinstance(getattr(processor, OBSERVER), FrontendRecorder)
    assert isinstance(getattr(scheduler, OBSERVER), EngineJudge)
    assert isinstance(getattr(worker, OBSERVER), WorkerJudge)
    assert getattr(worker.model_runner, OBSERVER) is getattr(worker, OBSERVER)
    run = hub.run(os.getpid(), "one")
    assert run.topology is not None
    assert (run.topology.num_blocks, run.ranks.tp, run.is_open, run.unjudged_cause) == (64, 0, True, None)


def test_a_pool_of_which_not_every_call_is_seen_is_not_read_at_all(hub: PluginHub) -> None:
    """Its hooks would cost what they cost, and remember what nobody takes up."""
    of = vllm_config()
    of.additional_config["kv_guard_config"] = {"enabled": True}
    hub.configure_engine(of)
    hub.ledger.uninstall("allocator")
    scheduler = SimpleNamespace(vllm_config=of, kv_cache_config=cache_config())
    hub.attach_scheduler(scheduler)
    judge = getattr(scheduler, OBSERVER)
    assert judge.pool.lost == NOT_OBSERVED
    assert not hasattr(scheduler, READER)


def test_a_worker_in_a_process_of_its_own_opens_its_trace(hub: PluginHub) -> None:
    of = vllm_config(parallel={"tensor_parallel_size": 2, "world_size": 2})
    hub.configure_worker(of)
    worker = SimpleNamespace(vllm_config=of, rank=1, model_runner=runner())
    hub.attach_worker(worker)
    hub.attach_runner(worker, cache_config())
    run = hub.run(os.getpid(), "one")
    assert (run.process, run.is_open, run.ranks.tp, run.ranks.world) == ("worker", True, 1, 1)
    assert run.stream.stem.startswith("worker-1-")


def test_runner_v1_does_not_say_what_a_rank_computes_of_a_prompt_and_that_is_said(hub: PluginHub) -> None:
    one_process(hub, parallel={"prefill_context_parallel_size": 2})
    run, cause = hub.run(os.getpid(), "one"), "prefill_context_parallel"
    assert run.unjudged_cause == cause
    assert ("plan", cause) in [(said.check, said.cause) for said in run.enabled().checks_inactive]


@pytest.mark.parametrize(
    ("size", "v2"),
    [("prefill_context_parallel_size", True), ("decode_context_parallel_size", True),
     ("decode_context_parallel_size", False)],
)  # fmt: skip
def test_other_context_parallelism_is_judged(hub: PluginHub, size: str, v2: bool) -> None:
    one_process(hub, parallel={size: 2}, v2=v2)
    run = hub.run(os.getpid(), "one")
    assert run.unjudged_cause is None
    said = run.enabled().context_parallel
    assert said is not UNSET
    assert {said.pcp_size, said.dcp_size} == {1, 2}


@pytest.mark.parametrize(("device", "on_host"), [("cpu", True), ("cuda", False), ("xpu", False)])
def test_whether_a_runner_has_its_tensors_on_the_host_is_settled_when_it_is_attached(
    hub: PluginHub, device: str, on_host: bool
) -> None:
    of = vllm_config()
    hub.configure_worker(of)
    worker = SimpleNamespace(vllm_config=of, rank=0, model_runner=runner(device))
    hub.attach_worker(worker)
    hub.attach_runner(worker, cache_config())
    assert getattr(worker, OBSERVER).reads_host_tensors is on_host


def test_a_runner_of_a_worker_that_is_not_observed_is_left_alone(hub: PluginHub) -> None:
    of = vllm_config()
    hub.configure_worker(of)
    worker = SimpleNamespace(vllm_config=of, rank=0, model_runner=Runner())
    hub.attach_runner(worker, cache_config())
    assert not hasattr(worker.model_runner, OBSERVER)


def test_a_runner_that_goes_another_way_is_said_to(hub: PluginHub, host: type[Any]) -> None:
    class OwnSlots(host):  # type: ignore[misc, valid-type]  # the host is made by a fixture
        device = SimpleNamespace(type="cpu")

        def slots(self) -> None:
            """Without the host's."""

    of = vllm_config()
    hub.configure_worker(of)
    worker = SimpleNamespace(vllm_config=of, rank=0, model_runner=OwnSlots())
    hub.attach_worker(worker)
    hub.attach_runner(worker, cache_config())
    assert hub.ledger.absent == {"worker_v1": "OwnSlots has its own slots"}
    assert LedgerBook(hub.ledger).seams_absent() == hub.ledger.absent


def test_an_engine_that_ends_ends_its_run(hub: PluginHub) -> None:
    _, scheduler, _ = one_process(hub)
    folder = hub.run(os.getpid(), "one").stream.folder
    hub.close_engine(SimpleNamespace(scheduler=scheduler))
    hub.close_engine(SimpleNamespace(scheduler=scheduler))
    (path,) = folder.glob("all-*.jsonl")
    assert [json.loads(line)["event"] for line in path.read_bytes().splitlines()] == ["kv.enabled", "kv.coverage"]
    hub.close_engine(SimpleNamespace(scheduler=SimpleNamespace()))
    hub.close_engine(SimpleNamespace())


def end(hub: PluginHub, scheduler: Any) -> None:
    hub.close_engine(SimpleNamespace(scheduler=scheduler))


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_engines_that_have_ended_leave_nothing_behind_in_their_process(hub: PluginHub) -> None:
    kept, before = [], descriptors()
    for number in range(5):
        of_one = one_process(hub, instance_id=f"engine-{number}")
        end(hub, of_one[1])
        kept.append(of_one)  # the host may keep its objects, and with them their observers
        assert (hub._runs, hub._frontend_run, descriptors()) == ({}, None, before)


def test_with_nothing_switched_on_after_an_engine_has_ended_the_host_is_as_it_was(
    hub: PluginHub, host: type[Any]
) -> None:
    before = dict(vars(host))
    register()
    _, scheduler, _ = one_process(hub)
    end(hub, scheduler)
    hub.configure_frontend(vllm_config(instance_id="off", on=False))
    assert installed(hub) == set()
    assert all(vars(host)[name] is value for name, value in before.items())


def test_an_engine_that_goes_on_is_observed_after_another_has_ended(hub: PluginHub) -> None:
    _, first, _ = one_process(hub, instance_id="first")
    one_process(hub, instance_id="second")
    end(hub, first)
    wrapped = installed(hub)
    hub.configure_frontend(vllm_config(instance_id="off", on=False))
    assert installed(hub) == wrapped
    assert not hub.run(os.getpid(), "second").is_closed
    with pytest.raises(KeyError):
        hub.run(os.getpid(), "first")


def test_a_worker_that_has_ended_is_forgotten_with_the_next_configuration(hub: PluginHub) -> None:
    of = vllm_config(parallel={"tensor_parallel_size": 2, "world_size": 2})
    hub.configure_worker(of)
    worker = SimpleNamespace(vllm_config=of, rank=1, model_runner=runner())
    hub.attach_worker(worker)
    hub.attach_runner(worker, cache_config())
    getattr(worker, OBSERVER).on_shutdown()
    hub.configure_worker(vllm_config(on=False))
    assert (hub._runs, installed(hub)) == ({}, set())


def test_the_ledger_is_published_as_numbers_and_names(hub: PluginHub, host: type[Any]) -> None:
    hub.configure_engine(vllm_config())
    engine = host()
    setattr(engine, OBSERVER, Told())
    hub.ledger.hooks["engine"].run(lambda: None)
    hub.ledger.absent["z"] = "reason"
    book = LedgerBook(hub.ledger)
    assert book.seams_installed() == ["bootstrap", "engine"]
    assert book.seams_absent() == {"z": "reason"}
    calls, faults, time_ns = book.hook_numbers()["engine"]
    assert (calls, faults) == (1, 0)
    assert time_ns > 0


# Doctor ---------------------------------------------------------------------------------------------------------------


def test_seams_are_probed_without_being_wrapped(hub: PluginHub, host: type[Any]) -> None:
    del host.schedule
    host.admit = types.FunctionType(host.slots.__code__, {"__name__": "vllm.v1.engine.output_processor"})
    before = dict(vars(host))
    reports = {report.name: report for report in probe_seams()}
    assert dict(vars(host)) == before
    assert reports["engine"].status == "refused"
    assert reports["engine"].reason == "Engine has no method schedule of its own"
    assert (reports["frontend"].status, reports["frontend"].reason) == ("matched", None)
    assert reports["frontend"].target == f"{MODULE}:Engine.admit"
    assert installed(hub) == set()


def test_another_tool_between_us_and_the_host_is_named(hub: PluginHub) -> None:
    reports = {report.name: report for report in probe_seams()}
    assert reports["frontend"].status == "matched"
    assert reports["frontend"].reason == f"wrapped by {__name__} as well"


def test_versions_are_those_of_the_installed_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert host_versions() == (None, None)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.32.0")
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    assert host_versions() == ("0.32.0", None)
    platforms = SimpleNamespace(current_platform=SimpleNamespace(device_type="cpu"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=platforms))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    assert host_versions() == ("0.32.0", "cpu")


# vLLM itself, in a process of its own ---------------------------------------------------------------------------------

ON_VLLM = """
import importlib, json, os, sys
from types import SimpleNamespace

from kvscope.config import DISABLE_VARIABLE
from kvscope.plugin import HUB, probe_seams, register

register()
said = {"before any module": sorted(HUB.ledger.installed), "imports vllm": "vllm" in sys.modules}

for module in sorted({seam.module for seam in HUB.table}):
    importlib.import_module(module)
modules = {seam.target: sys.modules[seam.module] for seam in HUB.table}
owners = {seam.target: getattr(modules[seam.target], seam.owner, modules[seam.target]) for seam in HUB.table}
originals = {seam.target: owners[seam.target].__dict__.get(seam.attribute) for seam in HUB.table}

def changed():
    return sorted(
        seam.name
        for seam in HUB.table
        if owners[seam.target].__dict__.get(seam.attribute) is not originals[seam.target]
    )

os.environ[DISABLE_VARIABLE] = "1"
register()
said["disabled"] = changed()
del os.environ[DISABLE_VARIABLE]
register()
register()
said["armed"] = changed()

def config(enabled):
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1)
    return SimpleNamespace(
        additional_config={key: {"enabled": enabled} for key in ("kv_trace", "kv_guard_config")},
        instance_id="one", parallel_config=parallel,
        use_v2_model_runner=sys.argv[1] == "v2", speculative_config=SimpleNamespace(),
    )

HUB.configure_frontend(config(False))
said["off"] = changed()
register()
HUB.configure_frontend(config(True))
HUB.configure_engine(config(True))
HUB.configure_worker(config(True))
said["on"] = changed()
HUB.ledger.uninstall_all()
said["uninstalled"] = changed()
said["probed"] = {report.name: [report.status, report.reason] for report in probe_seams()}
said["absent"] = HUB.ledger.absent
print(json.dumps(said))
"""


@pytest.fixture(scope="module", params=["v1", "v2"])
def on_vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from kvscope.testing.environment import environment

    variables = {**os.environ, **environment(request.param), "VLLM_LOGGING_LEVEL": "ERROR"}
    for name in (DISABLE_VARIABLE, DIR_VARIABLE):
        variables.pop(name, None)
    printed = subprocess.run(
        [sys.executable, "-c", ON_VLLM, request.param], capture_output=True, text=True, check=True, env=variables,
        cwd=tmp_path_factory.mktemp("run"), timeout=200,
    ).stdout  # fmt: skip
    return request.param, json.loads(printed.splitlines()[-1])


def test_before_vllm_is_loaded_nothing_is_wrapped_or_imported(on_vllm: tuple[str, dict[str, Any]]) -> None:
    assert on_vllm[1]["before any module"] == []
    assert on_vllm[1]["imports vllm"] is False


def test_vllm_is_untouched_by_identity_when_disabled_off_or_uninstalled(on_vllm: tuple[str, dict[str, Any]]) -> None:
    said = on_vllm[1]
    assert (said["disabled"], said["off"], said["uninstalled"]) == ([], [], [])


def test_only_the_bootstrap_seams_are_wrapped_before_a_configuration_is_read(
    on_vllm: tuple[str, dict[str, Any]],
) -> None:
    assert on_vllm[1]["armed"] == ["config.create", "config.executor", "config.worker"]


def test_an_engine_in_one_process_without_a_connector_wraps_all_but_that_and_the_other_runner(
    on_vllm: tuple[str, dict[str, Any]],
) -> None:
    runner, said = on_vllm
    other = {"v1": "runner_v2.", "v2": "runner_v1."}[runner]
    table = {seam.name for seam in PluginHub(Ledger()).table if not seam.role.startswith(("deferred_", "graphs_"))}
    assert set(said["on"]) == {name for name in table if not name.startswith((other, "connector.", "monitor."))}
    assert said["absent"] == {}


def test_every_seam_matches_the_installed_vllm(on_vllm: tuple[str, dict[str, Any]]) -> None:
    assert {name: found for name, found in on_vllm[1]["probed"].items() if found != ["matched", None]} == {}


SERVER = {"_api_process_rank": 1, "_api_process_count": 2}
LAUNCHER = {"_api_process_rank": -1, "_api_process_count": 2}


@pytest.mark.parametrize(
    ("server", "parent"),
    [(SERVER, None), ({**SERVER, "_api_process_count": 1}, "launcher")],
    ids=["one of two", "the only one that a launcher has"],
)
def test_api_servers_belong_to_the_run_of_their_launcher(
    hub: PluginHub, server: dict[str, int], parent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each makes a VllmConfig of its own, which knows nothing of the engines'."""
    hub.configure_frontend(vllm_config(instance_id="launcher", parallel=LAUNCHER))
    if parent is not None:
        monkeypatch.setattr(os, "getppid", os.getpid)
    child = PluginHub(hub.ledger)
    child.configure_frontend(vllm_config(instance_id="its own", parallel=server))
    assert [(run.run_id, run.rank) for run in child._runs.values()] == [("launcher", 1)]


def test_a_front_end_that_nobody_launched_has_a_run_of_its_own(hub: PluginHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER_VARIABLE, "1:of somebody else")
    hub.configure_frontend(vllm_config(instance_id="its own"))
    hub.configure_engine(vllm_config(instance_id="its own"))
    assert [run.run_id for run in hub._runs.values()] == ["its own"]
