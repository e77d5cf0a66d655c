"""Runs in test and demo processes, never in a serving one: settings come in, real vLLM engines with tiny models go out.

`models` builds the models, `environment` prepares a machine without an accelerator, `engine` starts an engine in this
process or in its own, and `server` starts `vllm serve`.
"""
