"""``kvscope demo``: a real server that kvscope watches, what that costs, then a fault that it finds. Needs vLLM, but no
accelerator.

Everything that is shown is also held against what must come out, so that the demo fails loudly where kvscope does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from kvscope.cli.narration import Narration, settings_lines
from kvscope.cli.screen import JSON_OPTION, facts, show_json, shown, typed, wrapped
from kvscope.cli.selftest import RUNNER_OPTION, RunnerName, vllm_is_here
from kvscope.errors import KvscopeError

if TYPE_CHECKING:
    from kvscope.testing.server import Server

FAULT = "slot_foreign_block"
STAGES = 6
DIR_OPTION = typer.Option(
    None, "--dir", help="Folder for traces and logs; it must be new or empty. [default: a new one in build/demo]"
)

_LOAD = {
    # What a step costs in Triton's interpreter, which stands for a GPU under the V2 runner, forbids more.
    RunnerName.v1: {"requests": 48, "at_once": 8, "max_tokens": 128},
    RunnerName.v2: {"requests": 18, "at_once": 9, "max_tokens": 10},
}
# A pool that is a little too small for this load, so that requests compete for blocks and some lose theirs, while most
# steps still have eight rows.
_BLOCKS = {RunnerName.v1: 46, RunnerName.v2: 28}
_SERVER_DEADLINE_S, _TRAFFIC_DEADLINE_S, _STOP_DEADLINE_S, _ENGINE_DEADLINE_S = 180, 120, 60, 180
# Time for the engine's process to end its trace: vLLM's default kills it as soon as the server is told to stop.
_SHUTDOWN_TIMEOUT_S, _ADVISED_TIMEOUT_S = 20, 10
_NO_COST = "Left out: V2's kernels run in an interpreter here, so its times say nothing."


class DemoUnavailableError(KvscopeError):
    """The demo needs something that is not here, or a folder that is free."""


class DemoFailedError(Exception):
    """Something did not go as it should. Each argument is a problem, which may bring the end of a log along."""


def command(
    runner: RunnerName = RUNNER_OPTION,
    directory: Path | None = DIR_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Show kvscope on a real server, and on an injected fault.

    Exit 0 if all went as it should, else 1.
    """
    if not vllm_is_here():
        raise DemoUnavailableError("demo: needs vLLM, which is not installed here")
    demo = Demo(runner, fresh_folder(directory), quiet=as_json)
    problems: list[str] = []
    with _ended_by_signals():
        try:
            demo.run()
        except DemoFailedError as failure:
            problems = [str(problem) for problem in failure.args]
        except KeyboardInterrupt:
            sys.stderr.write("kvscope: demo interrupted; what it had started is stopped\n")
            raise
    if as_json:
        show_json({**demo.document, "passed": not problems, "problems": problems, "seconds": demo.seconds})
    for problem in problems:
        sys.stderr.write(f"kvscope: demo FAILED: {problem}\n")
    if problems:
        sys.stderr.write(f"kvscope: logs and traces are in {shown(demo.folder)}\n")
    raise typer.Exit(1 if problems else 0)


def fresh_folder(asked: Path | None) -> Path:
    """The folder for this demo, made now. Raises DemoUnavailableError rather than write between other files."""
    if asked is not None:
        if asked.exists() and (not asked.is_dir() or any(asked.iterdir())):
            raise DemoUnavailableError(f"demo: {asked} is not empty; name a new folder")
        asked.mkdir(parents=True, exist_ok=True)
        return asked.absolute()
    from kvscope.testing.environment import cache_directory

    base = cache_directory() / "demo"
    base.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        with contextlib.suppress(FileExistsError):
            (base / str(number)).mkdir()
            return base / str(number)
    raise AssertionError  # `count` does not end


