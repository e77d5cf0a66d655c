"""A real `vllm serve` in processes of its own, on a free port of the loopback interface."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvscope.testing import models
from kvscope.testing.environment import Runner, environment


class ServerFailedError(RuntimeError):
    """The server ended, or its time was up, before it was ready. Carries the end of its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A server that has been ready. `url` has no trailing slash; `log` holds stdout and stderr of all its processes."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def get(self, path: str, *, timeout: float = 60) -> str:
        """The body of `GET path`; urllib.error.HTTPError for a status that is not 2xx."""
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: Mapping[str, object], *, timeout: float = 300) -> Any:
        """The decoded JSON answer to `POST path`; urllib.error.HTTPError for a status that is not 2xx."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    def complete(self, prompt: Sequence[int], max_tokens: int, **fields: object) -> Any:
        """A greedy completion of token ids, with the ids of the answer in `choices[0].token_ids`."""
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
        return self.post("/v1/completions", body | {"ignore_eos": True, "return_token_ids": True} | fields)

    def stop(self, *, timeout: float = 60) -> int:
        """Ask it to end as an orchestrator does, with SIGTERM, and return the exit code (negative: killed by signal).

        What is left of its process group when the time is up is killed.
        """
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._kill_group()
            code = self.process.wait()
        self._kill_group()
        return code

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(model: Path, port: int, *, additional_config: Mapping[str, object] | None = None) -> list[str]:
    """The `vllm serve` command line with the small settings that `engine.start` uses, too."""
    arguments = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    arguments += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "512", "--block-size", "32"]
    arguments += ["--num-gpu-blocks-override", "128", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"]
    arguments += ["--kv-cache-memory-bytes", str(64 << 20), "--enable-prompt-tokens-details"]
    if additional_config is not None:
        arguments += ["--additional-config", json.dumps(additional_config)]
    return arguments


def start_server(
    log: Path,
    *,
    runner: Runner = "v1",
    model: models.Kind | Path = "qwen3",
    port: int | None = None,
    additional_config: Mapping[str, object] | None = None,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    deadline_s: float = 180,
) -> Server:
    """Start a server and wait until `/health` answers.

    `arguments` are appended to the command line, so that they win over its defaults; `variables` likewise over the
    environment. Raises ServerFailedError if the server ends first or `deadline_s` passes.
    """
    path = model if isinstance(model, Path) else models.build(model)
    port = port or free_port()
    arguments = [*command(path, port, additional_config=additional_config), *arguments]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments,
            env={**os.environ, **environment(runner, in_process=False), **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(url=f"http://127.0.0.1:{port}", log=log, process=process)
    try:
        _wait_until_ready(server, time.monotonic() + deadline_s)
    except BaseException:
        server.stop(timeout=5)
        raise
    return server


@contextmanager
def serving(log: Path, **settings: Any) -> Iterator[Server]:
    """`start_server` for the duration of a `with` block. A block that wants the exit code calls `stop` itself."""
    server = start_server(log, **settings)
    try:
        yield server
    finally:
        server.stop()


def _wait_until_ready(server: Server, deadline: float) -> None:
    while True:
        code = server.process.poll()
        if code is not None:
            raise ServerFailedError(f"vllm serve ended with exit code {code}\n{_tail(server.log)}")
        try:
            server.get("/health", timeout=2)
        except (OSError, urllib.error.URLError):
            if time.monotonic() > deadline:
                raise ServerFailedError(f"vllm serve was not ready in time\n{_tail(server.log)}") from None
            time.sleep(0.25)
        else:
            return


def _tail(log: Path, lines: int = 25) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
