"""What an engine with decode context parallelism needs on a CPU beside two processes."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvscope.testing import models
from kvscope.testing.environment import shim_paths


def model() -> Path:
    """The smallest model with fewer heads of keys than ranks: vLLM deals out only what ranks would else have twice."""
    return models.build("qwen3-one-head")


@contextmanager
def context_parallel_environment() -> Iterator[None]:
    """The variables, and the import path, for the processes of engines started within.

    vLLM's CPU replacement of the kernel that computes V1's slots knows no context parallelism
    (``vllm/utils/cpu_triton_utils.py``), so Triton's interpreter runs the kernel itself, as it does for V2.
    """
    paths = [*shim_paths("v2"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    wanted = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "TRITON_INTERPRET": "1"}
    before, import_path = {name: os.environ.get(name) for name in wanted}, list(sys.path)
    os.environ.update(wanted)
    sys.path[:0] = [path for path in paths if path not in sys.path]  # a process that is spawned gets its parent's
    try:
        yield
    finally:
        sys.path[:] = import_path
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
