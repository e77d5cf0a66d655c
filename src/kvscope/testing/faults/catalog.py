"""What each fault does, where it goes in, and which finding it must cause. The names are a public interface."""

from kvscope.testing.faults.allocator_catalog import ALLOCATOR_FAULTS
from kvscope.testing.faults.connector_catalog import CONNECTOR_FAULTS
from kvscope.testing.faults.draft_catalog import DRAFT_CATALOG
from kvscope.testing.faults.fault import Fault

# A wrong or missing block stays in the worker's table until its request ends, so that later steps report it as well,
# and the rules that hold the plan against the allocator see the same error from their side.
_WRONG_BLOCK_PERSISTS = frozenset({
    "bind_block_shortfall", "bind_duplicate_block", "bind_null_block_declared", "ledger_pool_mismatch",
    "logical_order_mismatch", "null_block_write", "read_after_release", "read_duplicate_block", "read_foreign_block",
    "read_null_block", "read_row_request_mismatch", "read_table_short", "read_target_mismatch", "read_uninitialized",
    "write_after_release", "write_block_not_declared", "write_foreign_block", "write_foreign_owner",
    "write_shared_block", "write_slot_collision", "write_target_mismatch", "write_uninitialized_gap",
})  # fmt: skip

_WRONG_WRITE = frozenset({
    "read_uninitialized", "write_after_release", "write_block_not_declared", "write_foreign_owner",
    "write_shared_block", "write_slot_collision", "write_target_mismatch", "write_uninitialized_gap",
})  # fmt: skip

_WRONG_READ = frozenset({
    "logical_order_mismatch", "read_after_release", "read_duplicate_block", "read_foreign_block",
    "read_row_request_mismatch", "read_target_mismatch", "read_uninitialized",
})  # fmt: skip

# A request that is declared and not sent is missing in the message, in the batch and in the result of that step.
_UNTOLD = frozenset({"handover_request_mismatch", "result_request_mapping"})


