"""Holds a seam against the installed vLLM without wrapping it: what ``kvscope doctor`` prints."""

from __future__ import annotations

from typing import Any, NamedTuple

from .ledger import Seam


class SeamReport(NamedTuple):
    """One line of ``kvscope doctor``: ``status`` is ``matched`` or ``refused``, with the reason."""

    name: str
    target: str
    process: str
    fact: str
    lost_without: str
    status: str
    reason: str | None


def probed(seam: Seam) -> SeamReport:
    """Imports the host's module."""
    try:
        _, original = seam.resolve(load=True)
        reason = _wrapped_by_another(original)
    except LookupError as refused:
        return SeamReport(seam.name, seam.target, seam.role, seam.fact, seam.lost, "refused", str(refused))
    return SeamReport(seam.name, seam.target, seam.role, seam.fact, seam.lost, "matched", reason)


def _wrapped_by_another(original: Any) -> str | None:
    """The module of a wrapper that stands between us and the host, if there is one."""
    module = getattr(original, "__globals__", {}).get("__name__", "")
    if module.startswith(("vllm", "torch", "kvscope")) or not module:
        return None
    return f"wrapped by {module} as well"
