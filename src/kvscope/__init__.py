"""kvscope: makes the KV cache of a running vLLM engine observable and checkable.

Importing this package does nothing but name its version; ``kvscope.plugin`` is what vLLM loads.
"""

__version__ = "0.1.0"