_ALL = [
    Fault(
        name="slot_plus_one",
        summary="The slot of one decoded token is one too high, inside the same block.",
        expected="write_target_mismatch",
        allowed_also=_WRONG_WRITE,
    ),
    Fault(
        name="slot_foreign_block",
        summary="The slot of one decoded token lies in a block that only another request of the batch holds.",
        expected="write_foreign_block",
        allowed_also=_WRONG_WRITE,
    ),
    Fault(
        name="slot_null_block",
        summary="The slot of one decoded token lies in the null block.",
        expected="null_block_write",
        allowed_also=_WRONG_WRITE,
    ),
    Fault(
        name="slot_outside_cache",
        summary="The slot of one decoded token lies far behind the last block of the pool.",
        expected="write_outside_cache",
        allowed_also=_WRONG_WRITE,
        crashes=True,
    ),
    Fault(
        name="slot_switched_off",
        summary="The slot of one decoded token is -1, so that the token is left out of the cache.",
        expected="write_slot_negative",
        allowed_also=_WRONG_WRITE,
    ),
    Fault(
        name="slots_cut",
        summary="The slot mapping ends before the batch's last row, whose decoded token has no slot.",
        expected="write_slot_count_mismatch",
    ),
    Fault(
        name="offset_short",
        summary="The last row's query offset ends a token early, so that its decoded token belongs to no row.",
        expected="write_query_offsets_invalid",
        # V2 reads the offsets of the plan on the host and gives attention those of the device, which are still right.
        allowed_also=frozenset({"write_length_mismatch", "operator_argument_mismatch"}),
    ),
    Fault(
        name="group_missing",
        summary="The last group of the cache is left out of what is handed to attention.",
        expected="write_group_missing",
        crashes=True,
    ),
    Fault(
        name="two_slots_equal",
        summary="Two neighbouring tokens of one prompt chunk get the same slot: the second that of the first.",
        expected="write_slot_collision",
        # One of two tokens that share a slot is always off its target.
        alternatives=frozenset({"write_target_mismatch"}),
        allowed_also=_WRONG_WRITE,
    ),
    Fault(
        name="padding_slot_enabled",
        summary="The batch is padded, and the first padding token has the slot of a token computed before, not -1.",
        expected="write_padding_slot_enabled",
    ),
    Fault(
        name="position_shifted",
        summary="The position of one decoded token is one too high, and its slot is computed from that position.",
        expected="write_position_mismatch",
        allowed_also=_WRONG_WRITE | {"write_length_mismatch"},
    ),
    Fault(
        name="seq_len_plus",
        summary="The length that attention reads for one row is one block too long.",
        expected="read_length_exceeds_declared",
        allowed_also=frozenset({"read_null_block", "read_table_short", "write_length_mismatch"}) | _WRONG_READ,
    ),
    Fault(
        name="seq_len_minus",
        summary="The length that attention reads for one row lacks the row's newest token.",
        expected="write_length_mismatch",
    ),
    Fault(
        name="table_null_in_tail",
        summary="The last visible entry of one row's table is the null block; the slots are right.",
        expected="read_null_block",
        allowed_also=_WRONG_READ,
    ),
    Fault(
        name="table_outside_cache",
        summary="The last visible entry of one row's table is an id far beyond the pool.",
        expected="read_outside_cache",
        allowed_also=_WRONG_READ,
        crashes=True,
    ),
    Fault(
        name="table_foreign_block",
        summary="The last visible entry of one row's table is a block that only another request of the batch holds.",
        expected="read_foreign_block",
        allowed_also=_WRONG_READ,
    ),
    Fault(
        name="table_ids_swapped",
        summary="The last two visible entries of one row's table have changed places.",
        expected="read_target_mismatch",
        allowed_also=_WRONG_READ,
    ),
    Fault(
        name="table_ids_rotated",
        summary="All visible entries of one row's table have moved on by one place, the last one to the front.",
        expected="logical_order_mismatch",
        allowed_also=_WRONG_READ,
    ),
    Fault(
        name="table_block_twice",
        summary="The last visible entry of one row's table is the block before it once more.",
        expected="read_duplicate_block",
        allowed_also=_WRONG_READ,
    ),
    Fault(
        name="rows_swapped",
        summary="Two rows of equal length have changed places in the table; slots and lengths are right.",
        expected="read_row_request_mismatch",
        allowed_also=_WRONG_READ,
    ),
    Fault(
        name="table_short",
        summary="The runner counts one block fewer for a row than its length needs.",
        expected="read_table_short",
        # The V2 runner does not gather the uncounted entry: attention gets what an earlier step left there.
        allowed_also=_WRONG_READ | {"read_null_block"},
    ),
    Fault(
        name="stale_row_after_preemption",
        summary="A request that resumes after its preemption reads through the blocks that it held before.",
        expected="read_target_mismatch",
        traffic="preempting",
        alternatives=frozenset({"read_foreign_block"}),
        allowed_also=_WRONG_READ,
    ),
    Fault(
        name="operator_table_row",
        summary="The metadata that a backend builds names another request's block in one row; the plan is right.",
        expected="operator_argument_mismatch",
        point="operator",
    ),
    Fault(
        name="operator_slot",
        summary="The metadata that a backend builds has a slot that is one too high for one token; the plan is right.",
        expected="operator_argument_mismatch",
        point="operator",
    ),
    Fault(
        name="operator_length",
        summary="The metadata that a backend builds has one row a token too short; the plan is right.",
        expected="operator_argument_mismatch",
        point="operator",
    ),
    Fault(
        name="operator_slot_rewritten",
        summary="After the metadata was built and before the forward, one token's slot changes in the runner's buffer.",
        expected="operator_argument_mismatch",
        point="operator",
    ),
    Fault(
        name="bind_out_of_pool",
        summary="The scheduler declares a block id far beyond the pool, and the runner uses it.",
        expected="bind_block_out_of_range",
        point="declaration",
        allowed_also=_WRONG_BLOCK_PERSISTS | {"read_outside_cache", "write_outside_cache"},
        crashes=True,
    ),
    Fault(
        name="bind_null_tail",
        summary="The scheduler declares the null block for tokens of this step, and the runner uses it.",
        expected="null_block_write",
        point="declaration",
        alternatives=frozenset({"read_null_block", "bind_null_block_declared"}),
        allowed_also=_WRONG_BLOCK_PERSISTS,
    ),
    Fault(
        name="bind_duplicate",
        summary="The scheduler declares a new block of a request under the id of the request's block before it.",
        expected="bind_duplicate_block",
        point="declaration",
        allowed_also=_WRONG_BLOCK_PERSISTS,
    ),
    Fault(
        name="bind_shortfall",
        summary="The scheduler does not declare a block that the tokens of this step need.",
        expected="bind_block_shortfall",
        point="declaration",
        allowed_also=_WRONG_BLOCK_PERSISTS,
    ),
    Fault(
        name="bind_extra_group",
        summary="The scheduler declares one list of new blocks more than there are groups: an empty one.",
        expected="bind_group_count_mismatch",
        point="declaration",
    ),
    Fault(
        name="bind_computed_back",
        summary="The scheduler declares that a decoding request goes on one token before where it was.",
        expected="bind_computed_regressed",
        point="declaration",
        # Runner V1 follows, and writes that token again; V2 counts computed tokens itself.
        allowed_also=frozenset({"read_length_exceeds_declared", "write_position_mismatch", "write_length_mismatch"})
        | _WRONG_WRITE,
    ),
    Fault(
        name="unknown_declared",
        summary="The scheduler declares a running request that nobody admitted; the worker is not told of it.",
        expected="bind_unknown_request",
        point="declaration",
        allowed_also=_UNTOLD,
    ),
    Fault(
        name="finished_declared",
        summary="The scheduler declares a request as running that has finished; the worker is not told of it.",
        expected="bind_finished_scheduled",
        point="declaration",
        traffic="finishing",
        allowed_also=_UNTOLD,
    ),
    Fault(
        name="preempted_declared",
        summary="The scheduler declares a preempted request as running; the worker is not told of it.",
        expected="bind_preempted_scheduled",
        point="declaration",
        traffic="preempting",
        allowed_also=_UNTOLD,
    ),
    Fault(
        name="total_declared",
        summary="The scheduler declares one token more in total than it schedules, and sends the right number.",
        expected="bind_token_total_mismatch",
        point="declaration",
    ),
    Fault(
        name="step_lost",
        summary="A step without work is scheduled and never reaches the worker.",
        expected="handover_out_of_order",
        point="handover",
    ),
    Fault(
        name="invalid_drafts_in_handover",
        summary="A request's draft tokens turn into invalid ones on the way to the worker, one of them.",
        expected="handover_spec_mismatch",
        point="handover",
    ),
    Fault(
        name="delta_dropped",
        summary="The new blocks of a running request are lost between the scheduler and the worker.",
        expected="handover_delta_mismatch",
        point="handover",
        allowed_also=_WRONG_BLOCK_PERSISTS,
    ),
    Fault(
        name="request_dropped_in_handover",
        summary="A finished request's id is lost on the way to the worker and arrives one step late.",
        expected="handover_request_mismatch",
        point="handover",
    ),
    Fault(
        name="tokens_cut_in_handover",
        summary="One token of a new request's first prompt chunk is lost on the way to the worker.",
        expected="handover_request_mismatch",
        point="handover",
        allowed_also=frozenset({"write_length_mismatch", "write_slot_count_mismatch", "write_query_offsets_invalid"})
        | {"write_uninitialized_gap", "read_uninitialized", "bind_token_total_mismatch"},
        # The V2 runner counts computed tokens itself and would wait for the lost one for ever.
        runners=frozenset({"v1"}),
    ),
    Fault(
        name="computed_shifted_in_handover",
        summary="A running request's number of computed tokens reaches the worker one too high.",
        expected="handover_request_mismatch",
        point="handover",
        allowed_also=frozenset({"read_length_exceeds_declared", "write_position_mismatch", "write_length_mismatch"})
        | _WRONG_WRITE,
    ),
    Fault(
        name="declaration_lost",
        summary="What kvscope attached to the scheduler's output is gone when the worker receives it.",
        expected="handover_missing",
        point="handover",
        blinds=True,
    ),
    Fault(
        name="dummy_slot",
        summary="A run without work writes its token to the last slot of a live request's last block.",
        expected="dummy_slot_enabled",
        point="dummy",
        traffic="dummies",
        allowed_also=frozenset({"dummy_persistent_slot_enabled", "dummy_table_live"}),
    ),
    Fault(
        name="dummy_persistent_slot",
        summary="After a run without work the last entry of the slot buffer is that of a live request's last block.",
        expected="dummy_persistent_slot_enabled",
        point="dummy",
        traffic="dummies",
    ),
    Fault(
        name="dummy_writes_loaded_prefix",
        summary="A run without work writes its token to the last slot of a live request's first block, which is full.",
        expected="dummy_table_live",
        point="dummy",
        traffic="dummies",
        allowed_also=frozenset({"dummy_persistent_slot_enabled"}),
    ),
    Fault(
        name="result_rows_exchanged",
        summary="A result leads two requests to each other's rows.",
        expected="result_request_mapping",
        point="result",
    ),
    Fault(
        name="result_row_added",
        summary="A result has one more row of tokens than it names requests.",
        expected="result_row_count",
        point="result",
    ),
    Fault(
        name="result_repeated",
        summary="The scheduler is given the result of the step before once more.",
        expected="result_trace_mismatch",
        point="result",
    ),
    *ALLOCATOR_FAULTS,
    *DRAFT_CATALOG,
    *CONNECTOR_FAULTS,
]

FAULTS: dict[str, Fault] = {fault.name: fault for fault in _ALL}
"""Every fault by its name."""
