"""Context parallelism: what fires each rule about ranks, and what it must let pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from kvscope.checks.context_parallel import CoordinatesView, LengthsView
from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_coordinates, judge_local_lengths
from kvscope.facts.context_parallel import ContextParallel, LocalLengths
from kvscope.facts.plans import PAD_SLOT, Plan
from kvscope.facts.topology import Ranks, Topology
from unit.checks.cases import fires, silent
from unit.checks.dealing import dcp_pool, on_rank, partitioned, sharded
from unit.checks.scenes import ONE_GROUP, PARTS, Scene
from unit.checks.worlds import group

RANK_1 = ContextParallel(dcp_size=2, dcp_rank=1, interleave=4, sharded=(0,))
PCP_1 = ContextParallel(pcp_size=2, pcp_rank=1)
TWO = dcp_pool(sharded())
WITH_REPLICA = dcp_pool(sharded(), group(1))
Change = Callable[[Plan], object]


def unchanged(_: Plan) -> None:
    pass


def dealt_out(
    change: Change = unchanged, topology: Topology = TWO, context: ContextParallel = RANK_1, pad: int = 3
) -> list[Finding]:
    """``a`` and ``b`` compute 40 tokens each, in blocks of 32 of which each of two ranks has 16 slots.

    Rank 1 stores tokens 4 to 7, 12 to 15 and so on. In a second group the blocks are 10 higher.
    """
    scene = Scene(topology)
    groups = range(len(topology.groups))
    tables = {name: tuple([block + 10 * of for block in blocks] for of in groups) for name, blocks in
              (("a", [1, 2, 3]), ("b", [4, 5, 6]))}  # fmt: skip
    declaration = scene.say(new=[(name, blocks, 0, 40) for name, blocks in tables.items()])
    plan = on_rank(scene.plan(declaration, pad), topology, scene.tables, context)
    change(plan)
    return scene.judge(declaration, plan)


def slot(value: int, token: int, index: int = 0, **more: Any) -> list[Finding]:
    return dealt_out(lambda plan: plan.groups[index].slots.__setitem__(token, value), **more)


def chunked(change: Change = unchanged, context: ContextParallel = PCP_1, tokens: int = 40) -> list[Finding]:
    """``a`` decodes; ``b`` has a prompt of 40 tokens, of which rank 1 of two computes chunks 1 and 2 of four."""
    scene = Scene(ONE_GROUP)
    scene.say(new=[("a", ([1, 2, 3],), 0, 40)])
    declaration = scene.say(new=[("b", ([4, 5, 6],), 0, tokens)], known=[("a", None, 40, 1)])
    plan = partitioned(scene.plan(declaration, 0), context, {"a"})
    change(plan)
    return scene.judge(declaration, plan)


def local(plan: Plan) -> Any:
    assert plan.local is not None
    return plan.local


def taken(place: int, token: int) -> Change:
    return lambda plan: local(plan).writers.__setitem__(place, token)


# cp_slot_owner_mismatch -----------------------------------------------------------------------------------------------

OF_A = {"request_id": "a", "row": 0, "group_id": 0}


@fires("cp_slot_owner_mismatch", **OF_A, token_index=1, position=1, block_id=2, slot=40, expected=-1, actual=40,
       also=("write_target_mismatch",))  # fmt: skip
def a_token_of_another_rank_is_stored() -> list[Finding]:
    return slot(40, 1)


@fires("cp_slot_owner_mismatch", **OF_A, token_index=5, position=5, block_id=1, slot=-1, expected=17, actual=-1,
       also=("write_slot_negative", "write_target_mismatch"))  # fmt: skip
def a_token_of_its_own_is_left_out() -> list[Finding]:
    return slot(PAD_SLOT, 5)


@fires("cp_slot_owner_mismatch", request_id="b", row=0, token_index=1, position=1, expected="stored once",
       actual="2 times")  # fmt: skip
def a_token_is_stored_from_two_places() -> list[Finding]:
    """Rank 0's places are the decode, and then its chunk, from token 0 on: token 1 is stored again in place of 2."""
    return chunked(taken(3, 1))


