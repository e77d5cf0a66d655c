from types import SimpleNamespace
from typing import Any

import pytest

from kvscope.testing.faults import arm
from kvscope.testing.faults.books import Books
from kvscope.testing.faults.story import Call, Story, Telling, Told, until_scheduled, waits


class Block:
    def __init__(self, block_id: int, ref_cnt: int = 1) -> None:
        self.block_id, self.ref_cnt, self.is_null = block_id, ref_cnt, False
        self.block_hash: int | None = None
        self.next_free_block: object = None


def request(name: str, *, computed: int, tokens: int, output: int = 2, limit: int = 24) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name,
        num_computed_tokens=computed,
        num_tokens=tokens,
        num_output_tokens=output,
        max_tokens=limit,
        num_output_placeholders=0,
        status=SimpleNamespace(name="RUNNING"),
    )


def scheduler(*running: SimpleNamespace, tables: dict[str, list[Block]] | None = None) -> SimpleNamespace:
    """As much of the host as `Books` looks at, with blocks of 32 tokens."""
    queue: list[Block] = []
    manager = SimpleNamespace(block_size=32, req_to_blocks=dict(tables or {}), num_cached_block={}, block_pool=None)
    pool = SimpleNamespace(free_block_queue=queue)
    kv = SimpleNamespace(block_pool=pool, coordinator=SimpleNamespace(single_type_managers=[manager]))
    return SimpleNamespace(
        kv_cache_manager=kv,
        running=list(running),
        requests={each.request_id: each for each in running},
        prev_step_scheduled_req_ids={each.request_id for each in running},
        _free_request_blocks=lambda request: manager.req_to_blocks.pop(request.request_id),
    )


def telling(story: Any, **settings: Any) -> tuple[Telling, list[dict[str, Any]]]:
    notes: list[dict[str, Any]] = []
    return Telling(arm("premature_free", on_fire=notes.append, **settings), Told(story)), notes


def output(*names: str) -> SimpleNamespace:
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1))


def test_a_story_waits_for_its_moment_and_is_told_once() -> None:
    calls: list[Call] = []

    def story(books: Books) -> Story:
        while True:
            yield "between"
            if books.due:
                break
        call = yield "zeroing"
        calls.append(call)
        call.result = [7]
        books.fire("a", Block(3))

    host = scheduler()
    told, notes = telling(story, after_steps=1)
    for _ in range(3):
        told.reached("zeroing", Call(()), host)
        told.reached("scheduled", Call(()), host)
        told.reached("between", Call(()), host)
    told.reached("zeroing", last := Call((), None), host)
    told.reached("zeroing", after := Call((), None), host)
    assert (len(calls), last.result, after.result) == (2 - 1, None, None)
    assert calls[0].result == [7]
    fault = {"fault": "premature_free", "rank": None, "step": 2, "group_id": 0, "expected": "read_after_release"}
    assert notes == [fault | {"request_id": "a", "block_id": 3}]


def test_a_story_without_an_occasion_begins_again_and_so_does_one_that_is_told_more_than_once() -> None:
    begun: list[int] = []

    def story(books: Books) -> Story:
        begun.append(1)
        yield "between"
        if len(begun) > 1:
            books.fire("a")

    host = scheduler()
    once, notes = telling(story)
    for _ in range(5):
        once.reached("between", Call(()), host)
    assert (len(begun), len(notes)) == (2, 1)
    begun.clear()
    always, notes = telling(story, once=False)
    for _ in range(5):
        always.reached("between", Call(()), host)
    assert len(notes) == 4


def test_what_a_story_makes_the_host_do_is_no_moment() -> None:
    def story(books: Books) -> Story:
        yield "between"
        told.reached("popping", Call(()))
        yield "popping"
        books.fire("a")

    told, notes = telling(story)
    host = scheduler()
    told.reached("popping", Call(()))
    told.reached("between", Call(()), host)
    assert notes == []
    told.reached("popping", Call(()))
    assert len(notes) == 1


def test_a_story_belongs_to_the_first_scheduler_that_it_sees() -> None:
    def story(books: Books) -> Story:
        yield "between"
        books.fire("a")

    told, notes = telling(story)
    told.reached("zeroing", Call(()), scheduler())
    told.reached("between", Call(()), scheduler())
    assert notes == []


