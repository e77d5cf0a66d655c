"""Decode context parallelism on a machine without an accelerator: what vLLM's CPU build lacks of it, and faults in it.

with context_parallel_environment(): ...  # before an engine of several processes is started
running(model(), in_process=False, tensor_parallel_size=2, decode_context_parallel_size=2)
"""

from kvscope.testing.context_parallel.engine import context_parallel_environment, model

__all__ = ["context_parallel_environment", "model"]
