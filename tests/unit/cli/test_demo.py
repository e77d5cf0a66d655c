"""The demo without an engine: it must fail loudly for whatever does not go as it should, and leave nothing running."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope.cli import demo, main
from kvscope.cli.narration import part_of, settings_lines
from kvscope.facts.topology import Ranks
from kvscope.testing.demo import cost, fault, traffic
from kvscope.testing.demo.apart import EngineFailedError
from kvscope.testing.demo.traffic import prompts, send
from kvscope.testing.server import ServerFailedError
from kvscope.testing.trace import TraceBuilder
from kvscope.testing.trace_file import TraceFile, coverage_of

Capture = pytest.CaptureFixture[str]
WRONG_SLOT = 67
"""In block 4, which the second request of `write_trace` holds; the first one's token belongs into slot 56."""


def write_trace(
    directory: Path, *, damage: bool = False, frontend: bool = True, in_process: bool = False, own_time: bool = True
) -> Path:
    builder = TraceBuilder(directory / "run", in_process=in_process)
    if frontend:
        stream = TraceFile(builder.directory, "frontend", 0, 50, "run", Ranks())
        stream.write(builder._enabled(stream, {}), "frontend", "config")
        stream.write(coverage_of(stream, False, False, steps=0, rows=0, tokens=0), "frontend", "shutdown")
        stream.close()
    builder.step({"r1": 40, "r2": 40})
    builder.step({"r1": 1, "r2": 1}, damage_plan=_to_another_block if damage else _sound)
    run = builder.close()
    if not own_time:
        for path in run.glob("*.jsonl"):
            _without_own_time(path)
    return run


def _without_own_time(path: Path) -> None:
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps({**json.loads(last), "hook_time_ns": {}})]) + "\n")


def _sound(plan: Any) -> None:
    pass


def _to_another_block(plan: Any) -> None:
    plan.groups[0].slots[0] = WRONG_SLOT


class FakeServer:
    """Writes a trace when it is stopped, as far as anybody can see from outside."""

    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.code = 0
        self.broken = False
        self.cached_tokens = 32
        self.layout: dict[str, bool] = {}
        self.stopped: list[float] = []

    def start(self, *_: Path, additional_config: dict[str, dict[str, Any]], **__: Any) -> FakeServer:
        write_trace(Path(additional_config["kv_output"]["dir"]), **self.layout)
        return self

    def post(self, path: str, body: dict[str, Any], *, timeout: float) -> Any:
        assert path == "/v1/completions"
        assert 0 < timeout <= demo._TRAFFIC_DEADLINE_S
        if self.broken:
            raise ConnectionError("the engine is dead")
        details = {"cached_tokens": self.cached_tokens}
        return {
            "usage": {"prompt_tokens": 200, "completion_tokens": body["max_tokens"], "prompt_tokens_details": details}
        }

    def get(self, path: str) -> str:
        assert path == "/metrics"
        return 'vllm:num_preemptions_created{engine="0"} 1.7e9\nvllm:num_preemptions_total{engine="0"} 3.0\n'

    def stop(self, *, timeout: float) -> int:
        self.stopped.append(timeout)
        return self.code


class FakeCost:
    """The trace that the engine with nothing but decoding leaves."""

    def __init__(self) -> None:
        self.layout: dict[str, bool] = {}
        self.error: Exception | None = None
        self.runs = 0

    def run_apart(self, directory: Path, *_: Path, **__: float) -> None:
        self.runs += 1
        if self.error is not None:
            raise self.error
        write_trace(directory, frontend=False, in_process=True, **self.layout)


