"""``python -m kvscope``: the command, where its script is not on the PATH."""

from __future__ import annotations

import sys

from kvscope.cli import main

if __name__ == "__main__":  # a process that is spawned from here imports this module again, under another name
    sys.exit(main())
