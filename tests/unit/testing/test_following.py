from pathlib import Path

import pytest

from kvscope.analysis.files import ProcessFiles
from kvscope.analysis.reader import Entry, ProcessLog
from kvscope.events.envelope import Envelope
from kvscope.events.plan_schema import ReadRecord, WriteRecord
from kvscope.events.schema import BindRecord, BoundaryRecord, BoundRequest
from kvscope.testing.following import Following

NAME = "a-0"
LOG = ProcessLog(
    files=ProcessFiles(
        name="all-0-1", paths=[Path("all-0-1.0.jsonl")], first_index=0, process="all", rank=0, pid=1, shared=None
    )
)


def bind(trace_id: str, computed: int = 0, prompt: int | None = None, preempted: tuple[str, ...] = ()) -> Envelope:
    request = BoundRequest(request_id=NAME, num_computed_tokens=computed)
    if prompt is not None:
        request.num_prompt_tokens = prompt
    return BindRecord(
        trace_id=trace_id, requests=[request], total_num_scheduled_tokens=1, finished=[], preempted=list(preempted)
    )


def write(trace_id: str) -> Envelope:
    return WriteRecord(
        trace_id=trace_id, requests=[NAME], groups=[0], num_tokens=1, graph_mode="NONE", query_len=[1],
        first_position=[0], slots=[[16]], padding_slots=[0],
    )  # fmt: skip


def read(trace_id: str) -> Envelope:
    return ReadRecord(trace_id=trace_id, requests=[NAME], groups=[0], blocks_needed=[[1]], digest=[["0" * 16]])


def result(trace_id: str, kind: str) -> Envelope:
    return BoundaryRecord(trace_id=trace_id, kind=kind, result_requests=[NAME], sampled_tokens=[1])


def admitted(client_id: str) -> Envelope:
    return BoundaryRecord(kind="frontend_admit", client_request_id=client_id, request_id=NAME)


def whole_step(trace_id: str) -> list[Envelope]:
    stations = [result(trace_id, "worker_result"), result(trace_id, "update_input")]
    return [bind(trace_id), write(trace_id), read(trace_id), *stations]


def followed(*records: Envelope) -> Following:
    following = Following()
    entries = [Entry(log=LOG, record=record) for record in records]  # type: ignore[arg-type]  # any record is one
    assert list(following.watch(entries)) == entries
    return following


def test_a_request_that_is_everywhere_lacks_nothing() -> None:
    assert followed(admitted("a"), *whole_step("t1"), *whole_step("t2")).missing(["a"]) == []


def test_the_id_of_an_http_answer_is_the_beginning_of_what_was_admitted() -> None:
    following = followed(admitted("cmpl-7-0"), *whole_step("t1"))
    assert following.missing(["cmpl-7"]) == []
    assert following.missing(["cmpl"]) == []
    assert following.missing(["mpl-7"]) == ["mpl-7: not admitted"]


def test_a_request_that_was_never_admitted_or_never_bound_is_named() -> None:
    assert followed(*whole_step("t1")).missing(["a"]) == ["a: not admitted"]
    assert followed(admitted("a")).missing(["a"]) == ["a-0: not bound"]


@pytest.mark.parametrize(
    ("station", "said"),
    [
        (1, "a-0: bound in t2, written 0 times there instead of 1"),
        (2, "a-0: bound in t2, read 0 times there instead of 1"),
        (3, "a-0: bound in t2, no worker gave a result"),
        (4, "a-0: bound in t2, taken up 0 times there instead of 1"),
    ],
)
def test_a_station_that_is_missing_in_one_step_is_named(station: int, said: str) -> None:
    second = whole_step("t2")
    del second[station]
    assert followed(admitted("a"), *whole_step("t1"), *second).missing(["a"]) == [said]


def test_what_stands_under_another_trace_id_does_not_count() -> None:
    steps = [bind("t1"), write("t2"), read("t1"), *whole_step("t1")[3:]]
    assert followed(admitted("a"), *steps).missing(["a"]) == ["a-0: bound in t1, written 0 times there instead of 1"]


def test_every_rank_writes_and_reads_and_one_gives_the_result() -> None:
    following = followed(admitted("a"), *whole_step("t1"), write("t1"), read("t1"))
    assert following.missing(["a"], ranks=2) == []
    assert following.missing(["a"]) == [
        "a-0: bound in t1, written 2 times there instead of 1",
        "a-0: bound in t1, read 2 times there instead of 1",
    ]


def test_prompts_in_pieces_and_preemptions_are_counted() -> None:
    pieces = followed(bind("t1", prompt=100), bind("t2", computed=64), bind("t3", computed=100, preempted=("a-0",)))
    assert (pieces.chunked_prompts, pieces.preemptions) == (1, 1)
    whole = followed(bind("t1", prompt=100), bind("t2", computed=100))
    assert (whole.chunked_prompts, whole.preemptions) == (0, 0)
