"""How a step is run: eagerly, in pieces of graphs, or as one graph that replays what it captured.

The runner decides before it lays out the batch, and keeps the decision to itself: it is in what V1's
``_determine_batch_execution_and_padding`` returns (``vllm/v1/worker/gpu_model_runner.py``) and in what V2's
``prepare_inputs`` is given (``vllm/v1/worker/gpu/model_runner.py``), vLLM 0.32.
"""

from __future__ import annotations

from typing import Any

GRAPH_MODE = "_kvscope_graph_mode"
"""Attribute by which a runner carries how its current step is run; absent: no engine of this process runs graphs."""
EAGER = "NONE"


def after_dispatch_v1(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    setattr(runner, GRAPH_MODE, result[0].name)


def after_inputs_v2(observer: Any, runner: Any, args: Any, kwargs: Any, result: Any) -> None:
    descriptor = args[2] if len(args) > 2 else kwargs["batch_desc"]
    setattr(runner, GRAPH_MODE, descriptor.cg_mode.name)


def graph_mode_of(runner: Any) -> str:
    """``NONE``, ``PIECEWISE`` or ``FULL``, as vLLM's ``CUDAGraphMode`` names them."""
    return getattr(runner, GRAPH_MODE, EAGER)


def runs_graphs(vllm_config: Any) -> bool:
    """Whether any step of this engine may be run as a graph."""
    compilation = getattr(vllm_config, "compilation_config", None)
    mode = getattr(compilation, "cudagraph_mode", None)
    return mode is not None and mode.name != EAGER
