"""Clones of device tensors: what they hold, whose turn it is, and what is counted instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvscope.boundary import device as d
from kvscope.boundary import runner_v1, runner_v2, worker
from kvscope.boundary.ledger import MAX_FAULTS, Hook
from kvscope.boundary.results import DUE, after_output
from kvscope.boundary.seams import seam_table
from kvscope.errors import ViolationError
from kvscope.facts.plans import Plan
from unit.boundary.devices import SlowDevice
from unit.boundary.fakes import HostError, Told
from unit.boundary.test_runner_v2 import BATCH, RUNNER, SLOTS, TABLES
from unit.boundary.test_runners import V1

torch = pytest.importorskip("torch")


class DeviceV1(V1):
    """A V1 runner whose tensors count as a device's."""

    def __init__(self, device: Any = None, clones: int = 4) -> None:
        super().__init__()
        self.query_start_loc.gpu = torch.arange(5, dtype=torch.int32)
        self.optimistic_seq_lens_cpu = torch.tensor([20, 9, 0, 0], dtype=torch.int32)
        self.input_batch.block_table.block_tables[0].block_size = 16
        self.device = device or SlowDevice()
        ring = d.CloneRing(self.device, d.clone_bytes_of(runner_v1.whole_plan(self)), clones)
        setattr(self, d.CLONES, ring)

    @property
    def ring(self) -> d.CloneRing:
        ring: d.CloneRing = getattr(self, d.CLONES)
        return ring

    def launch(self, observer: Told) -> None:
        runner_v1.after_slot_mappings(observer, self, (), {"num_tokens_unpadded": 2}, ({0: self.slots[:3]}, None))


def asked(**answers: Any) -> Told:
    return Told(expects_no_plan=False, reads_host_tensors=False, reads_local_lengths=False, **answers)


class Runner(SimpleNamespace):
    """One that can be referred to weakly, as a class of vLLM's can."""


def v2_runner(device: d.Device) -> Any:
    runner = Runner(**vars(RUNNER))
    runner.block_tables = SimpleNamespace(
        num_blocks=RUNNER.block_tables.num_blocks, block_sizes=[4, 4], input_block_tables=TABLES, slot_mappings=SLOTS
    )
    runner.input_buffers = SimpleNamespace(
        query_start_loc=torch.tensor([0, 2, 3, 3], dtype=torch.int32),
        positions=BATCH.positions,
        seq_lens=BATCH.seq_lens,
    )
    setattr(runner, d.CLONES, d.CloneRing(device, d.clone_bytes_of(runner_v2.whole_plan(runner)), 4))
    return runner


def v2_batch() -> Any:
    batch = SimpleNamespace(**vars(BATCH))
    batch.query_start_loc = torch.tensor([0, 2, 3, 3], dtype=torch.int32)
    batch.seq_lens_cpu_upper_bound = torch.tensor([6, 8, 0], dtype=torch.int32)
    return batch


def same_plan(one: Plan, other: Plan) -> bool:
    """Whether two plans say the same where the rules look."""
    assert (one.request_ids, one.num_tokens, one.exact) == (other.request_ids, other.num_tokens, other.exact)
    assert one.query_start.tolist() == other.query_start.tolist()
    assert (one.positions.tolist(), one.seq_lens.tolist()) == (other.positions.tolist(), other.seq_lens.tolist())
    for a, b in zip(one.groups, other.groups, strict=True):
        width = min(a.tables.shape[1], b.tables.shape[1])
        assert (a.group_id, a.table_blocks.tolist()) == (b.group_id, b.table_blocks.tolist())
        assert a.tables[:, :width].tolist() == b.tables[:, :width].tolist()
        assert a.slots.tolist() == b.slots.tolist()
        assert (a.tables.dtype, a.slots.dtype) == (np.int32, np.int64)
    return True


# What a clone holds ---------------------------------------------------------------------------------------------------


def test_a_clone_is_the_plan_as_it_was_at_the_launch() -> None:
    runner, observer = DeviceV1(), asked()
    expected = runner.read()
    values = [array.copy() for array in (expected.positions, expected.groups[0].slots, expected.groups[0].tables)]
    runner.launch(observer)
    # The speculator and the next step reuse every buffer of the runner before the copy has arrived.
    runner.slots.fill_(7)
    runner.positions.fill_(7)
    runner.input_batch.block_table.block_tables[0].block_table.gpu.fill_(7)
    runner.input_batch.block_table.block_tables[0].num_blocks_per_row[:] = 7
    runner.input_batch.req_ids[0] = "another"
    ((name, (clone,)),) = observer.calls
    assert name == "on_plan_clone"
    assert not clone.ready()
    clone.wait()
    plan = clone.read()
    assert plan.request_ids == ["a", "b"]
    assert plan.groups[0].table_blocks.tolist() == [2, 1]
    assert [a.tolist() for a in (plan.positions, plan.groups[0].slots, plan.groups[0].tables)] == [
        a.tolist() for a in values
    ]


