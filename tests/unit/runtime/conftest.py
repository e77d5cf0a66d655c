from __future__ import annotations

from collections.abc import Iterator

import pytest

from unit.runtime.support import MADE


@pytest.fixture(autouse=True)
def _runs_end_with_their_test() -> Iterator[None]:
    """A test that fails would leave its writer behind, for other tests to stumble over."""
    yield
    while MADE:
        MADE.pop().close()
