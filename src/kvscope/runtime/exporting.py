"""The exporter of a run in one of its processes, its series in vLLM's own registry, and the line in vLLM's log that
`kv_monitor.log` asks for.

A front end exports at once. An EngineCore in a process of its own waits first: where there is a front end on its host,
that has the lock by then, and the exporter's thread never runs beside the scheduler's.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Protocol

from ..config import Config
from ..facts.topology import Ranks
from ..logs import say
from ..metrics.aggregates import aggregates_line
from ..metrics.collecting import collect_run
from ..metrics.exporter import Exporter, ExporterSettings
from ..metrics.families import Family
from ..metrics.host_registry import HostRegistration
from ..metrics.place import Place
from ..metrics.sampling import Collected
from ..metrics.switch import Switch
from ..metrics.viewing import Viewer, readout_of
from .collectors_called import sampler_of_exporter

ENGINE_PATIENCE_S = 30.0
MAX_FAULTS = 16
LAST_PORT = 65535


class Exported(Protocol):
    """What is read of a run in one process."""

    run_id: str
    config: Config
    ranks: Ranks

    @property
    def process(self) -> str: ...


class RunExporter:
    """Begins with :meth:`start`, once; :meth:`stop` may be called twice. Neither raises, and only stopping waits."""

    def __init__(self, run: Exported, *, engine_patience_s: float = ENGINE_PATIENCE_S) -> None:
        monitor = run.config.monitor
        folder = Path(run.config.output.dir) / run.run_id
        of_frontend = run.process == "frontend"
        self._folder = folder
        self._switch = Switch(folder)
        self._viewer = Viewer(str(folder), run.run_id)
        self._interval_s = monitor.scrape_interval
        self._logs = monitor.log
        self._ending = threading.Event()
        self._collected: Collected = {}
        self._sampler = sampler_of_exporter(
            run.run_id, run.config, folder, is_exporting=self._is_exporting, publish=self._take
        )
        self._in_host = (
            None
            if run.process == "engine"
            else HostRegistration(
                self._collect,
                prefix=monitor.prefix,
                interval_s=monitor.scrape_interval,
                is_on=self._switch.is_on,
            )
        )
        self._exporter = Exporter(
            ExporterSettings(
                folder=folder,
                run_id=run.run_id,
                host=monitor.host,
                port=min(monitor.port + (0 if of_frontend else run.ranks.dp), LAST_PORT),
                metrics_path=monitor.metrics_path,
                scrape_interval_s=monitor.scrape_interval,
                patience_s=engine_patience_s if run.process == "engine" else 0.0,
            ),
            self._collect,
            is_on=self._switch.is_on,
        )

    @property
    def place(self) -> Place | None:
        """Where it serves; None while another process does."""
        return self._exporter.place

    def start(self) -> None:
        """Begin, in daemon threads."""
        self._exporter.start()
        if self._in_host is not None:
            self._in_host.begin()
        self._sampler.start()
        if self._logs:
            threading.Thread(target=self._log, name="kvscope-monitor-log", daemon=True).start()

    def stop(self) -> None:
        """End, and let another process take over."""
        self._ending.set()
        self._sampler.stop()
        if self._in_host is not None:
            self._in_host.end()
        self._exporter.stop()

    def _collect(self) -> list[Family]:
        return collect_run(self._folder, self._collected)

    def _is_exporting(self) -> bool:
        return self.place is not None or (self._in_host is not None and self._in_host.is_registered)

    def _take(self, collected: Collected) -> None:
        self._collected = collected

    def _log(self) -> None:
        """One line an interval, from the process that exports, while monitoring is on."""
        faults = 0
        while faults < MAX_FAULTS and not self._ending.wait(self._interval_s):
            if (trouble := self._log_once()) is not None:
                faults += 1
                if faults in {1, MAX_FAULTS}:
                    say(logging.WARNING, "kvscope: no line of aggregates: %s", trouble)

    def _log_once(self) -> Exception | None:
        """What kept it from logging, if anything did."""
        try:
            if self.place is not None and self._switch.is_on():
                view = self._viewer.view(readout_of(self._collect(), at_s=time.time()))
                say(logging.INFO, "KV_MONITOR %s", aggregates_line(view))
        except Exception as error:  # noqa: BLE001  a thread of ours; files of a run can be gone or damaged
            return error
        return None