def test_both_runners_say_the_same_through_a_clone() -> None:
    runner, observer = DeviceV1(d.HostDevice()), asked()
    expected = runner.read()
    runner.launch(observer)
    assert same_plan(observer.calls[0][1][0].read(), expected)
    newer, batch, observer = v2_runner(d.HostDevice()), v2_batch(), asked()
    runner_v2.after_prepare_attn(observer, newer, (batch,), {}, (TABLES, SLOTS))
    assert same_plan(observer.calls[0][1][0].read(), runner_v2.read_plan(newer, batch, TABLES, SLOTS))


def test_a_table_is_cloned_as_far_as_attention_may_read_even_where_the_runner_counts_less() -> None:
    counts = np.array([1, 2], np.int32)
    assert d.table_width(counts, longest=20, block_size=16, width=100) == 8
    assert d.table_width(counts, longest=16 * 20, block_size=16, width=100) == 24
    assert d.table_width(np.array([31], np.int32), longest=5, block_size=16, width=100) == 32
    assert d.table_width(counts, longest=16 * 20, block_size=16, width=11) == 11


def test_memory_is_laid_out_once_for_steps_of_one_size() -> None:
    runner = DeviceV1(d.HostDevice(), clones=1)
    arrays = []
    for _ in range(2):
        observer = asked()
        runner.launch(observer)
        clone = observer.calls[0][1][0]
        arrays.append(clone.read().positions)
        clone.release()
    assert arrays[0] is arrays[1]


def test_slots_of_32_bits_are_read_as_what_they_are() -> None:
    runner = DeviceV1(d.HostDevice())
    table = runner.input_batch.block_table.block_tables[0]
    table.slot_mapping.gpu = table.slot_mapping.gpu.to(torch.int32)
    observer = asked()
    runner.launch(observer)
    slots = observer.calls[0][1][0].read().groups[0].slots
    assert (slots.dtype, slots.tolist()) == (np.int64, [80, 80, 80])


def test_estimated_lengths_stay_estimates() -> None:
    runner, observer = DeviceV1(d.HostDevice()), asked()
    runner.use_async_spec_decode = True
    runner.launch(observer)
    assert not observer.calls[0][1][0].read().exact


# What is counted instead ----------------------------------------------------------------------------------------------


def test_when_all_memory_waits_room_is_asked_for_and_then_the_step_is_counted() -> None:
    runner, observer = DeviceV1(clones=2), asked()
    for _ in range(3):
        runner.launch(observer)
    assert observer.names == ["on_plan_clone", "on_plan_clone", "make_room", "on_plan_skipped"]
    assert observer.calls[-1][1] == ("ring_full",)
    observer.calls[0][1][0].release()
    runner.launch(observer)
    assert observer.names[4:] == ["on_plan_clone"]
    made_room = asked(make_room=observer.calls[1][1][0].release)
    runner.launch(made_room)
    assert made_room.names == ["make_room", "on_plan_clone"]


def test_a_step_that_does_not_fit_is_counted_and_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(d, "MOST_CLONE_BYTES", 64)
    runner, observer = DeviceV1(), asked()
    assert runner.ring.device_bytes == 4 * 64
    for _ in range(5):
        runner.launch(observer)
    assert observer.calls == [("on_plan_skipped", ("clone_too_large",))] * 5
    assert runner.device.log == []


def test_nothing_is_launched_into_a_graph() -> None:
    runner, observer = DeviceV1(), asked(has_begun=True)
    runner.device.capturing = True
    runner.launch(observer)
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
    for capturing in (True, False):
        runner.device.capturing = capturing
        asked_for = {} if capturing else {"is_graph_capturing": True}
        runner_v1.before_dummy_run(observer, runner, (2,), asked_for)
        runner_v1.after_dummy_run(observer, runner, (2,), asked_for, None)
    assert observer.calls == [
        ("on_plan_skipped", ("graph_capture",)),
        ("on_dummy_skipped", ("graph_capture",)),
        ("on_dummy_skipped", ("graph_capture",)),
    ]
    assert runner.device.log == []


def test_a_dummy_run_is_cloned_once_steps_have_begun() -> None:
    device = SlowDevice()
    runner = v2_runner(device)
    warming, serving = asked(has_begun=False), asked(has_begun=True)
    runner_v2.after_prepare_dummy_attn(warming, runner, (), {}, (TABLES, SLOTS))
    assert warming.calls == [("on_dummy_skipped", ("warm_up",))]
    runner_v2.after_prepare_dummy_attn(serving, runner, (), {}, (TABLES, SLOTS))
    ((name, (clone,)),) = serving.calls
    assert name == "on_dummy_clone"
    clone.wait()
    run = clone.read()
    assert run.num_tokens == 4
    assert {group: slots.tolist() for group, slots in run.slots.items()} == dict(enumerate(SLOTS.tolist()))


