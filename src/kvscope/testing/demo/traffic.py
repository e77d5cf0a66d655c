"""Completions over HTTP, many at a time, with prompts that share their beginnings as real ones do."""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kvscope.testing.server import Server

SYSTEM_PROMPTS = (
    "You answer questions about a large machine hall. Be brief, name the part that you mean, and give every number "
    "with its unit. If you do not know something, say so instead of guessing.\n",
    "You are the night editor of a small newspaper. Turn what the reporter sends you into one plain paragraph without "
    "adjectives, and keep every name as it was spelled.\n",
    "You translate recipes for people who have never cooked. Explain each step in one sentence, say how long it takes, "
    "and warn before anything becomes hot.\n",
)
"""The models here have one token a byte, so that each of these fills four blocks of 32 tokens or more."""

QUESTIONS = (
    "Which pump stands still?",
    "What happened on the bridge last night, and who saw it?",
    "How do I boil an egg?",
    "Why is the third line slower than the others since Monday?",
    "Begin.",
)


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What came back. `cached_tokens` are the prompt tokens that the server took from its prefix cache, `preemptions`
    how often a request lost its blocks to another one (None: the server does not say).
    """

    sent: int
    completed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int | None = None
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def mistakes(self) -> list[str]:
        """What did not go as it should, in a line at most."""
        if self.failures:
            return [f"{len(self.failures)} of {self.sent} completions failed: {self.failures[0]}"]
        if self.completed < self.sent:
            return [f"only {self.completed} of {self.sent} completions came back"]
        if not self.cached_tokens:
            return ["no prompt token came from the prefix cache, although the prompts share their beginnings"]
        return []


def prompts(number: int) -> list[str]:
    """Prompts of three families, mixed; those of a family begin alike, and no two are the same."""

    def endless() -> Iterator[str]:
        index = 0
        while True:
            system, question = SYSTEM_PROMPTS[index % len(SYSTEM_PROMPTS)], QUESTIONS[index % len(QUESTIONS)]
            yield f"{system}{question} ({index})"
            index += 1

    return list(islice(endless(), number))


def send(
    server: Server,
    *,
    requests: int,
    at_once: int,
    max_tokens: int,
    deadline_s: float,
    on_answer: Callable[[], None] = lambda: None,
) -> Traffic:
    """Send all requests, `at_once` at a time, and return when all are answered or `deadline_s` has passed.

    A request that fails is noted and not repeated.
    """
    traffic = Traffic(sent=requests)
    began = time.monotonic()

    def complete(prompt: str) -> Any:
        left = max(deadline_s - (time.monotonic() - began), 0.1)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return server.post("/v1/completions", body, timeout=left)

    pool = ThreadPoolExecutor(at_once, thread_name_prefix="demo")
    try:
        answers = [pool.submit(complete, prompt) for prompt in prompts(requests)]
        for answer in as_completed(answers, timeout=deadline_s + 1):
            _note(traffic, answer, max_tokens)
            on_answer()
    except TimeoutError:
        traffic.failures.append(f"time was up after {deadline_s:.0f} s")
    finally:
        # Whoever is interrupted here stops the server, which ends the requests that are under way.
        pool.shutdown(wait=False, cancel_futures=True)
    traffic.seconds = time.monotonic() - began
    return traffic


def preemptions(server: Server) -> int | None:
    """How often the server has preempted a request since it started (vLLM's own metric)."""
    counts = re.findall(r"^vllm:num_preemptions_total\{.*\} (\S+)$", server.get("/metrics"), re.MULTILINE)
    return int(sum(map(float, counts))) if counts else None


def _note(traffic: Traffic, answer: "Future[Any]", max_tokens: int) -> None:
    error = answer.exception()
    if error is not None:
        traffic.failures.append(f"{type(error).__name__}: {error}")
        return
    usage = answer.result()["usage"]
    traffic.completed += 1
    traffic.prompt_tokens += int(usage["prompt_tokens"])
    traffic.cached_tokens += int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    traffic.completion_tokens += int(usage["completion_tokens"])
    if usage["completion_tokens"] != max_tokens:
        traffic.failures.append(f"{usage['completion_tokens']} tokens came back instead of {max_tokens}")
