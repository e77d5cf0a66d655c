"""A finding on the terminal reads as its golden file does, 80 columns wide.

After an intended change: KVSCOPE_UPDATE_GOLDEN=1 pytest tests/unit/reports, then read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from kvscope.analysis.blocks import Tenure
from kvscope.analysis.scene import Neighbour, Scene
from kvscope.analysis.tally import FoldedFinding
from kvscope.checks.catalog import RULES
from kvscope.checks.finding import Finding
from kvscope.reports.prepare import prepare
from kvscope.reports.strip import SYMBOLS
from kvscope.reports.terminal import WIDTH, draw, plain

GOLDEN = Path(__file__).parent / "golden"


def strip(words: str, first: int = 0) -> list[Neighbour]:
    whose = {symbol: word for word, symbol in SYMBOLS.items()}
    return [Neighbour(block_id=first + index, whose=whose[symbol]) for index, symbol in enumerate(words)]


FOREIGN = FoldedFinding(
    first=Finding(
        reason="write_foreign_block",
        step=214,
        trace_id="1795981958.0.214",
        request_id="cmpl-7d1",
        other_request_id="cmpl-6f0",
        row=3,
        group_id=0,
        token_index=3,
        position=217,
        block_id=45,
        slot=725,
        expected=853,
        actual=725,
        also=("write_target_mismatch",),
    ),
    process="worker-0-4711",
    processes=["worker-0-4711"],
    runner="V2",
    action="log",
    in_replay=41,
    in_trace=16,
    told={"worker-0-4711": 41},
    first_step=214,
    last_step=254,
    requests=["cmpl-7d1", "cmpl-7d2"],
    num_requests=2,
    scene=Scene(
        num_blocks=2048,
        null_block_id=0,
        slots_per_block=16,
        logical_block=13,
        declared_block=53,
        holders=["cmpl-6f0"],
        tenures=[
            Tenure(request_id="cmpl-6f0", group_index=0, index=4, since_step=180),
            Tenure(request_id="cmpl-5aa", group_index=0, index=0, since_step=12, until_step=171, cause="finished"),
        ],
        strip=strip("...SSRRRRR..OO.O", first=37),
    ),
)
OUTSIDE_CACHE = FoldedFinding(
    first=Finding(
        reason="read_outside_cache",
        step=9,
        trace_id="run.0.9",
        request_id="r1",
        row=0,
        group_id=1,
        position=32,
        block_id=2050,
        expected=7,
        actual=2050,
        launch_fatal=True,
    ),
    process="worker-1-4712",
    processes=["worker-1-4712"],
    runner="V1",
    action="raise",
    in_replay=1,
    in_trace=1,
    first_step=9,
    last_step=9,
    requests=["r1"],
    num_requests=1,
    scene=Scene(
        num_blocks=2048,
        null_block_id=0,
        slots_per_block=16,
        logical_block=2,
        declared_block=7,
        holders=[],
        tenures=[],
        strip=strip("....RR" + "x" * 10, first=2042),
    ),
)
NULL_WRITE = FoldedFinding(
    first=Finding(
        reason="null_block_write",
        step=3,
        trace_id="run.0.3",
        request_id="r1",
        row=0,
        group_id=0,
        token_index=0,
        position=41,
        block_id=0,
        slot=3,
        expected=57,
        actual=3,
    ),
    process="all-0-1",
    processes=["all-0-1"],
    runner="V1",
    action="log",
    in_replay=1,
    first_step=3,
    last_step=3,
    requests=["r1"],
    num_requests=1,
    scene=Scene(
        num_blocks=16,
        null_block_id=0,
        slots_per_block=16,
        logical_block=2,
        declared_block=3,
        holders=[],
        tenures=[],
        strip=strip("NOOO" + "." * 12),
    ),
)
SHORTFALL = FoldedFinding(
    first=Finding(
        reason="bind_block_shortfall",
        step=5,
        trace_id="run.0.5",
        request_id="r\x1b[31m2\nKV_GUARD reason=forged",
        group_id=0,
        position=32,
        expected=3,
        actual=2,
    ),
    process="engine-0-1",
    processes=["engine-0-1"],
    runner="V1",
    action="isolate",
    in_trace=1,
    first_step=5,
    last_step=5,
    num_requests=1,
)
HANDOVER = FoldedFinding(
    first=Finding(
        reason="handover_request_mismatch",
        step=5,
        trace_id="run.0.5",
        request_id="r2",
        expected="role ['new', 'scheduled']",
        actual="role []",
    ),
    process="worker-0-2",
    processes=[f"worker-{rank}-2" for rank in range(5)],
    runner="V1",
    action="log",
    in_replay=5,
    in_trace=5,
    first_step=5,
    last_step=5,
    num_requests=1,
)
CASES = {
    "foreign_write": FOREIGN,
    "outside_read": OUTSIDE_CACHE,
    "null_write": NULL_WRITE,
    "shortfall": SHORTFALL,
    "handover": HANDOVER,
}


@pytest.mark.parametrize("name", CASES)
def test_a_finding_reads_as_agreed(name: str) -> None:
    text = plain(draw(prepare(CASES[name])))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("KVSCOPE_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_only_the_line_for_grep_is_longer_than_the_screen(name: str) -> None:
    frozen, *rest = plain(draw(prepare(CASES[name]))).splitlines()
    assert frozen.startswith("KV_GUARD reason=")
    assert max(map(len, rest)) <= WIDTH


def test_a_request_id_cannot_draw_on_the_terminal() -> None:
    text = plain(draw(prepare(SHORTFALL)))
    assert "\x1b" not in text
    assert sum(line.startswith("KV_GUARD") for line in text.splitlines()) == 1


@pytest.mark.parametrize("reason", RULES)
def test_every_reason_can_be_told_with_as_little_as_its_name(reason: str) -> None:
    folded = FoldedFinding(
        first=Finding(reason=reason, step=1, trace_id=""),
        process="p",
        runner=None,
        action="log",
        first_step=1,
        last_step=1,
    )
    text = plain(draw(prepare(folded)))
    assert reason in text
    assert "Next" in text
    assert all(len(line) <= WIDTH for line in text.splitlines()[1:])


def test_a_reason_from_a_later_version_is_told_as_unknown() -> None:
    folded = FoldedFinding(
        first=Finding(reason="from_the_future", step=1, trace_id="", block_id=3, actual="later"),
        process="p", runner=None, action="log",
        first_step=1, last_step=1,
    )  # fmt: skip
    assert "a reason that this version does not know" in plain(draw(prepare(folded)))


def _told(folded: FoldedFinding, **changes: object) -> str:
    finding = msgspec.structs.replace(folded.first, **changes)
    return plain(draw(prepare(msgspec.structs.replace(folded, first=finding))))


def test_a_token_that_is_not_stored_hits_no_block() -> None:
    text = _told(FOREIGN, reason="write_target_mismatch", slot=-1, block_id=-1, actual=-1, other_request_id=None)
    assert "WRITE           slot -1 (padding: nothing is written)\n" in text
    assert "neighbours" not in text
    assert "allocated for" not in text


def test_what_was_seen_in_the_batch_is_not_said_to_come_from_the_message() -> None:
    text = _told(HANDOVER, expected="in the batch", actual="absent")
    assert "actual          absent: the requests in the runner's batch\n" in text
    assert "expected        in the batch: the scheduler's declaration\n" in text


def test_a_symbol_stays_on_one_line_with_its_meaning() -> None:
    text = _told(FOREIGN, request_id="a-rather-long-request-id-of-a-client")
    lines = text.splitlines()
    legend = lines[lines.index(next(line for line in lines if "^ block" in line)) + 1 :]
    assert [line.strip() for line in legend[:3]] == [
        "O a-rather-long-request-id-of-a-client's own",
        "S a-rather-long-request-id-of-a-client's, shared",
        "R another request's   . nobody's",
    ]
