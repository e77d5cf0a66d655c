"""Record tests/fixtures/trace: what this release writes, kept so that every later one can be shown to read it.

    .venv/bin/python scripts/record_fixture.py

It runs a real engine (runner V1, trace and guard on, one fault injected) and replaces what is there. A fixture of a
release is not remade after it: a new release gets one beside it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from kvscope import __version__
from kvscope.testing.engine import apply_environment, running
from kvscope.testing.faults import SETTINGS, arm, workload

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures"
FAULT = "slot_foreign_block"
SAID_FOLDER = "/var/log/kvscope"
"""Stands in the records in place of the folder in which they were made."""


def record() -> Path:
    """Record the trace, and return its folder."""
    part = {"enabled": True, "action": "log"}
    kept = FIXTURES / f"trace-{__version__}"
    with tempfile.TemporaryDirectory() as made:
        config = {"kv_trace": part, "kv_guard_config": part, "kv_output": {"dir": made, "log": "off"}}
        with running(additional_config=config, **SETTINGS) as llm, arm(FAULT, after_steps=3) as injection:
            workload(llm, max_tokens=12)
        assert injection.fired
        (run,) = Path(made).iterdir()
        shutil.rmtree(kept, ignore_errors=True)
        (kept / "run").mkdir(parents=True)
        for path in sorted(run.iterdir()):
            content = path.read_bytes()
            if path.suffix == ".jsonl":
                content = content.replace(made.encode(), SAID_FOLDER.encode())
            assert made.encode() not in content
            (kept / "run" / path.name).write_bytes(content)
    return kept


if __name__ == "__main__":
    apply_environment("v1")
    folder = record()
    print(f"{sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()):,} bytes in {folder.name}")
