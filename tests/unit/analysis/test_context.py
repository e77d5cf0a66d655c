"""A context-parallel rank in a live process: what is judged, recorded, counted, and found again in the trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvscope.analysis.context import NO_COORDINATES, WRONG_COORDINATES
from kvscope.analysis.reader import Trace
from kvscope.analysis.replay import Replay
from kvscope.analysis.tally import LIVE, REPLAY
from kvscope.analysis.verdict import CLEAN, FINDINGS, INCONCLUSIVE, verdict_of
from kvscope.errors import ViolationError
from kvscope.facts.context_parallel import ContextParallel, LocalLengths
from kvscope.facts.plans import PAD_SLOT, DummyRun, Plan
from kvscope.facts.requests import Declaration
from kvscope.facts.topology import Ranks, Topology
from kvscope.runtime.engine import EngineJudge
from kvscope.runtime.worker import WorkerJudge
from unit.checks.dealing import dcp_pool, on_rank, partitioned, sharded, share_of
from unit.checks.scenes import Scene
from unit.checks.worlds import group
from unit.runtime.conftest import _runs_end_with_their_test  # noqa: F401  the fixture that closes runs
from unit.runtime.support import Live, last_coverage, make_run, of_event

AT = ContextParallel(dcp_size=2, dcp_rank=1, interleave=4, sharded=(0,))
DCP = dcp_pool(sharded())
PCP_AT = ContextParallel(pcp_size=2, pcp_rank=1)
PCP = dcp_pool(group(0), size=1, pcp_size=2)
Change = Callable[[Plan], object]


class Rank(Live):
    """One rank that says where it stands (None: it does not)."""

    def __init__(
        self, folder: Path, topology: Topology = DCP, context: ContextParallel | None = AT, **run: Any
    ) -> None:
        ranks = Ranks(dp=0, tp=0, pp=0, world=0, dcp=1 if topology.dcp_size > 1 else None,
                      pcp=1 if topology.pcp_size > 1 else None)  # fmt: skip
        self.run = make_run(folder, "frontend", "engine", "worker", topology=topology, ranks=ranks, **run)
        self.run.open()
        self.engine, self.scene, self.context = EngineJudge(self.run, topology), Scene(topology), context
        self.worker = WorkerJudge(self.run, returns_results=True, ranks=ranks)
        self.worker.bind_topology(topology)

    def rank_step(self, change: Change | None = None, lengths: Change | None = None, **said: Any) -> Declaration:
        """A step up to its launch; ``lengths`` changes what the rank is told to have of each row."""
        declaration = self.declare(**said)
        self.worker.on_input(declaration, declaration.requests)
        plan = self.scene.plan(declaration)
        topology = self.scene.topology
        if topology.dcp_size > 1:
            plan = on_rank(plan, topology, self.scene.tables, self.context or AT)
        if topology.pcp_size > 1 and self.context is not None:
            decodes = {name for name, count in declaration.requests.scheduled.items() if count == 1}
            plan = partitioned(plan, self.context, decodes)
        plan.context = self.context
        if change is not None:
            change(plan)
        self.worker.on_plan(plan)
        if self.worker.reads_local_lengths:
            told = [share_of(int(n), 32, self.context or AT) for n in plan.seq_lens]
            fact = LocalLengths(request_ids=list(plan.request_ids), lengths=np.array(told, np.int32))
            if lengths is not None:
                lengths(fact)  # type: ignore[arg-type]  # a change of lengths, not of the plan
            self.worker.on_local_lengths(fact)
        self.worker.on_launched()
        return declaration

    def three_steps(self, change: Change | None = None, lengths: Change | None = None) -> None:
        """Two prompts, a step in which both decode, and one in which something is changed."""
        self.rank_step(new=[("a", ([1, 2, 3],), 0, 40), ("b", ([4, 5, 6],), 0, 37)])
        self.rank_step(known=[("a", None, 40, 1), ("b", None, 37, 1)])
        self.rank_step(change, lengths, known=[("a", None, 41, 1), ("b", None, 38, 8)])


def replayed(rank: Rank) -> tuple[Replay, Any]:
    rank.run.close()
    replay = Replay(Trace.open(rank.run.stream.folder)).run()
    return replay, verdict_of(replay)


def _one_more(said: Any) -> None:
    said.lengths += 1


SCENARIOS: dict[str, tuple[Topology, ContextParallel, Change | None, Change | None]] = {
    "cp_slot_owner_mismatch": (DCP, AT, lambda plan: plan.groups[0].slots.__setitem__(0, 30), None),
    "cp_order_mismatch": (DCP, AT, lambda plan: plan.groups[0].slots.__setitem__(7, 95), None),
    "cp_local_length_mismatch": (DCP, AT, None, _one_more),
    "cp_rank_invalid": (
        DCP, AT, lambda plan: setattr(plan, "context", msgspec.structs.replace(AT, dcp_rank=0)), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("records", ["compact", "full"])
@pytest.mark.parametrize("topology", [DCP, PCP], ids=["dcp", "pcp"])
def test_a_sound_rank_is_clean_live_and_in_its_trace(tmp_path: Path, topology: Topology, records: str) -> None:
    rank = Rank(tmp_path, topology, AT if topology is DCP else PCP_AT, records=records)
    rank.three_steps()
    replay, verdict = replayed(rank)
    assert of_event(rank.run, "kv.violation") == []
    assert (verdict.word, replay.coverage.audited, replay.coverage.scheduled) == (CLEAN, 6, 6)
    assert rank.run.coverage.rows == 6
    recorded = of_event(rank.run, "kv.boundary", "cp_context")
    (at,) = [record["coordinates"] for record in recorded if "coordinates" in record]
    assert rank.context is not None
    assert ContextParallel(**at, sharded=rank.context.sharded) == rank.context
    said = {record.get("coordinates") for record in of_event(rank.run, "kv.write")}
    assert said == ({"local"} if topology is DCP else {"global"} if records == "full" else {None})


@pytest.mark.parametrize("records", ["compact", "full"])
@pytest.mark.parametrize("reason", SCENARIOS)
def test_what_is_wrong_with_a_rank_is_found_live_and_in_its_trace(tmp_path: Path, reason: str, records: str) -> None:
    topology, context, change, lengths = SCENARIOS[reason]
    rank = Rank(tmp_path, topology, context, records=records)
    rank.three_steps(change, lengths)
    replay, verdict = replayed(rank)
    said = of_event(rank.run, "kv.violation")
    assert said[0]["reason"] == reason
    assert {record["step"] for record in said} == {3}
    assert verdict.word == FINDINGS
    assert replay.findings.keys[REPLAY] == replay.findings.keys[LIVE] != set()


@pytest.mark.parametrize("records", ["compact", "full"])
def test_chunks_in_disorder_are_found_live_and_in_the_trace(tmp_path: Path, records: str) -> None:
    def change(plan: Plan) -> None:
        assert plan.local is not None
        plan.local.positions[-2:] += 1

    rank = Rank(tmp_path, PCP, PCP_AT, records=records)
    rank.three_steps(change)
    replay, verdict = replayed(rank)
    (said,) = of_event(rank.run, "kv.violation")
    assert (said["reason"], said["request_id"], said["step"]) == ("cp_order_mismatch", "b", 3)
    assert verdict.word == FINDINGS
    assert replay.findings.keys[REPLAY] == replay.findings.keys[LIVE]


@pytest.mark.parametrize("topology", [DCP, PCP], ids=["dcp", "pcp"])
def test_a_rank_that_does_not_say_where_it_stands_is_counted_and_not_judged(tmp_path: Path, topology: Topology) -> None:
    rank = Rank(tmp_path, topology, None)
    rank.three_steps(lambda plan: plan.groups[0].slots.fill(3))
    replay, verdict = replayed(rank)
    assert of_event(rank.run, "kv.violation") == []
    assert last_coverage(rank.run)["checks_skipped"]["plan"] == {"cp_coordinates_missing": 6}
    assert rank.run.coverage.skipped["L", "cp_coordinates_missing"] == (6 if topology is DCP else 0)
    assert verdict.word == INCONCLUSIVE
    assert replay.coverage.audited == 0


def test_plans_of_a_rank_with_wrong_coordinates_are_counted_and_not_judged(tmp_path: Path) -> None:
    rank = Rank(tmp_path, context=msgspec.structs.replace(AT, interleave=3))
    rank.three_steps()
    replay, _ = replayed(rank)
    assert [record["reason"] for record in of_event(rank.run, "kv.violation")] == ["cp_rank_invalid"]
    assert last_coverage(rank.run)["checks_skipped"]["plan"] == {"cp_rank_invalid": 6}
    assert dict(replay.coverage.skipped) in ({WRONG_COORDINATES: 6}, {"no plan recorded": 6})
    assert NO_COORDINATES not in replay.coverage.skipped


def test_a_wrong_length_stops_the_engine_where_it_is_told_to(tmp_path: Path) -> None:
    rank = Rank(tmp_path, trace="raise")
    rank.three_steps(lengths=SCENARIOS["cp_local_length_mismatch"][3])
    with pytest.raises(ViolationError, match="cp_local_length_mismatch"):
        rank.engine.on_update(None, None)


def test_a_dummy_run_is_judged_by_the_share_of_the_rank(tmp_path: Path) -> None:
    """Slot 18 is the third of block 1 on rank 1, where it stores token 6; of 40 tokens it is written."""
    rank = Rank(tmp_path)
    rank.three_steps()
    rank.worker.on_dummy(DummyRun(slots={0: np.array([18, PAD_SLOT])}, num_tokens=2))
    (said,) = of_event(rank.run, "kv.violation")
    assert (said["reason"], said["block_id"], said["other_request_id"]) == ("dummy_slot_enabled", 1, "a")
