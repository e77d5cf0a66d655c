"""What vLLM calls: the entry point of group ``vllm.general_plugins``, and the hub that wraps as configurations appear.

vLLM loads plugins in every process, several times, before any configuration exists. ``register`` therefore wraps only
the bootstrap seams. The first VllmConfig decides: with nothing switched on they are removed again, else each process
wraps what its role needs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from pathlib import Path
from typing import Any

from . import config as configuration
from .boundary import runner_v1, runner_v2
from .boundary.allocator import PoolReader
from .boundary.attention import AttentionLayout
from .boundary.block_work import observe_block_work
from .boundary.connector import PlanReader
from .boundary.context_parallel import unjudged_cause
from .boundary.device import CLONES, DEVICE_TENSORS, CloneRing, audit_device, clone_bytes_of, clones_of
from .boundary.drafts import observe_drafts
from .boundary.graphs import runs_graphs
from .boundary.isolation import SchedulerControl
from .boundary.ledger import OBSERVER, Hook, Ledger, Role
from .boundary.metering import METER, MeteredHost, observe_scheduler
from .boundary.probing import SeamReport, probed
from .boundary.seams import seam_table
from .boundary.topology import api_server_of, read_ranks, read_topology, returns_results, run_id_of, runner_of
from .boundary.versions import host_versions
from .config import Config
from .errors import ConfigurationError
from .logs import say
from .metrics.collectors import COLLECTORS
from .metrics.labels import FOREIGN
from .runtime.deferred import DeferredJudge
from .runtime.engine import EngineJudge
from .runtime.extensions import EXTENSIONS
from .runtime.frontend import FrontendRecorder
from .runtime.isolation import Isolation
from .runtime.pool_meter import PoolMeter, meter_of
from .runtime.run import ProcessRole, Run
from .runtime.unsupported import refused_groups, refused_seams
from .runtime.worker import WorkerJudge
from .sinks.subscribers import SUBSCRIBERS

LAUNCHER_VARIABLE = "_KVSCOPE_LAUNCHER"
"""Process and run of whoever launched this API server, for the servers alone. It configures nothing."""


class LedgerBook:
    """The ledger as a run publishes it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def seams_installed(self) -> list[str]:
        return sorted(self._ledger.installed)

    def seams_absent(self) -> dict[str, str]:
        return dict(sorted(self._ledger.absent.items()))

    @property
    def allocator_faults(self) -> list[int]:
        """Faults of the block pool's hooks since this process started: a list of one number, which goes on counting."""
        return Hook.allocator_faults

    def works(self, name: str) -> bool:
        """Whether a seam is wrapped and its hook has never failed."""
        return name in self._ledger.installed and not self._ledger.hooks[name].faults

    def connector_faults(self) -> int:
        """Faults of the hooks of what is planned with a connector, since this process started."""
        return Hook.connector_faults

    def hook_numbers(self) -> dict[str, tuple[int, int, int]]:
        """``{hook: (calls, faults, own time in ns)}`` since this process started; what others hooked in stands last."""
        numbers = {name: (hook.calls, hook.faults, hook.time_ns) for name, hook in self._ledger.hooks.items()}
        foreign = dict(zip(FOREIGN, (EXTENSIONS.numbers(), SUBSCRIBERS.numbers(), COLLECTORS.numbers()), strict=True))
        return numbers | {name: found for name, found in foreign.items() if found is not None}