class FakeFault:
    """What the process with the fault reports, and the trace that it leaves."""

    def __init__(self) -> None:
        self.damage = True
        self.what: dict[str, Any] | None = {
            "expected": "write_foreign_block", "request_id": "r1", "position": 40, "slot": WRONG_SLOT, "block_id": 4,
            "expected_slot": 56, "expected_block_id": 3,
        }  # fmt: skip
        self.mistakes: list[str] = []
        self.error: Exception | None = None

    def run_apart(self, _runner: str, name: str, directory: Path, *_: Path, **__: float) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        write_trace(directory, damage=self.damage)
        return {"fault": name, "summary": "A fault.", "what": self.what, "step": 2, "mistakes": self.mistakes}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake = FakeServer()
    monkeypatch.setattr(demo, "vllm_is_here", lambda: True)
    monkeypatch.setattr("kvscope.testing.server.start_server", fake.start)
    return fake


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> FakeCost:
    fake = FakeCost()
    monkeypatch.setattr(cost, "run_apart", fake.run_apart)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 4, 7})
    return fake


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> FakeFault:
    fake = FakeFault()
    monkeypatch.setattr(fault, "run_apart", fake.run_apart)
    return fake


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_stages_are_shown_and_the_exit_code_is_zero(
    server: FakeServer, injected: FakeFault, capsys: Capture
) -> None:
    assert main(["demo", "--dir", "out"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line[:5] for line in out.splitlines() if line.startswith("[")] == [f"[{n}/6]" for n in range(1, 7)]
    assert "answered      48 of 48" in out
    assert "preempted     3 times" in out
    assert "exit code     0" in out
    assert "$ kvscope info out/healthy\n" in out
    assert "$ kvscope check out/healthy\nCLEAN\ncoverage: 4 of 4 rows" in out
    assert "KV_GUARD reason=write_foreign_block check=C3 action=log request=r1 group=0 block=4 slot=67 step=2" in out
    assert "Everything went as it should." in out
    assert "kvscope rules write_foreign_block" in out
    assert server.stopped == [demo._STOP_DEADLINE_S]


def test_the_cost_is_what_info_says_of_it_and_why_the_server_may_say_more(
    server: FakeServer, injected: FakeFault, measured: FakeCost, capsys: Capture
) -> None:
    main(["demo", "--dir", "out"])
    stage = capsys.readouterr().out.partition("[5/6] What it costs\n")[2].partition("\n[6/6]")[0]
    command, _, shown = stage.partition("$ ")[2].partition("\n")
    assert command == "kvscope info out/cost | sed -n '/^own time/,/^$/p'"
    lines = shown.splitlines()
    assert lines[0] == "own time      60.0 µs a step, scheduler and slowest worker together"
    assert lines[1].startswith("              all-0-100: scheduler.schedule 20.0, worker.execute 20.0,")
    assert "processes" not in shown
    assert "over 2 steps with 2.0 rows each" in shown
    said = " ".join(shown.split())
    assert "the server 60.0 µs a step. It may be more there" in said
    assert "front end, scheduler and worker share 3 cores" in said
    assert measured.runs == 1


def test_the_commands_to_type_are_complete_and_named_as_the_shell_finds_them(
    server: FakeServer, injected: FakeFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    programs = tmp_path / "env" / "bin"
    programs.mkdir(parents=True)
    for name in ("kvscope", "vllm"):
        (programs / name).write_text("")
    monkeypatch.setattr("sys.argv", [str(programs / "kvscope"), "demo"])
    main(["demo", "--dir", "out"])
    out = capsys.readouterr().out
    assert "\n$ env/bin/vllm serve MODEL --shutdown-timeout 20 --additional-config '{\n" in out
    said = " ".join(out.split())
    assert 'are left out; all of them are in out/server.log, at "non-default args".' in said
    assert "\n$ env/bin/kvscope info out/healthy\n" in out
    last = out.rpartition("\nNext\n")[2]
    assert re.findall(r"^  (\S.*)", last, re.MULTILINE) == [
        "env/bin/kvscope rules write_foreign_block",
        "env/bin/kvscope selftest",
        "env/bin/kvscope doctor",
        "env/bin/vllm serve MODEL --shutdown-timeout 10 --additional-config \\",
        "env/bin/kvscope check kvscope-out",
    ]
    commands = re.findall(r"(?:\S*/)?(?:kvscope|vllm) (?:rules|selftest|doctor|serve|check|info)\b.*", out)
    assert [command for command in commands if not command.startswith("env/bin/")] == []


def test_what_is_shown_of_info_is_what_its_command_line_gives() -> None:
    text = "run  1\nown time  2\n  hooks\n\nprocesses\nown time\n"
    assert part_of(text, "own time") == ["own time  2", "  hooks"]
    assert part_of(text, "nothing") == []


def test_v2_measures_no_cost_and_says_so(
    server: FakeServer, injected: FakeFault, measured: FakeCost, capsys: Capture
) -> None:
    assert main(["demo", "--runner", "v2", "--dir", "out"]) == 0
    out = capsys.readouterr().out
    (heading,) = re.findall(r"^\[5/6\] What it costs\n(.*?)\n\n\[6/6\]", out, re.DOTALL | re.MULTILINE)
    assert heading == demo._NO_COST
    assert measured.runs == 0
    assert main(["demo", "--runner", "v2", "--dir", "json", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cost"] == {"own_ns_per_step": None, "left_out": demo._NO_COST}
    assert "cost" not in document["seconds"]


def test_lines_fit_the_screen_but_for_the_frozen_one(server: FakeServer, injected: FakeFault, capsys: Capture) -> None:
    main(["demo", "--dir", "out"])
    long = [line for line in capsys.readouterr().out.splitlines() if len(line) > 80]
    assert [line for line in long if not line.startswith("KV_GUARD ")] == []


def test_json_is_one_document_with_all_numbers(server: FakeServer, injected: FakeFault, capsys: Capture) -> None:
    assert main(["demo", "--dir", "out", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is True
    assert document["problems"] == []
    assert document["parts"]["kv_trace"] == "on"
    assert document["traffic"]["completed"] == 48
    assert document["traffic"]["cached_tokens"] == 48 * 32
    assert document["healthy"]["verdict"] == "clean"
    hooks = {"scheduler.schedule": 20_000, "worker.execute": 20_000, "runner_v1.slots": 20_000}
    numbers = {"steps": 2, "rows_audited": 4, "own_ns_per_step": 60_000, "own_ns_by_hook": hooks}
    for run in ("healthy", "cost"):
        assert document[run] == {"verdict": "clean", "coverage": document[run]["coverage"], **numbers}
        assert document[run]["coverage"].startswith("coverage: 4 of 4 rows")
    assert set(document["seconds"]) == {
        "server start", "traffic", "server stop", "healthy check", "cost", "injected fault", "total"
    }  # fmt: skip


def failure(server: FakeServer, injected: FakeFault, part: str) -> str:
    """Break one thing; the answer is what must be said about it."""
    match part:
        case "exit code":
            server.code = -9
            return "vllm serve ended with exit code -9 instead of 0"
        case "finding":
            server.layout = {"damage": True}
            return "the healthy run holds write_foreign_block"
        case "process":
            server.layout = {"frontend": False}
            return "only engine, worker wrote a trace"
        case "own time":
            server.layout = {"own_time": False}
            return "kvscope's own time was not recorded in the healthy run\n"
        case "completions":
            server.broken = True
            return "48 of 48 completions failed: ConnectionError: the engine is dead"
        case "cache":
            server.cached_tokens = 0
            return "no prompt token came from the prefix cache"
        case "missed":
            injected.damage = False
            return "kvscope check ended with 0 on the trace with the fault, instead of 1"
        case "elsewhere":
            assert injected.what is not None
            injected.what["block_id"] = 5
            return "but the replay found [('write_foreign_block', 'r1', 4, 67, 2)]"
        case "live":
            injected.mistakes = ["step is 3, injected was 2"]
            return "step is 3, injected was 2"
        case "no occasion":
            injected.what = None
            return "found no occasion"
        case "crash":
            injected.error = EngineFailedError("the engine with the fault ended with exit code -11\nlog")
            return "ended with exit code -11\nlog"
    raise AssertionError(part)


@pytest.mark.parametrize(
    "part",
    [
        "exit code", "finding", "process", "own time", "completions", "cache", "missed", "elsewhere", "live",
        "no occasion", "crash",
    ],
)  # fmt: skip
def test_whatever_does_not_go_as_it_should_is_said_and_ends_with_one(
    server: FakeServer, injected: FakeFault, part: str, capsys: Capture
) -> None:
    said = failure(server, injected, part)
    assert main(["demo", "--dir", "out"]) == 1
    out, err = capsys.readouterr()
    assert said in err
    assert err.startswith("kvscope: demo FAILED: ")
    assert err.endswith("logs and traces are in out\n")
    assert "Everything went as it should." not in out
    assert server.stopped


@pytest.mark.parametrize(
    ("layout", "error", "said"),
    [
        ({"own_time": False}, None, "kvscope's own time was not recorded in the run that is measured"),
        ({"damage": True}, None, "the run that is measured holds write_foreign_block"),
        ({}, EngineFailedError("the engine that is measured ended with exit code 1"), "ended with exit code 1"),
    ],
)
def test_a_cost_that_is_not_known_is_a_failure(
    server: FakeServer,
    measured: FakeCost,
    layout: dict[str, bool],
    error: Exception | None,
    said: str,
    capsys: Capture,
) -> None:
    measured.layout, measured.error = layout, error
    assert main(["demo", "--dir", "out"]) == 1
    out, err = capsys.readouterr()
    assert said in err
    assert err.startswith("kvscope: demo FAILED: ")
    assert "It may be more there" not in out


def test_a_server_that_does_not_start_is_a_failure(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise ServerFailedError("vllm serve ended with exit code 1\nthe end of its log")

    monkeypatch.setattr("kvscope.testing.server.start_server", start)
    assert main(["demo", "--dir", "out"]) == 1
    assert "vllm serve ended with exit code 1\nthe end of its log" in capsys.readouterr().err


@pytest.mark.parametrize("moment", ["get", "stop"])
def test_an_interrupted_demo_stops_the_server_at_once(
    server: FakeServer, injected: FakeFault, moment: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def interrupted(*_: Any, **settings: Any) -> int:
        if settings.get("timeout") == 0:
            server.stopped.append(0)
            return -9
        raise KeyboardInterrupt

    monkeypatch.setattr(server, moment, interrupted)
    assert main(["demo", "--dir", "out"]) == 130
    assert server.stopped == [0]
    assert capsys.readouterr().err.startswith("kvscope: demo interrupted")


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(demo, "vllm_is_here", lambda: False)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "kvscope: demo: needs vLLM, which is not installed here\n"


def test_a_folder_with_files_in_it_is_refused(server: FakeServer, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me", encoding="utf-8")
    assert main(["demo", "--dir", "mine"]) == 2
    assert capsys.readouterr().err == "kvscope: demo: mine is not empty; name a new folder\n"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_every_demo_gets_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscope.testing.environment.cache_directory", lambda: tmp_path)
    folders = [demo.fresh_folder(None) for _ in range(3)]
    assert folders == [tmp_path / "demo" / name for name in ("1", "2", "3")]


def test_the_settings_are_shown_as_json_that_can_be_typed(tmp_path: Path) -> None:
    lines = settings_lines({"kv_trace": {"enabled": True}, "kv_output": {"dir": str(tmp_path / "out")}})
    text = "\n".join(line for _, line in lines)
    assert json.loads(f"{{{text}}}") == {"kv_trace": {"enabled": True}, "kv_output": {"dir": "out"}}


def test_prompts_share_whole_blocks_and_fit_the_model() -> None:
    made = prompts(48)
    assert len(set(made)) == 48
    assert {len(traffic.SYSTEM_PROMPTS)} == {len({prompt[:128] for prompt in made})}
    longest = max(int(load["max_tokens"]) for load in demo._LOAD.values())
    assert max(len(prompt.encode()) for prompt in made) + longest < 512


def test_requests_whose_cost_is_measured_share_no_block_and_fit_the_model() -> None:
    made = [prompt for salt in range(2) for prompt in cost.prompts(salt)]
    assert len({prompt[0] for prompt in made}) == len(made) == 2 * cost.REQUESTS
    assert all(0 < token < 256 for prompt in made for token in prompt)
    assert max(map(len, made)) + cost.TOKENS < 512


def test_completions_that_do_not_come_back_in_time_are_a_failure() -> None:
    released = threading.Event()
    hanging: Any = SimpleNamespace(post=lambda *_, **__: released.wait(10))
    try:
        result = send(hanging, requests=3, at_once=2, max_tokens=8, deadline_s=-0.9)
    finally:
        released.set()
    assert result.completed == 0
    assert "time was up" in result.mistakes()[0]


def test_a_short_answer_is_a_failure() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": None}
    short: Any = SimpleNamespace(post=lambda *_, **__: {"usage": usage})
    result = send(short, requests=1, at_once=1, max_tokens=8, deadline_s=5)
    assert result.mistakes() == ["1 of 1 completions failed: 3 tokens came back instead of 8"]
