"""The command as a user meets it: exit codes, one clear line for what goes wrong, text that fits the screen."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from kvscope import __version__
from kvscope.checks.catalog import RULES
from kvscope.checks.finding import Finding
from kvscope.cli import main
from kvscope.cli.app import VERBS
from kvscope.cli.screen import typed
from kvscope.cli.selftest import verdict_on
from kvscope.errors import UnreadableTraceError
from kvscope.events.schema import RECORDS
from kvscope.testing.faults import FAULTS
from kvscope.testing.selftest import mistakes_in
from kvscope.testing.trace import TraceBuilder

Capture = pytest.CaptureFixture[str]


def write_run(directory: Path, *, damage: bool = False, coverage: bool = True) -> Path:
    builder = TraceBuilder(directory, in_process=True)
    builder.step({"r1": 40, "r2": 40})
    builder.step({"r1": 1, "r2": 1}, damage_plan=_foreign if damage else _sound)
    return builder.close(coverage=coverage)


def _sound(plan: Any) -> None:
    pass


def _foreign(plan: Any) -> None:
    plan.groups[0].slots[0] = 67


@pytest.fixture(autouse=True)
def seams(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What probing vLLM would say, without importing it and whether or not it is here."""
    monkeypatch.setattr("kvscope.cli.doctor._version", {"vllm": "0.32.0"}.get)
    reports = [_seam("scheduler.schedule", "matched", None), _seam("worker.execute", "matched", "wrapped by x as well")]
    fake = SimpleNamespace(probe_seams=lambda: reports)
    monkeypatch.setitem(sys.modules, "kvscope.plugin", fake)  # type: ignore[arg-type]  # only probe_seams is called
    return reports


def _seam(name: str, status: str, reason: str | None) -> Any:
    return SimpleNamespace(
        name=name, target="m:C.f", process="engine", fact="a fact", lost_without="a check", status=status, reason=reason
    )


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    return write_run(tmp_path / "clean")


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    return write_run(tmp_path / "faulty", damage=True)


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    return write_run(tmp_path / "unfinished", coverage=False)