@fires("cp_slot_owner_mismatch", request_id="b", row=0, token_index=0, position=0,
       expected="stored once", actual="0 times")  # fmt: skip
def nobody_stores_a_token() -> list[Finding]:
    return chunked(taken(1, -1))


@silent("cp_slot_owner_mismatch", "cp_order_mismatch")
def each_rank_stores_its_own() -> list[Finding]:
    assert dealt_out() == []
    assert dealt_out(context=msgspec.structs.replace(RANK_1, dcp_rank=0)) == []
    return dealt_out(context=msgspec.structs.replace(RANK_1, interleave=16))


@silent("cp_slot_owner_mismatch", "cp_order_mismatch")
def every_rank_stores_all_tokens_of_a_group_that_is_not_dealt_out() -> list[Finding]:
    assert dealt_out(topology=WITH_REPLICA) == []
    return slot(PAD_SLOT, 5, 1, topology=WITH_REPLICA)


@silent("cp_slot_owner_mismatch", "cp_order_mismatch")
def without_context_parallelism_a_missing_slot_is_no_rank_s() -> list[Finding]:
    scene = Scene()
    declaration = scene.say(new=[("a", ([1, 2, 3],), 0, 40)])
    plan = scene.plan(declaration)
    plan.groups[0].slots[5] = PAD_SLOT
    return scene.judge(declaration, plan)


@silent("cp_slot_owner_mismatch", "cp_order_mismatch")
def the_copies_of_a_row_that_every_rank_computes_count_once() -> list[Finding]:
    return chunked()


# cp_order_mismatch ----------------------------------------------------------------------------------------------------


@fires("cp_order_mismatch", **OF_A, token_index=4, position=4, block_id=1, slot=17, expected=16, actual=17,
       also=("write_target_mismatch",))  # fmt: skip
def two_tokens_of_a_block_have_changed_places() -> list[Finding]:
    def change(plan: Plan) -> None:
        slots = plan.groups[0].slots
        slots[4], slots[5] = slots[5], slots[4]

    return dealt_out(change)


@fires("cp_order_mismatch", request_id="b", row=0, token_index=0, position=0, expected="positions 10 to 19 and 20 to "
       "29, or the whole row", actual="positions 0 to 9")  # fmt: skip
def a_rank_computes_another_rank_s_chunk() -> list[Finding]:
    return chunked(lambda plan: local(plan).positions.__setitem__(slice(1, 11), np.arange(10)))


@fires("cp_order_mismatch", request_id="b", row=0, token_index=0, position=0, expected="positions 10 to 19 and 20 to "
       "29, or the whole row", actual="positions 10 to 19")  # fmt: skip
def one_of_the_two_chunks_is_missing() -> list[Finding]:
    def change(plan: Plan) -> None:
        rows = local(plan)
        rows.request_ids, rows.seq_lens = rows.request_ids[:2], rows.seq_lens[:2]
        rows.query_start, rows.positions = rows.query_start[:3], rows.positions[:11]

    return chunked(change)


@fires("cp_order_mismatch", request_id="b", row=0, token_index=10, position=10, expected="token 10 of the batch",
       actual="taken for token 11")  # fmt: skip
def the_gathered_keys_are_taken_for_those_of_the_neighbours() -> list[Finding]:
    def change(plan: Plan) -> None:
        writers = local(plan).writers
        place = len(writers) // 2 + 1
        writers[place], writers[place + 1] = writers[place + 1], writers[place]

    return chunked(change)


@fires("cp_order_mismatch", request_id="b", row=0, token_index=0, position=0, expected="positions 10 to 19 and 20 to "
       "29, or the whole row", actual="positions 20 to 29")  # fmt: skip
def a_chunk_sees_another_length_than_it_reaches() -> list[Finding]:
    return chunked(lambda plan: local(plan).seq_lens.__setitem__(2, 40))


@silent("cp_order_mismatch", "cp_slot_owner_mismatch")
def a_prompt_that_does_not_fill_all_chunks() -> list[Finding]:
    for tokens in range(1, 12):
        for rank in (0, 1):
            assert chunked(context=msgspec.structs.replace(PCP_1, pcp_rank=rank), tokens=tokens) == []
    return []


