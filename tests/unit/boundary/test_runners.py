"""What is read from a runner's buffers: that they are looked at once, and only as long as they are its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvscope.boundary import runner_v1, runner_v2
from kvscope.facts.plans import Plan
from unit.boundary.fakes import Told

torch = pytest.importorskip("torch")


def input_batch(value: int) -> Any:
    """Two rows in one group; the buffers have room for four."""
    table = SimpleNamespace(
        block_table=SimpleNamespace(gpu=torch.full((4, 3), value, dtype=torch.int32)),
        num_blocks_per_row=np.array([2, 1, 0, 0], np.int32),
        block_size=16,
        slot_mapping=SimpleNamespace(gpu=torch.full((8,), 16 * value, dtype=torch.int64)),
    )
    return SimpleNamespace(
        num_reqs=2, req_ids=["a", "b", "left over"], block_table=SimpleNamespace(block_tables=[table])
    )


class V1:
    def __init__(self) -> None:
        self.input_batch = input_batch(5)
        self.positions = torch.arange(8)
        self.seq_lens = torch.arange(4, dtype=torch.int32)
        self.query_start_loc = SimpleNamespace(np=np.arange(5, dtype=np.int32))
        self.use_async_spec_decode = False

    @property
    def slots(self) -> Any:
        return self.input_batch.block_table.block_tables[0].slot_mapping.gpu

    def read(self, slots: Any = None) -> Plan:
        return runner_v1.read_plan(self, {0: self.slots[:3] if slots is None else slots}, 2)


def test_a_plan_is_the_part_of_the_buffers_that_is_in_use() -> None:
    plan = V1().read()
    assert (plan.request_ids, plan.num_tokens, plan.exact) == (["a", "b"], 2, True)
    assert (plan.positions.tolist(), plan.seq_lens.tolist(), plan.query_start.tolist()) == ([0, 1], [0, 1], [0, 1, 2])
    (group,) = plan.groups
    assert (group.tables.tolist(), group.table_blocks.tolist()) == ([[5] * 3] * 2, [2, 1])
    assert group.slots.tolist() == [80, 80, 80]


def test_encoder_only_attention_has_slots_and_no_table() -> None:
    """Its group comes last, and nothing is stored for it (`_get_slot_mappings` makes its slots anew)."""
    runner = V1()
    slots = {0: runner.slots[:3], 1: torch.zeros(3, dtype=torch.int64)}
    assert [group.group_id for group in runner_v1.read_plan(runner, slots, 2).groups] == [0]


def test_later_steps_see_what_the_buffers_hold_by_then() -> None:
    runner = V1()
    runner.read()
    views = getattr(runner, runner_v1.VIEWS)
    runner.slots[1] = 7
    runner.input_batch.block_table.block_tables[0].block_table.gpu[1, 2] = 9
    runner.positions += 10
    runner.seq_lens += 20
    plan = runner.read()
    assert getattr(runner, runner_v1.VIEWS) is views
    assert plan.groups[0].slots.tolist() == [80, 7, 80]
    assert plan.groups[0].tables.tolist() == [[5, 5, 5], [5, 5, 9]]
    assert (plan.positions.tolist(), plan.seq_lens.tolist()) == ([10, 11], [20, 21])


@pytest.mark.parametrize("name", ["input_batch", "positions", "seq_lens"])
def test_other_buffers_are_looked_at_anew(name: str) -> None:
    runner = V1()
    runner.read()
    if name == "input_batch":
        runner.input_batch = input_batch(6)
    else:
        setattr(runner, name, getattr(runner, name) + 3)
    plan = runner.read()
    expected = {"input_batch": (96, 6, 0, 0), "positions": (80, 5, 3, 0), "seq_lens": (80, 5, 0, 3)}[name]
    (group,) = plan.groups
    assert (group.slots[0], group.tables[0, 0], plan.positions[0], plan.seq_lens[0]) == expected


def test_slots_from_elsewhere_are_read_as_what_they_are() -> None:
    runner = V1()
    assert runner.read(torch.tensor([1, 2, -1])).groups[0].slots.tolist() == [1, 2, -1]
    assert runner.read(runner.slots[4:6]).groups[0].slots.tolist() == [80, 80]
    runner.slots[4] = 11
    assert runner.read(runner.slots[4:6]).groups[0].slots.tolist() == [11, 80]


def test_lengths_of_asynchronous_speculative_decoding_are_estimates() -> None:
    runner = V1()
    runner.use_async_spec_decode = True
    assert not runner.read().exact


@pytest.mark.parametrize("on_host", [True, False])
def test_tensors_that_nobody_can_copy_are_not_touched_but_counted(on_host: bool) -> None:
    runner, observer = V1(), Told(expects_no_plan=False, reads_host_tensors=on_host)
    result = ({0: runner.slots[:3]}, None)
    runner_v1.after_slot_mappings(observer, runner, (), {"num_tokens_unpadded": 2}, result)
    assert observer.names == ["on_plan" if on_host else "on_plan_skipped"]
    assert hasattr(runner, runner_v1.VIEWS) is on_host
    if not on_host:
        observer = Told(expects_no_plan=False, reads_host_tensors=False)
        runner_v2.after_prepare_attn(observer, None, (None,), {}, (object(), object()))
        assert observer.calls == [("on_plan_skipped", ("device_tensors",))]


def test_outside_a_step_nothing_is_read() -> None:
    observer = Told(expects_no_plan=True, is_warming_up=False)
    runner_v1.after_slot_mappings(observer, V1(), (), {}, ({0: np.zeros(3)}, None))
    runner_v1.after_slot_mappings(observer, V1(), (), {}, ({}, None))
    runner_v1.after_slot_mappings(observer, None, (), {}, (None, None))
    runner_v2.after_prepare_attn(observer, None, (), {}, None)
    assert observer.calls == []


class Dummy(V1):
    """A runner whose last real step had four tokens, with two groups, of which one has no slots of its own."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.input_batch.block_table.block_tables += input_batch(6).block_table.block_tables
        for number, table in enumerate(self.input_batch.block_table.block_tables):
            table.slot_mapping.gpu = torch.tensor([40, 41, 42, 43, -1, -1, -1, -1]) + number
            table.slot_mapping.gpu[4:] = -1
            table.slot_mapping.gpu = table.slot_mapping.gpu.to(device)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None, None])

    def run(self, observer: Any, padded: int, change: Any = len, **kwargs: Any) -> None:
        """One token, padded to so many."""
        runner_v1.before_dummy_run(observer, self, (1,), kwargs)
        buffers = [table.slot_mapping.gpu for table in self.input_batch.block_table.block_tables]
        handed = {number: buffer[:padded] for number, buffer in enumerate(buffers)}
        runner_v1.after_slot_mappings(observer, self, (), {}, (handed, None))
        for mapping in handed.values():
            mapping.fill_(-1)
        change(buffers)
        runner_v1.after_dummy_run(observer, self, (1,), kwargs, None)


