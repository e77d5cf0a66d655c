"""The same calls as streams of an `AsyncLLM`, whose engine runs in processes of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from kvscope.plugin import register
from kvscope.testing.engine import arguments
from kvscope.testing.matrix.traffic import Call, Outcome

_DEADLINE_S = 240


def serve(
    model: Path, settings: Mapping[str, Any], additional_config: Mapping[str, object], calls: Sequence[Call]
) -> Outcome:
    """Start an engine, stream every call at the same time, and end it. A stream is given up by leaving its loop, as a
    server does when its client is gone.
    """
    return asyncio.run(asyncio.wait_for(_serve(model, settings, additional_config, calls), _DEADLINE_S))


async def _serve(
    model: Path, settings: Mapping[str, Any], additional_config: Mapping[str, object], calls: Sequence[Call]
) -> Outcome:
    import vllm.envs
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    register()
    vllm.envs.disable_envs_cache()
    # AsyncLLM has its engine in another process whatever this says, but while it is "1" vLLM's CPU platform does not
    # let scheduler and worker share that process, which is how an engine with one device usually runs.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    given = arguments(model, additional_config=additional_config, **settings)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
    try:
        outcome = Outcome()
        await asyncio.gather(*(_stream(engine, call, outcome) for call in calls))
        outcome.numbers["aborted"] = len(outcome.aborted)
        return outcome
    finally:
        engine.shutdown(timeout=10)


async def _stream(engine: Any, call: Call, outcome: Outcome) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(**call.sampling, output_kind=RequestOutputKind.CUMULATIVE)
    async with aclosing(engine.generate(call.prompt, parameters, call.name)) as stream:
        async for output in stream:
            outcome.answers[call.name] = [list(sample.token_ids) for sample in output.outputs]
            if output.finished:
                return
            if call.abort_at is not None and len(output.outputs[0].token_ids) >= call.abort_at:
                outcome.aborted.append(call.name)
                return
    outcome.unfinished.append(call.name)