@silent("cp_order_mismatch", "cp_slot_owner_mismatch")
def rows_whose_positions_the_host_only_estimates() -> list[Finding]:
    def change(plan: Plan) -> None:
        plan.exact = False
        local(plan).positions[:] = 7

    return chunked(change)


# cp_rank_invalid ------------------------------------------------------------------------------------------------------


def coordinates(topology: Topology = TWO, ranks: Ranks | None = None, **fields: Any) -> list[Finding]:
    return judge_coordinates(
        CoordinatesView(
            step=1,
            trace_id="t1",
            context=msgspec.structs.replace(RANK_1, **fields),
            topology=topology,
            ranks=ranks or Ranks(dcp=1),
        )
    )


@fires("cp_rank_invalid", expected="dcp_rank 1", actual="dcp_rank 0")
def a_rank_takes_itself_for_another() -> list[Finding]:
    return coordinates(dcp_rank=0)


@fires("cp_rank_invalid", expected="dcp_rank from 0 to 1", actual="dcp_rank 2")
def a_rank_is_not_below_its_size() -> list[Finding]:
    return coordinates(dcp_rank=2, ranks=Ranks())


@fires("cp_rank_invalid", expected="dcp_size 2", actual="dcp_size 4")
def a_rank_deals_out_over_more_ranks_than_configured() -> list[Finding]:
    return coordinates(dcp_size=4)


@fires("cp_rank_invalid", expected="pcp_size 1", actual="pcp_size 2")
def a_rank_cuts_prompts_that_nobody_else_cuts() -> list[Finding]:
    return coordinates(pcp_size=2)


@fires("cp_rank_invalid", expected="an interleave that divides 16", actual="interleave 3")
def a_deal_does_not_end_with_the_block() -> list[Finding]:
    return coordinates(interleave=3)


@fires("cp_rank_invalid", expected="groups dealt out 0", actual="groups dealt out 0, 1")
def a_group_is_dealt_out_that_the_manager_counts_whole() -> list[Finding]:
    return coordinates(WITH_REPLICA, sharded=(0, 1))


@silent("cp_rank_invalid")
def coordinates_that_are_the_rank_s_own() -> list[Finding]:
    assert coordinates(interleave=16) == []
    assert coordinates(dcp_rank=0, ranks=Ranks(dcp=0)) == []
    assert coordinates(dcp_pool(sharded(), pcp_size=2), Ranks(dcp=1, pcp=1), pcp_size=2, pcp_rank=1) == []
    return coordinates(ranks=Ranks())


# cp_local_length_mismatch ---------------------------------------------------------------------------------------------


def lengths(*of: int, seq_lens: list[int] | None = None) -> list[Finding]:
    """``a`` has 40 tokens after the step and ``b`` 70: of the first rank 1 stores 20, of the second 34."""
    scene = Scene(TWO)
    declaration = scene.say(new=[("a", ([1, 2],), 0, 40), ("b", ([3, 4, 5],), 0, 70)])
    said = LocalLengths(
        request_ids=["a", "b"],
        lengths=np.array(of, np.int32),
        seq_lens=None if seq_lens is None else np.array(seq_lens, np.int32),
    )
    view = LengthsView(declaration=declaration, context=RANK_1, lengths=said, bindings=scene.bindings)
    return judge_local_lengths(view, PARTS)


@fires("cp_local_length_mismatch", request_id="b", row=1, expected=34, actual=35)
def a_rank_counts_one_token_more_than_its_share() -> list[Finding]:
    return lengths(20, 35)


@fires("cp_local_length_mismatch", request_id="a", row=0, expected=20, actual=40)
def a_rank_counts_the_whole_sequence() -> list[Finding]:
    return lengths(40, 34)


@fires("cp_local_length_mismatch", request_id="a", row=0, expected=4, actual=20)
def a_rank_counts_beyond_the_end_of_its_chunk() -> list[Finding]:
    return lengths(20, 34, seq_lens=[10, 70])


@silent("cp_local_length_mismatch")
def each_length_is_the_rank_s_share() -> list[Finding]:
    return lengths(20, 34)
