"""What attention operators get: what fires the rule about it, and what it must let pass."""

from __future__ import annotations

from collections.abc import Callable

from kvscope.checks.finding import Finding
from kvscope.facts.operators import OperatorArguments
from kvscope.facts.plans import Plan
from kvscope.facts.topology import SLIDING_WINDOW, Topology
from unit.checks.cases import fires, silent
from unit.checks.operator_world import Cut, hand_over, judged, operators
from unit.checks.scenes import ONE_GROUP, Scene, decoding
from unit.checks.worlds import group, pool

REASON = "operator_argument_mismatch"
BIG = pool(group(0, block_size=64), group(1, block_size=32), num_blocks=64)
WINDOW = pool(group(0, SLIDING_WINDOW, 16, 8))

Change = Callable[[OperatorArguments], object]


def nothing(_: OperatorArguments) -> None:
    pass


def steady(change: Change = nothing, topology: Topology = ONE_GROUP) -> list[Finding]:
    """``a`` in blocks 1 to 3 and ``b`` in 4 to 6 decode their token 40, in slots 56 and 104; three slots pad."""
    scene, declaration = decoding(topology)
    plan = scene.plan(declaration)
    arguments = operators(plan)
    change(arguments)
    return judged(plan, arguments, topology)


def expanded(change: Change = nothing, stride: int = 4) -> list[Finding]:
    """The first group's kernels count in blocks of 16, the second's in those of the manager. Token 40 is in ``a``'s
    first block of 64: the third block of the kernel in it.
    """
    scene, declaration = decoding(BIG)
    plan = scene.plan(declaration)
    arguments = operators(plan, ratio={0: 4}, stride={0: stride})
    change(arguments)
    return judged(plan, arguments, BIG)


def cut_in_two(change: Change = nothing, cuts: tuple[Cut, ...] = ((0, 1, 0, 30), (0, 2, 30, 60))) -> list[Finding]:
    """``a`` computes 40 tokens and ``b`` 20, in two micro-batches: the first ends within ``a``."""
    scene = Scene()
    plan = scene.plan(scene.say(new=[("a", ([1, 2, 3],), 0, 40), ("b", ([4, 5],), 0, 20)]), pad=0)
    arguments = operators(plan, cuts=cuts)
    change(arguments)
    return judged(plan, arguments, ONE_GROUP)


def rewritten(change: Callable[[Plan], object]) -> list[Finding]:
    """Operators that are given the runner's own buffers, which somebody changes after they were judged."""
    scene, declaration = decoding()
    plan = scene.plan(declaration)
    arguments = operators(plan)
    (of,) = arguments.groups
    of.parts[0].tables, of.parts[0].seq_lens = plan.groups[0].tables, plan.seq_lens
    of.slots[0].slots = of.slots[1].slots = plan.groups[0].slots

    handed = hand_over(plan, ONE_GROUP)
    change(plan)
    return judged(plan, arguments, ONE_GROUP, handed)


A_WRITES = {
    "request_id": "a", "row": 0, "group_id": 0, "token_index": 0, "position": 40, "block_id": 3, "slot": 57,
    "expected": 56, "actual": 57,
}  # fmt: skip
A_READS = {"request_id": "a", "row": 0, "group_id": 0, "position": 32, "block_id": 9, "expected": 3, "actual": 9}


@fires(REASON, **A_WRITES)
def the_metadata_has_another_slot() -> list[Finding]:
    return steady(lambda arguments: arguments.groups[0].slots[0].slots.__setitem__(0, 57))


@fires(REASON, **A_WRITES)
def the_forward_writes_by_another_slot_than_its_metadata_has() -> list[Finding]:
    return steady(lambda arguments: arguments.groups[0].slots[1].slots.__setitem__(0, 57))


@fires(REASON, **A_WRITES)
def a_slot_is_changed_after_it_was_judged() -> list[Finding]:
    return rewritten(lambda plan: plan.groups[0].slots.__setitem__(0, 57))