def test_waiting_for_an_occasion_and_for_a_request_to_be_scheduled() -> None:
    found: list[Any] = [None, "here"]
    seen: list[Any] = []

    def story(books: Books) -> Story:
        seen.append((yield from waits(books, lambda: found.pop(0))))
        seen.append((yield from until_scheduled(books, host.requests["a"])))
        seen.append((yield from until_scheduled(books, SimpleNamespace(request_id="gone"))))

    host = scheduler(request("a", computed=3, tokens=4))
    told, _ = telling(story)
    for _ in range(2):
        told.reached("scheduled", Call((host, output("b"))), host)
        told.reached("between", Call(()), host)
    told.reached("scheduled", Call((host, output("b"))), host)
    told.reached("scheduled", Call((host, both := output("a", "b"))), host)
    told.reached("scheduled", Call((host, output("b"))), host)
    assert seen == ["here", both, None]


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, True),
        ({"tokens": 60}, False),  # still computes its prompt
        ({"computed": 64, "tokens": 65}, False),  # the next token needs another block
        ({"computed": 61, "tokens": 62}, False),  # too little room in its last block
        ({"output": 23}, False),  # ends with the next step
    ],
)
def test_a_decoding_request_has_room_and_goes_on(changes: dict[str, int], chosen: bool) -> None:
    chosen_request = request("a", **({"computed": 40, "tokens": 41} | changes))
    host = scheduler(chosen_request, tables={"a": [Block(4), Block(5)]})
    books = Books(arm("premature_free"), host)
    assert list(books.decoding(room=4)) == ([chosen_request] if chosen else [])
    host.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks["a"][1].ref_cnt = 2
    assert list(books.decoding(room=4)) == []


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, True),
        ({"output": 22}, False),
        ({"computed": 40}, False),
        ({"references": 2}, False),
        ({"hashed": 1}, False),
    ],
)
def test_a_request_ends_with_the_step_that_computes_its_last_token(changes: dict[str, int], chosen: bool) -> None:
    last = Block(5, ref_cnt=changes.pop("references", 1))
    last.block_hash = changes.pop("hashed", None)
    one = request("a", **({"computed": 41, "tokens": 41, "output": 23} | changes))
    books = Books(arm("premature_free"), scheduler(one, tables={"a": [Block(4), last]}))
    assert list(books.ending(output("a", "gone"))) == ([one] if chosen else [])
    assert list(books.ending(output("gone"))) == []


def test_a_free_behind_the_requests_back_leaves_its_table() -> None:
    one = request("a", computed=40, tokens=41)
    host = scheduler(one, tables={"a": [Block(4), Block(5)]})
    books = Books(arm("premature_free"), host)
    table = books.table(one)
    books.manager.num_cached_block["a"] = 1
    books.free_but_keep(one)
    assert books.table(one) is table
    assert books.manager.num_cached_block == {"a": 1}


def test_a_restart_gives_up_what_is_left_of_the_table() -> None:
    one = request("a", computed=40, tokens=41)
    host = scheduler(one, tables={"a": [Block(4), Block(5)]})
    preempted: list[Any] = []
    host._preempt_request = lambda request, _, *, drop_stale_output: preempted.append((request, drop_stale_output))
    books = Books(arm("premature_free"), host)
    kept = books.table(one)[1]
    books.restart(one, [books.table(one)[0]])
    assert books.table(one) == [kept]
    assert preempted == [(one, True)]
    assert (host.running, host.prev_step_scheduled_req_ids) == ([], set())
    # What is no longer running has nothing to give up.
    books.restart(one, [kept])
    assert books.table(one) == [kept]


@pytest.mark.parametrize(("references", "queued", "appended"), [(0, False, True), (0, True, False), (1, False, False)])
def test_a_settled_block_is_queued_if_it_is_free(references: int, queued: bool, appended: bool) -> None:
    books = Books(arm("premature_free"), scheduler())
    block = Block(4, ref_cnt=-1)
    if queued:
        block.next_free_block = Block(5)
    books.settle(block, references)
    assert block.ref_cnt == references
    assert books.queue == ([block] if appended else [])
