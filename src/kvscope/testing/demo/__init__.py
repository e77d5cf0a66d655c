"""Runs what `kvscope demo` shows, on a machine without an accelerator: settings come in, what happened goes out.

`traffic` sends completions to a real server, `fault` runs an engine with one injected fault in a process of its own.
"""
