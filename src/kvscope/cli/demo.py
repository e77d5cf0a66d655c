"""``kvscope demo``: a real server that kvscope watches, then a fault that it finds. Needs vLLM, no accelerator.

Everything that is shown is also held against what must come out, so that the demo fails loudly where kvscope does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from kvscope.cli.screen import JSON_OPTION, Line, facts, show, show_json, wrapped
from kvscope.cli.selftest import RUNNER_OPTION, RunnerName
from kvscope.errors import KvscopeError

if TYPE_CHECKING:
    from kvscope.analysis.replay import Replay
    from kvscope.analysis.verdict import Verdict
    from kvscope.testing.demo.traffic import Traffic
    from kvscope.testing.server import Server

FAULT = "slot_foreign_block"
STAGES = 5
DIR_OPTION = typer.Option(
    None, "--dir", help="Folder for traces and logs; it must be new or empty. [default: a new one in build/demo]"
)

_LOAD = {
    # What a step costs in Triton's interpreter, which stands for a GPU under the V2 runner, forbids more.
    RunnerName.v1: {"requests": 48, "at_once": 12, "max_tokens": 24},
    RunnerName.v2: {"requests": 18, "at_once": 9, "max_tokens": 10},
}
_SERVER_DEADLINE_S, _TRAFFIC_DEADLINE_S, _STOP_DEADLINE_S, _FAULT_DEADLINE_S = 180, 120, 60, 180
# A small pool, so that requests compete for blocks; and time for the engine's process to end its trace, because
# vLLM's default kills it as soon as the server is told to stop.
_SERVER_ARGUMENTS = ("--num-gpu-blocks-override", "48", "--shutdown-timeout", "20")


class DemoUnavailableError(KvscopeError):
    """The demo needs something that is not here, or a folder that is free."""


class DemoFailedError(Exception):
    """Something did not go as it should; the text says what, one line a problem."""


def command(
    runner: RunnerName = RUNNER_OPTION,
    directory: Path | None = DIR_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Show kvscope on a real server, and on an injected fault: exit 0 if all went as it should, else 1."""
    if importlib.util.find_spec("vllm") is None:
        raise DemoUnavailableError("demo: needs vLLM, which is not installed here")
    demo = Demo(runner, fresh_folder(directory), quiet=as_json)
    problems: list[str] = []
    with _ended_by_signals():
        try:
            demo.run()
        except DemoFailedError as failure:
            problems = str(failure).splitlines()
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


