"""What scrapers cost inference: the engine on one core; its front end, the exporter and 50 clients on the other.

    python -m kvscope.testing.scrapers --rounds 3 --seconds 20

starts a real `vllm serve` with everything on and keeps it full of long requests. Phases with scrapers and phases
without take turns; of each, the CPU time of EngineCore and its worker is divided by their steps. A fifth of the
scrapers reads a few bytes at a time, or stops reading. Exit code 1 where the time a step differs by more than noise.

Steps are `guard_rows_audited_total / 8`: every step has a row for each of eight requests, since two more always wait.
The worker is a thread of EngineCore, as vLLM has it for one GPU. On a CPU it would be a process, and whichever of the
two waits for the other spins, so that the CPU time a step would be the time a step takes, whatever it is spent on.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import typer

from kvscope.metrics.place import Place, places_in
from kvscope.metrics.reader import read_run
from kvscope.testing.scraper_clients import SCRAPES_PER_S, Scrapers
from kvscope.testing.server import Server, free_port, serving

NOISE = 0.03
"""The least that counts as a difference."""

_ROWS, _WAITING = 8, 2
_PROMPT, _MODEL_TOKENS, _BLOCKS = 16, 1024, 336
_UNIPROC = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""For a server it only means that its executor may be `uni` on a CPU (vllm/platforms/cpu.py)."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """CPU seconds of EngineCore and its workers, and the steps they made meanwhile."""

    scraped: bool
    cpu_s: float
    steps: float

    @property
    def cpu_us_per_step(self) -> float:
        return self.cpu_s / self.steps * 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`ratios` on / off, one a round; `noise` is what counts as none; `ratio` is their median."""

    ratios: list[float]
    noise: float

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def is_unchanged(self) -> bool:
        return abs(self.ratio - 1) <= self.noise


def order(rounds: int) -> list[bool]:
    """Whether there are scrapers, phase by phase: off on, on off, off on, ... so that a drift favours neither."""
    return [scraped for number in range(rounds) for scraped in ((False, True) if number % 2 == 0 else (True, False))]


def compare(phases: Sequence[Phase]) -> Verdict:
    """Each round's phase with scrapers against the one without. Noise is the median difference between a phase without
    and the next one without, and at least `NOISE`.
    """
    off = [phase.cpu_us_per_step for phase in phases if not phase.scraped]
    on = [phase.cpu_us_per_step for phase in phases if phase.scraped]
    apart = [abs(later / earlier - 1) for earlier, later in itertools.pairwise(off)]
    ratios = [with_them / without for with_them, without in zip(on, off, strict=True)]
    return Verdict(ratios=ratios, noise=max(NOISE, statistics.median(apart or [0.0])))


@dataclass(kw_only=True, slots=True)
class Load:
    """Ten long requests under way at any moment, of which vLLM runs eight. `failed` says what came to no answer."""

    server: Server
    failed: list[str] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = threading.Event()
        for number in range(_ROWS + _WAITING):
            threading.Thread(target=self._client, args=(number, stop), daemon=True).start()
        try:
            yield
        finally:
            stop.set()  # what is still under way ends with the server

    def _client(self, number: int, stop: threading.Event) -> None:
        dice = random.Random(number)
        most = _MODEL_TOKENS - _PROMPT
        # The first ones end at different times, so that the lengths of those in one step are spread at any moment.
        tokens = most * (number + 1) // (_ROWS + _WAITING)
        while not stop.is_set():
            try:
                self.server.complete([dice.randrange(4, 260) for _ in range(_PROMPT)], tokens)
            except (OSError, ValueError) as error:
                if not stop.is_set():
                    self.failed.append(f"request: {type(error).__name__}: {error}")
                return
            tokens = most


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process, `proc(5)`; resolution 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def pin(pid: int, core: int) -> None:
    """All threads that a process has; what it starts later inherits the core."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), {core})


def _members(session: int) -> list[int]:
    """Process ids of a session: `start_server` makes one for each server."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            if os.getsid(int(path.name)) == session:
                found.append(int(path.name))
    return found


def _place_of(folder: Path) -> Place:
    ends = time.monotonic() + 20
    while not (places := places_in(folder)):
        if time.monotonic() > ends:
            raise RuntimeError(f"no exporter in {folder}")
        time.sleep(0.1)
    return places[0]


def _read(folder: Path, pids: Sequence[int]) -> tuple[float, float]:
    """CPU seconds and rows so far."""
    values = [process.values.get("guard_rows_audited_total", {}) for process in read_run(folder).processes]
    rows = sum(value for one in values for value in one.values() if isinstance(value, (int, float)))
    return sum(map(cpu_seconds, pids)), rows


def _warm_up(folder: Path, pids: Sequence[int]) -> None:
    """Until the first requests, which all began at once, are over."""
    ends = time.monotonic() + 120
    while _read(folder, pids)[1] < _MODEL_TOKENS * _ROWS:
        if time.monotonic() > ends:
            raise RuntimeError("the engine makes no steps, or too few")
        time.sleep(0.2)


