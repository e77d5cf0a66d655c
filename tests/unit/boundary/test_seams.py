"""The table of seams itself."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from kvscope.boundary import host
from kvscope.boundary.ledger import Hook, Role
from kvscope.boundary.seams import HOSTS, seam_table
from kvscope.plugin import PluginHub
from kvscope.runtime.deferred import DeferredJudge
from kvscope.runtime.engine import EngineJudge
from kvscope.runtime.frontend import FrontendRecorder
from kvscope.runtime.worker import WorkerJudge
from unit.boundary.fakes import Told

TABLE = seam_table(Told())


def test_every_seam_says_what_it_touches_yields_and_is_needed_for() -> None:
    for seam in TABLE:
        assert re.fullmatch(r"vllm(\.\w+)+:(\w+\.)?\w+", seam.target)
        assert seam.fact
        assert seam.lost


def test_names_and_targets_are_distinct() -> None:
    assert len({seam.name for seam in TABLE}) == len({seam.target for seam in TABLE}) == len(TABLE)


def test_every_role_has_seams_and_only_some_wait_for_their_module() -> None:
    assert {seam.role for seam in TABLE} == set(get_args(Role))
    waiting = {seam.name for seam in TABLE if seam.when_loaded}
    assert waiting == {seam.name for seam in TABLE if seam.role == "bootstrap"} | {"runner_v1.zero_cpu"}


def test_the_hosts_that_were_read_are_named() -> None:
    assert all(re.fullmatch(r"\d+\.\d+", host) for host in HOSTS)


@pytest.mark.parametrize(
    ("protocol", "implementation"),
    [
        (host.FrontendObserver, FrontendRecorder),
        (host.EngineObserver, EngineJudge),
        (host.WorkerObserver, WorkerJudge),
        (host.DeferringObserver, DeferredJudge),
        (host.Hub, PluginHub),
    ],
)
def test_what_the_boundary_calls_is_there_with_the_same_parameters(protocol: Any, implementation: Any) -> None:
    asked = {name: member for base in protocol.__mro__ for name, member in vars(base).items() if name[0] != "_"}
    assert asked
    for name, member in asked.items():
        found = getattr(implementation, name)
        if callable(member):
            assert list(inspect.signature(found).parameters) == list(inspect.signature(member).parameters), name


CONSTRUCTORS = {
    "config.create": [],
    "config.executor": [("configure_engine", ("config",))],
    "config.worker": [("configure_worker", ("config",)), ("attach_worker", ("host",))],
    "frontend.create": [("attach_frontend", ("host",))],
    "scheduler.create": [("attach_scheduler", ("host",))],
    "worker.cache": [("attach_runner", ("host", "config"))],
    "engine.shutdown": [("close_engine", ("host",))],
}


@pytest.mark.parametrize("by_name", ["", "vllm_config", "kv_cache_config"])
def test_constructors_tell_the_hub_what_it_needs(by_name: str) -> None:
    made = SimpleNamespace(name="host")
    for name, expected in CONSTRUCTORS.items():
        if by_name and (by_name == "kv_cache_config") is not (name == "worker.cache"):
            continue
        hub = Told()
        (seam,) = [seam for seam in seam_table(hub) if seam.name == name]
        wrapped = seam.wrap(lambda *_, **__: "made", Hook(name))
        result = wrapped(made, **{by_name: "config"}) if by_name else wrapped(made, "config")
        assert result == "made"
        calls = [("configure_frontend", ("made",))] if name == "config.create" else expected
        assert hub.calls == [(what, tuple(made if of == "host" else of for of in args)) for what, args in calls]