def rest_of(observer: Told) -> list[tuple[int, list[int], list[int]]]:
    ((name, (run,)),) = observer.calls
    assert (name, run.num_tokens, [slots.tolist() for slots in run.slots.values()]) == ("on_dummy", 1, [[-1], [-1]])
    return [(rest.checked, rest.indexes.tolist(), rest.slots.tolist()) for rest in run.persistent.values()]


def test_what_a_real_step_left_behind_the_padding_of_a_dummy_run_is_nobodys_fault() -> None:
    observer = Told(expects_no_plan=True)
    Dummy().run(observer, 2)
    assert rest_of(observer) == [(7, [], []), (7, [], [])]


@pytest.mark.parametrize("index", [1, 3, 7])
def test_a_slot_that_a_dummy_run_switches_on_is_seen_anywhere(index: int) -> None:
    observer = Told(expects_no_plan=True)
    Dummy().run(observer, 2, lambda buffers: buffers[1].__setitem__(index, 90))
    assert rest_of(observer) == [(7, [], []), (7, [index], [90])]


def test_dummy_runs_that_cannot_be_looked_at_are_counted() -> None:
    for device, kwargs, cause in (
        ("meta", {}, "device_tensors"),
        ("cpu", {"is_graph_capturing": True}, "graph_capture"),
    ):
        observer, runner = Told(expects_no_plan=True, reads_host_tensors=device == "cpu"), Dummy(device)
        runner.run(observer, 2, **kwargs)
        assert observer.calls == [("on_dummy_skipped", (cause,))]
        assert not hasattr(runner, runner_v1.BEFORE_DUMMY)
