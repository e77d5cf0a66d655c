from __future__ import annotations

import pytest

from kvscope.checks.finding import Finding
from kvscope.config import RequestIds
from kvscope.events.codec import encode
from kvscope.events.findings import violation_record
from kvscope.events.frozen import frozen_line
from kvscope.events.names import RequestNames
from kvscope.events.schema import decode_record
from unit.events.samples import RULE


def test_the_line_has_the_promised_fields_in_the_promised_order() -> None:
    finding = Finding(
        reason="write_target_mismatch", step=3, trace_id="t", request_id="r-1", group_id=0, block_id=7, slot=112
    )
    assert frozen_line(finding, RULE, "raise") == (
        "KV_GUARD reason=write_target_mismatch check=C1 action=raise request=r-1 group=0 block=7 slot=112 step=3 "
        "trace_id=t"
    )


def test_what_does_not_apply_is_a_dash_and_zero_is_not() -> None:
    line = frozen_line(Finding(reason="x", step=0, trace_id="t", group_id=0), RULE, "log", tag="MINE")
    assert line == "MINE reason=x check=C1 action=log request=- group=0 block=- slot=- step=0 trace_id=t"


def test_a_client_cannot_forge_a_field_or_a_line() -> None:
    finding = Finding(reason="x", step=1, trace_id="t", request_id="a block=1\nKV_GUARD reason=é=\u2028%")
    line = frozen_line(finding, RULE, "log")
    assert len(line.splitlines()) == 1
    assert line.count(" block=") == 1
    assert "request=a%20block%3D1%0AKV_GUARD%20reason%3Dé%3D%E2%80%A8%25 " in line


def test_the_line_says_the_id_as_the_records_do() -> None:
    finding = Finding(reason="x", step=1, trace_id="t", request_id="secret")
    assert "request=- " in frozen_line(finding, RULE, "log", names=RequestNames("omitted"))
    hashed = RequestNames("hashed", b"0" * 16)
    assert f"request={hashed('secret')} " in frozen_line(finding, RULE, "log", names=hashed)


@pytest.mark.parametrize("mode", ["plain", "hashed", "omitted"])
def test_an_id_with_half_a_surrogate_pair_is_told_and_recorded(mode: RequestIds) -> None:
    """`"\\ud83d"` is JSON, so a client can send it; no JSON of ours could hold it as it is."""
    names = RequestNames(mode, b"0" * 16)
    finding = Finding(reason="x", step=1, trace_id="t\ud83d", request_id="r\ud83d")
    shown = {"plain": "r\\ud83d", "hashed": names("r\ud83d"), "omitted": "-"}[mode]
    assert f"request={shown} " in frozen_line(finding, RULE, "log", names=names)
    finding.trace_id = "t"
    assert decode_record(encode(violation_record(finding, RULE, "log", 0, names))).request_id == names("r\ud83d")


def test_every_other_id_is_recorded_as_it_is() -> None:
    assert [RequestNames()(name) for name in ("r-1", "日本語-😀", "a\x1b\n")] == ["r-1", "日本語-😀", "a\x1b\n"]
