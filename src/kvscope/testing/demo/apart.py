"""Runs a module of the demo as a program in a process of its own: vLLM starts fresh there, and writes into a log."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


class EngineFailedError(RuntimeError):
    """A process with an engine did not end well. Carries the end of its log."""


def run_module(name: str, arguments: Sequence[str], *, what: str, log: Path, deadline_s: float) -> None:
    """`python -m name arguments`, its output in `log`. Neither it nor what it starts outlives this call.

    Raises EngineFailedError, which calls it `what`, if it ends with anything but 0 or has not ended after `deadline_s`.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", name, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        raise EngineFailedError(f"{what} did not end in {deadline_s:.0f} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code != 0:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:])
        raise EngineFailedError(f"{what} ended with exit code {code}\n{tail}")