def shown(path: Path) -> str:
    """The path as a person here would type it."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


class Demo:
    """One demo. `document` gathers what ``--json`` prints, `seconds` how long each stage took."""

    def __init__(self, runner: RunnerName, folder: Path, *, quiet: bool) -> None:
        self.runner, self.folder, self._quiet = runner, folder, quiet
        self.healthy, self.faulty = folder / "healthy", folder / "fault"
        self.document: dict[str, Any] = {"dir": str(folder), "runner": runner.value}
        self.seconds: dict[str, float] = {}

    def run(self) -> None:
        """All stages. Raises DemoFailedError; whatever happens, no process is left behind."""
        began = monotonic()
        problems = self._serve()
        problems += self._judge_healthy()
        if problems:
            raise DemoFailedError("\n".join(problems))
        self._inject()
        self._judge_fault()
        self.seconds["total"] = monotonic() - began
        self._end()

    # The healthy server ---------------------------------------------------------------------------------------------

    def _serve(self) -> list[str]:
        from kvscope.testing.server import ServerFailedError, free_port, start_server

        on = {"enabled": True, "action": "raise"}
        config = {
            "kv_trace": on,
            "kv_guard_config": on,
            "kv_monitor": {"enabled": True, "port": free_port()},
            "kv_transfer": {"enabled": True},
            "kv_output": {"dir": str(self.healthy)},
        }
        title = "A real server, with kvscope switched on"
        text = (
            f"vLLM's own OpenAI server starts with a tiny random model ({self.runner.value.upper()} runner). One "
            "option switches kvscope on; vLLM itself is not changed. Under action raise, a single finding would stop "
            "this server."
        )
        with self._stage("server start", title, text):
            self._say([("dim", "$ vllm serve MODEL --additional-config '{")])
            self._say([("dim", f"    {json.dumps(key)}: {_abridged(value)}") for key, value in config.items()])
            self._say([("dim", "  }'")])
            with self._waiting("vLLM starts"):
                try:
                    server = start_server(
                        self.folder / "server.log",
                        runner=self.runner.value,
                        additional_config=config,
                        arguments=_SERVER_ARGUMENTS,
                        deadline_s=_SERVER_DEADLINE_S,
                    )
                except ServerFailedError as error:
                    raise DemoFailedError(str(error)) from error
        try:
            self._say_ready(server)
            problems = self._send(server)
            return problems + self._stop(server)
        except BaseException:
            server.stop(timeout=0)
            raise

    def _say_ready(self, server: Server) -> None:
        enabled = _first_record(self.healthy)
        self.document["parts"] = enabled["parts"]
        self._say(facts([("ready", f"after {self.seconds['server start']:.1f} s, {server.url}")]))
        self._say(facts([("kv.enabled", ", ".join(f"{part} {state}" for part, state in enabled["parts"].items()))]))
        self._say(facts([("checks", f"{len(enabled['checks_active'])} reasons can be found in this version")]))

    def _send(self, server: Server) -> list[str]:
        from kvscope.testing.demo.traffic import SYSTEM_PROMPTS, send

        load = _LOAD[self.runner]
        text = (
            f"{load['requests']} completions over HTTP, {load['at_once']} at a time, with {len(SYSTEM_PROMPTS)} shared "
            "system prompts: cache blocks are shared, freed and handed out again all the time, which is where a wrong "
            "block would slip in."
        )
        with self._stage("traffic", "Traffic", text), self._waiting("completions", load["requests"]) as advance:
            traffic = send(server, **load, deadline_s=_TRAFFIC_DEADLINE_S, on_answer=advance)
        self.document["traffic"] = traffic
        self._say(facts([("answered", f"{traffic.completed} of {traffic.sent} in {traffic.seconds:.1f} s")]))
        cached = f"{traffic.cached_tokens:,} of {traffic.prompt_tokens:,} prompt tokens came from the prefix cache"
        self._say(facts([("tokens", f"{traffic.completion_tokens:,} generated; {cached}")]))
        return list(_mistakes_of(traffic))

    def _stop(self, server: Server) -> list[str]:
        text = "SIGTERM, as an orchestrator sends it: an observer must not keep a server from ending well."
        with self._stage("server stop", "The server ends", text), self._waiting("vLLM ends"):
            code = server.stop(timeout=_STOP_DEADLINE_S)
        self.document["server_exit_code"] = code
        self._say(facts([("exit code", f"{code}, after {self.seconds['server stop']:.1f} s")]))
        return [] if code == 0 else [f"vllm serve ended with exit code {code} instead of 0"]

    def _judge_healthy(self) -> list[str]:
        text = (
            "info says what was recorded and what recording cost (own time: kvscope's share of each step). check "
            "replays the records through the rules that judged them live. No verdict comes without its coverage: how "
            "many of the scheduled rows were really looked at."
        )
        with self._stage("healthy check", "What the healthy run left behind", text):
            info = self._kvscope("info", self.healthy)
            shown_code = self._kvscope("check", self.healthy)
            replay, verdict = _judged(self.healthy)
        processes = {log.process for log in replay.trace.logs}
        self.document["healthy"] = {"verdict": verdict.word, "coverage": verdict.coverage_line}
        problems = [f"the healthy run holds {entry.first.reason}" for entry in verdict.findings]
        problems += [f"the healthy run is {verdict.word}: {reason}" for reason in verdict.reasons]
        if not {"frontend", "engine", "worker"} <= processes:
            problems.append(f"only {', '.join(sorted(processes))} wrote a trace")
        if info or shown_code != verdict.exit_code:
            problems.append(f"kvscope info and kvscope check ended with {info} and {shown_code}")
        return problems

    # The fault ------------------------------------------------------------------------------------------------------

    def _inject(self) -> None:
        from kvscope.testing.demo.fault import INJECTED
        from kvscope.testing.faults import FAULTS

        text = (
            "A second real engine, and one number changed behind the scheduler's back. "
            f"{FAULTS[FAULT].summary} The other request would then read a foreign key and value as its own. Action "
            "log: the finding is recorded and the engine goes on."
        )
        with self._stage("injected fault", "A fault, put in on purpose", text):
            with self._waiting("an engine runs with the fault"):
                _run_apart(
                    [sys.executable, "-m", "kvscope.testing.demo.fault", "--runner", self.runner.value]
                    + ["--fault", FAULT, "--dir", str(self.faulty)],
                    self.folder / "fault.log",
                )
            injected = json.loads((self.faulty / INJECTED).read_text(encoding="utf-8"))
        self.document["fault"] = injected
        if injected["what"] is None:
            raise DemoFailedError(f"the fault {FAULT} found no occasion")
        what = injected["what"]
        instead = f"slot {what['slot']} (block {what['block_id']}) instead of slot {what['expected_slot']}"
        where = f"step {injected['step']}, request {what['request_id']}, position {what['position']}: "
        self._say(facts([("injected", f"{where}{instead} (block {what['expected_block_id']})")]))
        self._say(facts([("vLLM", "noticed nothing: no error, and the engine went on to its end")]))

    def _judge_fault(self) -> None:
        injected = self.document["fault"]
        code = self._kvscope("check", self.faulty)
        _, verdict = _judged(self.faulty)
        problems = [f"the fault {FAULT}: {mistake}" for mistake in injected["mistakes"]]
        problems += mistakes_of_replay(injected, verdict)
        if code != 1:
            problems.append(f"kvscope check ended with {code} on the trace with the fault, instead of 1")
        if problems:
            raise DemoFailedError("\n".join(problems))
        self._say([("", "")])
        self._say(facts([("exit code", "1, which means findings, and is what this trace must give")]))
        same = f"as {injected['what']['expected']}, at the request, block, slot and step where it was put in"
        self._say(facts([("found", same)]))

    # How it is shown ------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        name = "kvscope" if shutil.which("kvscope") else shown(Path(sys.argv[0]).absolute())
        spent = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self.seconds.items())
        self._say([("", ""), ("good", "Everything went as it should.")])
        self._say([*facts([("time", spent), ("kept in", shown(self.folder))]), ("", ""), ("label", "Next")])
        reason = self.document["fault"]["what"]["expected"]
        steps = [
            (f"{name} rules {reason}", "what this finding proves, and what it does not"),
            (f"{name} selftest", "every fault that there is, each held against its finding"),
            (f"{name} doctor", "whether the vLLM that is installed here can be watched"),
        ]
        for typed, why in steps:
            self._say([("", f"  {typed}"), ("dim", f"      {why}")])
        switches = '\'{"kv_trace": {"enabled": true}, "kv_guard_config": {"enabled": true}}\''
        self._say([("", "  vllm serve MODEL --additional-config \\"), ("", f"    {switches}")])
        self._say([("dim", "      your own server, findings logged; then kvscope check kvscope-out")])

    @contextlib.contextmanager
    def _stage(self, name: str, title: str, text: str) -> Iterator[None]:
        number = len(self.seconds) + 1
        self._say([("", ""), ("label", f"[{number}/{STAGES}] {title}"), *_paragraph(text), ("", "")])
        began = monotonic()
        yield
        self.seconds[name] = monotonic() - began

    def _say(self, lines: list[Line]) -> None:
        if not self._quiet:
            show(lines)
            sys.stdout.flush()  # in a pipe, too, the stage that runs is the last one that was announced

    def _kvscope(self, verb: str, path: Path) -> int:
        """Run another verb on a trace as a person would, and give its exit code."""
        from kvscope.cli.app import INTERRUPTED, run

        arguments = [verb, shown(path)]
        self._say([("", ""), ("dim", f"$ kvscope {' '.join(arguments)}")])
        if self._quiet:
            with contextlib.redirect_stdout(None):
                code = run([*arguments, "--json"])
        else:
            code = run(arguments)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        return code

    @contextlib.contextmanager
    def _waiting(self, what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """A bar on stderr while something takes its time; the value is called for each thing that is done."""
        if self._quiet or not (sys.stderr.isatty() and sys.stdout.isatty()):
            yield lambda: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = [SpinnerColumn(), TextColumn("{task.description}")]
        columns += [BarColumn(), MofNCompleteColumn()] if total is not None else []
        with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(what, total=total)
            yield lambda: progress.advance(task)


def mistakes_of_replay(injected: dict[str, Any], verdict: Verdict) -> list[str]:
    """What the trace with the fault does not show as it was injected."""
    what = injected["what"]
    expected = (what["expected"], what["request_id"], what["block_id"], what["slot"], injected["step"])
    firsts = [entry.first for entry in verdict.findings]
    found = [(f.reason, f.request_id, f.block_id, f.slot, f.step) for f in firsts]
    problems = [] if expected in found else [f"injected was {expected}, but the replay found {found or 'nothing'}"]
    return problems + [] if verdict.agree else [*problems, "live and replay do not agree on the findings"]


def _mistakes_of(traffic: Traffic) -> Iterator[str]:
    yield from dict.fromkeys(f"a completion failed: {failure}" for failure in traffic.failures[:3])
    if traffic.completed < traffic.sent:
        yield f"only {traffic.completed} of {traffic.sent} completions came back"
    elif not traffic.cached_tokens:
        yield "no prompt token came from the prefix cache, although the prompts share their beginnings"


def _judged(path: Path) -> tuple[Replay, Verdict]:
    from kvscope.analysis.reader import Trace
    from kvscope.analysis.replay import Replay
    from kvscope.analysis.verdict import verdict_of

    replay = Replay(Trace.open(path))
    replay.run()
    return replay, verdict_of(replay)


def _first_record(folder: Path) -> dict[str, Any]:
    """EngineCore's kv.enabled: everything is known in that process."""
    paths = list(folder.glob("*/engine-*.0.jsonl"))
    if len(paths) != 1:
        raise DemoFailedError(f"{len(paths)} engine files in {shown(folder)} instead of one: kvscope did not start")
    with paths[0].open("rb") as file:
        record: dict[str, Any] = json.loads(file.readline())
    return record


def _run_apart(arguments: list[str], log: Path) -> None:
    """Run a process to its end, its output in `log`; it does not outlive this one."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(_FAULT_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise DemoFailedError(f"the engine with the fault did not end in {_FAULT_DEADLINE_S} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        raise DemoFailedError(f"the engine with the fault ended with exit code {code}; its log is {shown(log)}")


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """What asks this process to end, ends the server as well: as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _paragraph(text: str) -> list[Line]:
    return [(style, line.strip()) for style, line in wrapped(text)]


def _abridged(value: dict[str, object]) -> str:
    return json.dumps({key: shown(Path(v)) if key == "dir" else v for key, v in value.items()})
