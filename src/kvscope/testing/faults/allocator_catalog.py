"""The faults of the allocator: what the scheduler's process does to the pool, and what the worker then uses.

`step` in what such a fault notes is the step of the finding: the last one that was scheduled where the pool's own books
are wrong at once, the one in which a request uses what it should not where that is the finding, and None where only an
audit can find it, at a time of its own.
"""

from kvscope.testing.faults.fault import Fault

# What an audit of the pool's books finds while they are wrong, until the fault repairs them.
_AUDIT = frozenset({"alias_owner_mismatch", "free_list_damaged", "ledger_pool_mismatch"})

# A request goes on using, in its step and in later ones, what is not its own any more; others may have it by then.
_USE = _AUDIT | {
    "alloc_live_block", "read_after_release", "read_foreign_block", "read_reserved_block", "read_uninitialized",
    "write_after_release", "write_foreign_block", "write_foreign_owner", "write_reserved_block", "write_shared_block",
    "write_uninitialized_gap",
}  # fmt: skip

# Who reads tokens that nobody wrote, or writes behind them, does so until it ends; its own blocks are hashed meanwhile.
_UNWRITTEN = _AUDIT | {
    "aborted_block_still_cached", "hit_before_write", "hit_uninitialized", "read_uninitialized",
    "write_uninitialized_gap",
}  # fmt: skip

# The null block in a table is seen from every side.
_NULL = _AUDIT | {
    "bind_duplicate_block", "bind_null_block_declared", "null_block_write", "read_null_block", "read_uninitialized",
    "watermark_exceeded", "write_slot_collision", "write_uninitialized_gap",
}  # fmt: skip