class PluginHub:
    """Decides what is wrapped, and gives every host object its observer. One a process."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.table = seam_table(self)
        self._runs: dict[tuple[int, str], Run] = {}
        self._frontend_run: Run | None = None
        self._runners: list[tuple[weakref.ref[Any], WorkerJudge | DeferredJudge]] = []
        self._said: set[str] = set()

    def arm(self) -> None:
        """Wrap the bootstrap seams whose modules are loaded."""
        self._install("bootstrap")

    def configure_frontend(self, vllm_config: Any) -> None:
        """The front end has a VllmConfig. Raises ConfigurationError, which is meant to reach the user."""
        config = configuration.parse(vllm_config.additional_config)
        if not config.disabled_by_environment:
            self._say_misspelled(vllm_config.additional_config)
        self._frontend_run = None
        if not config.any_enabled:
            self._disarm_unless_running()
            return
        config = config.resolve_output_dir(Path.cwd())
        EXTENSIONS.load(config.output.extensions, refuse=True, prefix=config.monitor.prefix)
        vllm_config.additional_config = configuration.travel_dict(config, vllm_config.additional_config)
        os.environ.update(configuration.travel_environment(config))
        self._frontend_run = self._join(vllm_config, config, "frontend", _run_of_launcher(vllm_config))
        self._frontend_run.api_server = max(api_server_of(vllm_config)[0], 0)
        self._install("frontend")
        self._install("bootstrap", load=True)
        self._refuse_lost(config, "bootstrap")

    def configure_engine(self, vllm_config: Any) -> None:
        """EngineCore has a VllmConfig; the model is not loaded yet."""
        config = self._enabled(vllm_config)
        if config is None:
            return
        run = self._join(vllm_config, config, "engine")
        EXTENSIONS.load(config.output.extensions, refuse=False, prefix=config.monitor.prefix)
        run.ranks = read_ranks(vllm_config, None)
        run.runner = runner_of(vllm_config)
        self._install("engine")
        if config.guard.enabled or config.monitor.enabled:
            self._install("allocator")
        if config.monitor.enabled:
            self._install("monitor")
        self._install("bootstrap", load=True)
        self._refuse_lost(config, "bootstrap", "engine", "allocator")

    def configure_worker(self, vllm_config: Any) -> None:
        """A worker has a VllmConfig; neither device nor model is there yet."""
        config = self._enabled(vllm_config)
        if config is None:
            return
        run = self._join(vllm_config, config, "worker")
        EXTENSIONS.load(config.output.extensions, refuse=False, prefix=config.monitor.prefix)
        run.runner = runner_of(vllm_config)
        if config.only_counts:  # nothing of it is in a worker
            return
        self._install("worker")
        role: Role = "worker_v2" if run.runner == "V2" else "worker_v1"
        self._install(role)
        roles: list[Role] = ["worker", role]
        if getattr(vllm_config, "speculative_config", None) is not None:
            roles.append("drafts_v2" if run.runner == "V2" else "drafts_v1")
            self._install(roles[-1])
        if runs_graphs(vllm_config):
            self._install("graphs_v2" if run.runner == "V2" else "graphs_v1")
        self._refuse_lost(config, *roles)

    def run(self, pid: int, run_id: str) -> Run:
        """The run of an engine that is observed in this process. Raises KeyError for any other."""
        return self._runs[pid, run_id]

    def attach_frontend(self, processor: Any) -> None:
        run = self._frontend_run
        if run is not None:
            setattr(processor, OBSERVER, FrontendRecorder(run))
            run.export()

    def attach_scheduler(self, scheduler: Any) -> None:
        run = self._run_of(scheduler.vllm_config)
        if run is None:
            return
        run.topology = read_topology(scheduler.kv_cache_config, scheduler.vllm_config, run.kernel_block_sizes)
        run.unjudged_cause = unjudged_cause(scheduler.vllm_config)
        self._refuse_if(refused_groups(run.config, run.topology, run.unjudged_cause))
        connector = getattr(scheduler, "connector", None)
        # Before the run is opened: its first record says what is wrapped.
        reads_plans = connector is not None and self._install_connector(type(connector))
        run.open()
        judge = None if run.config.only_counts else EngineJudge(run, run.topology)
        if judge is not None:
            setattr(scheduler, OBSERVER, judge)
            if reads_plans:
                judge.observe_connector()
        told: EngineJudge | PoolMeter | None = judge
        pool, meter = None if judge is None else judge.pool, None
        is_observed = all(seam.name in self.ledger.installed for seam in self.table if seam.role == "allocator")
        if run.monitor is not None:
            name = "none" if connector is None else type(connector).__name__
            told = meter = meter_of(
                *(run, run.monitor, MeteredHost(scheduler), name, judge),
                is_observed=is_observed,
                reads_plans=reads_plans,
            )
            observe_scheduler(meter, scheduler)
        planner = (None if meter is None else meter.connector) or judge
        if reads_plans and planner is not None:
            PlanReader(planner, scheduler)
        if is_observed and told is not None and (meter or pool):
            reader = PoolReader(told, scheduler)
            if pool is not None:
                pool.observe(reader)
        if meter is not None:
            meter.publish()
        if judge is not None and "isolate" in map(run.config.action_for, run.parts):
            states = None if meter is None else meter.ledger
            judge.isolate_with(Isolation(SchedulerControl(scheduler), run.names, pool, states))

    def attach_worker(self, worker: Any) -> None:
        run = self._run_of(worker.vllm_config)
        if run is None:
            return
        ranks = read_ranks(worker.vllm_config, worker.rank)
        if "engine" not in run.roles or worker.vllm_config.parallel_config.world_size == 1:
            run.ranks = ranks
        if run.config.only_counts:
            run.collect()
            return
        observer = WorkerJudge(
            run,
            returns_results=returns_results(worker.vllm_config, ranks),
            unjudged_cause=unjudged_cause(worker.vllm_config),
            ranks=ranks,
        )
        setattr(worker, OBSERVER, observer)

    def attach_runner(self, worker: Any, kv_cache_config: Any) -> None:
        run, observer = self._run_of(worker.vllm_config), getattr(worker, OBSERVER, None)
        if run is None or observer is None:
            return
        layout = AttentionLayout.of_runner(worker.model_runner)
        run.kernel_block_sizes = layout.kernel_block_sizes
        topology = read_topology(kv_cache_config, worker.vllm_config, layout.kernel_block_sizes)
        observer.bind_topology(topology)
        observer = self._defer(run, worker, observer)
        setattr(worker.model_runner, OBSERVER, observer)
        self._runners.append((weakref.ref(worker.model_runner), observer))
        observe_block_work(worker.model_runner, observer)
        if getattr(worker.vllm_config, "speculative_config", None) is not None:
            observe_drafts(worker.model_runner, observer)
        self._note_overrides(worker.model_runner)
        wrappers = [entry.wrapper for entry in self.ledger.installed.values()]
        run.unread_operators = layout.attach(worker.model_runner, observer, wrappers, topology)
        self._refuse_lost(run.config, "worker_v2" if run.runner == "V2" else "worker_v1")
        if not (observer.reads_host_tensors or isinstance(observer, DeferredJudge)):
            self._refuse_if(refused_groups(run.config, topology, DEVICE_TENSORS))
        if "engine" not in run.roles:
            run.topology = topology
            run.unjudged_cause = unjudged_cause(worker.vllm_config)
            run.open()

    def worker_of(self, kv_caches: Any) -> WorkerJudge | DeferredJudge | None:
        """The observer of the runner whose caches these are."""
        for reference, observer in self._runners:
            if getattr(reference(), "kv_caches", None) is kv_caches:
                return observer
        return None

    def _defer(self, run: Run, worker: Any, observer: Any) -> Any:
        """The observer that can judge this worker's tensors where they are.

        Without the memory for clones, or on a device that torch does not serve, it is one that judges no plan.
        """
        runner, judge = worker.model_runner, observer.judge if isinstance(observer, DeferredJudge) else observer
        judge.reads_host_tensors = False
        try:
            device = audit_device(runner)
            if device is None:
                judge.reads_host_tensors = True
                return judge
            whole = runner_v2.whole_plan(runner) if run.runner == "V2" else runner_v1.whole_plan(runner)
            ring = CloneRing(device, clone_bytes_of(whole), clones_of(worker.vllm_config))
        except Exception as error:  # noqa: BLE001 - the device is anybody's; what it cannot do must not stop the start
            text = "kvscope: plans on this device are not judged (%s)"
            say(logging.WARNING, text, type(error).__name__, error=error)
            return judge
        setattr(runner, CLONES, ring)
        run.device_clone_bytes = ring.device_bytes
        self._install("deferred_v2" if run.runner == "V2" else "deferred_v1")
        if isinstance(observer, DeferredJudge):
            return observer
        ranks = read_ranks(worker.vllm_config, worker.rank)
        deferred = DeferredJudge(judge, run, returns_results=returns_results(worker.vllm_config, ranks))
        setattr(worker, OBSERVER, deferred)
        return deferred

    def close_engine(self, core: Any) -> None:
        """EngineCore ends. By now its VllmConfig may have another ``instance_id``: vLLM recompiles it at times."""
        scheduler = getattr(core, "scheduler", None)
        for observer in (getattr(scheduler, OBSERVER, None), getattr(scheduler, METER, None)):
            if observer is not None:
                observer.on_shutdown()
        self._forget_closed()

    def _refuse_lost(self, config: Config, *roles: Role) -> None:
        lost = {seam.name: seam.role for seam in self.table if seam.role in roles and seam.name in self.ledger.absent}
        self._refuse_if(refused_seams(config, lost, self.ledger.absent))

    def _refuse_if(self, error: ConfigurationError | None) -> None:
        """``unsupported: refuse``. Where the front end is another process vLLM tells it nothing but "see above"."""
        if error is not None:
            say(logging.ERROR, "kvscope: %s", error)
            raise error

    def _say_misspelled(self, additional_config: Any) -> None:
        """A misspelled key switches nothing on and is no error, since it could be another plugin's: so it is said."""
        with contextlib.suppress(Exception):  # the settings are anybody's, and a hint is no reason to stop a start
            for path, ours in configuration.misspelled_keys(additional_config).items():
                if path not in self._said:
                    self._said.add(path)
                    text = "kvscope: %s is not a key of kvscope and is left alone; did you mean %s?"
                    say(logging.WARNING, text, path, ours)

    def _enabled(self, vllm_config: Any) -> Config | None:
        config = configuration.parse(vllm_config.additional_config)
        if config.any_enabled:
            return config.resolve_output_dir(Path.cwd())
        self._disarm_unless_running()
        return None

    def _disarm_unless_running(self) -> None:
        """Nothing is switched on: leave vLLM as it was found, unless another engine of this process is observed."""
        self._forget_closed()
        if not any(pid == os.getpid() for pid, _ in self._runs):
            self.ledger.uninstall_all()

    def _forget_closed(self) -> None:
        """Engines that have ended are observed no more, and a process may start many."""
        self._runs = {key: run for key, run in self._runs.items() if not run.is_closed}
        self._runners = [entry for entry in self._runners if entry[0]() is not None]
        if self._frontend_run is not None and self._frontend_run.is_closed:
            self._frontend_run = None

    def _join(self, vllm_config: Any, config: Config, role: ProcessRole, run_id: str | None = None) -> Run:
        """The run of this configuration in this process; a forked child has runs of its own."""
        self._forget_closed()
        key = (os.getpid(), run_id or run_id_of(vllm_config))
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = Run(key[1], config, LedgerBook(self.ledger), host_versions())
        run.roles.add(role)
        return run

    def _run_of(self, vllm_config: Any) -> Run | None:
        return self._runs.get((os.getpid(), run_id_of(vllm_config)))

    def _install(self, role: Role, *, load: bool = False) -> None:
        for seam in self.table:
            if seam.role == role:
                self.ledger.install(seam, load=load)

    def _install_connector(self, kind: type) -> bool:
        """Wrap what leads to a connector of this class; whether all of it is wrapped."""
        seams = [seam.on(kind) if seam.interface else seam for seam in self.table if seam.role == "connector"]
        return all(self.ledger.install(seam) for seam in seams)

    def _note_overrides(self, runner: Any) -> None:
        """A subclass that replaces a method of ours without calling it takes the seam out of the path."""
        wrappers = [entry.wrapper for entry in self.ledger.installed.values()]
        for name, entry in self.ledger.installed.items():
            seam = entry.seam
            if not (isinstance(entry.owner, type) and isinstance(runner, entry.owner)):
                continue
            if getattr(type(runner), seam.attribute) not in wrappers:
                self.ledger.absent[name] = f"{type(runner).__name__} has its own {seam.attribute}"


