"""Log lines on the host's own threads, fenced: a handler is foreign code, and its failure must not become vLLM's.

Nor may it stand in for what kvscope means to raise: an error of a handler would be taken for a fault of a hook.
"""

from __future__ import annotations

import contextlib
import logging

LOGGER = "vllm.kvscope"
"""A child of vLLM's own logger, whose handlers, level and format therefore apply."""

logger = logging.getLogger(LOGGER)


def say(level: int, text: str, *values: object, error: BaseException | None = None) -> None:
    """Log one line, with the traceback of ``error`` behind it; whatever a handler or a filter raises is swallowed."""
    with contextlib.suppress(Exception):
        logger.log(level, text, *values, exc_info=error, stacklevel=2)
