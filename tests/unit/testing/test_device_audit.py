"""The audit on a device runs here without one, and says when something is not as it should be."""

from __future__ import annotations

import re

import pytest

from kvscope.testing import device_audit
from kvscope.testing.device_audit import Outcome, main

torch = pytest.importorskip("torch")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == "not run: no accelerator\n"


def test_on_the_host_every_row_is_audited_and_the_planted_fault_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--host", "--requests", "3", "--steps", "20"]) == 0
    said = capsys.readouterr().out
    assert "rows: 60 audited of 60, skipped none" in said
    assert "findings: write_target_mismatch in step 10" in said
    assert "outputs equal with and without: yes" in said
    assert re.search(r"^clones: [1-9]\d* bytes on the device$", said, re.MULTILINE)


def test_the_planted_slot_stays_in_its_block(capsys: pytest.CaptureFixture[str]) -> None:
    """Position 47, the last of a block, would be that of step 9."""
    assert main(["--host", "--requests", "2", "--steps", "18"]) == 0
    assert "findings: write_target_mismatch in step 8" in capsys.readouterr().out


def test_whatever_is_not_as_it_should_be_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = iter([Outcome(), Outcome(rows_scheduled=4, rows=3, skipped={"ring_full": 1}), Outcome(checksum=1.0)])
    monkeypatch.setattr(device_audit, "audited", lambda *_, **__: next(outcomes))
    assert main(["--host"]) == 1
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("MISTAKE: ")]
    assert said == [
        "MISTAKE: rows audited: 3 of 4",
        "MISTAKE: skipped: {'ring_full': 1}",
        "MISTAKE: found [], planted in step 100",
        "MISTAKE: the outputs differ with and without the audit",
    ]
