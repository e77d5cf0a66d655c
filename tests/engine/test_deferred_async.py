"""Plans judged from copies that arrive late, while later steps are already launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvscope.analysis.reader import Trace as Recorded
from kvscope.analysis.replay import Replay
from kvscope.analysis.verdict import CLEAN, verdict_of
from kvscope.errors import ViolationError
from kvscope.testing import engine, models, selftest
from kvscope.testing.deferral import LateDevice, deferring
from kvscope.testing.faults import FAULTS, arm, occasion, workload
from kvscope.testing.live import LiveTrace, findings_in
from kvscope.testing.storm import STORM, forced_async, storm

from .test_faults import AFTER_STEPS
from .test_healthy import CROWDED, answers, prompts, switched_on
from .test_isolate import ROOMY, ended_early
from .traces import Trace

ROWS: dict[engine.Runner, int] = {"v1": 1_500, "v2": 300}
STOPPING = ("slot_plus_one", "table_foreign_block", "position_shifted", "seq_len_minus")


@pytest.mark.long_v2
def test_steps_that_overlap_are_judged_by_their_own_tables(runner: engine.Runner, tmp_path: Path, cell: Any) -> None:
    """A storm of hits, preemptions, aborts and resets, in which blocks change hands while a plan is on its way."""
    config = switched_on(tmp_path, action="log", queue_records=1 << 17, queue_bytes=1 << 28)
    settings = STORM | {"async_scheduling": True}
    with forced_async(), deferring(LateDevice()), engine.running(additional_config=config, **settings) as llm:
        run = LiveTrace(llm).run
        numbers = storm(llm, rows=ROWS[runner], rows_so_far=lambda: run.coverage.rows)
        assert run.stream.flush(60)
    assert not run.coverage.findings
    assert not run.coverage.skipped
    assert run.coverage.rows == run.coverage.rows_scheduled
    replay = Replay(Recorded.open(tmp_path)).run()
    verdict = verdict_of(replay)
    assert (verdict.word, verdict.reasons, verdict.agree) == (CLEAN, [], True)
    assert replay.coverage.audited == replay.coverage.scheduled >= ROWS[runner]
    assert numbers.preemptions > 0
    cell(f"{replay.coverage.audited} rows from late copies, {numbers.preemptions} preemptions, 0 skipped, 0 findings")


@pytest.mark.long_v2
@pytest.mark.parametrize("name", [STOPPING[0], *(pytest.param(name, marks=pytest.mark.long) for name in STOPPING[1:])])
def test_a_fault_withholds_the_result_of_its_step_while_the_next_one_runs(
    name: str, runner: engine.Runner, tmp_path: Path
) -> None:
    config = switched_on(tmp_path, log="off")
    settings, traffic = occasion(FAULTS[name])
    settings = settings | {"async_scheduling": True}
    with forced_async(), deferring(LateDevice()), engine.running(additional_config=config, **settings) as llm:
        trace = LiveTrace(llm)
        with arm(name, after_steps=AFTER_STEPS) as injection, pytest.raises(ViolationError) as stopped:
            workload(llm, **traffic)
        records = trace.records()
    assert injection.what is not None
    steps = selftest.steps_in(records)
    assert selftest.mistakes_in(FAULTS[name], injection.what, findings_in(records), steps) == []
    faulty = steps[injection.what["step"] - 1]
    assert (stopped.value.step, max(steps)) == (faulty, faulty + 1)


@pytest.mark.long_v2
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_only_who_is_named_ends_though_the_next_step_runs_already(
    asynchronous: bool, tmp_path: Path, cell: Any
) -> None:
    config = switched_on(tmp_path, "isolate", log="off")
    settings = ROOMY | {"async_scheduling": asynchronous}
    with forced_async(), deferring(LateDevice()), engine.running(additional_config=config, **settings) as llm:
        healthy = workload(llm)
        with arm("slot_foreign_block", after_steps=6) as injection:
            tokens = workload(llm)
        assert injection.what is not None
        ended = ended_early(healthy, tokens)
        assert str(injection.what["request_id"]).rpartition("-")[0] in ended
        assert len(ended) < len(healthy)
        assert workload(llm) == healthy
    found = Trace(tmp_path)
    assert {(record.reason, record.action) for record in found.violations} >= {("write_foreign_block", "isolate")}
    assert found.faults() == {}
    cell(f"{'async' if asynchronous else 'sync'}, isolate from late copies: ended {len(ended)} of {len(healthy)}")


@pytest.mark.long_v2
def test_drafts_whose_number_the_host_does_not_know_are_judged_by_the_devices_positions(
    runner: engine.Runner, tmp_path: Path, cell: Any
) -> None:
    draft = {"method": "draft_model", "model": str(models.build("qwen3")), "num_speculative_tokens": 3}
    settings = CROWDED | {"num_blocks": 30, "max_num_seqs": 8, "async_scheduling": True}
    with (
        forced_async(),
        deferring(LateDevice()),
        engine.running(additional_config=switched_on(tmp_path), speculative_config=draft, **settings) as llm,
    ):
        answers(llm, prompts(12), 24)
    trace = Trace(tmp_path)
    assert not trace.violations
    assert not trace.faults()
    (skipped,) = trace.skipped().values()
    # The last step's result is not taken by anybody: all requests have ended by then.
    unaudited = skipped.pop("plan", {"not_arrived": 0})
    assert skipped.keys() == {"C1"}
    assert skipped["C1"].keys() == {"estimated_lengths"}
    assert unaudited.keys() == {"not_arrived"}
    assert trace.rows_audited() + unaudited["not_arrived"] == trace.rows_scheduled()
    assert trace.rows_audited() > 50
    cell(f"drafts from late copies: {trace.rows_audited()} rows, 0 findings")
