"""The command among pipes, terminals, locales and foreign text: it draws on no terminal, and its exit code holds."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvscope.cli import main
from kvscope.reports.printable import clean, clean_json
from kvscope.testing.trace import TraceBuilder

Capture = pytest.CaptureFixture[str]

KVSCOPE = [sys.executable, "-c", "import sys; from kvscope.cli import main; sys.exit(main())"]
SHELL = shlex.join(KVSCOPE)
REQUESTS = ["日本語-😀", "a\x1b[31mb\nc\u202e\u009b", "x" * 3000]


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    """Three requests with ids that a client might choose, and the same finding on each of them."""
    builder = TraceBuilder(tmp_path / "faulty", in_process=True)
    builder.step(dict.fromkeys(REQUESTS, 40))
    builder.step(dict.fromkeys(REQUESTS, 1), damage_plan=_shift)
    return builder.close()


def _shift(plan: Any) -> None:
    plan.groups[0].slots[:3] = [67, 19, 35]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A trace with control characters wherever a text can stand."""
    builder = TraceBuilder(tmp_path / "hostile", in_process=True)
    builder.step({"r": 20})
    (path,) = builder.close().glob("*.jsonl")
    enabled, *lines, coverage = map(json.loads, path.read_text().splitlines())
    e = "\x1b[31m"
    enabled.update(run_id=f"{e}run", seams_absent=[{"seam": f"s{e}", "reason": f"r\n{e}"}])
    enabled["versions"]["vllm"] = f"0{e}"
    enabled["parts"][f"p{e}"] = "on"
    coverage["hook_faults"] = {f"h{e}": 3}
    coverage["hook_time_ns"][f"t{e}"] = 10**9
    coverage["records_dropped"] = {f"d{e}": 2}
    coverage["checks_stalled"] = {f"C{e}": 4}
    unknown = {"event": f"kv.{e}", "schema": "kvscope.trace/1", "seq": coverage["seq"]}
    found = {
        **{name: enabled[name] for name in ("schema", "component", "boundary", "engine_id", "mono_ns", "wall_ns")},
        "event": "kv.violation", "seq": coverage["seq"] + 1, "step": 1, "trace_id": f"t{e}", "reason": f"new{e}",
        "check": "Z", "severity": "error", "evidence": "e", "action": f"log{e}", "repeats": 0, "also": [f"a{e}"],
        "request_id": f"r{e}", "actual": f"v{e}",
    }  # fmt: skip
    coverage["seq"] += 2
    records = [enabled, *lines, unknown, found, coverage]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path.parent


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, env={**os.environ, **environment}, check=False, timeout=60
    )


# Foreign text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("verb", ["check", "info"])
def test_nothing_in_a_trace_can_draw_on_the_terminal(
    hostile: Path, faulty: Path, verb: str, options: list[str], capsys: Capture
) -> None:
    for trace in (hostile, faulty):
        assert main([verb, str(trace), *options]) in {0, 1}
        captured = capsys.readouterr()
        assert all(char.isprintable() or char == "\n" for char in captured.out + captured.err)


def test_a_finding_of_an_unknown_reason_names_a_next_command_that_works(hostile: Path, capsys: Capture) -> None:
    main(["check", str(hostile)])
    assert capsys.readouterr().out.splitlines()[-1] == "next: kvscope rules"


def test_a_path_cannot_draw_on_the_terminal_either(tmp_path: Path, capsys: Capture) -> None:
    assert main(["check", str(tmp_path / "\x1b[31m\n")]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_readable_text_stays_readable() -> None:
    assert clean("日本語-😀 µ \\x1b") == "日本語-😀 µ \\x1b"
    assert clean("a\x1b\n\u202e\udcff") == "a\\x1b\\n\\u202e\\udcff"


@pytest.mark.parametrize("only_ascii", [True, False])
def test_what_is_escaped_in_json_is_read_back_as_it_was(only_ascii: bool) -> None:
    text = json.dumps({"k": "日本\u202e😀\u009b\udcff\n\\"}, ensure_ascii=False, indent=2)
    escaped = clean_json(text, only_ascii=only_ascii)
    assert json.loads(escaped) == json.loads(text)
    assert "\u202e" not in escaped
    assert escaped.isascii() is only_ascii


@pytest.mark.skipif(os.fsencode("\udcff") != b"\xff", reason="the file system takes no such name")
@pytest.mark.parametrize("verb", ["check", "info"])
def test_a_folder_whose_name_is_not_utf8_is_named_all_the_same(
    faulty: Path, tmp_path: Path, verb: str, capsys: Capture
) -> None:
    folder = faulty.rename(tmp_path / os.fsdecode(b"bad\xff\nname"))
    assert main([verb, str(folder), "--json"]) in {0, 1}
    assert json.loads(capsys.readouterr().out)["path"].endswith("bad\\udcff\nname")
    assert main([verb, str(folder)]) in {0, 1}


# Streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "locale", [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}], ids=["C", "ascii"]
)
def test_json_is_json_in_any_locale(faulty: Path, locale: dict[str, str]) -> None:
    told = shell(f"{SHELL} check {faulty} --json", **locale)
    assert told.returncode == 1
    said = json.loads(told.stdout)
    assert said["findings"][0]["entry"]["requests"] == REQUESTS