ALLOCATOR_FAULTS = [
    # A block is used while it is not the request's.
    Fault(
        name="premature_free",
        summary="A running request's blocks are freed, and the request goes on in them.",
        expected="read_after_release",
        point="allocator",
        alternatives=frozenset({"write_after_release"}),
        allowed_also=_USE,
    ),
    Fault(
        name="premature_free_tail",
        summary="The block that a running request writes its next token to is freed, and the request goes on.",
        expected="write_after_release",
        point="allocator",
        alternatives=frozenset({"read_after_release"}),
        allowed_also=_USE,
    ),
    Fault(
        name="stale_reference_read",
        summary="A hit takes no reference: the blocks are freed with their first owner, and the second one reads on.",
        expected="read_after_release",
        point="allocator",
        traffic="twins",
        alternatives=frozenset({"alias_owner_mismatch"}),
        allowed_also=_USE,
    ),
    Fault(
        name="free_under_reserved_load",
        summary="A block is freed while the step that writes it is running, and an asynchronous load gets it.",
        expected="free_inflight_step",
        point="allocator",
        traffic="finishing",
        # The request ends with that step; what ends it frees nothing a second time.
        allowed_also=_AUDIT,
    ),
    Fault(
        name="null_block_write",
        summary="The allocator gives a request the null block, and declaration and worker use it for tokens.",
        expected="null_block_write",
        point="allocator",
        alternatives=frozenset({"bind_null_block_declared"}),
        allowed_also=_NULL,
    ),
    # Contents are not what the hash or the number of computed tokens says.
    Fault(
        name="hash_before_write",
        summary="Blocks are hashed for a request that is not scheduled, and freed; the request then hits them.",
        expected="hit_uninitialized",
        point="allocator",
        allowed_also=_UNWRITTEN,
    ),
    Fault(
        name="stale_hit",
        summary="The entry of a hash survives its block's reuse, and a request hits what is another's half-full block.",
        expected="hit_uninitialized",
        point="allocator",
        # The other one goes on writing what is shared by now.
        allowed_also=_UNWRITTEN | {"write_shared_block"},
    ),
    Fault(
        name="wiped_cache_hit",
        summary="The prefix cache is reset, its index is not, and a request hits a block from before.",
        expected="hit_uninitialized",
        point="allocator",
        traffic="again",
        allowed_also=_UNWRITTEN,
    ),
    Fault(
        name="hit_after_failed_step",
        summary="The step that fills a request's first block fails; the block stays hashed, and the next one hits it.",
        expected="hit_before_write",
        point="allocator",
        traffic="twins_again",
        allowed_also=_UNWRITTEN,
        # An engine in processes of its own ends with the failed step.
        in_process=True,
    ),
    Fault(
        name="aborted_step_stays_cached",
        summary="The step that fills a request's first block fails, the request is aborted, the block stays hashed.",
        expected="aborted_block_still_cached",
        point="allocator",
        traffic="twins_again",
        allowed_also=_UNWRITTEN,
        in_process=True,
    ),
    Fault(
        name="computed_claimed",
        summary="A new request is admitted as if its first block were computed, which no step ever does.",
        expected="read_uninitialized",
        point="allocator",
        allowed_also=_UNWRITTEN,
    ),
    Fault(
        name="write_gap",
        summary="Four tokens between two chunks of a prompt are counted as computed, and never written.",
        expected="write_uninitialized_gap",
        point="allocator",
        allowed_also=_UNWRITTEN,
        # With V2 the worker has to be made to count with it.
        in_process=True,
    ),
    Fault(
        name="shared_tail_write",
        summary="A new request computes the last tokens of its hit again, in a block that another one has as well.",
        expected="write_shared_block",
        point="allocator",
        traffic="twins",
    ),
    Fault(
        name="zero_live_block",
        summary="The list of blocks to be zeroed before a step names the first block of a running request.",
        expected="zero_live_block",
        point="allocator",
        allowed_also=frozenset({"bind_zero_conflict"}) | _UNWRITTEN,
        # With V2 the worker is prepared for it, too.
        in_process=True,
    ),
    # The pool's own books are wrong.
    Fault(
        name="double_free_batch",
        summary="The blocks that are freed with a request's end name the last one twice.",
        expected="double_free",
        point="allocator",
        traffic="finishing",
        allowed_also=_AUDIT | {"ref_underflow"},
    ),
    Fault(
        name="double_free_later",
        summary="A block of a request that has ended is freed again, two steps later.",
        expected="double_free",
        point="allocator",
        traffic="finishing",
        allowed_also=_AUDIT | {"ref_underflow"},
    ),
    Fault(
        name="free_null_block",
        summary="The blocks that are freed with a request's end name the null block, and the last one twice.",
        # Freeing the null block alone is harmless and happens with sliding windows.
        expected="double_free",
        point="allocator",
        traffic="finishing",
        allowed_also=_AUDIT | {"free_unallocated", "ref_underflow"},
    ),
    Fault(
        name="free_unallocated",
        summary="The blocks that are freed with a request's end name one that the pool does not have.",
        expected="free_unallocated",
        point="allocator",
        traffic="finishing",
        allowed_also=_AUDIT | {"ref_underflow"},
    ),
    Fault(
        name="free_foreign_block",
        summary="The blocks that are freed with a request's end name one that only another running request has.",
        expected="alias_owner_mismatch",
        point="allocator",
        traffic="finishing",
        allowed_also=_USE,
    ),
    Fault(
        name="ref_underflow",
        summary="A count of references is lowered by hand, and goes below zero when the request ends.",
        expected="ref_underflow",
        point="allocator",
        traffic="finishing",
        allowed_also=_AUDIT,
    ),
    Fault(
        name="live_block_in_queue",
        summary="A running request's block is put into the free queue, and handed out to another one.",
        expected="alloc_live_block",
        point="allocator",
        allowed_also=_USE | {"write_slot_collision"},
    ),
    Fault(
        name="null_in_queue",
        summary="The null block is put into the free queue, and handed out.",
        expected="alloc_null_block",
        point="allocator",
        allowed_also=_NULL,
    ),
    Fault(
        name="evict_referenced",
        summary="The hash of a running request's first block is dropped.",
        expected="evict_referenced",
        point="allocator",
    ),
    Fault(
        name="ref_count_changed",
        summary="A count of references is raised by hand: the block of a running request never comes back.",
        expected="ledger_pool_mismatch",
        point="allocator",
        allowed_also=_AUDIT | {"leak_after_finish"},
    ),
    Fault(
        name="queue_entry_lost",
        summary="A free block falls out of the free queue.",
        expected="free_list_damaged",
        point="allocator",
        traffic="long",
        allowed_also=_AUDIT,
    ),
    # Blocks never come back.
    Fault(
        name="leak_after_finish",
        summary="The blocks that are freed with a request's end lack the last one.",
        expected="leak_after_finish",
        point="allocator",
        traffic="finishing",
        allowed_also=_AUDIT,
    ),
    Fault(
        name="skip_free",
        summary="A request ends, and its blocks are not freed.",
        expected="leak_after_finish",
        point="allocator",
        traffic="finishing",
        allowed_also=_AUDIT,
    ),
    Fault(
        name="endless_hold",
        summary="A request's blocks are held back as if a step still used them, and nothing lets them go.",
        expected="hold_deadline_exceeded",
        point="allocator",
        traffic="long",
        allowed_also=_AUDIT,
    ),
    # The worker writes what only the allocator's books show to be wrong.
    Fault(
        name="block_not_declared",
        summary="A decoded token goes to a block that the request was given, and that no message has named.",
        expected="write_block_not_declared",
        point="allocator",
        allowed_also=_AUDIT | {"read_uninitialized", "write_target_mismatch", "write_uninitialized_gap"},
        in_process=True,
    ),
    Fault(
        name="foreign_owner_write",
        summary="A decoded token goes to a block of a request that no worker has heard of.",
        expected="write_foreign_owner",
        point="allocator",
        allowed_also=_AUDIT | {"read_uninitialized", "write_target_mismatch", "write_uninitialized_gap"},
        in_process=True,
    ),
    # The worker is told to clear or copy what must stay as it is.
    Fault(
        name="zero_null_block",
        summary="The blocks that a step clears have the null block among them.",
        expected="bind_zero_conflict",
        point="allocator",
    ),
    Fault(
        name="zero_copy_source",
        summary="A step clears two new blocks of a request, and then copies one of them over the other.",
        expected="bind_zero_conflict",
        point="allocator",
    ),
    Fault(
        name="copy_onto_live_block",
        summary="A step copies a block over one that another running request has computed in.",
        expected="bind_copy_conflict",
        point="allocator",
    ),
]
