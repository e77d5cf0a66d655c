"""One cell of the matrix, in this process: the same requests with kvscope off and on, and what came of it.

    python -m kvscope.testing.matrix.cell gemma3 v1 --rows 1000

prints the result as JSON. A process can have one runner only, and some features leave a process in which no other
engine can start; so the matrix gives each cell a process of its own.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import msgspec
import typer

from kvscope.testing import engine
from kvscope.testing.environment import Runner, apply_environment
from kvscope.testing.load import completions, send
from kvscope.testing.matrix import streams, traffic
from kvscope.testing.matrix.features import Feature, adapters, features
from kvscope.testing.matrix.traffic import Call, Outcome
from kvscope.testing.matrix.verdict import TraceVerdict, verdict_on
from kvscope.testing.random_weights import register_random_weights
from kvscope.testing.server import serving
from kvscope.testing.storm import forced_async

Word = Literal["ok", "failed", "not run"]

_PROBES = 4
_PROBE_TOKENS = 16
_KEPT = 8
"""How many tokens at the end of a prompt stay as they are: more than a convolution over tokens sees."""
_SERVER_DEADLINE_S = 400


class CellResult(msgspec.Struct, kw_only=True):
    """A cell. ``outputs`` is ``equal``, ``complete`` (where they cannot be compared), or says what differs.

    ``findings`` counts by reason what is not a known defect of vLLM; ``known`` what is, with where it is explained.
    ``mistakes`` are the reasons why the cell failed, ``reason`` why it could not run. ``cpu_seconds`` are those of the
    cell's process, and of its children that have ended.
    """

    feature: str
    runner: str
    word: Word
    outputs: str = ""
    requests: int = 0
    rows: int = 0
    rows_scheduled: int = 0
    coverage: str = ""
    not_judged: dict[str, int] = msgspec.field(default_factory=dict)
    findings: dict[str, int] = msgspec.field(default_factory=dict)
    known: dict[str, str] = msgspec.field(default_factory=dict)
    numbers: dict[str, int] = msgspec.field(default_factory=dict)
    mistakes: list[str] = msgspec.field(default_factory=list)
    reason: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def line(self) -> str:
        """The cell on one line."""
        name = f"{self.feature} {self.runner}"
        if self.word == "not run":
            return f"not run  {name:24} {self.reason}"
        if self.word == "failed":
            return f"FAILED   {name:24} {'; '.join(self.mistakes[:3])}"
        parts = [self.coverage.removeprefix("coverage: ").partition(", because")[0], f"outputs {self.outputs}"]
        parts += [f"{sum(self.findings.values())} findings"]
        parts += [f"{reason}: a defect of vLLM ({place})" for reason, place in self.known.items()]
        parts += [f"{count:,} rows of {group} not judged" for group, count in self.not_judged.items()]
        parts += [f"{count:,} {name.replace('_', ' ')}" for name, count in self.numbers.items() if name != "steps"]
        return f"ok       {name:24} {', '.join(parts)}, {self.seconds:.0f} s"


def run_cell(feature: Feature, runner: Runner, rows: int, folder: Path) -> CellResult:
    """Run one cell. Whatever goes wrong, in vLLM or here, is in the result."""
    began, before = time.monotonic(), os.times()
    result = CellResult(feature=feature.name, runner=runner, word="failed")
    try:
        _run(feature, runner, rows, folder, result)
    except Exception as error:  # noqa: BLE001  a cell reports whatever the engine raises
        traceback.print_exc(file=sys.stderr)
        result.mistakes.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
    if not result.mistakes:
        result.word = "ok"
    elif (obstacle := feature.obstacles.get(runner)) and obstacle.error in " ".join(result.mistakes):
        result.word, result.reason = "not run", f"{obstacle.reason} ({obstacle.error})"
    result.seconds = time.monotonic() - began
    now = os.times()
    result.cpu_seconds = sum(now[:4]) - sum(before[:4])
    return result


def _run(feature: Feature, runner: Runner, rows: int, folder: Path, result: CellResult) -> None:
    serve = {"in-process": _in_process, "streams": _streams, "server": _server}[feature.way]
    folder.mkdir(parents=True, exist_ok=True)
    calls = feature.requests(runner, rows)
    result.requests = len(calls)
    off = (
        _off_apart(feature, runner, rows)
        if feature.one_engine
        else serve(feature, runner, calls, folder / "off.log", {})[0]
    )
    part = {"enabled": True, "action": "raise"}
    switches = {"kv_trace": part, "kv_guard_config": part, "kv_output": {"dir": str(folder / "trace")}}
    on, client_ids = serve(feature, runner, calls, folder / "on.log", switches)
    verdict = verdict_on(folder / "trace", client_ids, ranks=feature.ranks, judged=feature.judged)
    result.outputs = _compared(off, on) if feature.way == "in-process" else _complete(off, on)
    result.rows, result.rows_scheduled = verdict.rows_audited, verdict.rows_scheduled
    result.coverage, result.not_judged = verdict.coverage, verdict.not_judged
    result.known = {reason: feature.known[reason] for reason in verdict.findings if reason in feature.known}
    result.findings = {reason: count for reason, count in verdict.findings.items() if reason not in feature.known}
    result.numbers = _numbers(feature, on, off, verdict)
    result.mistakes += _mistakes(feature, result, verdict)


def _mistakes(feature: Feature, result: CellResult, verdict: TraceVerdict) -> list[str]:
    found = [f"found: {example}" for example in verdict.examples if example.partition(":")[0] not in feature.known]
    found += verdict.complaints
    if result.outputs not in {"equal", "complete"}:
        found.append(f"outputs: {result.outputs}")
    if verdict.ranks != feature.ranks * feature.engines:
        found.append(f"{verdict.ranks} ranks in the trace instead of {feature.ranks * feature.engines}")
    found += [f"no evidence of the feature: {name} is 0" for name in feature.evidence if not result.numbers.get(name)]
    return found


def _numbers(feature: Feature, on: Outcome, off: Outcome, verdict: TraceVerdict) -> dict[str, int]:
    numbers = {name: count for name, count in {**off.numbers, **on.numbers}.items() if count}
    traced = {"preemptions": verdict.preemptions, "chunked_prompts": verdict.chunked_prompts, "steps": verdict.steps}
    numbers |= {name: count for name, count in traced.items() if count}
    if "adapted" in feature.evidence:
        numbers["adapted"] = sum(
            answer != on.answers.get(name.replace("base-", "adapter-"))
            for name, answer in on.answers.items()
            if name.startswith("base-")
        )
    return numbers


def _compared(off: Outcome, on: Outcome) -> str:
    if (unfinished := len(off.unfinished) + len(on.unfinished)) > 0:
        return f"{unfinished} requests did not finish"
    differing = [name for name in off.answers | on.answers if off.answers.get(name) != on.answers.get(name)]
    if differing:
        return f"{len(differing)} of {len(off.answers)} answers differ, {differing[0]} first"
    return "equal" if off.answers and off.aborted == on.aborted else "nothing was answered, or the aborts differ"


def _complete(off: Outcome, on: Outcome) -> str:
    missing = [*off.unfinished, *on.unfinished]
    if missing:
        return f"{len(missing)} requests did not finish, {missing[0]} first"
    return "complete" if off.answers and off.answers.keys() == on.answers.keys() else "not the same requests answered"


def _in_process(
    feature: Feature, runner: Runner, calls: Sequence[Call], _log: Path, switches: Mapping[str, object]
) -> tuple[Outcome, list[str]]:
    settings = feature.engine_settings(runner)
    forced: AbstractContextManager[None] = forced_async() if feature.forced_async else nullcontext()
    register_random_weights()
    compiled = _compilations()
    with forced, engine.running(feature.model(), additional_config=switches, **settings) as llm:
        outcome = traffic.serve(llm, calls, adapters() if "adapted" in feature.evidence else None)
        config = llm.llm_engine.vllm_config
        outcome.numbers["asynchronous"] = int(bool(config.scheduler_config.async_scheduling))
        outcome.numbers["compiled"] = _compilations() - compiled
        if not switches and "prompt_dependent" in feature.evidence:
            outcome.numbers["prompt_dependent"] = _prompt_dependent(llm, calls)
    return outcome, [call.name for call in calls]


def _off_apart(feature: Feature, runner: Runner, rows: int) -> Outcome:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_off_by_name, feature.name, runner, rows).result()


def _off_by_name(name: str, runner: Runner, rows: int) -> Outcome:
    feature = features()[name]
    return _in_process(feature, runner, feature.requests(runner, rows), Path(), {})[0]


def _compilations() -> int:
    """How often vLLM has compiled a model in this process, or has loaded one that it had compiled before."""
    from vllm.compilation.counter import compilation_counter as counter

    return int(counter.num_aot_compiles + counter.num_aot_artifacts_loaded + counter.num_backend_compilations)


def _prompt_dependent(llm: Any, calls: Sequence[Call]) -> int:
    """How many answers change with the beginning of their prompt: without that, no output tells anything about the
    cache.
    """
    probes = []
    for number, call in enumerate(calls[:_PROBES]):
        for shift in (0, 1):
            prompt, inner = dict(call.prompt), None
            if "decoder_prompt" in prompt:
                inner = prompt["decoder_prompt"] = dict(prompt["decoder_prompt"])
            text = inner if inner is not None else prompt
            tokens = text["prompt_token_ids"]
            probed = len(tokens) - min(_KEPT, len(tokens) // 2)
            text["prompt_token_ids"] = [token + 7 * shift for token in tokens[:probed]] + tokens[probed:]
            sampling = dict(call.sampling) | {"max_tokens": _PROBE_TOKENS}
            probes.append(Call(name=f"probe-{number}-{shift}", prompt=prompt, sampling=sampling))
    answers = traffic.serve(llm, probes).answers
    return sum(answers[f"probe-{number}-0"] != answers[f"probe-{number}-1"] for number in range(len(probes) // 2))


def _streams(
    feature: Feature, runner: Runner, calls: Sequence[Call], _log: Path, switches: Mapping[str, object]
) -> tuple[Outcome, list[str]]:
    settings = feature.engine_settings(runner)
    settings["num_gpu_blocks_override"] = settings.pop("num_blocks")
    settings |= {"block_size": 32, "dtype": "float32"}
    outcome = streams.serve(feature.model(), settings, switches, calls)
    return outcome, [call.name for call in calls]


def _server(
    feature: Feature, runner: Runner, calls: Sequence[Call], log: Path, switches: Mapping[str, object]
) -> tuple[Outcome, list[str]]:
    """Requests of :mod:`kvscope.testing.load`, as many as there are calls, some of which are cancelled."""
    arguments = ["--data-parallel-size", str(feature.engines), "--shutdown-timeout", "20"]
    requests = completions(len(calls))
    given = {"additional_config": switches, "arguments": arguments, "deadline_s": _SERVER_DEADLINE_S}
    with serving(log, runner=runner, **given) as server:
        load = send(server.url, requests, deadline_s=_SERVER_DEADLINE_S)
        server.stop()
    outcome = Outcome(unfinished=load.mistakes(requests))
    outcome.answers = {f"http-{number}": [answer.tokens] for number, answer in enumerate(load.answers)}
    outcome.numbers["aborted"] = sum(answer.cancelled for answer in load.answers)
    return outcome, load.client_ids


def main(
    feature: str,
    runner: str,
    rows: int = typer.Option(1000, help="About how many rows to make."),
    out: Path | None = typer.Option(None, help="Where to write the result instead of printing it."),  # noqa: B008  typer reads it
) -> None:
    """Run one cell in this process."""
    name: Runner = "v2" if runner == "v2" else "v1"
    apply_environment(name)
    with tempfile.TemporaryDirectory(prefix="kvscope-cell-") as folder:
        result = run_cell(features()[feature], name, rows, Path(folder))
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=1)
    if out is None:
        sys.stdout.write(f"{encoded.decode()}\n")
    else:
        out.write_bytes(encoded)
    sys.stderr.write(f"{result.line}\n")
    raise typer.Exit(1 if result.word == "failed" else 0)


if __name__ == "__main__":
    typer.run(main)