@fires(
    REASON, request_id="b", row=1, group_id=0, token_index=1, position=40, block_id=64, slot=1024, expected=104,
    actual=1024, launch_fatal=True,
)  # fmt: skip
def a_slot_lies_outside_the_cache() -> list[Finding]:
    return steady(lambda arguments: arguments.groups[0].slots[0].slots.__setitem__(1, 1024))


@fires(REASON, group_id=0, token_index=3, block_id=5, slot=80, expected=-1, actual=80)
def a_padding_slot_is_switched_on() -> list[Finding]:
    return steady(lambda arguments: arguments.groups[0].slots[0].slots.__setitem__(3, 80))


@fires(REASON, request_id="b", row=1, group_id=0, expected="2 slots", actual="1 slots")
def there_are_fewer_slots_than_tokens() -> list[Finding]:
    def cut(arguments: OperatorArguments) -> None:
        arguments.groups[0].slots[0].slots = arguments.groups[0].slots[0].slots[:1]

    return steady(cut)


@fires(REASON, **A_READS)
def the_metadata_has_another_block() -> list[Finding]:
    return steady(lambda arguments: arguments.groups[0].parts[0].tables.__setitem__((0, 2), 9))


@fires(REASON, **A_READS)
def a_block_is_changed_after_it_was_judged() -> list[Finding]:
    return rewritten(lambda plan: plan.groups[0].tables.__setitem__((0, 2), 9))


@fires(REASON, **{**A_READS, "block_id": 64, "actual": 64, "launch_fatal": True})
def a_block_lies_outside_the_cache() -> list[Finding]:
    return steady(lambda arguments: arguments.groups[0].parts[0].tables.__setitem__((0, 2), 64))


@fires(
    REASON, {"reason": REASON, **A_READS, "request_id": "b", "row": 1, "position": 0, "block_id": 1, "expected": 4,
             "actual": 1},
    **{**A_READS, "position": 0, "block_id": 4, "expected": 1, "actual": 4},
)  # fmt: skip
def a_builder_has_exchanged_two_rows() -> list[Finding]:
    def exchange(arguments: OperatorArguments) -> None:
        part = arguments.groups[0].parts[0]
        part.tables = part.tables[::-1]

    return steady(exchange)


@fires(
    REASON,
    **{**A_READS, "block_id": -1, "actual": -1, "launch_fatal": True},
)
def the_tables_are_too_narrow() -> list[Finding]:
    def cut(arguments: OperatorArguments) -> None:
        part = arguments.groups[0].parts[0]
        part.tables = part.tables[:1, :2].repeat(2, axis=0)
        part.rows = 1

    return steady(cut)


@fires(REASON, request_id="b", row=1, group_id=0, expected=41, actual=40)
def a_sequence_is_shorter_than_planned() -> list[Finding]:
    def shorten(arguments: OperatorArguments) -> None:
        lengths = arguments.groups[0].parts[0].seq_lens
        assert lengths is not None
        lengths[1] -= 1

    return steady(shorten)


@fires(REASON, request_id="a", row=0, group_id=0, expected=41, actual=73, launch_fatal=True)
def a_sequence_is_longer_than_its_table() -> list[Finding]:
    def lengthen(arguments: OperatorArguments) -> None:
        lengths = arguments.groups[0].parts[0].seq_lens
        assert lengths is not None
        lengths[0] += 32

    return steady(lengthen)


@fires(REASON, request_id="a", row=0, group_id=0, expected="1 query tokens", actual="2 query tokens")
def a_row_gets_a_token_of_the_next_one() -> list[Finding]:
    def shift(arguments: OperatorArguments) -> None:
        starts = arguments.groups[0].parts[0].query_start
        assert starts is not None
        starts[1] += 1

    return steady(shift)