def test_check_ends_with_zero_on_a_clean_trace(clean: Path, capsys: Capture) -> None:
    assert main(["check", str(clean)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("CLEAN\ncoverage: 4 of 4 rows audited (100.0 %), 2 steps, 1 rank\n")
    assert re.search(r"\nrun: clean, started 2023-11-1[45] \d\d:\d\d:\d\d, 1 process\n", out)
    assert out.splitlines()[-1] == f"next: kvscope info {clean}"


@pytest.mark.parametrize("verb", ["check", "info"])
def test_the_run_that_was_read_is_named_with_its_start(
    verb: str, clean: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("TZ", "XYZ-05:30")
    time.tzset()
    try:
        main([verb, str(clean), "--json"])
        said = json.loads(capsys.readouterr().out)
        main([verb, str(clean)])
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()
    assert (said["run_id"], said["started"]) == ("clean", "2023-11-15T03:43:20+05:30")
    assert "clean, started 2023-11-15 03:43:20, 1 process\n" in capsys.readouterr().out


def test_of_several_runs_it_is_said_which_was_read_and_how_many_there_are(
    clean: Path, faulty: Path, tmp_path: Path, capsys: Capture
) -> None:
    for number, run in enumerate((faulty, clean)):
        for path in run.iterdir():
            os.utime(path, (number, number))
    assert main(["check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\nrun: clean, " in out
    assert "\nnote: this is the newest of 2 runs in this folder; name a run's folder to choose\n" in out
    main(["check", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["other_runs"] == ["faulty"]


def test_info_gives_the_verdict_and_names_check_only_where_it_says_more(
    clean: Path, faulty: Path, unfinished: Path, capsys: Capture
) -> None:
    told = {}
    for run in (clean, faulty, unfinished):
        main(["info", str(run)])
        lines = capsys.readouterr().out.splitlines()
        (verdict,) = [line.split()[1].rstrip(";") for line in lines if line.startswith("verdict ")]
        told[verdict] = lines[-1]
    assert told == {
        "clean": "next: kvscope rules",
        "findings": f"next: kvscope check {faulty}",
        "inconclusive": "next: kvscope doctor",
    }


def test_info_explains_numbers_that_steps_without_work_took(clean: Path, capsys: Capture) -> None:
    main(["info", str(clean)])
    assert "\nsteps         2 with work (numbers 1 to 2; empty ones take one, too), " in capsys.readouterr().out


def test_check_ends_with_one_on_findings_and_folds_repeats(faulty: Path, capsys: Capture) -> None:
    assert main(["check", str(faulty)]) == 1
    out = capsys.readouterr().out
    assert out.count("KV_GUARD reason=write_foreign_block check=C3 ") == 1
    assert "FINDINGS: 1 of 1 kind\ncoverage: 4 of 4 rows" in out
    assert "live and replay agree on every finding" in out
    assert out.splitlines()[-1] == "next: kvscope rules write_foreign_block"


def test_an_engine_that_failed_by_itself_is_not_called_clean_without_a_word(clean: Path, capsys: Capture) -> None:
    """Its trace may well be complete."""
    path = next(clean.rglob("all-*.jsonl"))
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    envelope = {
        key: lines[-1][key] for key in ("schema", "engine_id", "dp_rank", "mono_ns", "wall_ns", "after_step", "seq")
    }
    error = {"event": "kv.error", "component": "worker", "boundary": "worker.sample", "error_type": "builtins.OSError"}
    lines[-1]["seq"] += 1
    lines[-1:] = [envelope | error | {"native": True}, lines[-1]]
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    for shared in clean.rglob("all-*.shared"):
        shared.unlink()
    main(["check", str(clean)])
    out = " ".join(capsys.readouterr().out.split())
    assert "vLLM itself failed, 1 time: builtins.OSError in worker.sample" in out


def test_check_ends_with_three_where_the_trace_does_not_suffice(unfinished: Path, capsys: Capture) -> None:
    assert main(["check", str(unfinished)]) == 3
    out = capsys.readouterr().out
    assert out.startswith("INCONCLUSIVE\ncoverage: ")
    assert "the end is missing" in out
    said = " ".join(out.split())
    assert "note: all-0-100: no orderly end. Unless it still runs, the usual reason is that vLLM kills" in said
    assert "; vllm serve --shutdown-timeout 10 gives them time to end their traces note: " in said
    assert "note: nothing is recorded of the block pool: what only its books can show was not judged next: " in said


def test_min_coverage_decides(tmp_path: Path, capsys: Capture) -> None:
    run = write_run(tmp_path / "run")
    (path,) = run.glob("*.jsonl")
    path.write_text(path.read_text().replace('"digest":[["', '"digest":[["0', 1).replace('",', '",', 1))
    text = path.read_text()
    head, _, tail = text.partition('"digest":[["0')
    path.write_text(f'{head}"digest":[["0{tail[:15]}{tail[16:]}')
    assert main(["check", str(run), "--min-coverage", "0.5"]) == 3  # an unknown table is never clean
    assert "coverage: 3 of 4 rows audited (75.0 %)" in capsys.readouterr().out
    assert main(["check", str(run)]) == 3
    assert "coverage 75.0 % is below 0.99" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "/nowhere/at/all"], "/nowhere/at/all: no such file or folder"),
        (["info", "/nowhere/at/all"], "/nowhere/at/all: no such file or folder"),
        (["check"], "Missing argument"),
        (["nonsense"], "No such command 'nonsense'"),
        (["check", ".", "--min-coverage", "3"], "--min-coverage"),
        (["check", ".", "--min-coverage", "much"], "--min-coverage"),
        (["selftest", "--runner", "v3"], "kvscope: Invalid value for '--runner': 'v3' is not one of 'v1', 'v2'; see "),
        (["rules", "nulblock_write"], "did you mean null_block_write"),
        (
            ["rules", "C9"],
            "kvscope: rules: 'C9' is neither a reason nor a check of this version; kvscope rules lists both\n",
        ),
        (["rules", "\x1b[31m"], "kvscope rules lists both"),
        (["schema", "kv.wirte"], "did you mean kv.write"),
        (["schema", "\x1b[31m"], "kvscope schema lists them"),
        (["schema", ""], "kvscope schema lists them"),
        (["--wrong"], "No such option"),
    ],
)
def test_bad_input_is_one_line_and_ends_with_two(arguments: list[str], says: str, capsys: Capture) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.startswith("kvscope: ")
    assert captured.err.count("\n") == 1
    assert "\x1b" not in captured.err


def test_a_file_that_is_no_trace_is_unreadable(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr().err == f"kvscope: {path}: holds no complete kvscope.trace/1 record\n"


@pytest.mark.parametrize("part", [0.0, 0.1, 0.35, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("verb", ["check", "info"])
def test_a_trace_cut_anywhere_gets_an_answer(faulty: Path, verb: str, part: float, capsys: Capture) -> None:
    (path,) = faulty.glob("*.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    assert main([verb, str(path)]) in {0, 1, 2, 3}
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    assert "defect" not in captured.err


@pytest.mark.parametrize("verb", ["check", "info", "rules", "schema", "doctor"])
def test_json_is_one_document_with_the_same_exit_code(faulty: Path, verb: str, capsys: Capture) -> None:
    path = [str(faulty)] if verb in {"check", "info"} else []
    code = main([verb, *path])
    capsys.readouterr()
    assert main([verb, *path, "--json"]) == code
    captured = capsys.readouterr()
    assert json.loads(captured.out)


@pytest.mark.parametrize("verb", ["check", "info", "rules", "schema", "doctor"])
def test_text_fits_80_columns_and_ends_by_naming_the_next_command(faulty: Path, verb: str, capsys: Capture) -> None:
    main([verb, *([str(faulty)] if verb in {"check", "info"} else [])])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("next: kvscope ")
    long = [line for line in lines if len(line) > 80]
    assert all(line.startswith("KV_GUARD ") or str(faulty) in line for line in long)


def test_check_says_in_json_what_it_says_in_text(faulty: Path, capsys: Capture) -> None:
    main(["check", str(faulty), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (said["verdict"], said["exit_code"], said["live_and_replay_agree"]) == ("findings", 1, True)
    assert (said["rows_audited"], said["rows_scheduled"], said["coverage_share"]) == (4, 4, 1.0)
    (finding,) = said["findings"]
    assert finding["frozen"].startswith("KV_GUARD reason=write_foreign_block check=C3 action=log request=r1 group=0 ")
    assert finding["entry"]["scene"]["holders"] == ["r2"]


def test_info_counts_and_times(clean: Path, capsys: Capture) -> None:
    main(["info", str(clean), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["steps"] == 2
    assert said["events"] == {
        "kv.bind": 2, "kv.boundary": 2, "kv.coverage": 1, "kv.enabled": 1, "kv.read": 2, "kv.write": 2,
    }  # fmt: skip
    assert said["own_ns_per_step"] == 60_000
    assert said["versions"]["vllm"] == "0.32.0"
    main(["info", str(clean)])
    assert "60.0 µs a step, scheduler and slowest worker together" in capsys.readouterr().out


def test_rules_lists_every_reason_and_tells_one_in_full(capsys: Capture) -> None:
    assert main(["rules"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {reason} " in listed for reason in RULES)
    assert main(["rules", "read_null_block"]) == 0
    told = capsys.readouterr().out
    rule = RULES["read_null_block"]
    squeezed = " ".join(told.split())
    for text in (rule.fires, rule.silent, rule.proves_not, rule.part, *rule.sources):
        assert text in squeezed
    assert main(["rules", "read_null_block", "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)
    assert set(said) >= {"id", "check", "severity", "part", "fires", "silent", "sources", "proves_not"}


@pytest.mark.parametrize("name", ["C3", "c3"])
def test_rules_lists_the_reasons_of_a_check(name: str, capsys: Capture) -> None:
    assert main(["rules", name]) == 0
    heading, *listed = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert heading.startswith("C3  ownership: ")
    mine = [reason for reason, rule in RULES.items() if rule.check == "C3"]
    assert [line.split()[0] for line in listed if line.startswith("  ") and line[2] != " "] == mine
    assert main(["rules", name, "--json"]) == 0
    assert [said["id"] for said in json.loads(capsys.readouterr().out)] == mine


def test_whoever_follows_the_next_lines_learns_something_new_each_time(
    clean: Path, faulty: Path, unfinished: Path, capsys: Capture
) -> None:
    for start in ["doctor", "rules", "schema", *(f"{verb} {run}" for verb in ("check", "info")
                  for run in (clean, faulty, unfinished))]:  # fmt: skip
        seen = [start]
        while "--json" not in seen[-1] and seen[-1] != "selftest":
            main(seen[-1].split())
            seen.append(capsys.readouterr().out.splitlines()[-1].removeprefix("next: kvscope "))
        assert len({" ".join(step.split()) for step in seen}) == len(seen)
        judged = [step.split()[0] for step in seen]
        assert judged.count("check") <= 1
        assert judged.count("info") <= 1


def test_the_schema_that_is_printed_describes_a_trace(clean: Path, capsys: Capture) -> None:
    assert main(["schema", "--json"]) == 0
    validator = jsonschema.Draft202012Validator(json.loads(capsys.readouterr().out))
    (path,) = clean.glob("*.jsonl")
    for line in path.read_text().splitlines():
        validator.validate(json.loads(line))


@pytest.mark.parametrize("event", RECORDS)
def test_the_schema_of_one_event_describes_it_and_no_other(event: str, clean: Path, capsys: Capture) -> None:
    assert main(["schema", event, "--json"]) == 0
    validator = jsonschema.Draft202012Validator(json.loads(capsys.readouterr().out))
    (path,) = clean.glob("*.jsonl")
    for line in map(json.loads, path.read_text().splitlines()):
        assert validator.is_valid(line) is (line["event"] == event)
    assert main(["schema", event]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == event
    assert {f"  {name} " for name in RECORDS[event].__struct_fields__} <= {f"{line[:29].rstrip()} " for line in lines}
    assert max(map(len, lines)) <= 80
    assert not any("None" in line or "any value" in line for line in lines)


def test_the_schema_says_how_lists_of_integers_are_spelled(capsys: Capture) -> None:
    main(["schema", "kv.write"])
    told = capsys.readouterr().out
    assert "slots                      list of lists of Runs\n" in told
    assert "\nRuns\n" in told
    assert "\nRanges\n" not in told


def test_doctor_says_what_stands_in_the_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "something_else")
    monkeypatch.setenv("KVSCOPE_DISABLE", "1")
    monkeypatch.setenv("KVSCOPE_TYPO", "1")
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("KVSCOPE_DIR", str(blocked / "out"))
    assert main(["doctor"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    for text in ("leaves kvscope out", "KVSCOPE_DISABLE=1 switches", "cannot write into", "KVSCOPE_TYPO means nothing"):
        assert text in out


def test_doctor_lists_the_seams_and_what_a_refused_one_costs(seams: list[Any], capsys: Capture) -> None:
    main(["doctor"])
    assert "wrapped by x as well" in capsys.readouterr().out
    seams.append(_seam("runner_v1.slots", "refused", "has no method"))
    assert main(["doctor"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "in the way: seam runner_v1.slots is refused (has no method): a check" in out


def test_doctor_goes_on_where_the_host_cannot_be_imported(seams: list[Any], capsys: Capture) -> None:
    seams[:] = [SimpleNamespace()]
    assert main(["doctor"]) == 1
    assert "the seams could not be probed: AttributeError" in " ".join(capsys.readouterr().out.split())


def test_doctor_says_that_nothing_is_watched_without_vllm(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("kvscope.cli.doctor._version", {}.get)
    assert main(["doctor", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["seams"], said["checks"]) == (None, {})
    assert said["problems"] == ["vLLM is not installed here: nothing can be watched; traces can be read and checked"]
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "\nchecks        none would run here\n" in out
    assert "reasons" not in out
    assert "nothing stands in the way" not in out


@pytest.mark.parametrize(("name", "value"), [("KVSCOPE_DISABLE", "1"), ("VLLM_PLUGINS", "other")])
def test_doctor_lists_no_check_where_kvscope_is_kept_out(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    main(["doctor"])
    assert "checks        kv_trace: " in capsys.readouterr().out
    monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "\nchecks        none would run here\n" in out
    assert "reasons" not in out


def _fake_selftest(monkeypatch: pytest.MonkeyPatch, outcomes: list[Any], control: list[str]) -> None:
    result = SimpleNamespace(
        runner="v1", outcomes=outcomes, control_rows=170, control_findings=control, duration_s=61.0
    )
    fake = SimpleNamespace(run={"v1": result}.__getitem__)
    monkeypatch.setitem(sys.modules, "kvscope.testing.selftest", fake)  # type: ignore[arg-type]  # only run() is called
    monkeypatch.setattr("kvscope.cli.selftest.vllm_is_here", lambda: True)


def test_selftest_without_vllm_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    _fake_selftest(monkeypatch, [], [])
    monkeypatch.setattr("kvscope.cli.selftest.vllm_is_here", lambda: False)
    assert main(["selftest"]) == 2
    assert capsys.readouterr().err == "kvscope: selftest: needs vLLM, which is not installed here\n"


def test_selftest_names_a_module_that_is_missing_once_it_runs(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def run(_runner: str) -> None:
        raise ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers.models")

    fake = SimpleNamespace(run=run)
    monkeypatch.setattr("kvscope.cli.selftest.vllm_is_here", lambda: True)
    monkeypatch.setitem(sys.modules, "kvscope.testing.selftest", fake)  # type: ignore[arg-type]  # only run() is called
    assert main(["selftest"]) == 2
    assert capsys.readouterr().err == "kvscope: selftest: needs tokenizers, which is not installed here\n"


def outcome(fault: str, found: list[str], *, injected: bool = True, mistakes: list[str] | None = None) -> Any:
    return SimpleNamespace(
        fault=fault, expected="write_target_mismatch", found=found, injected=injected, mistakes=mistakes or []
    )


DETECTED = outcome("slot_plus_one", ["write_target_mismatch"])
MISNAMED = outcome("slot_of_other", ["read_null_block"], mistakes=["write_target_mismatch was not found"])
MISSED = outcome("slot_gone", [], mistakes=["write_target_mismatch was not found, but nothing"])
IDLE = outcome("never", [], injected=False, mistakes=["the fault found no occasion"])
MISPLACED = outcome(
    "slot_plus_one",
    ["write_target_mismatch"],
    mistakes=mistakes_in(
        FAULTS["slot_plus_one"],
        {"expected": "write_target_mismatch", "request_id": "a", "block_id": 6, "slot": 200, "step": 1},
        [Finding(reason="write_target_mismatch", step=9, trace_id="t", request_id="a", block_id=5, slot=184)],
        [9],
    ),
)


def test_selftest_tells_the_four_ends_apart() -> None:
    assert [verdict_on(o) for o in (DETECTED, MISNAMED, MISPLACED, MISSED, IDLE)] == [
        "detected", "wrong", "wrong", "missed", "not injected",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("outcomes", "control", "code"),
    [
        ([DETECTED], [], 0),
        ([DETECTED, MISNAMED], [], 1),
        ([DETECTED, MISPLACED], [], 1),
        ([DETECTED, MISSED], [], 1),
        ([DETECTED, IDLE], [], 1),
        ([DETECTED], ["read_null_block"], 1),
        ([], [], 1),
    ],
)
def test_selftest_passes_only_without_a_miss_and_without_a_false_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, outcomes: list[Any], control: list[str], code: int
) -> None:
    _fake_selftest(monkeypatch, outcomes, control)
    assert main(["selftest", "--runner", "v1"]) == code
    out = capsys.readouterr().out
    assert "170 rows audited" in out
    _fake_selftest(monkeypatch, outcomes, control)
    assert main(["selftest", "--json"]) == code
    said = json.loads(capsys.readouterr().out)
    assert said["numbers"]["faults"] == len(outcomes)
    assert [fault["mistakes"] for fault in said["faults"]] == [o.mistakes for o in outcomes]


def test_selftest_shows_every_difference_where_the_reason_is_right_and_the_place_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    mistakes = ["block_id is 5, injected was 6", "slot is 184, injected was 200"]
    _fake_selftest(monkeypatch, [MISPLACED, DETECTED], [])
    assert main(["selftest"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["slot_plus_one", "write_target_mismatch", "wrong"]
    assert lines[2:4] == [f"  - {mistake}" for mistake in mistakes]
    assert lines[4].split() == ["slot_plus_one", "write_target_mismatch", "detected"]
    assert main(["selftest", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["numbers"] | {"detected": 1, "wrong": 1} == said["numbers"]
    assert [(fault["verdict"], fault["mistakes"]) for fault in said["faults"]] == [
        ("wrong", mistakes), ("detected", []),
    ]  # fmt: skip


# As a process of its own ----------------------------------------------------------------------------------------------

KVSCOPE = [sys.executable, "-c", "import sys; from kvscope.cli import main; sys.exit(main())"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVSCOPE, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_version_and_help() -> None:
    assert run("--version").stdout == f"kvscope {__version__}\n"
    for arguments in ([], ["--help"], ["-h"]):
        told = run(*arguments)
        assert told.returncode == 0
        assert "check" in told.stdout


def test_the_help_has_one_whole_sentence_a_verb() -> None:
    listed = run("--help", COLUMNS="80").stdout.partition("\nCommands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == list(VERBS)
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []


def test_it_runs_as_a_module_and_names_the_next_command_as_it_was_called(clean: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "kvscope", "check", str(clean)], capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.splitlines()[-1].endswith(f" -m kvscope info {clean}")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs, which the shell does not look into."""
    folder = tmp_path / "my env" / "bin"
    folder.mkdir(parents=True)
    for name in ("kvscope", "vllm"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", [str(folder / "kvscope"), "rules"])
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_command_is_named_with_its_folder_unless_the_shell_finds_it(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [typed(), typed("vllm"), typed("other")] == ["'my env/bin/kvscope'", "'my env/bin/vllm'", "other"]
    monkeypatch.chdir(installed)
    assert typed() == "./kvscope"
    monkeypatch.setenv("PATH", f"{installed}:/usr/bin:/bin")
    assert [typed(), typed("vllm")] == ["kvscope", "vllm"]


def test_every_line_that_names_a_command_names_it_as_it_was_called(
    installed: Path, faulty: Path, capsys: Capture
) -> None:
    main(["check", str(faulty)])
    lines = capsys.readouterr().out.splitlines()
    assert "  'my env/bin/kvscope' rules write_foreign_block" in lines
    assert lines[-1] == "next: 'my env/bin/kvscope' rules write_foreign_block"
    main(["check"])
    assert capsys.readouterr().err.endswith("; see 'my env/bin/kvscope' check --help\n")


def test_offline_verbs_import_neither_vllm_nor_torch_and_start_fast(clean: Path) -> None:
    script = (
        "import sys; from kvscope.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(code or 10 * any(name in sys.modules for name in ('vllm', 'torch')))"
    )
    for verb in (["check", str(clean)], ["info", str(clean)], ["rules"], ["schema"]):
        assert subprocess.run([sys.executable, "-c", script, *verb], capture_output=True, check=False).returncode == 0


def test_nothing_is_coloured_in_a_pipe(faulty: Path) -> None:
    told = run("check", str(faulty), FORCE_COLOR="1")
    assert "\x1b" not in told.stdout
    assert told.stderr == ""


def test_a_reader_that_stops_reading_is_no_error(faulty: Path) -> None:
    with subprocess.Popen([*KVSCOPE, "check", str(faulty)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_a_terminal_that_knows_no_unicode_still_gets_its_report(clean: Path) -> None:
    told = run("info", str(clean), PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert told.returncode == 0
    assert "\\xb5s a step" in told.stdout


def test_ctrl_c_ends_quietly() -> None:
    script = (
        "import sys, signal; from kvscope.cli import main; import kvscope.analysis.reader as r;"
        "r.Trace.open = classmethod(lambda cls, path: (print('ready', flush=True), signal.pause()));"
        "sys.exit(main(['check', 'x']))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == b""


def test_a_defect_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def broken(path: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("kvscope.analysis.reader.Trace.open", broken)
    assert main(["check", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvscope: a defect of kvscope: ZeroDivisionError at test_commands.py:")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "error", [lambda: UnreadableTraceError("p", "m"), lambda: PermissionError(13, "Permission denied", "/p")]
)
def test_expected_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, error: Callable[[], Exception]
) -> None:
    def failing(path: object) -> None:
        raise error()

    monkeypatch.setattr("kvscope.analysis.reader.Trace.open", failing)
    assert main(["info", "x"]) == 2
    assert "p: " in capsys.readouterr().err