class Demo:
    """One demo. `document` gathers what ``--json`` prints, `seconds` how long each stage took."""

    def __init__(self, runner: RunnerName, folder: Path, *, quiet: bool) -> None:
        self.runner, self.folder, self._screen = runner, folder, Narration(STAGES, quiet=quiet)
        self.healthy, self.measured, self.faulty = folder / "healthy", folder / "cost", folder / "fault"
        self.document: dict[str, Any] = {"dir": str(folder), "runner": runner.value}
        self.seconds, self._say = self._screen.seconds, self._screen.say

    def run(self) -> None:
        """All stages. Raises DemoFailedError; whatever happens, no process is left behind."""
        began = monotonic()
        problems = self._serve()
        problems += self._judge_healthy()
        if problems:
            raise DemoFailedError(*problems)
        self._measure()
        self._inject()
        self._judge_fault()
        self.seconds["total"] = monotonic() - began
        self._end()

    # The healthy server ---------------------------------------------------------------------------------------------

    def _serve(self) -> list[str]:
        from kvscope.testing.server import ServerFailedError, free_port, start_server

        on: dict[str, object] = {"enabled": True, "action": "raise"}
        config: dict[str, dict[str, object]] = {
            "kv_trace": on,
            "kv_guard_config": on,
            "kv_monitor": {"enabled": True, "port": free_port()},
            "kv_transfer": {"enabled": True},
            "kv_output": {"dir": str(self.healthy)},
        }
        title = "A real server, with kvscope switched on"
        text = (
            f"vLLM's own server starts with a tiny model ({self.runner.value.upper()} runner). One option switches "
            "kvscope on; vLLM is not changed. Under action raise, a single finding stops the server."
        )
        server = None
        try:
            with self._screen.stage("server start", title, text):
                self._say_command(config)
                with self._screen.waiting("vLLM starts"):
                    server = start_server(
                        self.folder / "server.log",
                        runner=self.runner.value,
                        additional_config=config,
                        arguments=self._server_arguments(),
                        deadline_s=_SERVER_DEADLINE_S,
                    )
            self._say_ready(server)
            problems = self._send(server)
            return problems + self._stop(server)
        except BaseException as error:
            if server is not None:
                server.stop(timeout=0)
            if isinstance(error, ServerFailedError):
                raise DemoFailedError(str(error)) from error
            raise

    def _say_command(self, config: dict[str, dict[str, object]]) -> None:
        """What is typed to switch kvscope on; vLLM itself logs the rest."""
        typing = f"$ {typed('vllm')} serve MODEL --shutdown-timeout {_SHUTDOWN_TIMEOUT_S} --additional-config '{{"
        left_out = (
            "The flags that fit the server to a tiny model are left out; all of them are in "
            f'{shown(self.folder / "server.log")}, at "non-default args".'
        )
        self._say([("dim", typing), *settings_lines(config), ("dim", "  }'"), *wrapped(left_out, style="dim", hang=0)])

    def _server_arguments(self) -> tuple[str, ...]:
        blocks, timeout = str(_BLOCKS[self.runner]), str(_SHUTDOWN_TIMEOUT_S)
        return "--num-gpu-blocks-override", blocks, "--shutdown-timeout", timeout

    def _say_ready(self, server: Server) -> None:
        enabled = _first_record(self.healthy)
        self.document["parts"] = enabled["parts"]
        ready = f"after {self.seconds['server start']:.1f} s, {server.url}"
        parts = ", ".join(f"{part} {state}" for part, state in enabled["parts"].items())
        checks = f"{len(enabled['checks_active'])} reasons can be found in this version"
        self._say(facts([("ready", ready), ("kv.enabled", parts), ("checks", checks)]))

    def _send(self, server: Server) -> list[str]:
        from kvscope.testing.demo.traffic import SYSTEM_PROMPTS, preemptions, send

        load = _LOAD[self.runner]
        text = (
            f"{load['requests']} completions over HTTP, {load['at_once']} at a time, with {len(SYSTEM_PROMPTS)} shared "
            "system prompts and a small cache: blocks are shared, freed, taken away and handed out again all the time, "
            "which is when a wrong one can slip in."
        )
        with (
            self._screen.stage("traffic", "Traffic", text),
            self._screen.waiting("completions", load["requests"]) as advance,
        ):
            traffic = send(server, **load, deadline_s=_TRAFFIC_DEADLINE_S, on_answer=advance)
        problems = traffic.mistakes()
        if not problems:
            traffic.preemptions = preemptions(server)
        self.document["traffic"] = traffic
        answered = f"{traffic.completed} of {traffic.sent} in {traffic.seconds:.1f} s"
        cached = f"{traffic.cached_tokens:,} of {traffic.prompt_tokens:,} prompt tokens came from the prefix cache"
        tokens = f"{traffic.completion_tokens:,} generated; {cached}"
        self._say(facts([("answered", answered), ("tokens", tokens)]))
        if traffic.preemptions:
            self._say(facts([("preempted", f"{traffic.preemptions} times a request lost its blocks to another")]))
        return problems

    def _stop(self, server: Server) -> list[str]:
        text = "SIGTERM, as an orchestrator sends it: an observer must not keep a server from ending well."
        with self._screen.stage("server stop", "The server ends", text), self._screen.waiting("vLLM ends"):
            code = server.stop(timeout=_STOP_DEADLINE_S)
        self.document["server_exit_code"] = code
        self._say(facts([("exit code", f"{code}, after {self.seconds['server stop']:.1f} s")]))
        return [] if code == 0 else [f"vllm serve ended with exit code {code} instead of 0"]

    def _judge_healthy(self) -> list[str]:
        from kvscope.testing.demo.outcome import judged, numbers, unsound

        text = (
            "info says what was recorded, and what of each step was kvscope's own time. check replays the records "
            "through the same rules, and says how many of the scheduled rows were looked at: without that, a verdict "
            "is worth nothing."
        )
        with self._screen.stage("healthy check", "What the healthy run left behind", text):
            codes = [self._screen.kvscope("info", self.healthy)]
            self._say([("", "")])
            codes.append(self._screen.kvscope("check", self.healthy))
        replay, verdict = judged(self.healthy)
        self.document["healthy"] = numbers(replay, verdict)
        problems = unsound("the healthy run", self.document["healthy"], verdict)
        processes = {log.process for log in replay.trace.logs}
        if not {"frontend", "engine", "worker"} <= processes:
            problems.append(f"only {', '.join(sorted(processes))} wrote a trace")
        if codes != [0, verdict.exit_code]:
            problems.append(f"kvscope info and kvscope check ended with {codes[0]} and {codes[1]}")
        return problems

    # What it costs --------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        if self.runner is not RunnerName.v1:
            self._screen.announce("What it costs", _NO_COST)
            self.document["cost"] = {"own_ns_per_step": None, "left_out": _NO_COST}
            return
        from kvscope.testing.demo.apart import EngineFailedError
        from kvscope.testing.demo.cost import REQUESTS, run_apart

        text = (
            f"A second engine, kv_trace and kv_guard_config on as above, decodes {REQUESTS} requests: scheduler and "
            "worker in one process, no server around them. The hooks measure themselves: wall time, the mean of a step."
        )
        with self._screen.stage("cost", "What it costs", text), self._screen.waiting("an engine decodes"):
            try:
                run_apart(self.measured, self.folder / "cost.log", deadline_s=_ENGINE_DEADLINE_S)
            except EngineFailedError as error:
                raise DemoFailedError(str(error)) from error
        self._judge_cost()

    def _judge_cost(self) -> None:
        from kvscope.testing.demo.outcome import judged, numbers, unsound

        code = self._screen.kvscope("info", self.measured, part="own time")
        replay, verdict = judged(self.measured)
        self.document["cost"] = numbers(replay, verdict)
        problems = unsound("the run that is measured", self.document["cost"], verdict)
        if code != 0:
            problems.append(f"kvscope info ended with {code} on the run that is measured")
        if problems:
            raise DemoFailedError(*problems)
        self._say_cost()

    def _say_cost(self) -> None:
        cost, served = self.document["cost"], self.document["healthy"]["own_ns_per_step"]
        rows = f"{cost['steps']:,} steps with {cost['rows_audited'] / cost['steps']:.1f} rows each"
        cores = len(os.sched_getaffinity(0))
        why = (
            f"{served / 1000:,.1f} µs a step. It may be more there, since front end, scheduler and worker share "
            f"{cores} {'core' if cores == 1 else 'cores'}, a hook that is interrupted counts the interruption, and a "
            "prompt costs more than decoding"
        )
        self._say(facts([("measured over", rows), ("the server", why)]))

    # The fault ------------------------------------------------------------------------------------------------------

    def _inject(self) -> None:
        from kvscope.testing.demo.apart import EngineFailedError
        from kvscope.testing.demo.fault import run_apart
        from kvscope.testing.faults import FAULTS

        text = (
            f"Another real engine, and one wrong number in one step. {FAULTS[FAULT].summary} Nothing crashes: "
            "some answer is simply wrong. Under action log, the finding is recorded and the engine goes on."
        )
        with self._screen.stage("injected fault", "A fault, put in on purpose", text):
            log = self.folder / "fault.log"
            try:
                with self._screen.waiting("an engine runs with the fault"):
                    injected = run_apart(self.runner.value, FAULT, self.faulty, log, deadline_s=_ENGINE_DEADLINE_S)
            except EngineFailedError as error:
                raise DemoFailedError(str(error)) from error
        self.document["fault"] = injected
        if injected["what"] is None:
            raise DemoFailedError(f"the fault {FAULT} found no occasion")
        what = injected["what"]
        instead = f"slot {what['slot']} (block {what['block_id']}) instead of slot {what['expected_slot']}"
        where = f"step {injected['step']}, request {what['request_id']}, position {what['position']}: "
        done = f"{where}{instead} (block {what['expected_block_id']})"
        self._say(facts([("injected", done), ("vLLM", "noticed nothing: no error, the next steps ran as usual")]))

    def _judge_fault(self) -> None:
        from kvscope.testing.demo.fault import not_found
        from kvscope.testing.demo.outcome import judged

        injected = self.document["fault"]
        self._say([("", "")])
        code = self._screen.kvscope("check", self.faulty)
        _, verdict = judged(self.faulty)
        problems = [f"the fault {FAULT}: {mistake}" for mistake in injected["mistakes"]]
        problems += not_found(injected, [entry.first for entry in verdict.findings])
        if not verdict.agree:
            problems.append("live and replay do not agree on the findings")
        if code != 1:
            problems.append(f"kvscope check ended with {code} on the trace with the fault, instead of 1")
        if problems:
            raise DemoFailedError(*problems)
        same = f"as {injected['what']['expected']}, at the request, block, slot and step where it was put in"
        meant = "1, which means findings, and is what this trace must give"
        self._say([("", ""), *facts([("exit code", meant), ("found", same)])])

    def _end(self) -> None:
        spent = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self.seconds.items())
        self._say([("", ""), ("good", "Everything went as it should.")])
        self._say([*facts([("time", spent), ("kept in", shown(self.folder))]), ("", ""), ("label", "Next")])
        reason = self.document["fault"]["what"]["expected"]
        steps = [
            (f"rules {reason}", "what this finding proves, and what it does not"),
            ("selftest", "every fault that there is, each held against its finding"),
            ("doctor", "whether the vLLM that is installed here can be watched"),
        ]
        for step, why in steps:
            self._say([("", f"  {typed()} {step}"), ("dim", f"      {why}")])
        self._say_own_server()

    def _say_own_server(self) -> None:
        self._say([
            ("", f"  {typed('vllm')} serve MODEL --shutdown-timeout {_ADVISED_TIMEOUT_S} --additional-config \\"),
            ("", '    \'{"kv_trace": {"enabled": true}, "kv_guard_config": {"enabled": true}}\''),
            ("dim", "      your own server, findings logged; in the timeout it ends its trace"),
            ("", f"  {typed()} check kvscope-out"),
            ("dim", "      what was found there"),
        ])  # fmt: skip


def _first_record(folder: Path) -> dict[str, Any]:
    """EngineCore's kv.enabled: everything is known in that process."""
    paths = [*folder.glob("*/engine-*.0.jsonl"), *folder.glob("*/all-*.0.jsonl")]
    if len(paths) != 1:
        raise DemoFailedError(f"{len(paths)} engine files in {shown(folder)} instead of one: kvscope did not start")
    with paths[0].open("rb") as file:
        record: dict[str, Any] = json.loads(file.readline())
    return record


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """What asks this process to end, ends the server as well: as Ctrl-C does."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