@fires(
    REASON, request_id="a", row=0, group_id=0, position=32, block_id=1, expected="kernel block 6",
    actual="kernel block 5",
)  # fmt: skip
def a_block_is_put_together_from_the_wrong_blocks_of_the_kernel() -> list[Finding]:
    return expanded(lambda arguments: arguments.groups[0].parts[0].tables.__setitem__((0, 2), 5))


@fires(REASON, request_id="a", row=0, group_id=0, position=0, block_id=9, expected=1, actual=9)
def another_block_is_expanded() -> list[Finding]:
    return expanded(lambda arguments: arguments.groups[0].parts[0].tables.__setitem__((0, 0), 36))


@fires(
    REASON, request_id="a", row=0, group_id=0, position=16, block_id=1, expected="kernel block 11",
    actual="kernel block 15", launch_fatal=True,
)  # fmt: skip
def a_block_of_the_kernel_lies_between_two_of_the_manager() -> list[Finding]:
    return expanded(lambda arguments: arguments.groups[0].parts[0].tables.__setitem__((0, 1), 15), stride=10)


@fires(REASON, request_id="a", row=0, group_id=1, position=32, block_id=5, expected=12, actual=5)
def the_group_whose_blocks_are_not_expanded_is_wrong() -> list[Finding]:
    return expanded(lambda arguments: arguments.groups[1].parts[0].tables.__setitem__((0, 1), 5))


@fires(REASON, request_id="a", row=0, group_id=0, token_index=30, position=30, block_id=3, slot=50, expected=46,
       actual=50)  # fmt: skip
def the_second_micro_batch_writes_elsewhere() -> list[Finding]:
    return cut_in_two(lambda arguments: arguments.groups[1].slots[0].slots.__setitem__(0, 50))


@fires(REASON, request_id="a", row=0, group_id=0, expected=30, actual=40)
def the_first_micro_batch_reads_what_the_second_writes() -> list[Finding]:
    def lengthen(arguments: OperatorArguments) -> None:
        lengths = arguments.groups[0].parts[0].seq_lens
        assert lengths is not None
        lengths[0] = 40

    return cut_in_two(lengthen)


@fires(REASON, request_id="b", row=1, group_id=0, position=16, block_id=7, expected=5, actual=7)
def the_second_micro_batch_reads_elsewhere() -> list[Finding]:
    return cut_in_two(lambda arguments: arguments.groups[1].parts[0].tables.__setitem__((1, 1), 7))


# Silent ---------------------------------------------------------------------------------------------------------------


@silent(REASON)
def sound_arguments() -> list[Finding]:
    return steady()


@silent(REASON)
def what_nobody_reads_may_differ() -> list[Finding]:
    return steady(lambda arguments: arguments.groups[0].parts[0].tables.__setitem__((0, 3), 77))


@silent(REASON)
def what_lies_before_the_window_may_differ() -> list[Finding]:
    return steady(lambda arguments: arguments.groups[0].parts[0].tables.__setitem__((0, 0), 77), WINDOW)


@silent(REASON)
def blocks_of_a_kernel_put_back_together() -> list[Finding]:
    return expanded()


@silent(REASON)
def blocks_of_a_kernel_that_lie_apart() -> list[Finding]:
    return expanded(stride=10)


@silent(REASON)
def a_batch_cut_into_micro_batches() -> list[Finding]:
    return cut_in_two() + cut_in_two(cuts=((0, 1, 0, 40), (1, 2, 40, 60)))


@silent(REASON)
def a_plan_that_is_wrong_itself_and_handed_over_as_it_is() -> list[Finding]:
    scene, declaration = decoding()
    plan = scene.plan(declaration)
    plan.groups[0].slots[0] = 57
    return judged(plan, operators(plan), ONE_GROUP)


@silent(REASON)
def a_group_that_nobody_can_judge() -> list[Finding]:
    layout = pool(group(0), group(1, "mamba"))
    return steady(lambda arguments: arguments.groups[1].parts[0].tables.__setitem__((0, 0), 77), layout)
