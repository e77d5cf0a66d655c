"""Records in vLLM's log: one line each, a tag and one JSON object."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvscope.config import LogLevel
from kvscope.events.envelope import Envelope
from kvscope.events.finding_schema import ViolationRecord
from kvscope.logs import logger
from kvscope.sinks.limits import MinuteLimit

LINES_A_MINUTE = 30
"""Lines about findings. What goes beyond them is counted, and stands in the trace alone."""

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR, "fatal": logging.CRITICAL}


class LogSink:
    """``suppressed`` counts findings that were not logged because there were too many."""

    def __init__(self, mode: LogLevel, tag: str, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._mode = mode
        self._tag = tag
        self._limit = MinuteLimit(LINES_A_MINUTE, clock)
        self._untold = 0
        self.suppressed = 0

    def offer(self, record: Envelope, line: bytes) -> None:
        """Log the record, if records of its event are asked for."""
        if self._mode == "off":
            return
        if isinstance(record, ViolationRecord):
            if not self._limit.allows(record.reason):
                self._untold += 1
                self.suppressed += 1
                return
            self.tell_suppressed()
            self._limit.take(record.reason)
            logger.log(_LEVELS.get(record.severity, logging.ERROR), "%s %s", self._tag, line.decode())
        elif self._mode == "all":
            logger.info("%s %s", self._tag, line.decode())

    def tell_suppressed(self) -> None:
        """Say how many findings were not logged since this was said last, if there were any."""
        count, self._untold = self._untold, 0
        if count:
            self.announce(
                f"{count} more {'finding was' if count == 1 else 'findings were'} not logged, since there are more "
                f"than {LINES_A_MINUTE} a minute; the trace has them"
            )

    def announce(self, text: str) -> None:
        """Something about kvscope itself that an operator has to know; not subject to ``kv_output.log``."""
        logger.warning("kvscope: %s", text)
