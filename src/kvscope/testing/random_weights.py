"""Random weights for any architecture, under which the next token depends on what attention reads.

vLLM's own dummy weights are about a thousandth, so that every logit is the same and no test of a cache could fail.
These are scaled by the width of what they multiply. They exist in the process that registers them only: an engine whose
workers are processes of their own needs a model with a checkpoint (`kvscope.testing.models`).
"""

from __future__ import annotations

import hashlib
from typing import Any

RANDOM_WEIGHTS = "kvscope-random"
"""The `load_format` for vLLM."""


def register_random_weights() -> None:
    """Make :data:`RANDOM_WEIGHTS` known to vLLM in this process; twice is as good as once."""
    from vllm.model_executor import model_loader

    if RANDOM_WEIGHTS in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return

    class RandomWeights(model_loader.BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: Any, model_config: Any) -> None:  # noqa: ARG002  vLLM's signature
            # Buffers are computed by the layers themselves, rotary tables for example.
            for name, tensor in model.named_parameters():
                _fill(name, tensor)

    model_loader.register_model_loader(RANDOM_WEIGHTS)(RandomWeights)


def _fill(name: str, tensor: Any) -> None:
    import torch

    if not torch.is_floating_point(tensor):
        raise TypeError(f"{name} is {tensor.dtype}: quantised weights are not made here")
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    with torch.no_grad():
        tensor.copy_(_scaled(name, values))


def _scaled(name: str, values: Any) -> Any:
    """Standard normal values made into a plausible parameter of that name."""
    last = name.rpartition(".")[2]
    if last == "A":  # of a Mamba state: how fast it forgets
        return -0.05 - 0.1 * values.abs()
    if last == "A_log":
        return -2.0 + 0.5 * values
    if last == "D":
        return 1.0 + 0.1 * values
    if last == "dt_bias":  # together with A: half of a state is left after a hundred tokens
        return -2.0 + 0.1 * values
    if "norm" in name and values.dim() == 1:
        return 0.05 * values if last == "bias" else 1.0 + 0.1 * values
    if values.dim() == 1:
        return 0.1 * values
    if "embed" in name:
        return 1.0 * values
    return 2.0 * values / values.shape[-1] ** 0.5