@pytest.mark.parametrize(
    ("redirection", "code"),
    [("2>&-", 1), (">&-", 1), (">&- 2>&-", 1), ("--json >&-", 1), (">/dev/full", 2), ("--json >/dev/full", 2)],
)
def test_a_stream_that_is_closed_or_full_does_not_change_what_the_exit_code_means(
    faulty: Path, redirection: str, code: int
) -> None:
    told = shell(f"{SHELL} check {faulty} {redirection}")
    assert told.returncode == code
    assert b"Traceback" not in told.stderr
    assert b"defect" not in told.stderr
    assert told.stderr.count(b"\n") == ("full" in redirection)


def test_an_error_without_a_place_to_tell_it_keeps_its_exit_code() -> None:
    assert shell(f"{SHELL} check /nowhere 2>&-").returncode == 2


@pytest.mark.parametrize("arguments", ["rules --json", "schema --json", "rules", "--help"])
def test_whoever_stops_reading_early_causes_no_noise(arguments: str) -> None:
    told = shell(f"{SHELL} {arguments} 2>err | head -n 1; code=${{PIPESTATUS[0]}}; cat err >&2; rm err; exit $code")
    assert told.returncode in {0, 141}
    assert told.stderr == b""
    assert told.stdout.count(b"\n") == 1


def test_nobody_reads_at_all_and_the_help_is_no_finding() -> None:
    with subprocess.Popen([*KVSCOPE, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


@pytest.mark.parametrize("columns", [20, 80, 200])
@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["color", "NO_COLOR", "dumb"])
def test_on_a_terminal_of_any_width(faulty: Path, columns: int, environment: dict[str, str]) -> None:
    code, shown = on_a_terminal(["check", str(faulty)], columns, environment)
    assert code == 1
    assert ("\x1b[" in shown) is not bool(environment)
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert "\x1b" not in plain
    assert f"\r\n{'=' * 80}\r\nERROR write_foreign_block (C3): " in plain
    assert "reason=write_foreign_block check=C3 action=log request=日本語-😀 group=0 block=4" in plain


def on_a_terminal(arguments: list[str], columns: int, environment: dict[str, str]) -> tuple[int, str]:
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "cols", str(columns), "rows", "10"], stdin=theirs, check=True)
    inherited = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "COLUMNS", "TERM"}}
    full = {**inherited, "TERM": "xterm-256color", **environment}
    shown = b""
    with subprocess.Popen([*KVSCOPE, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=full) as process:
        os.close(theirs)
        while True:
            try:
                shown += (part := os.read(ours, 65536))
            except OSError:  # how Linux says that the other end is closed
                break
            if not part:
                break
        code = process.wait(60)
    os.close(ours)
    return code, shown.decode()


@pytest.mark.parametrize("loading", ["the command", "a verb"])
def test_ctrl_c_while_something_is_loaded_is_quiet(
    loading: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    module = "kvscope.cli.app" if loading == "the command" else "kvscope.analysis.replay"
    monkeypatch.setitem(sys.modules, module, Interrupted())  # type: ignore[arg-type]  # stands in for a module
    assert main(["check", __file__]) == 128 + signal.SIGINT
    assert capsys.readouterr() == ("", "")


# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", ["nan", "inf", "-0.1", "1.0001", ""])
def test_no_share_that_would_make_everything_clean(faulty: Path, share: str) -> None:
    assert main(["check", str(faulty), "--min-coverage", share]) == 2
