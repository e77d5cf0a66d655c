"""Engines with a KV connector: a healthy one is silent and gives the same tokens, and what is wrong is found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvscope.analysis.reader import Trace as ReadTrace
from kvscope.analysis.replay import Replay
from kvscope.analysis.tally import LIVE, REPLAY
from kvscope.analysis.verdict import CLEAN, verdict_of
from kvscope.events.schema import BoundaryRecord
from kvscope.metrics.families import families, runs
from kvscope.metrics.reader import read_run
from kvscope.plugin import HUB
from kvscope.testing import engine, selftest
from kvscope.testing.faults import FAULTS, LOADING, SETTINGS, arm, occasion, workload
from kvscope.testing.live import LiveTrace

from .test_healthy import switched_on
from .traces import Trace

WHOLE_PROMPTS: dict[str, Any] = SETTINGS | {"max_num_batched_tokens": 1024}
"""vLLM's ExampleConnector stores the chunk of a step under the name of the whole prompt, and cannot load that."""
OFFLOADING: dict[str, Any] = LOADING["kv_transfer_config"]
CONNECTOR_FAULTS = [name for name, fault in FAULTS.items() if fault.point == "connector"]


def example(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def connectors(kind: str, folder: Path) -> dict[str, Any]:
    if kind == "offloading":
        return OFFLOADING
    if kind == "example":
        return example(folder)
    children = [OFFLOADING, example(folder)]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }


def transfers_counted(folder: Path) -> dict[tuple[str, str], float]:
    """What a run that is over has counted of transfers between engines, by name and direction or cause: the last value
    of each, of histograms how many observations.
    """
    (run_folder,) = (path for path in folder.iterdir() if path.is_dir())
    (run,) = runs(read_run(run_folder).processes)
    return {
        (family.name, sample.labels.get("direction", sample.labels.get("cause", ""))): (
            sample.count if sample.buckets else sample.value
        )
        for family in families(run.processes, prefix="")
        if family.name.startswith("pd_")
        for sample in family.samples
    }


@pytest.mark.parametrize(
    "kind", ["offloading", *(pytest.param(kind, marks=pytest.mark.long_v2) for kind in ("example", "multi"))]
)
def test_a_healthy_connector_is_silent_and_changes_nothing(
    kind: str, runner: engine.Runner, tmp_path: Path, cell: Any
) -> None:
    config = switched_on(tmp_path / "out", log="off") | {"kv_monitor": {"enabled": True}}
    settings = WHOLE_PROMPTS | {"kv_transfer_config": connectors(kind, tmp_path / "store")}
    with engine.running(additional_config=config, **settings) as llm:
        stored = workload(llm, max_tokens=6)
        loaded = workload(llm, max_tokens=6, rounds=2)
    trace = Trace(tmp_path / "out")
    assert trace.violations == []
    assert trace.faults() == {}
    boundaries = trace.of(BoundaryRecord)
    receives = [receive for record in boundaries if isinstance(record.receives, list) for receive in record.receives]
    assert len(receives) >= 8
    assert {receive.waits for receive in receives} == {kind != "example"}
    finished = [name for record in boundaries for name in record.finished_recving or ()]
    assert sorted(finished) == sorted(receive.request_id for receive in receives if receive.waits)
    counted = transfers_counted(tmp_path / "out")
    if kind == "offloading":
        assert counted == {}
    else:
        waited = [receive for receive in receives if receive.waits]
        tokens = sum(receive.external_tokens for receive in waited)
        assert counted["pd_transfer_tokens_total", "received"] == tokens
        assert (tokens > 0) is (kind == "multi")
        assert counted["pd_transfer_latency_seconds", ""] == counted["pd_wait_seconds", ""] == len(waited)
        idle = ("pd_transfer_in_flight", "pd_transfer_queue_depth", "pd_transfer_failures_total")
        assert {value for (name, _), value in counted.items() if name in idle} == {0}
    (enabled,) = trace.enabled
    assert "connector.plan" in enabled.seams_installed
    replay = Replay(ReadTrace.open(tmp_path / "out")).run()
    verdict = verdict_of(replay)
    assert (verdict.word, verdict.reasons, verdict.agree) == (CLEAN, [], True)
    with engine.running(**settings | {"kv_transfer_config": connectors(kind, tmp_path / "other")}) as llm:
        assert workload(llm, max_tokens=6) == stored
        assert workload(llm, max_tokens=6, rounds=2) == loaded
    cell(f"{kind}: {len(receives)} loads, {replay.coverage.audited} rows, 0 findings")


def test_what_was_found_about_a_connector_is_found_in_the_trace(tmp_path: Path, cell: Any) -> None:
    config = switched_on(tmp_path, action="log", log="off")
    with engine.running(additional_config=config, **LOADING) as llm:
        trace = LiveTrace(llm)
        for name in CONNECTOR_FAULTS:
            assert selftest.inject(llm, trace, name).mistakes == []
            workload(llm, max_tokens=4)
    replay = Replay(ReadTrace.open(tmp_path)).run()
    assert replay.findings.keys[REPLAY] == replay.findings.keys[LIVE]
    reasons = {reason for reason, _, _ in replay.findings.keys[REPLAY]}
    assert reasons >= {FAULTS[name].expected for name in CONNECTOR_FAULTS}
    assert verdict_of(replay).agree
    cell(f"{len(reasons)} reasons, the same live and in the replay")


@pytest.mark.long_v2
def test_the_faults_of_a_connector_leave_an_engine_without_kvscope_in_order(runner: engine.Runner) -> None:
    with engine.running(**LOADING) as llm:
        before = workload(llm, max_tokens=4)
        for name in CONNECTOR_FAULTS:
            with arm(name, after_steps=3) as injection:
                workload(llm, until=lambda injection=injection: injection.fired, **occasion(FAULTS[name])[1])
            assert injection.times == 1, name
            # Loads of what was aborted have to end. What was loaded elsewhere is missing in a block that others hit,
            # and so in what they store.
            assert all(len(tokens) == 4 for tokens in workload(llm, max_tokens=4)), name
            assert llm.reset_prefix_cache(reset_connector=True), name
            assert workload(llm, max_tokens=4) == before, name


@pytest.mark.once
def test_a_connector_is_wrapped_only_where_it_is_watched(runner: engine.Runner, tmp_path: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.v1.core.sched.scheduler import Scheduler

    def found() -> list[Any]:
        places: list[tuple[type, str]] = [(OffloadingConnector, "update_state_after_alloc")]
        places += [(Scheduler, "_build_kv_connector_meta"), (Scheduler, "_connector_finished")]
        return [vars(owner)[name] for owner, name in places]

    HUB.ledger.uninstall_all()
    before = found()
    config = {"kv_trace": {"enabled": True}, "kv_output": {"dir": str(tmp_path), "log": "off"}}
    with engine.running(additional_config=config):
        assert found() == before  # without a connector nothing of it is wrapped
    with engine.running(additional_config=config, **LOADING) as llm:
        assert all(now is not then for now, then in zip(found(), before, strict=True))
        engine.generate(llm, [[5, 6, 7]], 4)
    with engine.running(**LOADING) as llm:
        assert all(now is then for now, then in zip(found(), before, strict=True))  # off is untouched
        engine.generate(llm, [[5, 6, 7]], 4)
