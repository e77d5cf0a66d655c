"""What is read of attention metadata: by the class that made it, where it lies, and of whichever layer it is."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvscope.boundary import runner_v1, runner_v2
from kvscope.boundary.attention import ADAPTERS, LAYOUT, AttentionLayout, extents
from kvscope.boundary.ledger import OBSERVER
from unit.boundary.fakes import Told
from unit.checks.worlds import group, pool

torch = pytest.importorskip("torch")


def builder(module: str = "vllm.v1.attention.backends.cpu_attn", name: str = "CPUAttentionMetadataBuilder") -> Any:
    return type(name, (), {"__module__": module})()


LATENT = ("vllm.model_executor.layers.attention.mla_attention", "MLACommonMetadataBuilder")


def attn_group(group_id: int = 0, *names: str, made_by: Any = None, kernel: int | None = None, stride: int = 0) -> Any:
    return SimpleNamespace(
        kv_cache_group_id=group_id,
        layer_names=list(names) or [f"{group_id}.0", f"{group_id}.1"],
        kv_cache_spec=SimpleNamespace(block_size=64),
        kernel_block_size=kernel,
        kernel_block_stride=stride,
        get_metadata_builder=lambda: made_by or builder(),
    )


class CPUAttentionMetadata:
    """Two rows of three that are in the buffers; one padding slot."""

    def __init__(self, tables: Any, lengths: Any, starts: Any, slots: Any) -> None:
        self.block_table, self.seq_lens = tables[:2], lengths[:2]
        self.query_start_loc, self.slot_mapping = starts[:3], slots[:4]


class Buffers:
    def __init__(self) -> None:
        self.tables = torch.arange(12, dtype=torch.int32).view(3, 4)
        self.lengths = torch.tensor([5, 9, 1], dtype=torch.int32)
        self.starts = torch.tensor([0, 1, 3, 3], dtype=torch.int32)
        self.slots = torch.tensor([10, 20, 21, -1, 99])

    def metadata(self) -> CPUAttentionMetadata:
        return CPUAttentionMetadata(self.tables, self.lengths, self.starts, self.slots)


ROWS, TOKENS = 2, 3


def by_layer(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names or ("0.0", "0.1"), value)


def read(buffers: Buffers, layout: AttentionLayout | None = None) -> Any:
    metadata = buffers.metadata()
    layout = layout or AttentionLayout([[attn_group()]])
    return layout.arguments(by_layer(metadata), by_layer(metadata.slot_mapping), ROWS, TOKENS)


def test_arguments_are_what_the_metadata_holds() -> None:
    (group,) = read(Buffers()).groups
    ((part,), (mapping,)) = group.parts, group.slots
    assert (group.group_id, group.kernel_blocks, group.kernel_stride) == (0, 1, 1)
    assert (part.first_row, part.rows, part.first_token, part.end_token) == (0, 2, 0, 3)
    assert part.tables.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (part.seq_lens.tolist(), part.query_start.tolist()) == ([5, 9], [0, 1, 3])
    assert (mapping.first_token, mapping.tokens, mapping.slots.tolist()) == (0, 3, [10, 20, 21, -1])


def test_later_steps_see_what_lies_there_by_then_through_the_same_object() -> None:
    buffers, layout = Buffers(), AttentionLayout([[attn_group()]])
    first = read(buffers, layout)
    buffers.tables[1, 2] = 77
    buffers.slots[0] = 11
    assert read(buffers, layout) is first
    (group,) = first.groups
    assert group.parts[0].tables[1, 2] == 77
    assert group.slots[0].slots[0] == 11


@pytest.mark.parametrize("name", ["tables", "lengths", "starts", "slots"])
def test_what_lies_elsewhere_is_read_anew(name: str) -> None:
    buffers, layout = Buffers(), AttentionLayout([[attn_group()]])
    first = read(buffers, layout)
    setattr(buffers, name, getattr(buffers, name) + 1)
    again = read(buffers, layout)
    assert again is not first
    (group,) = again.groups
    values = (group.parts[0].tables[0, 0], group.parts[0].seq_lens[0], group.parts[0].query_start[0])
    expected = {"tables": (1, 5, 0, 10), "lengths": (0, 6, 0, 10), "starts": (0, 5, 1, 10), "slots": (0, 5, 0, 11)}
    assert (*values, group.slots[0].slots[0]) == expected[name]


def test_another_part_of_the_batch_is_read_anew() -> None:
    layout, metadata = AttentionLayout([[attn_group()]]), Buffers().metadata()
    first = layout.arguments(by_layer(metadata), None, ROWS, TOKENS)
    assert layout.arguments(by_layer(metadata), None, 1, 1) is not first
    assert len(first.groups[0].slots) == 1


def test_slots_of_the_forward_that_are_others_are_read_too() -> None:
    metadata = Buffers().metadata()
    slots = torch.tensor([1, 2, 3, -1])
    (group,) = AttentionLayout([[attn_group()]]).arguments(by_layer(metadata), by_layer(slots), ROWS, TOKENS).groups
    assert [mapping.slots.tolist() for mapping in group.slots] == [[10, 20, 21, -1], [1, 2, 3, -1]]


def test_one_layer_that_has_its_own_is_not_overlooked() -> None:
    layout, metadata, own = AttentionLayout([[attn_group()]]), Buffers().metadata(), Buffers().metadata()
    own.block_table[0, 0] = 50
    of_layers = {"0.0": metadata, "0.1": own}
    slots = {"0.0": metadata.slot_mapping, "0.1": torch.tensor([7, 7, 7, 7])}
    groups = layout.arguments(of_layers, slots, ROWS, TOKENS).groups
    assert [group.parts[0].tables[0, 0] for group in groups] == [0, 50]
    for each in groups:
        assert [7, 7, 7, 7] in [mapping.slots.tolist() for mapping in each.slots]
    same = layout.arguments(by_layer(metadata), slots, ROWS, TOKENS).groups
    assert [[7, 7, 7, 7] in [mapping.slots.tolist() for mapping in group.slots] for group in same] == [True]


def test_a_layer_without_metadata_is_an_error() -> None:
    metadata = Buffers().metadata()
    with pytest.raises(KeyError):
        AttentionLayout([[attn_group()]]).arguments({"0.0": metadata}, None, ROWS, TOKENS)


@pytest.mark.parametrize(("kernel", "stride", "expected"), [(None, 0, (1, 1)), (16, 0, (4, 4)), (32, 10, (2, 10))])
def test_blocks_of_a_kernel(kernel: int | None, stride: int, expected: tuple[int, int]) -> None:
    layout = AttentionLayout([[attn_group(kernel=kernel, stride=stride)]])
    (group,) = read(Buffers(), layout).groups
    assert (group.kernel_blocks, group.kernel_stride) == expected
    assert layout.kernel_block_sizes == {0: kernel or 64}


# Who made it ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made_by",
    [builder(name="ChunkedLocalAttentionBuilder"), builder(module="elsewhere"), type("X", (type(builder()),), {})()],
)
def test_metadata_of_another_builder_is_not_read(made_by: Any) -> None:
    layout = AttentionLayout([[attn_group()], [attn_group(1, made_by=made_by)], [attn_group(2), attn_group(2, "x")]])
    assert [layout.unread(group) for group in (0, 1, 2, 3)] == [
        None, f"metadata of {type(made_by).__name__}", None, "no attention group",
    ]  # fmt: skip
    metadata = Buffers().metadata()
    names = ("0.0", "0.1", "2.0", "2.1", "x")
    arguments = layout.arguments(by_layer(metadata, *names), by_layer(metadata.slot_mapping, *names), ROWS, TOKENS)
    assert [group.group_id for group in arguments.groups] == [0, 2, 2]
    assert arguments.unread == {1: f"metadata of {type(made_by).__name__}"}


def test_a_group_of_which_one_part_is_not_known_is_not_read() -> None:
    layout = AttentionLayout([[attn_group(0, "x"), attn_group(0, "y", made_by=builder(module="elsewhere"))]])
    assert layout.unread(0) == "metadata of CPUAttentionMetadataBuilder"
    assert layout.arguments({}, {}, ROWS, TOKENS).groups == []


def test_metadata_of_another_class_than_its_builder_makes_is_not_read() -> None:
    class Other(CPUAttentionMetadata):
        pass

    metadata = Buffers().metadata()
    metadata.__class__ = Other
    arguments = AttentionLayout([[attn_group()]]).arguments(by_layer(metadata), None, ROWS, TOKENS)
    assert (arguments.groups, arguments.unread) == ([], {0: "metadata of Other"})


def test_the_builders_that_are_known_are_those_of_the_host() -> None:
    pytest.importorskip("vllm")
    for (module, name), adapter in ADAPTERS.items():
        host = importlib.import_module(module)
        assert isinstance(getattr(host, name), type)
        assert isinstance(getattr(host, adapter.metadata), type)


def test_a_runner_without_attention_groups_has_an_empty_layout() -> None:
    for runner in (SimpleNamespace(), SimpleNamespace(attn_groups=None), SimpleNamespace(attn_groups=[[object()]])):
        layout = AttentionLayout.of_runner(runner)
        assert (layout.layers, layout.kernel_block_sizes, layout.unread(0)) == ([], {}, "no attention group")


# Latent attention -----------------------------------------------------------------------------------------------------


class MLACommonMetadata:
    """``decodes`` rows with one token each, and then one with three."""

    def __init__(self, decodes: int, prefills: int) -> None:
        rows = decodes + prefills
        tables = torch.arange(4 * rows, dtype=torch.int32).view(rows, 4)
        self.num_decodes = self.num_decode_tokens = decodes
        starts = [*range(decodes + 1), *(decodes + 3 * (n + 1) for n in range(prefills))]
        self.query_start_loc = torch.tensor(starts, dtype=torch.int32)
        self.slot_mapping = torch.arange(starts[-1])
        self.decode = self.prefill = None
        if decodes:
            lengths = torch.full((decodes,), 9, dtype=torch.int32)
            self.decode = SimpleNamespace(block_table=tables[:decodes], seq_lens=lengths)
        if prefills:
            of_prefills = self.query_start_loc[decodes:] - decodes
            self.prefill = SimpleNamespace(block_table=tables[decodes:], query_start_loc=of_prefills)


@pytest.mark.parametrize(("decodes", "prefills"), [(2, 0), (0, 2), (2, 1)])
def test_latent_attention_has_a_part_for_each_sort_of_row(decodes: int, prefills: int) -> None:
    metadata = MLACommonMetadata(decodes, prefills)
    tokens = decodes + 3 * prefills
    layout = AttentionLayout([[attn_group(made_by=builder(*LATENT))]])
    of_all = by_layer(metadata), by_layer(metadata.slot_mapping), decodes + prefills, tokens
    (group,) = layout.arguments(*of_all).groups
    said = [(part.first_row, part.rows, part.first_token, part.end_token) for part in group.parts]
    decoding, prefilling = (0, decodes, 0, decodes), (decodes, prefills, decodes, tokens)
    assert said == [of for of in (decoding, prefilling) if of[1]]
    tables = np.concatenate([part.tables for part in group.parts])
    assert tables.tolist() == np.arange(4 * (decodes + prefills)).reshape(-1, 4).tolist()
    assert [part.seq_lens is None for part in group.parts] == [False] * (decodes > 0) + [True] * (prefills > 0)
    assert [part.query_start.tolist() for part in group.parts if part.query_start is not None] == [
        of for of in (list(range(decodes + 1)), [3 * n for n in range(prefills + 1)]) if len(of) > 1
    ]
    assert (layout.arguments(*of_all).groups[0] is group) is (prefills == 0)


# Where it is read -----------------------------------------------------------------------------------------------------


SLICES = [
    SimpleNamespace(request_slice=slice(0, 1), token_slice=slice(0, 2)),
    SimpleNamespace(request_slice=slice(0, 4), token_slice=slice(2, 8)),
]


def test_micro_batches_lie_where_their_slices_say_without_the_rows_of_padding() -> None:
    assert list(extents(SLICES, 3, 7)) == [(0, 1, 0, 2, 7), (0, 3, 2, 8, 7)]


def awaiting(**more: Any) -> Told:
    return Told(awaits_operators=True, planned_tokens=3, **more)


def on_v1(monkeypatch: pytest.MonkeyPatch, observer: Told, metadata: Any, slots: Any, slices: Any = None) -> None:
    context = SimpleNamespace(attn_metadata=metadata, slot_mapping=slots, ubatch_slices=slices)
    module = SimpleNamespace(_forward_context=context)
    monkeypatch.setitem(runner_v1.sys.modules, "vllm.forward_context", module)
    runner = SimpleNamespace(input_batch=SimpleNamespace(num_reqs=2))
    setattr(runner, LAYOUT, AttentionLayout([[attn_group()]]))
    runner_v1.before_forward(observer, runner, (), {})


def test_v1_reads_the_forward_context(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata, observer = Buffers().metadata(), awaiting()
    on_v1(monkeypatch, observer, by_layer(metadata), by_layer(metadata.slot_mapping))
    ((name, (arguments,)),) = observer.calls
    assert name == "on_operators"
    assert [part.end_token for part in arguments.groups[0].parts] == [3]


def test_v1_reads_every_micro_batch_of_a_batch_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata, observer = Buffers().metadata(), awaiting()
    each = [by_layer(metadata), by_layer(metadata)], [by_layer(metadata.slot_mapping), by_layer(metadata.slot_mapping)]
    on_v1(monkeypatch, observer, *each, slices=SLICES)
    ((_, (arguments,)),) = observer.calls
    assert [group.parts[0].end_token for group in arguments.groups] == [2, 8]
    assert [group.slots[0].tokens for group in arguments.groups] == [2, 1]


def test_v1_reads_nothing_where_nothing_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    observer = Told(awaits_operators=False)
    on_v1(monkeypatch, observer, {}, {})
    assert observer.calls == []


BATCH = SimpleNamespace(num_reqs=2, num_tokens=3)


def carrying() -> Any:
    host = SimpleNamespace()
    setattr(host, LAYOUT, AttentionLayout([[attn_group()]]))
    return host


@pytest.mark.parametrize("by_name", [True, False])
def test_v2_reads_what_the_models_state_makes(by_name: bool) -> None:
    observer, args, kwargs = awaiting(), () if by_name else (BATCH,), {"input_batch": BATCH} if by_name else {}
    runner_v2.after_metadata(observer, carrying(), args, kwargs, by_layer(Buffers().metadata()))
    ((_, (arguments,)),) = observer.calls
    assert [mapping.slots.tolist() for mapping in arguments.groups[0].slots] == [[10, 20, 21, -1]]
    runner_v2.after_metadata(observer, carrying(), args, {**kwargs, "ubatch_idx": 0}, None)
    runner_v2.after_metadata(Told(awaits_operators=False), carrying(), args, kwargs, None)
    assert len(observer.calls) == 1


def test_v2_reads_the_contexts_of_micro_batches() -> None:
    metadata, observer = Buffers().metadata(), awaiting()
    context = SimpleNamespace(attn_metadata=by_layer(metadata), slot_mapping=by_layer(metadata.slot_mapping))
    state = SimpleNamespace(slices=SLICES, forward_contexts=[context, context])
    runner_v2.after_micro_batches(observer, carrying(), (BATCH,), {}, state)
    ((_, (arguments,)),) = observer.calls
    assert [group.parts[0].first_token for group in arguments.groups] == [0, 2]


def test_v2_reads_what_is_kept_of_the_forward() -> None:
    metadata, observer, runner = Buffers().metadata(), awaiting(), carrying()
    slots = torch.tensor([7, 7, 7, 7])
    runner.execute_model_state = SimpleNamespace(
        attn_metadata=by_layer(metadata), slot_mappings_by_layer=by_layer(slots), input_batch=BATCH
    )
    runner_v2.after_forward(observer, runner, (), {}, None)
    ((_, (arguments,)),) = observer.calls
    assert [mapping.slots.tolist() for mapping in arguments.groups[0].slots] == [[10, 20, 21, -1], [7, 7, 7, 7]]
    for state in (None, SimpleNamespace(attn_metadata=None)):
        runner.execute_model_state = state
        runner_v2.after_forward(observer, runner, (), {}, None)
    assert len(observer.calls) == 1


class RunnerV1:
    def _model_forward(self) -> None: ...


class State:
    def prepare_attn(self) -> None: ...


WRAPPERS = [RunnerV1._model_forward, State.prepare_attn]


def on_host(**more: Any) -> Any:
    return SimpleNamespace(**{"reads_host_tensors": True, **more})


def test_every_object_that_yields_arguments_carries_what_reads_them() -> None:
    layout, observer, topology = AttentionLayout([[attn_group()]]), on_host(), pool(group(0))
    v1 = RunnerV1()
    v2 = SimpleNamespace(model_state=State(), ubatch_runner=SimpleNamespace())
    alone = SimpleNamespace(model_state=State(), ubatch_runner=None)
    for runner in (v1, v2, alone):
        assert layout.attach(runner, observer, WRAPPERS, topology) == {}
        assert observer.reads_operators
    for carrier in (v1, v2, v2.model_state, v2.ubatch_runner, alone.model_state):
        assert getattr(carrier, LAYOUT) is layout
        assert getattr(carrier, OBSERVER) is observer


def test_where_arguments_cannot_be_read_it_is_said_why() -> None:
    class Own(RunnerV1):
        def _model_forward(self) -> None: ...

    layout = AttentionLayout([[attn_group()], [attn_group(1, made_by=builder(module="elsewhere"))]])
    topology = pool(group(0), group(1), group(2, "mamba"))
    odd = "metadata of CPUAttentionMetadataBuilder"
    for runner, observer, expected in (
        (RunnerV1(), on_host(), {1: odd}),
        (Own(), on_host(), dict.fromkeys((0, 1), "Own has its own _model_forward")),
        (RunnerV1(), on_host(reads_host_tensors=False), dict.fromkeys((0, 1), "device_tensors")),
    ):
        assert layout.attach(runner, observer, WRAPPERS, topology) == expected
        assert observer.reads_operators is (len(expected) < 2)


def test_under_context_parallelism_nothing_is_read() -> None:
    topology = msgspec.structs.replace(pool(group(0)), dcp_size=2)
    observer = on_host()
    told = AttentionLayout([[attn_group()]]).attach(RunnerV1(), observer, WRAPPERS, topology)
    assert (told, observer.reads_operators) == ({0: "context_parallel"}, False)


@pytest.mark.parametrize("pairs", [False, True])
def test_slots_in_another_shape_are_numbers_all_the_same_and_read_in_every_step(pairs: bool) -> None:
    buffers, layout = Buffers(), AttentionLayout([[attn_group()]])
    slots = torch.tensor([10, 84, 21, -1])
    raw = torch.stack((slots // 64, slots % 64), 1).to(torch.int32) if pairs else slots.to(torch.int32)
    metadata = buffers.metadata()
    metadata.slot_mapping = raw
    for value in (10, 11):
        raw[0] = torch.tensor([0, value]) if pairs else value
        (of,) = layout.arguments(by_layer(metadata), by_layer(raw), ROWS, TOKENS).groups
        (mapping,) = of.slots
        assert mapping.slots.tolist() == [value, 84, 21, -1]
        assert mapping.host_slots is not None
        assert mapping.host_slots.shape == tuple(raw.shape)