def test_a_dummy_run_of_the_first_runner_is_cloned_as_far_as_it_was_handed_on() -> None:
    """What lies behind it may be left over from a real step, and is not looked at."""
    observer = Told(expects_no_plan=True, reads_host_tensors=False, has_begun=True)
    runner = DeviceV1(d.HostDevice())
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
    slots = runner.slots
    runner_v1.before_dummy_run(observer, runner, (2,), {})
    runner_v1.after_slot_mappings(observer, runner, (), {}, ({0: slots[:4]}, None))
    slots[:4] = torch.tensor([-1, -1, -1, 90])
    runner_v1.after_dummy_run(observer, runner, (2,), {}, None)
    ((name, (clone,)),) = observer.calls
    assert name == "on_dummy_clone"
    run = clone.read()
    assert (run.num_tokens, run.slots[0].tolist()) == (2, [-1, -1])
    rest = run.persistent[0]
    assert (rest.checked, rest.indexes.tolist(), rest.slots.tolist()) == (2, [3], [90])


def test_the_memory_is_what_is_announced() -> None:
    asked_for = []

    class Counting(d.HostDevice):
        def memory(self, num_bytes: int) -> tuple[Any, Any]:
            asked_for.append(num_bytes)
            return super().memory(num_bytes)

    runner = DeviceV1(Counting())
    assert asked_for == [runner.ring.device_bytes]
    assert runner.ring.device_bytes <= 4 * d.MOST_CLONE_BYTES


def test_there_are_more_clones_than_steps_on_their_way() -> None:
    assert d.clones_of(SimpleNamespace(max_concurrent_batches=5)) == 7


def test_a_device_that_refuses_a_clone_keeps_no_memory_for_it() -> None:
    class Refusing(d.HostDevice):
        def clone(self, sources: Any, targets: Any) -> None:
            super().clone(sources, targets)
            raise RuntimeError("out of resources")

    runner = DeviceV1(Refusing(), clones=1)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            runner.launch(asked())


# When it is due -------------------------------------------------------------------------------------------------------


def result(**fields: Any) -> Any:
    return SimpleNamespace(sampled_token_ids=[], **fields)


@pytest.mark.parametrize("door", [worker.after_execute, worker.after_sample])
def test_a_result_that_the_host_has_waited_for_settles_its_step(door: Any) -> None:
    observer = asked()
    door(observer, None, (), {}, result(req_ids=["a"]))
    assert observer.names[-2:] == ["on_result", "settle"]


@pytest.mark.parametrize(
    "given", [result(req_ids=[]), SimpleNamespace(tensors={}), None], ids=["empty", "of an earlier stage", "none"]
)
def test_what_nobody_has_waited_for_settles_nothing(given: Any) -> None:
    observer = asked()
    worker.after_execute(observer, None, (), {}, given)
    assert "settle" not in observer.names


def test_an_asynchronous_result_settles_its_step_when_it_is_taken() -> None:
    due = Told()
    observer = asked(due=lambda: due)
    output = SimpleNamespace(get_output=lambda: None, model_runner_output=result(req_ids=["a"]))
    worker.after_sample(observer, None, (), {}, output)
    assert observer.names == ["on_result", "due"]
    after_output(getattr(output, DUE), output, (), {}, None)
    assert due.names == ["settle"]


def test_where_tensors_are_on_the_host_no_result_is_marked() -> None:
    observer = Told(reads_host_tensors=True)
    output = SimpleNamespace(get_output=lambda: None)
    worker.after_sample(observer, None, (), {}, output)
    assert observer.names == ["on_result"]
    assert not hasattr(output, DUE)


class Output:
    """A result of the host's that is made when somebody takes it."""

    def get_output(self) -> str:
        return "made"


def test_a_result_is_given_whatever_fails_and_the_hook_ends_after_its_faults() -> None:
    def fail() -> None:
        raise IndexError("a rule of ours")

    (seam,) = [seam for seam in seam_table(Told()) if seam.name == "runner_v2.output"]
    hook = Hook(seam.name)
    take = seam.wrap(Output.get_output, hook)
    output, due = Output(), Told(settle=fail)
    setattr(output, DUE, due)
    assert [take(output) for _ in range(MAX_FAULTS + 5)] == ["made"] * (MAX_FAULTS + 5)
    assert (hook.faults, hook.disabled, len(due.calls)) == (MAX_FAULTS, True, MAX_FAULTS)


def test_a_finding_is_raised_in_place_of_the_result() -> None:
    def fail() -> None:
        raise ViolationError("found", reason="r", request=None, group=None, block=None, step=1)

    (seam,) = [seam for seam in seam_table(Told()) if seam.name == "runner_v1.output"]
    output = Output()
    setattr(output, DUE, Told(settle=fail))
    with pytest.raises(ViolationError):
        seam.wrap(Output.get_output, Hook(seam.name))(output)


def test_a_result_that_the_host_cannot_make_is_told_to_whoever_waits_for_it() -> None:
    def broken(self: Output) -> str:
        raise HostError("the device is gone")

    (seam,) = [seam for seam in seam_table(Told()) if seam.name == "runner_v2.output"]
    output, due = Output(), Told()
    setattr(output, DUE, due)
    with pytest.raises(HostError):
        seam.wrap(broken, Hook(seam.name))(output)
    assert due.calls == [("on_native_error", ("runner_v2.output", "HostError"))]
