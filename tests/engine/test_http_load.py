"""Hundreds of concurrent HTTP requests: every one of them can be followed from what its client saw to its results."""

from pathlib import Path
from typing import Any

import pytest

from kvscope.testing.environment import Runner
from kvscope.testing.load import under_load

REQUESTS = 700
IN_FLIGHT_REQUIRED = 500

pytestmark = [pytest.mark.long, pytest.mark.server]


@pytest.mark.timeout(1200)
def test_many_requests_at_once_some_of_them_cancelled(runner: Runner, tmp_path: Path, cell: Any) -> None:
    result = under_load(runner, tmp_path, count=REQUESTS, deadline_s=900)
    cell(result.line)
    assert not result.mistakes, result.mistakes[:5]
    assert result.load.most_in_flight >= IN_FLIGHT_REQUIRED
    assert result.verdict.word == "clean"
    assert result.verdict.rows_audited == result.verdict.rows_scheduled > REQUESTS
    cancelled = [answer for answer in result.load.answers if answer.cancelled]
    assert REQUESTS / 10 < len(cancelled) < REQUESTS / 5
    assert all(answer.tokens for answer in cancelled)
