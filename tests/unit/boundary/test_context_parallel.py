"""What is read of a context-parallel rank. PCP batches are cut by vLLM's own manager, and judged as declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvscope.boundary import runner_v1, runner_v2
from kvscope.boundary.context_parallel import context_of_v1, context_of_v2, read_local_lengths
from kvscope.boundary.topology import read_ranks, read_topology
from kvscope.checks.finding import Finding
from kvscope.facts.context_parallel import ContextParallel
from kvscope.facts.plans import PAD_SLOT, Plan
from kvscope.facts.requests import Declaration
from unit.boundary.test_runners import V1
from unit.checks.dealing import dcp_pool, deal, partitioned, sharded
from unit.checks.scenes import Scene
from unit.checks.worlds import group

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")


class Tables:
    """V2's block tables, whose kernels are played token by token: ``rows`` are requests in the order of their state."""

    def __init__(self, tables: list[list[int]], context: ContextParallel, slots_per_block: int) -> None:
        width = max(map(len, tables)) + 2
        filled = [table + [0] * (width - len(table)) for table in tables]
        self.block_tables = [SimpleNamespace(gpu=torch.tensor(filled, dtype=torch.int32))]
        self.input_block_tables = [torch.zeros((len(tables), width), dtype=torch.int32)]
        self.num_blocks = SimpleNamespace(np=np.array([list(map(len, tables))], np.int32))
        self.num_kv_cache_groups, self.block_sizes = 1, [slots_per_block]
        self.cp_size, self.cp_rank, self.cp_interleave = context.dcp_size, context.dcp_rank, context.interleave
        self.dcp_sharded, self._slot_mapping_enabled = torch.tensor([context.dcp_size > 1]), [True]
        self._dealt = deal(slots_per_block * context.dcp_size, context.dcp_size, context.interleave)

    def gather_block_tables(self, idx_mapping: Any, rows: int, out: Any, **_: Any) -> Any:
        for row, index in enumerate(idx_mapping.tolist()):
            count = self.num_blocks.np[0, index]
            out[0][row, :count] = self.block_tables[0].gpu[index, :count]
        return (out[0][:rows],)

    def compute_slot_mappings(
        self, idx_mapping: Any, query_start_loc: Any, positions: Any, num_tokens_padded: int, out: Any
    ) -> Any:
        out[:] = PAD_SLOT
        for row, index in enumerate(idx_mapping.tolist()):
            for token in range(int(query_start_loc[row]), int(query_start_loc[row + 1])):
                block, offset = divmod(int(positions[token]), len(self._dealt))
                rank, before = self._dealt[offset]
                if rank == self.cp_rank:
                    out[0, token] = int(self.block_tables[0].gpu[index, block]) * self.block_sizes[0] + before
        return out[:, :num_tokens_padded]


def host_batch(plan: Plan, order: list[str], prefilling: set[str]) -> Any:
    """vLLM's InputBatch of a plan; ``order`` are the requests as V2's state has them."""
    from vllm.v1.worker.gpu.input_batch import InputBatch

    rows, tokens = len(plan.request_ids), plan.num_tokens
    index = np.array([order.index(name) for name in plan.request_ids])
    lens = np.diff(plan.query_start)
    known: dict[str, Any] = {
        "req_ids": list(plan.request_ids),
        "num_reqs": rows,
        "num_reqs_after_padding": rows,
        "idx_mapping": torch.from_numpy(index),
        "idx_mapping_np": index,
        "expanded_local_pos": torch.zeros(rows, dtype=torch.int32),
        "num_scheduled_tokens": lens,
        "num_tokens": tokens,
        "num_tokens_after_padding": tokens,
        "query_start_loc": torch.from_numpy(plan.query_start.copy()),
        "query_start_loc_np": plan.query_start.copy(),
        "seq_lens": torch.from_numpy(plan.seq_lens.copy()),
        "num_computed_tokens_np": plan.seq_lens - lens,
        "prefill_len_np": np.where([name in prefilling for name in plan.request_ids], 1000, 0),
        "is_prefilling_np": np.array([name in prefilling for name in plan.request_ids]),
        "has_prefill": bool(prefilling),
        "input_ids": torch.zeros(tokens, dtype=torch.int32),
        "positions": torch.from_numpy(plan.positions.copy()),
    }
    return InputBatch(**{field.name: known.get(field.name) for field in fields(InputBatch)})


