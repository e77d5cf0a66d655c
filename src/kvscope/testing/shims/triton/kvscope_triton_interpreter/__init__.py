"""A Triton backend named "cpu" that lets Triton's interpreter run vLLM's kernels on a machine without an accelerator.

vLLM's V2 model runner calls Triton kernels even on a CPU. With `TRITON_INTERPRET=1` Triton executes a kernel's Python
text with NumPy and compiles nothing, but vLLM turns Triton off unless some driver says that it is active. This package
is that driver. Triton finds it through the entry point in the dist-info folder beside it, so that putting this folder's
parent on the import path is enough; nothing needs to be installed.
"""
