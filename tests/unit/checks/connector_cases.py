"""What a connector reports: transfers that are over, loads that have failed, blocks that could not be loaded."""

from __future__ import annotations

from kvscope.checks.finding import Finding
from kvscope.checks.judge import judge_completions, judge_failed_loads, judge_receives
from kvscope.facts.connector import ConnectorPlan, ConnectorResult, PlannedReceive, TakenUp
from kvscope.facts.requests import Declaration
from kvscope.facts.topology import SLIDING_WINDOW, Topology
from kvscope.state.transfers import MOST_TRANSFERS, Transfers
from unit.checks.cases import fires, silent
from unit.checks.guarded import Guarded, two_decode
from unit.checks.hit_cases import GO_ON, comes_in
from unit.checks.scenes import ONE_GROUP, PARTS, Scene
from unit.checks.worlds import group, pool

COMPLETIONS = ("connector_duplicate_completion", "connector_unknown_request", "connector_completion_unplanned")


def receive(name: str, blocks: list[int], *, tokens: int = 32, waits: bool = True) -> PlannedReceive:
    """All of ``tokens`` is to be loaded."""
    return PlannedReceive(
        request_id=name, computed_tokens=tokens, external_tokens=tokens, waits=waits, blocks=(blocks,)
    )


def receiving(*names: str) -> Transfers:
    """Each of the requests waits for a load since step 1."""
    transfers = Transfers()
    transfers.plan(ConnectorPlan(receives=[receive(name, [1, 2]) for name in names]), 1)
    return transfers


def sending(*names: str) -> Transfers:
    transfers = Transfers()
    transfers.plan(ConnectorPlan(sends=list(names)), 1)
    return transfers


def completed(
    transfers: Transfers, *, received: str = "", sent: str = "", unknown: str = "", step: int = 2
) -> list[Finding]:
    """The result of a step names these requests, one letter each."""
    result = ConnectorResult(finished_recving=list(received), finished_sending=list(sent), unknown=list(unknown))
    completions = transfers.complete(result, step)
    return judge_completions(completions, step, f"t{step}", PARTS, is_partial=transfers.is_partial)


@fires(
    "connector_duplicate_completion", request_id="r", expected="one report of each planned transfer",
    actual="finished receiving, as was reported with the result of step 2",
)  # fmt: skip
def a_receive_is_reported_with_two_results() -> list[Finding]:
    transfers = receiving("r", "s")
    assert completed(transfers, received="r") == []
    return completed(transfers, received="rs", step=3)


@fires(
    "connector_duplicate_completion", request_id="r", expected="one report of each planned transfer",
    actual="finished sending, as was reported with the result of step 2",
)  # fmt: skip
def a_send_is_reported_again_when_its_request_is_gone() -> list[Finding]:
    transfers = sending("r")
    assert completed(transfers, sent="r") == []
    return completed(transfers, sent="r", unknown="r", step=4)


@fires(
    "connector_unknown_request", request_id="x", expected="a request that the scheduler has",
    actual="finished receiving, and the scheduler does not have it",
)  # fmt: skip
def a_receive_of_nobody() -> list[Finding]:
    return completed(receiving("r"), received="rx", unknown="x")


@fires(
    "connector_unknown_request", request_id="r", expected="a request that the scheduler has",
    actual="finished sending, and the scheduler does not have it",
)  # fmt: skip
def a_send_of_a_request_that_was_let_go_too_early() -> list[Finding]:
    return completed(sending("r"), sent="r", unknown="r")


@fires(
    "connector_completion_unplanned", request_id="r", expected="a transfer that was planned",
    actual="finished receiving, and nothing was planned",
)  # fmt: skip
def a_receive_of_a_request_that_loads_inside_of_its_step() -> list[Finding]:
    transfers = Transfers()
    transfers.plan(ConnectorPlan(receives=[receive("r", [1, 2], waits=False)]), 1)
    return completed(transfers, received="r")


@fires(
    "connector_completion_unplanned", request_id="r", expected="a transfer that was planned",
    actual="finished sending, and nothing was planned",
)  # fmt: skip
def a_send_of_an_aborted_request_that_is_still_being_loaded() -> list[Finding]:
    """The host would release its blocks under the load."""
    return completed(receiving("r"), sent="r")