def probe_seams() -> list[SeamReport]:
    """Hold every seam against the installed vLLM, wrapping nothing. Imports the host's modules."""
    return [probed(seam) for seam in HUB.table]


def _run_of_launcher(vllm_config: Any) -> str | None:
    """The run that this process' API server belongs to, None where the configuration at hand says it.

    Of several API servers each makes its own VllmConfig. The one whose engines they talk to is the launcher's, which
    leaves word in the environment that they inherit.
    """
    number, servers = api_server_of(vllm_config)
    if number < 0:
        os.environ[LAUNCHER_VARIABLE] = f"{os.getpid()}:{run_id_of(vllm_config)}"
        return None
    launcher, _, run_id = os.environ.get(LAUNCHER_VARIABLE, "").partition(":")
    return run_id or None if servers > 1 or launcher == str(os.getppid()) else None


HUB = PluginHub(Ledger())


def register() -> None:
    """Entry point. Safe to call any number of times, in any process; nothing but a log line can come out of it."""
    with contextlib.suppress(ConfigurationError):  # a wrong KVSCOPE_DIR is said where the front end reads its settings
        if configuration.parse(None).disabled_by_environment:
            return
    try:
        HUB.arm()
    except Exception as error:  # noqa: BLE001 - vLLM calls plugins outside any try: whatever happens here must not stop its start
        say(logging.WARNING, "kvscope is off in this process: %s", type(error).__name__)
