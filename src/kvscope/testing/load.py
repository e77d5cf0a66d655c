"""Hundreds of completions over HTTP at the same moment, streamed, with shared prefixes, some given up half-way.

    python -m kvscope.testing.load --requests 700 --runner v1

starts a server with trace and guard on under `raise`, sends them all at once, ends the server, and says what its trace
is worth: each request that was answered, whole or in part, must be found under one trace_id in the declaration, the
plan, and the result of each of its steps, and `kvscope check` must call the trace clean.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from kvscope.testing.environment import Runner, apply_environment
from kvscope.testing.matrix.verdict import TraceVerdict, verdict_on
from kvscope.testing.server import serving

SHORTEST, LONGEST = 8, 16
"""Tokens of an answer."""

_PREFIXES, _PREFIX_TOKENS, _LONGEST_TAIL = 5, 64, 40
_CANCELLED_SHARE = 0.15
_SEQS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One request. `cancel_at`: the client is gone when it has so many tokens."""

    prompt: Sequence[int]
    max_tokens: int
    cancel_at: int | None = None


@dataclass(kw_only=True, slots=True)
class Answer:
    """What one client saw. `client_id` is None where not even the first token came."""

    client_id: str | None = None
    tokens: list[int] = field(default_factory=list)
    cancelled: bool = False
    finished: bool = False
    error: str | None = None


@dataclass(kw_only=True, slots=True)
class Load:
    """All answers, in the order of the requests, and how many requests were under way at most."""

    answers: list[Answer]
    most_in_flight: int
    seconds: float

    @property
    def client_ids(self) -> list[str]:
        return [answer.client_id for answer in self.answers if answer.client_id]

    def mistakes(self, completions: Sequence[Completion]) -> list[str]:
        """What went wrong with an answer, a line each."""
        found = []
        for number, (answer, asked) in enumerate(zip(self.answers, completions, strict=True)):
            if answer.error:
                found.append(f"request {number}: {answer.error}")
            elif not answer.cancelled and (not answer.finished or len(answer.tokens) != asked.max_tokens):
                found.append(f"request {number}: {len(answer.tokens)} of {asked.max_tokens} tokens")
        if len(set(self.client_ids)) != len(self.answers):
            found.append(f"{len(self.answers)} requests, {len(set(self.client_ids))} different ids")
        return found


def completions(count: int, seed: int = 3) -> list[Completion]:
    """Requests of which three in four begin with one of five prefixes of two blocks, and some are given up."""
    dice = random.Random(seed)
    prefixes = [[dice.randrange(4, 260) for _ in range(_PREFIX_TOKENS)] for _ in range(_PREFIXES)]
    found = []
    for _ in range(count):
        tail = [dice.randrange(4, 260) for _ in range(dice.randrange(1, _LONGEST_TAIL))]
        tokens = dice.randrange(SHORTEST, LONGEST + 1)
        cancelled = dice.random() < _CANCELLED_SHARE
        found.append(
            Completion(
                prompt=(dice.choice(prefixes) if dice.random() < 0.75 else []) + tail,
                max_tokens=tokens,
                cancel_at=dice.randrange(1, tokens - 1) if cancelled else None,
            )
        )
    return found


def send(url: str, requests: Sequence[Completion], *, deadline_s: float) -> Load:
    """Send all of them to the server at `url` at the same time, and wait until each is through."""
    return asyncio.run(asyncio.wait_for(_send(url, requests), deadline_s))


async def _send(url: str, requests: Sequence[Completion]) -> Load:
    import aiohttp

    began = time.monotonic()
    clients = _Clients()
    unlimited = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=unlimited, timeout=aiohttp.ClientTimeout(total=None)) as session:
        answers = await asyncio.gather(*(clients.ask(session, request) for request in requests))
    return Load(answers=answers, most_in_flight=clients.most, seconds=time.monotonic() - began)


class _Clients:
    """Counts how many requests have been sent and are not through."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    async def ask(self, session: Any, request: Completion) -> Answer:
        import aiohttp

        body = {
            "model": "tiny",
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        answer = Answer()
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            async with session.post("/v1/completions", json=body) as response:
                if response.status != 200:
                    answer.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                else:
                    await _read(response, request, answer)
        except aiohttp.ClientError as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            self.now -= 1
        return answer


async def _read(response: Any, request: Completion, answer: Answer) -> None:
    """The events of one stream. Leaving before its end closes the connection, which is how a client cancels."""
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            answer.finished = True
            return
        event = json.loads(data)
        if "error" in event:
            answer.error = str(event["error"])[:200]
            return
        answer.client_id = event["id"]
        for choice in event["choices"]:
            answer.tokens += choice.get("token_ids") or []
        if request.cancel_at is not None and len(answer.tokens) >= request.cancel_at:
            answer.cancelled = True
            return


@dataclass(kw_only=True, slots=True)
class LoadResult:
    """What one server under load came to. `mistakes` is empty where everything is as it should be."""

    load: Load
    exit_code: int
    verdict: TraceVerdict
    mistakes: list[str]

    @property
    def line(self) -> str:
        load, verdict = self.load, self.verdict
        cancelled = sum(answer.cancelled for answer in load.answers)
        return (
            f"{len(load.answers)} requests, {load.most_in_flight} in flight at once, {cancelled} cancelled, "
            f"{load.seconds:.0f} s: {verdict.word}; {verdict.coverage}"
        )


def under_load(runner: Runner, folder: Path, *, count: int, deadline_s: float) -> LoadResult:
    """Start a server, send so many requests at once, end it and judge its trace, all below `folder`."""
    part = {"enabled": True, "action": "raise"}
    config = {"kv_trace": part, "kv_guard_config": part, "kv_output": {"dir": str(folder / "trace")}}
    arguments = ["--max-num-seqs", str(_SEQS), "--num-gpu-blocks-override", "256", "--max-num-batched-tokens", "1024"]
    requests = completions(count)
    with serving(
        folder / "server.log",
        runner=runner,
        additional_config=config,
        arguments=[*arguments, "--shutdown-timeout", "20"],
    ) as server:
        server.complete([5, 6, 7], 2)  # what is compiled or allocated on the first request is not part of the load
        load = send(server.url, requests, deadline_s=deadline_s)
        exit_code = server.stop()
    verdict = verdict_on(folder / "trace", load.client_ids)
    mistakes = [*load.mistakes(requests), *verdict.complaints]
    mistakes += [f"{count} x {reason}" for reason, count in verdict.findings.items()]
    if exit_code != 0:
        mistakes.append(f"the server ended with exit code {exit_code}")
    return LoadResult(load=load, exit_code=exit_code, verdict=verdict, mistakes=mistakes)


def main(
    requests: int = typer.Option(700, help="How many at once."),
    runner: str = typer.Option("v1", help="vLLM's model runner: v1 or v2."),
    deadline: float = typer.Option(300.0, help="Seconds after which the load is given up."),
) -> None:
    """Put one server under load and judge its trace."""
    name: Runner = "v2" if runner == "v2" else "v1"
    apply_environment(name, in_process=False)
    with tempfile.TemporaryDirectory(prefix="kvscope-load-") as folder:
        result = under_load(name, Path(folder), count=requests, deadline_s=deadline)
    sys.stdout.write("".join(f"wrong: {mistake}\n" for mistake in result.mistakes[:20]))
    sys.stdout.write(f"{result.line}\n")
    raise typer.Exit(1 if result.mistakes else 0)


if __name__ == "__main__":
    typer.run(main)
