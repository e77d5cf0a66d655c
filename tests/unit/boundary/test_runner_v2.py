"""What is read from the V2 runner's batch and tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvscope.boundary import runner_v2
from unit.boundary.fakes import Told

torch = pytest.importorskip("torch")

# Request state rows 3 and 1 are rows 0 and 1 of the batch; two groups of cache; one padded token.
RUNNER = SimpleNamespace(
    block_tables=SimpleNamespace(
        num_blocks=SimpleNamespace(np=np.array([[9, 1, 9, 2], [9, 3, 9, 4]], np.int32)),
        slot_mappings=torch.tensor([[20, 21, 55, -1, -1, -1], [68, 69, 87, -1, -1, 30]]),
    ),
    pcp_manager=None,
    num_speculative_steps=0,
    scheduler_config=SimpleNamespace(async_scheduling=True),
)
BATCH = SimpleNamespace(
    req_ids=["a", "b"],
    num_reqs=2,
    num_tokens=3,
    idx_mapping_np=np.array([3, 1]),
    query_start_loc_np=np.array([0, 2, 3, 3], np.int32),
    positions=torch.tensor([4, 5, 7, 0]),
    seq_lens=torch.tensor([6, 8, 0], dtype=torch.int32),
)
TABLES = (torch.tensor([[1, 2], [3, 0], [0, 0]], dtype=torch.int32), torch.tensor([[4], [5], [0]], dtype=torch.int32))
SLOTS = torch.tensor([[20, 21, 55, -1], [68, 69, 87, -1]])


def told(**fields: Any) -> Told:
    return Told(expects_no_plan=False, reads_host_tensors=True, **fields)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_plan_is_the_batch_in_its_own_order(by_name: bool) -> None:
    observer = told()
    args, kwargs = ((), {"input_batch": BATCH}) if by_name else ((BATCH,), {})
    runner_v2.after_prepare_attn(observer, RUNNER, args, kwargs, (TABLES, SLOTS))
    ((name, (plan,)),) = observer.calls
    assert name == "on_plan"
    assert (plan.request_ids, plan.num_tokens, plan.exact) == (["a", "b"], 3, True)
    assert plan.query_start.tolist() == [0, 2, 3]
    assert (plan.positions.tolist(), plan.seq_lens.tolist()) == ([4, 5, 7], [6, 8])
    assert [group.table_blocks.tolist() for group in plan.groups] == [[2, 1], [4, 3]]
    assert [group.tables.tolist() for group in plan.groups] == [[[1, 2], [3, 0]], [[4], [5]]]
    assert [group.slots.tolist() for group in plan.groups] == [[20, 21, 55, -1], [68, 69, 87, -1]]


def test_a_group_that_has_no_tables_or_no_slots_is_missing_in_the_plan() -> None:
    for tables, slots in ((TABLES[:1], SLOTS), (TABLES, SLOTS[:1])):
        assert [group.group_id for group in runner_v2.read_plan(RUNNER, BATCH, tables, slots).groups] == [0]


def test_lengths_of_asynchronous_speculative_decoding_are_estimates() -> None:
    speculating = SimpleNamespace(**{**vars(RUNNER), "num_speculative_steps": 2})
    assert not runner_v2.read_plan(speculating, BATCH, TABLES, SLOTS).exact


def test_a_dummy_run_is_all_slots_that_are_handed_on() -> None:
    observer = told()
    runner_v2.after_prepare_dummy_attn(observer, RUNNER, (), {}, (TABLES, SLOTS))
    ((name, (run,)),) = observer.calls
    assert (name, run.num_tokens) == ("on_dummy", 4)
    assert {group: slots.tolist() for group, slots in run.slots.items()} == {
        0: [20, 21, 55, -1],
        1: [68, 69, 87, -1],
    }
    assert {group: (rest.checked, rest.indexes.tolist(), rest.slots.tolist()) for group, rest in run.persistent.items()}
    assert [(rest.checked, rest.indexes.tolist(), rest.slots.tolist()) for rest in run.persistent.values()] == [
        (2, [], []),
        (2, [5], [30]),
    ]


def test_a_dummy_run_that_nobody_can_copy_is_counted() -> None:
    observer = Told(reads_host_tensors=False)
    runner_v2.after_prepare_dummy_attn(observer, RUNNER, (), {}, (TABLES, SLOTS.to("meta")))
    runner_v2.after_capture(observer, RUNNER, (), {}, 0)
    runner_v2.after_capture(observer, RUNNER, (), {}, 4096)
    assert observer.calls == [("on_dummy_skipped", ("device_tensors",)), ("on_dummy_skipped", ("graph_capture",))]


@pytest.mark.parametrize("warming_up", [True, False])
def test_outside_a_step_only_what_a_warm_up_stores_is_read(warming_up: bool) -> None:
    observer = Told(expects_no_plan=True, is_warming_up=warming_up, reads_host_tensors=True)
    runner_v2.after_prepare_attn(observer, RUNNER, (BATCH,), {}, (TABLES, SLOTS))
    assert observer.names == ["on_dummy"] * warming_up
    if warming_up:
        ((_, (run,)),) = observer.calls
        assert (run.warm_up, run.num_tokens, run.slots[1].tolist()) == (True, 4, [68, 69, 87, -1])
    observer = Told(expects_no_plan=True, is_warming_up=warming_up, reads_host_tensors=False)
    runner_v2.after_prepare_attn(observer, RUNNER, (BATCH,), {}, (TABLES, SLOTS.to("meta")))
    assert observer.calls == [("on_dummy_skipped", ("warm_up",))] * warming_up
