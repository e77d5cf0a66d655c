"""Takes the picture of the live page in the README again: ``python scripts/take_picture.py [FILE]``.

A real engine in this process (the tiny model of the tests, on a CPU) serves waves of requests for over a minute, many
of which begin alike; one fault is injected on the way. A headless Chromium looks at its exporter meanwhile. So what is
in the picture is what such a run says, and a panel without data says why.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvscope.metrics.place import places_in
from kvscope.testing import engine
from kvscope.testing.browser import Page, chromium
from kvscope.testing.faults import arm

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "live-page.png"
SECONDS = 76.0
WAVE_S = 30.0
"""The last one is taken at its height."""
MOST_BYTES = 150_000
WIDTH = 1280
ENGINE: dict[str, Any] = {
    "num_blocks": 160,
    "block_size": 32,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "max_model_len": 512,
    "disable_log_stats": False,
}
FAULT = "slot_foreign_block"


def main(picture: Path) -> None:
    program = chromium()
    if program is None:
        sys.exit("take_picture: no Chromium here (Debian: chromium-headless-shell)")
    with tempfile.TemporaryDirectory() as folder:
        parts = {part: {"enabled": True} for part in ("kv_trace", "kv_guard_config", "kv_monitor")}
        config = parts | {"kv_output": {"dir": folder, "log": "off"}}
        with (
            engine.running(additional_config=config, **ENGINE) as llm,
            Page(program, Path(folder) / "profile", width=WIDTH) as page,
        ):
            page.open(_address(Path(folder)))
            _serve(llm, page)
            height = page.value("Math.ceil(document.querySelector('main').getBoundingClientRect().bottom)")
            page.command(
                "Emulation.setDeviceMetricsOverride", width=WIDTH, height=height, deviceScaleFactor=1, mobile=False
            )
            picture.parent.mkdir(parents=True, exist_ok=True)
            size = len(page.picture(picture))
    if size > MOST_BYTES:
        sys.exit(f"take_picture: {picture} has {size} bytes, more than {MOST_BYTES}")
    print(f"{picture}: {WIDTH} x {height}, {size} bytes")


def _address(output: Path) -> str:
    """Where the run's exporter is, once it listens."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for place in (place for run in output.iterdir() if run.is_dir() for place in places_in(run)):
            return place.url
        time.sleep(0.1)
    sys.exit("take_picture: the run has no exporter")


def _serve(llm: Any, page: Page) -> None:
    """Waves of requests, as many as the time of the wave asks for."""
    dice, began, asked_at, count = random.Random(7), time.monotonic(), 0.0, 0
    openings = [[dice.randrange(4, 260) for _ in range(96)] for _ in range(4)]
    fault = arm(FAULT, after_steps=400)
    with fault:
        while (now := time.monotonic() - began) < SECONDS:
            wanted = 4 + 22 * (0.5 - 0.5 * math.cos(2 * math.pi * now / WAVE_S)) * dice.uniform(0.7, 1.0)
            while llm.llm_engine.get_num_unfinished_requests() < wanted:
                count += 1
                _ask(llm, f"picture-{count}", openings, dice)
            llm.llm_engine.step()
            time.sleep(0.01)
            if now >= asked_at:  # what the browser reports has to be taken
                page.value("document.body.dataset.state")
                asked_at = now + 1
    if not fault.fired:
        sys.exit(f"take_picture: the fault {FAULT} did not come about")


def _ask(llm: Any, name: str, openings: list[list[int]], dice: random.Random) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    opening = dice.choice(openings) if dice.random() < 0.6 else []
    prompt = opening + [dice.randrange(4, 260) for _ in range(dice.randrange(20, 120))]
    parameters = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=dice.randrange(20, 160))
    llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), parameters)


if __name__ == "__main__":
    engine.apply_environment("v1")
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
