"""The groups of a real KVCacheConfig, spec by spec, and where a rank stands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvscope.boundary.topology import read_ranks, read_topology, returns_results, run_id_of
from kvscope.facts.topology import Group, Ranks

specs = pytest.importorskip("vllm.v1.kv_cache_interface", reason="vLLM is not installed")
torch = pytest.importorskip("torch")

ATTENTION: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}


def spec(name: str, **fields: Any) -> Any:
    return getattr(specs, name)(**{**ATTENTION, **fields})


def read(*kv_specs: Any) -> tuple[Group, ...]:
    groups = [specs.KVCacheGroupSpec([f"layer.{i}", f"layer.{i + 9}"], of) for i, of in enumerate(kv_specs)]
    return read_topology(specs.KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=groups)).groups


def kind_of(kv_spec: Any) -> tuple[str, int | None, bool]:
    (group,) = read(kv_spec)
    return group.kind, group.visible_tokens, group.judged


def uniform(**layers: Any) -> Any:
    return specs.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers)


def test_full_attention() -> None:
    (group,) = read(spec("FullAttentionSpec", block_size=32))
    assert group == Group(group_id=0, kind="full_attention", block_size=32, kernel_block_size=None, layers=2)


def test_full_attention_with_a_window_inside_keeps_its_whole_table() -> None:
    """Without the hybrid manager vLLM keeps every block of a windowed layer too."""
    assert kind_of(spec("FullAttentionSpec", sliding_window=64)) == ("full_attention", None, True)


def test_multi_head_latent_attention() -> None:
    assert kind_of(spec("MLAAttentionSpec", num_kv_heads=1)) == ("mla", None, True)


def test_a_sliding_window() -> None:
    assert kind_of(spec("SlidingWindowSpec", sliding_window=40)) == ("sliding_window", 40, True)


def test_a_sliding_window_that_keeps_more_than_it_looks_at() -> None:
    windowed = spec("SlidingWindowSpec", sliding_window=40, extra_retained_tokens=3)
    assert kind_of(windowed) == ("sliding_window", 43, True)


def test_chunked_local_attention() -> None:
    assert kind_of(spec("ChunkedLocalAttentionSpec", attention_chunk_size=64)) == ("chunked_local", 64, True)


@pytest.mark.parametrize(
    ("name", "fields", "kind"),
    [
        ("CrossAttentionSpec", {}, "cross_attention"),
        ("EncoderOnlyAttentionSpec", {}, "encoder_only_attention"),
        ("SinkFullAttentionSpec", {"sink_len": 4}, "sink_full_attention"),
        ("SlidingWindowMLASpec", {"sliding_window": 40, "num_kv_heads": 1}, "sliding_window_mla"),
    ],
)
def test_a_spec_that_is_not_known_is_named_and_not_judged(name: str, fields: dict[str, Any], kind: str) -> None:
    assert kind_of(spec(name, **fields)) == (kind, None, False)


def test_a_state_space_model_is_not_judged() -> None:
    mamba = specs.MambaSpec(block_size=16, shapes=((2, 4),), dtypes=(torch.float32,))
    assert kind_of(mamba) == ("mamba", None, False)


def test_a_subclass_of_a_known_spec_may_mean_something_else() -> None:
    class TwistedFullAttentionSpec(specs.FullAttentionSpec):  # type: ignore[misc, name-defined]  # vLLM is untyped here
        pass

    kind, _, judged = kind_of(TwistedFullAttentionSpec(**ATTENTION))
    assert (kind, judged) == ("twisted_full_attention", False)


def test_layers_of_one_type_under_several_names() -> None:
    full = spec("FullAttentionSpec")
    assert kind_of(uniform(a=full, b=spec("FullAttentionSpec", head_size=4))) == ("full_attention", None, True)
    window = spec("SlidingWindowSpec", sliding_window=40)
    assert kind_of(uniform(a=window, b=window)) == ("sliding_window", 40, True)
    mamba = specs.MambaSpec(block_size=16, shapes=((2, 4),), dtypes=(torch.float32,))
    assert kind_of(uniform(a=mamba)) == ("mamba", None, False)


def test_layers_that_differ_in_what_they_see_are_not_judged() -> None:
    near, far = spec("SlidingWindowSpec", sliding_window=40), spec("SlidingWindowSpec", sliding_window=80)
    assert kind_of(uniform(a=near, b=far)) == ("mixed", None, False)
    assert kind_of(uniform(a=near, b=spec("FullAttentionSpec"))) == ("mixed", None, False)


def test_several_groups_share_one_pool() -> None:
    groups = read(spec("FullAttentionSpec"), spec("SlidingWindowSpec", sliding_window=40), spec("CrossAttentionSpec"))
    assert [(group.group_id, group.kind) for group in groups] == [
        (0, "full_attention"),
        (1, "sliding_window"),
        (2, "cross_attention"),
    ]
    topology = read_topology(specs.KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=[]))
    assert (topology.num_blocks, topology.null_block_id, topology.groups) == (100, 0, ())


# Ranks ----------------------------------------------------------------------------------------------------------------


def config(**parallel: Any) -> Any:
    defaults = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_index": 0}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**defaults, **parallel}), instance_id=parallel.get("instance_id", "x")
    )


def test_the_scheduler_has_a_data_parallel_rank_only() -> None:
    assert read_ranks(config(data_parallel_index=3, tensor_parallel_size=4), None) == Ranks(dp=3)


def test_one_worker_is_rank_zero_of_everything() -> None:
    assert read_ranks(config(), 0) == Ranks(dp=0, tp=0, pp=0, world=0)


def test_ranks_are_laid_out_with_tensor_parallelism_innermost() -> None:
    of = config(tensor_parallel_size=2, pipeline_parallel_size=3)
    ranks = [read_ranks(of, rank) for rank in range(6)]
    assert [(r.pp, r.tp) for r in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert {(r.pcp, r.dcp) for r in ranks} == {(None, None)}
    assert [r.world for r in ranks] == list(range(6))


def test_prefill_context_parallelism_stands_between_stage_and_tensor_rank() -> None:
    of = config(tensor_parallel_size=2, pipeline_parallel_size=2, prefill_context_parallel_size=2)
    ranks = [read_ranks(of, rank) for rank in range(8)]
    assert [(r.pp, r.pcp, r.tp) for r in ranks] == [
        (pp, pcp, tp) for pp in range(2) for pcp in range(2) for tp in range(2)
    ]


def test_decode_context_parallelism_divides_the_tensor_ranks() -> None:
    of = config(tensor_parallel_size=4, decode_context_parallel_size=2)
    assert [read_ranks(of, rank).dcp for rank in range(4)] == [0, 1, 0, 1]


def test_vllm_lays_its_ranks_out_in_the_same_way() -> None:
    """The reshape in ``initialize_model_parallel``, read from the source that is installed."""
    import inspect

    from vllm.distributed import parallel_state

    source = inspect.getsource(parallel_state.initialize_model_parallel)
    layout = source.index("reshape(")
    order = [source.index(name, layout) for name in ("pipeline_model_parallel_size", "prefill_context", "tensor_model")]
    assert order == sorted(order)


def test_only_the_first_tensor_rank_of_the_last_stage_returns_results() -> None:
    of = config(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert [returns_results(of, read_ranks(of, rank)) for rank in range(4)] == [False, False, True, False]


@pytest.mark.parametrize(
    ("instance_id", "run_id"),
    [("3f9a", "3f9a"), ("3f9a_dp0", "3f9a"), ("3f9a_dp12", "3f9a"), ("a_dpx", "a_dpx"), ("", "run"), ("_dp1", "run")],
)
def test_the_processes_of_all_data_parallel_ranks_are_one_run(instance_id: str, run_id: str) -> None:
    assert run_id_of(config(instance_id=instance_id)) == run_id
