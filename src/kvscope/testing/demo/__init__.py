"""Runs what `kvscope demo` shows, on a machine without an accelerator: settings come in, what happened goes out.

`traffic` sends completions to a real server, `cost` runs an engine that decodes, `fault` one with one injected fault;
`apart` gives these two a process of their own, and `outcome` judges what a run left behind.
"""