@silent(*COMPLETIONS)
def transfers_that_were_planned() -> list[Finding]:
    transfers = receiving("r", "s")
    transfers.plan(ConnectorPlan(sends=["t"]), 2)
    return completed(transfers, received="rs", sent="t", step=5)


@silent(*COMPLETIONS)
def a_request_that_is_received_and_sent_and_comes_again() -> list[Finding]:
    transfers = receiving("r")
    found = completed(transfers, received="r")
    transfers.plan(ConnectorPlan(receives=[receive("r", [3])]), 3)  # after a preemption
    found += completed(transfers, received="r", step=4)
    transfers.plan(ConnectorPlan(sends=["r"]), 4)
    found += completed(transfers, sent="r", step=5)
    transfers.plan(ConnectorPlan(sends=["r"]), 9)  # another of the same name
    return found + completed(transfers, sent="r", step=10)


@silent(*COMPLETIONS)
def a_request_that_was_aborted_while_it_is_loaded() -> list[Finding]:
    return completed(receiving("r"), received="r", step=7)


@silent("connector_completion_unplanned", "connector_duplicate_completion")
def plans_that_were_not_seen() -> list[Finding]:
    transfers = receiving("r")
    found = completed(transfers, received="r")
    transfers.lose()
    return found + completed(transfers, received="r", sent="s", step=3)


@silent("connector_completion_unplanned")
def more_plans_than_are_kept() -> list[Finding]:
    transfers = receiving("r")
    transfers.plan(ConnectorPlan(sends=[f"s{number}" for number in range(MOST_TRANSFERS)]), 2)
    transfers.plan(ConnectorPlan(receives=[receive(f"q{number}", [1]) for number in range(MOST_TRANSFERS)]), 3)
    return completed(transfers, received="r", step=4)


# Where to load --------------------------------------------------------------------------------------------------------

WINDOW = pool(group(0, SLIDING_WINDOW, 16, 20))


def planned(
    blocks: list[int], *, tokens: int = 48, external: int = 32, topology: Topology = ONE_GROUP, guard: bool = True
) -> list[Finding]:
    """``x`` has blocks 10, 11, 12 of its own, and block 9 of a hit; ``y`` has 20. A connector is told to load ``x``."""
    scene = Guarded(topology)
    scene.allocate("p", [9])
    scene.hit("x", [9])
    scene.allocate("x", [10, 11, 12], 1)
    scene.allocate("y", [20])
    load = PlannedReceive(
        request_id="x", computed_tokens=tokens, external_tokens=external, waits=True, blocks=(blocks,)
    )
    return judge_receives([load], 1, "t1", topology, PARTS, scene.ledger if guard else None)


@fires(
    "connector_null_block", request_id="x", group_id=0, position=16, block_id=0, generation=0,
    expected="a block that holds tokens", actual="the null block; 1 of 2 such blocks",
)  # fmt: skip
def a_connector_is_told_to_load_into_the_null_block() -> list[Finding]:
    return planned([9, 0, 0])


@fires(
    "connector_null_block", request_id="x", group_id=0, position=32, block_id=0,
    expected="a block that holds tokens", actual="the null block",
)  # fmt: skip
def the_same_where_the_pool_is_not_followed() -> list[Finding]:
    return planned([9, 10, 0], guard=False)


@fires(
    "connector_block_not_bound", request_id="x", other_request_id="y", group_id=0, position=32, block_id=20,
    generation=1, expected="a block that the pool has given to the request",
    actual="generation 1, handed out in step 1",
)  # fmt: skip
def a_connector_is_told_to_load_into_a_block_of_another_request() -> list[Finding]:
    return planned([9, 10, 20])


@fires(
    "connector_block_not_bound", request_id="x", group_id=0, position=16, block_id=30, generation=0,
    expected="a block that the pool has given to the request", actual="never handed out; 1 of 2 such blocks",
)  # fmt: skip
def a_connector_is_told_to_load_into_blocks_that_nobody_has() -> list[Finding]:
    return planned([9, 30, 31])


