"""One engine with one injected fault, in a process of its own that leaves a trace behind.

    python -m kvscope.testing.demo.fault --runner v1 --fault slot_foreign_block --dir OUT

The engine runs under action `log`, so that the step with the fault and those after it stand in the trace. The trace
goes to `OUT/<run_id>/`; `OUT/injected.json` says what was really done and what is wrong with the findings about it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from kvscope.checks.finding import Finding
from kvscope.testing.demo.apart import run_module
from kvscope.testing.engine import Runner, apply_environment, running
from kvscope.testing.faults import FAULTS, arm, occasion, workload
from kvscope.testing.live import LiveTrace, findings_in, steps_in
from kvscope.testing.selftest import mistakes_in

INJECTED = "injected.json"
_AFTER_STEPS = 6


def run_apart(runner: Runner, name: str, directory: Path, log: Path, *, deadline_s: float) -> dict[str, Any]:
    """`run` in a process of its own; what it wrote into `injected.json`. Raises `apart.EngineFailedError`."""
    arguments = ["--runner", runner, "--fault", name, "--dir", str(directory)]
    run_module(__name__, arguments, what="the engine with the fault", log=log, deadline_s=deadline_s)
    report: dict[str, Any] = json.loads((directory / INJECTED).read_text(encoding="utf-8"))
    return report


def run(runner: Runner, name: str, directory: Path) -> dict[str, Any]:
    """Inject the fault once, and return what is written into `injected.json`.

    `what` is `Injection.what` (None: the fault found no occasion), `step` the number of the step in the trace that it
    hit, `found` the reasons that the live engine recorded, `mistakes` what `selftest.mistakes_in` says about them.
    """
    apply_environment(runner)
    part = {"enabled": True, "action": "log"}
    config = {"kv_trace": part, "kv_guard_config": part, "kv_output": {"dir": str(directory), "log": "off"}}
    settings, traffic = occasion(FAULTS[name])
    with running(additional_config=config, **settings) as llm:
        trace = LiveTrace(llm)
        with arm(name, after_steps=_AFTER_STEPS) as injection:
            workload(llm, until=lambda: injection.fired, **traffic)
        records = trace.records()
    findings, steps, what = findings_in(records), steps_in(records), injection.what
    number = (what["step"] or 0) if what is not None else 0
    return {
        "fault": name,
        "summary": FAULTS[name].summary,
        "what": what,
        "step": steps[number - 1] if 0 < number <= len(steps) else None,
        "found": [finding.reason for finding in findings],
        "mistakes": mistakes_in(FAULTS[name], what, findings, steps),
    }


def not_found(report: dict[str, Any], findings: list[Finding]) -> list[str]:
    """What is missing in findings that were made from the trace alone, without this process's knowledge."""
    what = report["what"]
    expected = (what["expected"], what["request_id"], what["block_id"], what["slot"], report["step"])
    found = [(f.reason, f.request_id, f.block_id, f.slot, f.step) for f in findings]
    return [] if expected in found else [f"injected was {expected}, but the replay found {found or 'nothing'}"]


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description="Run an engine with one injected fault, and keep its trace.")
    parser.add_argument("--runner", choices=("v1", "v2"), default="v1")
    parser.add_argument("--fault", choices=sorted(FAULTS), required=True)
    parser.add_argument("--dir", type=Path, required=True)
    arguments = parser.parse_args()
    report = run(arguments.runner, arguments.fault, arguments.dir.absolute())
    arguments.dir.mkdir(parents=True, exist_ok=True)
    (arguments.dir / INJECTED).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