class Engine:
    """The ranks of one PCP engine: ``a`` decodes its token 40, ``b`` has a prompt of ``tokens``."""

    def __init__(self, size: int, *, tokens: int = 40, dcp: bool = False, shard_decodes: bool = False) -> None:
        of = sharded(0, 16, size) if dcp else group(0)
        self.topology = dcp_pool(of, size=size if dcp else 1, pcp_size=size)
        self.size, self.dcp, self.shard_decodes = size, dcp, shard_decodes
        self.scene = Scene(self.topology)
        self.scene.say(new=[("a", ([1, 2, 3],), 0, 40)])
        self.declaration: Declaration = self.scene.say(
            new=[("b", ([4, 5, 6, 7],), 0, tokens)], known=[("a", None, 40, 1)]
        )

    def rank(self, rank: int, change: Callable[[Any], object] | None = None) -> Plan:
        """The plan of one rank, as it is read; ``change`` is made to the manager before slots are gathered."""
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.pcp_manager import PCPManager

        at = ContextParallel(
            pcp_size=self.size,
            pcp_rank=rank,
            dcp_size=self.size if self.dcp else 1,
            dcp_rank=rank if self.dcp else 0,
            interleave=4 if self.dcp else 1,
        )
        order = ["left over", "a", "b"]
        tables = Tables([[9], *[self.scene.tables[name][0] for name in order[1:]]], at, 16)
        manager = PCPManager(
            self.size, rank, torch.device("cpu"), self.shard_decodes, max_num_reqs=4, max_num_tokens=256,
            block_tables=tables, dcp_world_size=at.dcp_size, dcp_rank=at.dcp_rank, cp_interleave=at.interleave,
        )  # fmt: skip
        runner = SimpleNamespace(
            block_tables=tables,
            pcp_manager=manager,
            num_speculative_steps=0,
            scheduler_config=SimpleNamespace(async_scheduling=False),
        )
        whole = host_batch(self.scene.plan(self.declaration, 0), order, {"b"})
        batch = manager.partition_batch(whole, SimpleNamespace(cg_mode=CUDAGraphMode.NONE))
        if change is not None:
            change(SimpleNamespace(manager=manager, batch=batch, tables=tables))
        return runner_v2.read_plan(runner, batch, *manager.prepare_attn(batch))

    def judge(self, plan: Plan) -> list[Finding]:
        return self.scene.judge(self.declaration, plan)


