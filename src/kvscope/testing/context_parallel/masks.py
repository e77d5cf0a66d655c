"""Lets Triton's interpreter take a mask that it has made an integer of.

Where a truth value that was loaded meets one that was compared, the interpreter goes on with zeros and ones of eight
bits, and then refuses them as a mask ("mask has unsupported dtype"); a compiled kernel has one bit for either. vLLM's
kernel for slots under context parallelism has such a mask (``vllm/v1/worker/gpu/block_table.py``).
"""

from typing import Any


def mend() -> None:
    """Patch the interpreter of this process; once is enough."""
    from triton.runtime.interpreter import InterpreterBuilder

    if "masked_by_integers" in vars(InterpreterBuilder):
        return
    InterpreterBuilder.masked_by_integers = True
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def masked_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        return load(self, pointers, _as_mask(mask), *more)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        return store(self, pointers, value, _as_mask(mask), *more)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = masked_load, masked_store


def _as_mask(mask: Any) -> Any:
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return mask if mask.data.dtype == np.bool_ else TensorHandle(mask.data.astype(np.bool_), tl.int1)
