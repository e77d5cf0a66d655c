from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvscope.logs import LOGGER


class Logged(logging.Handler):
    """What reached kvscope's logger, whether or not vLLM has configured the one above it in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def text(self) -> str:
        return "\n".join(record.getMessage() for record in self.records)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Logged]:
    logger = logging.getLogger(LOGGER)
    handler, level = Logged(), logger.level
    monkeypatch.setattr(logger, "propagate", False)
    logger.setLevel(logging.INFO)  # not by assignment: logging remembers which levels are on
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