@silent("connector_null_block", "connector_block_not_bound")
def a_connector_is_told_to_load_into_what_the_request_has() -> list[Finding]:
    return (
        planned([9, 10, 11]) + planned([9, 10, 11, 12], tokens=40, external=24) + planned([9], tokens=16, external=16)
    )


@silent("connector_null_block", "connector_block_not_bound")
def what_is_not_to_be_loaded_may_be_anything() -> list[Finding]:
    """It was found before, or is still to be computed."""
    return planned([0, 10, 11, 20, 0]) + planned([20, 10, 11])


@silent("connector_null_block", "connector_block_not_bound")
def what_has_left_the_attention_window_is_not_loaded() -> list[Finding]:
    return planned([0, 10, 11], external=48, topology=WINDOW)


@silent("connector_block_not_bound")
def without_the_pool_nobody_knows_whose_a_block_is() -> list[Finding]:
    return planned([9, 10, 20], guard=False)


# Loads that have failed -----------------------------------------------------------------------------------------------


def failed(
    transfers: Transfers, *taken_up: TakenUp, scene: Scene | None = None, declaration: Declaration | None = None,
    invalid: tuple[int, ...] = (), failing: str = "",
) -> list[Finding]:  # fmt: skip
    """The result of step 2 says so, and the scheduler makes that of it."""
    result = ConnectorResult(failed_recving=list(failing), invalid_blocks=list(invalid), finished_recving=list(failing))
    loads = transfers.failed(result, declaration, (scene or Scene()).bindings)
    transfers.complete(result, 2)
    return judge_failed_loads(loads, taken_up, 2, "t2", PARTS)


def stands(name: str, computed: int, *, over: bool = False, marked: bool = False) -> TakenUp:
    return TakenUp(request_id=name, is_over=over, is_marked=marked, computed_tokens=computed)


@fires(
    "connector_failed_receive_lost", request_id="r", position=0,
    expected="a request that ends or goes on with at most 0 tokens", actual="32 tokens count as computed",
)  # fmt: skip
def a_failed_receive_that_the_scheduler_passes_over() -> list[Finding]:
    return failed(receiving("r"), stands("r", 32), failing="r")


@fires(
    "connector_failed_receive_lost", request_id="r", group_id=0, block_id=2, position=16,
    expected="a request that ends or goes on with at most 16 tokens", actual="32 tokens count as computed",
)  # fmt: skip
def a_failed_block_of_a_load_that_is_waited_for() -> list[Finding]:
    return failed(receiving("r"), stands("r", 32), invalid=(2, 9))


@fires(
    "connector_failed_receive_lost", request_id="p", group_id=0, block_id=2, position=16,
    expected="a request that ends or goes on with at most 16 tokens", actual="40 tokens count as computed",
)  # fmt: skip
def a_failed_block_of_a_load_inside_of_the_step() -> list[Finding]:
    scene = Scene()
    declaration = scene.say(new=[("p", ([1, 2, 3],), 32, 8), ("q", ([4],), 0, 8)])
    return failed(Transfers(), stands("p", 40), scene=scene, declaration=declaration, invalid=(2,))


@silent("connector_failed_receive_lost")
def failed_receives_that_end_or_wait_as_failed() -> list[Finding]:
    transfers = receiving("r", "s", "t")
    return failed(transfers, stands("r", 32, over=True), stands("s", 0, marked=True), stands("t", 32), failing="rs")


@silent("connector_failed_receive_lost")
def a_failed_block_whose_request_is_set_back() -> list[Finding]:
    scene = Scene()
    declaration = scene.say(new=[("p", ([1, 2, 3],), 32, 8)])
    return failed(Transfers(), stands("p", 16), scene=scene, declaration=declaration, invalid=(2,))


@silent("connector_failed_receive_lost")
def a_failed_block_that_two_requests_of_the_step_have() -> list[Finding]:
    """The first of them computes it again, and the other goes on with it."""
    scene = Scene()
    declaration = scene.say(new=[("p", ([1, 2, 3],), 32, 8), ("q", ([1, 2, 4],), 32, 8)])
    stand = (stands("p", 16), stands("q", 40))
    return failed(Transfers(), *stand, scene=scene, declaration=declaration, invalid=(2,))


