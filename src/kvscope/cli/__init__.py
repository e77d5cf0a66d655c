"""Station 10, offline: the ``kvscope`` command, one file a verb. In: arguments. Out: text or JSON, and an exit code.

0 is clean or done, 1 findings, 2 usage or unreadable, 3 inconclusive.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvscope import __version__

__all__ = ["main"]

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """What the console script calls; the return value is the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        sys.stdout.write(f"kvscope {__version__}\n")
        return 0
    try:
        from kvscope.cli.app import run

        return run(given)
    except KeyboardInterrupt:  # while the command was loaded
        return INTERRUPTED
