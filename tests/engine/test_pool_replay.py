"""The trace of a real engine, replayed: the books of its pool come back, and the findings with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvscope.analysis.pool import rebuild_ledger
from kvscope.analysis.reader import Trace
from kvscope.analysis.replay import Replay
from kvscope.analysis.tally import LIVE, REPLAY
from kvscope.analysis.verdict import CLEAN, verdict_of
from kvscope.state.blocks import BlockLedger
from kvscope.testing import engine, selftest
from kvscope.testing.faults import SETTINGS, workload
from kvscope.testing.live import LiveTrace
from kvscope.testing.storm import STORM, forced_async, storm

from .test_healthy import switched_on

ROWS: dict[engine.Runner, int] = {"v1": 1_500, "v2": 300}

FAULTS = ("premature_free", "hash_before_write", "computed_claimed", "double_free_batch", "skip_free")
"""One of each family, of those that every finding can be replayed of."""


def ledgers(llm: Any) -> tuple[BlockLedger, BlockLedger]:
    """The live ones of EngineCore and of the worker, in this process."""
    core = llm.llm_engine.engine_core.engine_core
    scheduled, followed = core.scheduler._kvscope_observer.pool, engine.model_runner(llm)._kvscope_observer._pool
    assert scheduled.lost is None
    assert followed.sides[0] is not None
    return scheduled.ledger, followed.sides[0]


@pytest.mark.long_v2
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_healthy_storm_is_clean_and_its_ledgers_come_back(
    runner: engine.Runner, asynchronous: bool, tmp_path: Path, cell: Any
) -> None:
    config = switched_on(tmp_path, action="log", queue_records=1 << 17, queue_bytes=1 << 28)
    settings = STORM | {"async_scheduling": asynchronous}
    with forced_async() if asynchronous else nullcontext(), engine.running(additional_config=config, **settings) as llm:
        run = LiveTrace(llm).run
        numbers = storm(llm, rows=ROWS[runner], rows_so_far=lambda: run.coverage.rows)
        assert run.stream.flush(60)
        scheduled, followed = ledgers(llm)
    replay = Replay(Trace.open(tmp_path)).run()
    verdict = verdict_of(replay)
    assert (verdict.word, verdict.reasons, verdict.agree) == (CLEAN, [], True)
    assert replay.coverage.audited == replay.coverage.scheduled >= ROWS[runner]
    assert rebuild_ledger(Trace.open(tmp_path)).equals(scheduled)
    (side,) = {id(side): side for side in replay._by_log.values()}.values()
    (rank,) = side.ranks.values()
    assert side.pool.ledger is not None
    assert rank.pool.ledger is not None
    assert side.pool.ledger.equals(scheduled)
    assert rank.pool.ledger.equals(followed)
    cell(f"{replay.coverage.audited} rows, {numbers.preemptions} preemptions, {numbers.resets} resets: equal ledgers")


@pytest.fixture
def observed(runner: engine.Runner, tmp_path: Path) -> Iterator[tuple[Any, LiveTrace]]:
    config = switched_on(tmp_path, action="log", log="off")
    with engine.running(additional_config=config, **SETTINGS) as llm:
        yield llm, LiveTrace(llm)


def test_what_was_found_in_a_live_pool_is_found_in_its_trace(
    observed: tuple[Any, LiveTrace], tmp_path: Path, cell: Any
) -> None:
    llm, trace = observed
    for name in FAULTS:
        assert selftest.inject(llm, trace, name).injected
        workload(llm, max_tokens=4)
    scheduled, _ = ledgers(llm)
    engine.stop(llm)
    replay = Replay(Trace.open(tmp_path)).run()
    verdict = verdict_of(replay)
    assert replay.findings.keys[REPLAY] == replay.findings.keys[LIVE]
    assert len({reason for reason, _, _ in replay.findings.keys[REPLAY]}) >= len(FAULTS)
    assert (verdict.reasons, verdict.agree) == ([], True)
    assert all(entry.in_replay == entry.live for entry in verdict.findings)
    assert rebuild_ledger(Trace.open(tmp_path)).equals(scheduled)
    cell(f"{len(verdict.findings)} kinds of findings, the same live and in the replay")
