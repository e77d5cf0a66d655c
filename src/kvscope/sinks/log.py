"""Records in vLLM's log: one line each, a tag and one JSON object."""

from __future__ import annotations

import logging

from kvscope.config import LogLevel
from kvscope.events.envelope import Envelope
from kvscope.events.finding_schema import ViolationRecord
from kvscope.logs import logger

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR, "fatal": logging.CRITICAL}


class LogSink:
    def __init__(self, mode: LogLevel, tag: str) -> None:
        self._mode = mode
        self._tag = tag

    def offer(self, record: Envelope, line: bytes) -> None:
        """Log the record, if records of its event are asked for."""
        if self._mode == "off":
            return
        if isinstance(record, ViolationRecord):
            logger.log(_LEVELS.get(record.severity, logging.ERROR), "%s %s", self._tag, line.decode())
        elif self._mode == "all":
            logger.info("%s %s", self._tag, line.decode())

    def announce(self, text: str) -> None:
        """Something about kvscope itself that an operator has to know; not subject to ``kv_output.log``."""
        logger.warning("kvscope: %s", text)