def _measure(folder: Path, pids: Sequence[int], scrapers: Scrapers | None, seconds: float) -> Phase:
    with scrapers.running() if scrapers else nullcontext():
        time.sleep(1)  # to get going
        cpu_s, rows = _read(folder, pids)
        time.sleep(seconds)
        cpu_later_s, rows_later = _read(folder, pids)
    if rows_later == rows:
        raise RuntimeError("the engine has stopped making steps")
    return Phase(scraped=scrapers is not None, cpu_s=cpu_later_s - cpu_s, steps=(rows_later - rows) / _ROWS)


def measure(folder: Path, rounds: int, seconds: float) -> tuple[list[Phase], Scrapers, list[str]]:
    """The phases in turn, what became of the scrapes, and what else went wrong; all files below `folder`.

    Raises:
        RuntimeError: the server did not start, nobody exports or the wrong process does, or the engine makes no steps.
    """
    part = {"enabled": True, "action": "log"}
    config = {"kv_trace": part, "kv_guard_config": part, "kv_output": {"dir": str(folder / "out")}}
    monitor = {"kv_monitor": {"enabled": True, "port": free_port()}}
    arguments = ["--max-model-len", str(_MODEL_TOKENS), "--num-gpu-blocks-override", str(_BLOCKS)]
    settings = {"additional_config": config | monitor, "variables": _UNIPROC}
    with serving(
        folder / "server.log", arguments=[*arguments, "--distributed-executor-backend", "uni"], **settings
    ) as server:
        (run,) = (folder / "out").iterdir()
        place = _place_of(run)
        scrapers = Scrapers(url=place.metrics_url)
        engine = {process.pid for process in read_run(run).processes if process.process != "frontend"}
        if place.pid in engine:
            raise RuntimeError("EngineCore exports, which is for the front end to do")
        first, second = sorted(os.sched_getaffinity(0))[:2]
        load = Load(server=server)
        with load.running():
            pin(os.getpid(), second)
            for pid in _members(server.process.pid):
                pin(pid, first if pid in engine else second)
            _warm_up(run, sorted(engine))
            phases = []
            for scraped in order(rounds):
                phases.append(_measure(run, sorted(engine), scrapers if scraped else None, seconds))
                _say(phases[-1])
            return phases, scrapers, load.failed


def _say(phase: Phase) -> None:
    name = "on " if phase.scraped else "off"
    sys.stdout.write(f"{name} {phase.cpu_us_per_step:8.1f} us of CPU a step, {phase.steps:.0f} steps\n")
    sys.stdout.flush()


def cannot_run() -> str | None:
    """Why this machine cannot tell, if it cannot."""
    if not hasattr(os, "sched_setaffinity") or not Path("/proc/self/stat").exists():
        return "needs Linux, for /proc and to pin processes"
    cores = len(os.sched_getaffinity(0))
    return None if cores >= 2 else f"needs two cores and has {cores}"


def main(
    rounds: int = typer.Option(3, min=1, help="How many phases without scrapers, and as many with them."),
    seconds: float = typer.Option(20.0, min=1, help="How long a phase is."),
) -> None:
    """Measure EngineCore and its workers with 50 scrapers and without."""
    if reason := cannot_run():
        sys.stdout.write(f"not run: {reason}\n")
        return
    with tempfile.TemporaryDirectory(prefix="kvscope-scrapers-") as folder:
        phases, scrapers, failed = measure(Path(folder), rounds, seconds)
    verdict = compare(phases)
    failed += scrapers.failed
    if (count := len(scrapers.answered_s) + len(scrapers.slow)) < (least := 0.8 * rounds * seconds * SCRAPES_PER_S):
        failed.append(f"{count} scrapes, where at least {least:.0f} are needed for {SCRAPES_PER_S} a second")
    for scraped, name in ((False, "off"), (True, "on")):
        median = statistics.median(phase.cpu_us_per_step for phase in phases if phase.scraped is scraped)
        sys.stdout.write(f"{name}: median {median:.1f} us of CPU a step\n")
    spread = f"{min(verdict.ratios):.3f} to {max(verdict.ratios):.3f}"
    sys.stdout.write(f"on / off: median {verdict.ratio:.3f}, {spread}; noise is 1 +- {verdict.noise:.3f}\n")
    slowest_ms = max(scrapers.answered_s, default=0.0) * 1e3
    sys.stdout.write(
        f"{len(scrapers.answered_s)} scrapes answered, the slowest in {slowest_ms:.0f} ms; "
        f"{len(scrapers.slow)} by slow clients, held for up to {max(scrapers.slow, default=0.0):.1f} s\n"
    )
    sys.stdout.write("".join(f"wrong: {line}\n" for line in failed[:20]))
    raise typer.Exit(0 if verdict.is_unchanged and not failed else 1)


if __name__ == "__main__":
    typer.run(main)