@pytest.mark.parametrize("shard_decodes", [False, True])
@pytest.mark.parametrize("dcp", [False, True], ids=["pcp", "pcp and dcp"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tokens", [1, 3, 8, 40, 63])
def test_what_vllms_own_manager_makes_of_a_batch_is_what_was_declared(
    size: int, dcp: bool, tokens: int, shard_decodes: bool
) -> None:
    engine = Engine(size, tokens=tokens, dcp=dcp, shard_decodes=shard_decodes and not dcp)
    stored = np.zeros(tokens + 1, np.int64)
    for rank in range(size):
        plan = engine.rank(rank)
        assert plan.context is not None
        assert (plan.context.pcp_size, plan.context.pcp_rank) == (size, rank)
        assert plan.local is not None
        assert engine.judge(plan) == []
        stored += plan.groups[0].slots[: plan.num_tokens] != PAD_SLOT
    assert (stored == (1 if dcp else size)).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_manager_cuts_as_the_oracle_does(rank: int) -> None:
    engine = Engine(2)
    plan = engine.rank(rank)
    expected = partitioned(
        engine.scene.plan(engine.declaration, 0), ContextParallel(pcp_size=2, pcp_rank=rank), {"a"}
    ).local
    assert plan.local is not None
    assert expected is not None
    assert plan.local.request_ids == expected.request_ids
    for name in ("query_start", "positions", "seq_lens", "writers"):
        assert getattr(plan.local, name).tolist() == getattr(expected, name).tolist(), name


def gathered(place: int, token: int) -> Callable[[Any], object]:
    return lambda host: host.manager._padded_gather_idx.__setitem__(place, token)


@pytest.mark.parametrize(
    ("change", "reason", "request_id"),
    [
        (gathered(3, 1), "cp_slot_owner_mismatch", "b"),
        (lambda host: host.manager._gathered_kv_write_mask.__setitem__(3, False), "cp_slot_owner_mismatch", "b"),
        (lambda host: host.batch.positions.__setitem__(slice(1, 3), torch.tensor([5, 4])), "cp_order_mismatch", "b"),
        (lambda host: host.batch.seq_lens.__setitem__(1, 40), "cp_order_mismatch", "b"),
        (lambda host: host.tables.block_tables[0].gpu.__setitem__((2, 0), 1), "write_foreign_block", "b"),
    ],
    ids=["a token from another's place", "a token from no place", "positions", "a length", "a block"],
)
def test_what_goes_wrong_in_the_manager_is_found(change: Callable[[Any], object], reason: str, request_id: str) -> None:
    engine = Engine(2)
    found = engine.judge(engine.rank(0, change))
    assert found
    said = {name for finding in found for name in (finding.reason, *finding.also)}
    assert reason in said
    assert {finding.request_id for finding in found} == {request_id}


def test_a_table_that_attention_reads_and_slots_are_not_computed_by_is_judged_as_it_is_read() -> None:
    def change(host: Any) -> None:
        gather = host.tables.gather_block_tables

        def damaged(*args: Any, **kwargs: Any) -> Any:
            (tables,) = gather(*args, **kwargs)
            tables[1, 0] = 3
            return (tables,)

        host.tables.gather_block_tables = damaged

    engine = Engine(2)
    (finding,) = engine.judge(engine.rank(0, change))
    assert (finding.reason, finding.request_id, finding.block_id) == ("read_foreign_block", "b", 3)


# Coordinates ----------------------------------------------------------------------------------------------------------


def v1_table(mode: str = "token_to_kv_slot", size: int = 2) -> Any:
    return SimpleNamespace(
        dcp_world_size=size, dcp_rank=1, cp_kv_cache_interleave_size=8, slot_mapping_mode=SimpleNamespace(value=mode)
    )


def test_v1_deals_out_every_group_that_has_a_slot_mapping() -> None:
    tables = [v1_table(), v1_table("none"), v1_table()]
    runner = SimpleNamespace(input_batch=SimpleNamespace(block_table=SimpleNamespace(block_tables=tables)))
    assert context_of_v1(runner) == ContextParallel(dcp_size=2, dcp_rank=1, interleave=8, sharded=(0, 2))
    for table in tables:
        table.dcp_world_size = 1
    assert context_of_v1(runner) is None


def test_v1_carries_the_coordinates_of_the_moment_in_every_plan() -> None:
    runner = V1()
    (table,) = runner.input_batch.block_table.block_tables
    vars(table).update(vars(v1_table()))
    assert runner.read().context == ContextParallel(dcp_size=2, dcp_rank=1, interleave=8, sharded=(0,))
    table.dcp_rank = 0
    context = runner.read().context
    assert context is not None
    assert context.dcp_rank == 0


def test_v2_reads_what_a_device_may_have_once_for_each_layout() -> None:
    at = ContextParallel(dcp_size=2, dcp_rank=1, interleave=4)
    runner = SimpleNamespace(block_tables=Tables([[1]], at, 16), pcp_manager=None)
    context = context_of_v2(runner)
    assert context == ContextParallel(dcp_size=2, dcp_rank=1, interleave=4, sharded=(0,))
    assert context_of_v2(runner) is context
    runner.block_tables.cp_rank = 0
    changed = context_of_v2(runner)
    assert changed is not None
    assert changed.dcp_rank == 0
    runner.block_tables = Tables([[1]], ContextParallel(), 16)
    assert context_of_v2(runner) is None


@pytest.mark.parametrize(
    ("tp", "pcp", "dcp", "pp"), [(2, 1, 2, 1), (4, 1, 2, 2), (1, 2, 2, 1), (2, 2, 4, 1), (2, 2, 2, 2), (2, 4, 8, 1)]
)
def test_ranks_are_those_of_vllms_own_groups(tp: int, pcp: int, dcp: int, pp: int) -> None:
    """As ``initialize_model_parallel`` cuts them: PP x PCP x TP, and DCP out of PCP first and TP then."""
    parallel = SimpleNamespace(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
    )
    all_ranks = torch.arange(pp * pcp * tp).reshape(pp, pcp, tp)
    dcp_groups = all_ranks.transpose(-1, -2).reshape(-1, dcp).tolist()
    pcp_groups = all_ranks.transpose(1, 2).reshape(-1, pcp).tolist()
    for rank in range(pp * pcp * tp):
        ranks = read_ranks(SimpleNamespace(parallel_config=parallel), rank)
        (of_dcp,) = [members.index(rank) for members in dcp_groups if rank in members]
        (of_pcp,) = [members.index(rank) for members in pcp_groups if rank in members]
        assert (ranks.dcp, ranks.pcp) == (of_dcp, of_pcp if pcp > 1 else None)


def test_a_group_that_is_dealt_out_has_larger_blocks_and_one_that_is_not_has_its_own() -> None:
    class FullAttentionSpec:
        def __init__(self, dcp_sharded: bool) -> None:
            self.block_size, self.dcp_sharded = 16, dcp_sharded

    groups = [SimpleNamespace(kv_cache_spec=FullAttentionSpec(dealt), layer_names=["l"]) for dealt in (True, False)]
    parallel = SimpleNamespace(decode_context_parallel_size=4, prefill_context_parallel_size=1)
    topology = read_topology(
        SimpleNamespace(num_blocks=8, kv_cache_groups=groups), SimpleNamespace(parallel_config=parallel)
    )
    assert [(of.block_size, of.slots_per_block, of.shards) for of in topology.groups] == [(64, 16, 4), (16, 16, 1)]
    assert (topology.dcp_size, topology.context_parallel) == (4, True)


# Lengths --------------------------------------------------------------------------------------------------------------


def test_v1_leaves_the_local_lengths_of_a_step_behind() -> None:
    batch = SimpleNamespace(num_reqs=2, req_ids=["a", "b", "left over"])
    runner = SimpleNamespace(input_batch=batch, dcp_local_seq_lens=SimpleNamespace(np=np.array([20, 34, 9], np.int32)))
    said = read_local_lengths(runner)
    assert said is not None
    assert (said.request_ids, said.lengths.tolist(), said.seq_lens) == (["a", "b"], [20, 34], None)
    runner.dcp_local_seq_lens.np[0] = 7
    assert said.lengths.tolist() == [20, 34]


@pytest.mark.parametrize("is_part", [False, True])
def test_v2_leaves_them_in_the_batch_of_the_step(is_part: bool) -> None:
    batch = SimpleNamespace(
        req_ids=["a", "a"],
        num_reqs=2,
        dcp_local_seq_lens=torch.tensor([4, 20, 0], dtype=torch.int32),
        seq_lens=torch.tensor([10, 40, 0], dtype=torch.int32),
    )
    runner = SimpleNamespace(execute_model_state=SimpleNamespace(input_batch=batch), pcp_manager=is_part or None)
    said = read_local_lengths(runner)
    assert said is not None
    assert (said.request_ids, said.lengths.tolist()) == (["a", "a"], [4, 20])
    assert (said.seq_lens is not None) == is_part
    runner.execute_model_state = None
    assert read_local_lengths(runner) is None


def test_a_v1_plan_with_context_is_not_read_where_no_context_is() -> None:
    assert V1().read().context is None
    assert runner_v1.HostViews(V1()).context is None
