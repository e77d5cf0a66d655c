"""The faults of speculative decoding. What is counted wrong once shifts everything that the request does after it."""

from kvscope.testing.faults.fault import Fault

_SHIFTED = frozenset({
    "ledger_pool_mismatch", "read_length_exceeds_declared", "read_uninitialized", "spec_advance_mismatch",
    "write_length_mismatch", "write_position_mismatch", "write_shared_block", "write_slot_collision",
    "write_target_mismatch", "write_uninitialized_gap",
})  # fmt: skip

DRAFT_CATALOG = [
    Fault(
        name="draft_left_out",
        summary="The runner verifies one draft of a row fewer than the row was given.",
        expected="spec_row_count_mismatch",
        point="drafts",
        traffic="drafting",
        allowed_also=_SHIFTED | {"spec_rejected_out_of_range"},
    ),
    Fault(
        name="accepted_beyond_drafts",
        summary="The runner accepts one draft of a row more than the row was given.",
        expected="spec_accepted_out_of_range",
        point="drafts",
        traffic="drafting",
        allowed_also=_SHIFTED | {"spec_rejected_out_of_range"},
    ),
    Fault(
        name="rejected_beyond_drafts",
        summary="One draft of a row more is counted as rejected than the row was given.",
        expected="spec_rejected_out_of_range",
        point="drafts",
        traffic="drafting",
        allowed_also=_SHIFTED,
    ),
    Fault(
        name="accepted_draft_forgotten",
        summary="The scheduler counts one token fewer of a request with drafts as computed than its results say.",
        expected="spec_advance_mismatch",
        point="allocator",
        traffic="drafting",
        allowed_also=_SHIFTED,
    ),
]