@silent("connector_failed_receive_lost")
def a_failed_block_behind_what_is_computed() -> list[Finding]:
    scene = Scene()
    declaration = scene.say(new=[("p", ([1, 2, 3],), 32, 8)])
    return failed(Transfers(), stands("p", 40), scene=scene, declaration=declaration, invalid=(3,))


@silent("connector_failed_receive_lost")
def a_failure_of_a_request_that_does_not_wait() -> list[Finding]:
    """The host passes over it as well: it was aborted, or has what it needs."""
    return failed(Transfers(), stands("r", 32), failing="r")


# Blocks that could not be loaded --------------------------------------------------------------------------------------


def lacking(*blocks: int) -> Guarded:
    """``a`` and ``b`` decode, and these blocks were reported with the result of step 1."""
    scene = two_decode()
    scene.legality.invalid.report(blocks, 1)
    return scene


SINCE = "0 since it was reported as not loaded with the result of step 1; generation 1, handed out in step 1"


@fires(
    "connector_invalid_block_reused", request_id="x", group_id=0, position=0, block_id=4, generation=1,
    expected="16 tokens of the block written", actual=SINCE + "; freed in step 2 (abort) and hit again",
)  # fmt: skip
def a_block_that_was_not_loaded_is_hit() -> list[Finding]:
    scene = lacking(4)
    scene.free("b", [6, 5, 4], "abort")
    scene.hit("x", [4])
    scene.allocate("x", [20], 1)
    return scene.content(new=[("x", ([4, 20],), 16, 3)], known=[("a", None, 40, 1)], finished=["b"])


@fires(
    "connector_invalid_block_reused", request_id="x", group_id=0, block_id=4, generation=1,
    expected="16 tokens of the block written", actual=SINCE + "; freed in step 2 (abort) and hit again",
)  # fmt: skip
def a_block_that_was_not_loaded_is_hit_by_a_request_that_waits_for_the_rest() -> list[Finding]:
    scene = lacking(4)
    scene.free("b", [6, 5, 4], "abort")
    scene.hit("x", [4])
    return scene.content(known=[("a", None, 40, 1)], finished=["b"])


@fires(
    "connector_invalid_block_reused", request_id="b", group_id=0, position=32, block_id=6, generation=1,
    expected="8 tokens of the block written", actual=SINCE,
)  # fmt: skip
def a_request_goes_on_behind_a_block_that_was_not_loaded() -> list[Finding]:
    scene = lacking(6)
    found = scene.content(**GO_ON)
    assert scene.content(known=[("a", None, 41, 1), ("b", None, 41, 1)]) == [], "each use is said once"
    return found


@silent("connector_invalid_block_reused")
def a_block_that_was_not_loaded_and_is_computed_again() -> list[Finding]:
    scene = lacking(5, 6)
    found = scene.content(known=[("a", None, 40, 1), ("b", None, 16, 10)])
    found += scene.content(known=[("a", None, 41, 1), ("b", None, 26, 14)])
    found += scene.content(known=[("a", None, 42, 1), ("b", None, 40, 1)])
    assert scene.legality.invalid.blocks.keys() == {6}, "block 5 is whole, and 9 tokens of block 6"
    return found


@silent("connector_invalid_block_reused")
def one_request_computes_the_block_again_and_another_of_the_step_goes_on_with_it() -> list[Finding]:
    scene = two_decode()
    comes_in(scene, [4, 5])
    scene.legality.invalid.report([5], 2)
    return scene.content(known=[("a", None, 41, 1), ("b", None, 16, 25), ("x", None, 35, 1)])


@silent("connector_invalid_block_reused")
def a_block_that_was_not_loaded_and_is_handed_out_anew() -> list[Finding]:
    scene = lacking(4, 5, 6)
    scene.free("b", [6, 5, 4], "abort")
    scene.allocate("x", [4])
    return scene.content(new=[("x", ([4],), 0, 16)], known=[("a", None, 40, 1)], finished=["b"])


@silent("connector_invalid_block_reused")
def a_request_that_lacks_a_block_and_ends() -> list[Finding]:
    scene = lacking(4)
    scene.free("b", [6, 5, 4], "abort")
    return scene.content(known=[("a", None, 40, 1)], finished=["b"])
