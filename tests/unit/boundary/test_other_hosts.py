"""Hosts that this machine cannot run: other shapes of slots, padded batches, graphs, and batches that are cut in two.

What a plan must be is worked out here token by token; what is read of the host is then judged by the rules.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvscope.boundary import graphs, runner_v1, runner_v2
from kvscope.boundary.slots import as_slots, is_direct
from kvscope.checks.finding import Finding
from kvscope.facts.plans import PAD_SLOT, Plan
from kvscope.facts.requests import Declaration
from unit.checks.scenes import Scene, declare
from unit.runtime.conftest import _runs_end_with_their_test  # noqa: F401  the fixture that closes runs
from unit.runtime.support import Live, last_coverage, of_event

torch = pytest.importorskip("torch")

SIZE = 16
TABLES = {"a": [3, 1, 7], "b": [9, 4], "c": [5]}
COMPUTED = {"a": 40, "b": 17, "c": 0}
SCHEDULED = {"a": 1, "b": 1, "c": 9}
NAMES = ["c", "a", "b"]
"""The order of the batch is not that of the declaration."""
PADDING = 5
"""Slots behind the real tokens: a graph runs a batch of a size for which it was captured."""


def declaration() -> Declaration:
    new = [(name, (TABLES[name],), 0, SCHEDULED[name]) for name in TABLES if COMPUTED[name] == 0]
    return declare(
        2, new=new, known=[(name, None, COMPUTED[name], SCHEDULED[name]) for name in TABLES if COMPUTED[name]]
    )


def expected_slots() -> list[int]:
    """Walks every token to its block."""
    slots = []
    for name in NAMES:
        for step in range(SCHEDULED[name]):
            block, offset = 0, COMPUTED[name] + step
            while offset >= SIZE:
                block, offset = block + 1, offset - SIZE
            slots.append(TABLES[name][block] * SIZE + offset)
    return slots


SLOTS = [*expected_slots(), *[PAD_SLOT] * PADDING]
STARTS = np.cumsum([0, *(SCHEDULED[name] for name in NAMES)]).astype(np.int32)
POSITIONS = [COMPUTED[name] + step for name in NAMES for step in range(SCHEDULED[name])]
LENGTHS = [COMPUTED[name] + SCHEDULED[name] for name in NAMES]
TOKENS = len(POSITIONS)


def pairs(slots: Any) -> Any:
    """As vLLM-Ascend makes them for kernels that take nothing else, the padding slot included."""
    return torch.stack([slots // SIZE, slots % SIZE], dim=-1)


SHAPES: dict[str, Any] = {
    "int64": lambda slots: slots,
    "int32": lambda slots: slots.to(torch.int32),
    "pairs of int64": pairs,
    "pairs of int32": lambda slots: pairs(slots.to(torch.int32)),
}


def table_rows() -> Any:
    """A row for each request and two more, with rubbish where nothing looks."""
    rows = [[*TABLES[name], *[99] * (4 - len(TABLES[name]))] for name in NAMES]
    return torch.tensor([*rows, [8, 8, 8, 8], [8, 8, 8, 8]], dtype=torch.int32)


class V1:
    """Runner V1 after ``_prepare_inputs``. Its buffers are longer than the batch, as a graph or FIA pads it.

    ``pseudo`` requests stand behind the real ones in ``query_start_loc`` and ``seq_lens``, which cover the padding
    tokens (vLLM-Ascend, ``_pad_query_start_loc_for_fia``); the batch itself does not count them.
    """

    def __init__(self, shape: str = "int64", pseudo: int = 0) -> None:
        counts = [len(TABLES[name]) for name in NAMES]
        self.table = SimpleNamespace(
            block_table=SimpleNamespace(gpu=table_rows()),
            num_blocks_per_row=np.array([*counts, 0, 0], np.int32),
            slot_mapping=SimpleNamespace(gpu=SHAPES[shape](torch.tensor([*SLOTS, 77, 78]))),
            block_size=SIZE,
        )
        self.input_batch = SimpleNamespace(
            num_reqs=3, req_ids=[*NAMES, "gone"], block_table=SimpleNamespace(block_tables=[self.table])
        )
        self.positions = torch.tensor([*POSITIONS, *[0] * PADDING])
        self.seq_lens = torch.tensor([*LENGTHS, *[1] * pseudo, 0, 0], dtype=torch.int32)
        ends = [TOKENS + PADDING] * max(pseudo, 1)
        self.query_start_loc = SimpleNamespace(np=np.array([*STARTS, *ends], np.int32))
        self.use_async_spec_decode = False

    @property
    def slots(self) -> Any:
        return self.table.slot_mapping.gpu[: TOKENS + PADDING]

    def read(self) -> Plan:
        return runner_v1.read_plan(self, {0: self.slots}, TOKENS)


class V2:
    """Runner V2 after ``prepare_attn``, with rows and tokens padded; ``query_start_loc_np`` goes on behind the rows."""

    def __init__(self, shape: str = "int64", pseudo: int = 0) -> None:
        counts = [len(TABLES[name]) for name in NAMES]
        self.block_tables = SimpleNamespace(
            num_blocks=SimpleNamespace(np=np.array([[7, *counts]], np.int32)), block_sizes=[SIZE], cp_size=1
        )
        self.pcp_manager = None
        self.num_speculative_steps, self.scheduler_config = 0, SimpleNamespace(async_scheduling=True)
        self.batch = SimpleNamespace(
            req_ids=list(NAMES),
            num_reqs=3,
            num_reqs_after_padding=5,
            num_tokens=TOKENS,
            idx_mapping_np=np.array([1, 2, 3]),
            query_start_loc_np=np.array([*STARTS, *[TOKENS + PADDING] * max(pseudo, 2)], np.int32),
            positions=torch.tensor([*POSITIONS, *[0] * PADDING]),
            seq_lens=torch.tensor([*LENGTHS, *[1] * pseudo, 0, 0], dtype=torch.int32),
        )
        self.slots = SHAPES[shape](torch.tensor(SLOTS))
        self.tables = (table_rows(),)

    def read(self) -> Plan:
        return runner_v2.read_plan(self, self.batch, self.tables, self.slots[None])


RUNNERS = pytest.mark.parametrize("runner", [V1, V2])


def judged(plan: Plan) -> list[Finding]:
    scene = Scene()
    known = [name for name in TABLES if COMPUTED[name]]
    scene.say(new=[(name, (TABLES[name],), 0, COMPUTED[name]) for name in known])
    scene.bindings.apply(declaration().requests)
    return scene.judge(declaration(), plan)


# Slots in other shapes ------------------------------------------------------------------------------------------------


@RUNNERS
@pytest.mark.parametrize("pseudo", [0, 1, 2], ids=["padding", "one pseudo-request", "two pseudo-requests"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sound_batch_is_the_same_whatever_its_shape(runner: Any, shape: str, pseudo: int) -> None:
    plan = runner(shape, pseudo).read()
    (group,) = plan.groups
    assert (plan.request_ids, plan.num_tokens) == (NAMES, TOKENS)
    assert plan.query_start.tolist() == STARTS.tolist()
    assert (plan.positions.tolist(), plan.seq_lens.tolist()) == (POSITIONS, LENGTHS)
    assert group.slots.dtype == np.int64
    assert group.slots.tolist() == SLOTS
    assert judged(plan) == []


@RUNNERS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("token", "slot", "reason"),
    [
        (TOKENS - 2, 7 * SIZE + 9, "write_target_mismatch"),  # `a` goes on in offset 8
        (0, 9 * SIZE + 9, "write_foreign_block"),
        (1, 2, "null_block_write"),
        (TOKENS, 3 * SIZE, "write_padding_slot_enabled"),
        (TOKENS - 1, 64 * SIZE, "write_outside_cache"),
    ],
)
def test_a_wrong_slot_is_found_whatever_its_shape(runner: Any, shape: str, token: int, slot: int, reason: str) -> None:
    host = runner(shape)
    host.slots[token] = SHAPES[shape](torch.tensor([slot]))[0]
    (finding,) = judged(host.read())
    assert (finding.reason, finding.slot, finding.token_index) == (reason, slot, token)


@RUNNERS
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_converted_is_read_anew_in_every_step(runner: Any, shape: str) -> None:
    host = runner(shape)
    assert judged(host.read()) == []
    host.slots[0] = SHAPES[shape](torch.tensor([2 * SIZE]))[0]
    assert host.read().groups[0].slots[0] == 2 * SIZE


@RUNNERS
@pytest.mark.parametrize("shape", SHAPES)
def test_an_access_outside_the_cache_is_taken_out_of_the_hosts_own_buffer(
    runner: Any, shape: str, tmp_path: Path
) -> None:
    """On a rank whose failure vLLM does not notice a launch that must not happen is made harmless instead."""
    host = runner(shape)
    for token in (0, TOKENS):
        host.slots[token] = SHAPES[shape](torch.tensor([64 * SIZE + 3]))[0]
    Live(tmp_path, returns_results=False).worker._refuse([], host.read())
    left = as_slots(host.slots.numpy(), SIZE)
    assert [left[0] < 0, left[TOKENS] < 0] == [True, True]
    assert left[1:TOKENS].tolist() == SLOTS[1:TOKENS]


@pytest.mark.parametrize("shape", SHAPES)
def test_slots_of_a_dummy_run_are_read_in_any_shape(shape: str) -> None:
    slots = SHAPES[shape](torch.tensor([PAD_SLOT, 3 * SIZE + 2, PAD_SLOT]))
    told: list[Any] = []
    observer = SimpleNamespace(on_dummy=told.append, reads_host_tensors=True)
    host = V2()
    host.block_tables.slot_mappings = slots[None]
    runner_v2.after_prepare_dummy_attn(observer, host, (), {}, (None, slots[None]))
    assert told[0].slots[0].tolist() == [PAD_SLOT, 3 * SIZE + 2, PAD_SLOT]
    assert told[0].num_tokens == 3


def test_vllms_own_slots_are_not_copied() -> None:
    own = np.arange(4)
    assert as_slots(own, SIZE) is own
    assert is_direct(own)
    assert not is_direct(own.astype(np.int32))
    for host in (V1(), V2()):
        (group,) = host.read().groups
        assert group.host_slots is None
        assert np.shares_memory(group.slots, host.slots.numpy())


def test_slots_of_a_shape_that_nobody_knows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        as_slots(np.zeros((2, 3)), SIZE)


# Graphs ---------------------------------------------------------------------------------------------------------------


@RUNNERS
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE", None])
def test_a_step_says_how_it_is_run(runner: Any, mode: str | None) -> None:
    host = runner()
    if mode is not None:
        descriptor = SimpleNamespace(cg_mode=SimpleNamespace(name=mode), num_tokens=TOKENS + PADDING)
        if runner is V1:
            graphs.after_dispatch_v1(None, host, (), {}, (descriptor.cg_mode, descriptor, False, None, None))
        else:
            graphs.after_inputs_v2(None, host, (None, None, descriptor, 0), {}, None)
            graphs.after_inputs_v2(None, host, (), {"batch_desc": descriptor}, None)
    plan = host.read()
    assert plan.graph_mode == (mode or "NONE")
    assert judged(plan) == []


@RUNNERS
def test_the_tail_of_a_graph_must_be_off_and_its_rows_mean_nothing(runner: Any) -> None:
    """The padded rows of the tables are read by nobody; a padded token that has a slot is written by the graph."""
    host = runner()
    rows = host.tables[0] if runner is V2 else host.table.block_table.gpu
    rows[3:] = 3
    assert judged(host.read()) == []
    host.slots[TOKENS + PADDING - 1] = 3 * SIZE
    (finding,) = judged(host.read())
    assert (finding.reason, finding.token_index) == ("write_padding_slot_enabled", TOKENS + PADDING - 1)
    assert finding.other_request_id == "a"


def test_the_graph_mode_stands_in_the_record(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.warm()
    live.decode(change=lambda plan: setattr(plan, "graph_mode", "FULL"))
    assert [record["graph_mode"] for record in of_event(live.run, "kv.write")] == ["NONE", "FULL"]
    assert last_coverage(live.run)["findings"] == []


@pytest.mark.parametrize(("mode", "runs"), [("NONE", False), ("FULL", True), ("FULL_AND_PIECEWISE", True)])
def test_graphs_are_looked_for_where_there_may_be_some(mode: str, runs: bool) -> None:
    compilation = SimpleNamespace(cudagraph_mode=SimpleNamespace(name=mode))
    assert graphs.runs_graphs(SimpleNamespace(compilation_config=compilation)) is runs
    assert not graphs.runs_graphs(SimpleNamespace())


# Batches that are cut in two ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 5, 9, 10])
def test_two_micro_batches_are_judged_by_the_whole_that_they_are_slices_of(cut: int) -> None:
    """V1's ``_get_slot_mappings`` hands each its slice by layer beside the whole by group; a row may be cut, too."""
    host, told = V1(), list[Plan]()
    observer = SimpleNamespace(expects_no_plan=False, reads_host_tensors=True, on_plan=told.append)
    by_layer = [{"layer": host.slots[:cut]}, {"layer": host.slots[cut:]}]

    def read() -> list[Finding]:
        told.clear()
        runner_v1.after_slot_mappings(observer, host, (), {"num_tokens_unpadded": TOKENS}, ({0: host.slots}, by_layer))
        (plan,) = told
        joined = torch.cat([part["layer"] for part in by_layer]).tolist()
        assert plan.groups[0].slots.tolist() == joined
        return judged(plan)

    assert read() == []
    by_layer[1]["layer"][0] = 50 * SIZE
    (finding,) = read()
    assert (finding.slot, finding.token_index) == (50 * SIZE, cut)
