"""The table of features: how an engine is made to have each, what it is asked, and by which numbers it is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvscope.testing import models
from kvscope.testing.architectures import Outline, lora_adapter, outline
from kvscope.testing.environment import Runner
from kvscope.testing.matrix import traffic
from kvscope.testing.matrix.traffic import Call
from kvscope.testing.random_weights import RANDOM_WEIGHTS

RUNNERS: tuple[Runner, ...] = ("v1", "v2")

Way = Literal["in-process", "streams", "server"]
"""How requests reach the engine: within this process, through AsyncLLM, or over HTTP. Only the first is compared token
by token; in the others it depends on the machine which requests share a step.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Obstacle:
    """Why a cell cannot run here. It is tried all the same, and counts as not run when it ends with this `error`."""

    error: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much one runner is asked: V2 runs in Triton's interpreter, about a hundred times slower."""

    seqs: int
    tokens: int
    requests: int


SIZES: Mapping[Runner, Size] = {
    "v1": Size(seqs=32, tokens=100, requests=24),
    "v2": Size(seqs=8, tokens=24, requests=12),
}

_V2_PART = 50
_FEWEST_TOKENS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """`rows_per_token` is how many rows a token makes (groups x ranks, less where drafts are accepted), `v1_share` how
    much of the usual rows runner V1 is to make (more where a row costs little). `evidence` are numbers that must be
    more than zero for the feature to have taken place, `one_engine` says that a process can start no other engine
    afterwards, `judged` whether any group of the model has semantics that rules judge, and `known` has reasons found
    because of a defect of vLLM, with the place that explains it.
    """

    name: str
    about: str
    model: Callable[[], Path] = lambda: models.build("qwen3")
    settings: Mapping[str, Any] = field(default_factory=dict)
    of_runner: Mapping[Runner, Mapping[str, Any]] = field(default_factory=dict)
    calls: Callable[[int, int], list[Call]] = traffic.plain
    rows_per_token: float = 1
    v1_share: float = 1
    ranks: int = 1
    engines: int = 1
    evidence: tuple[str, ...] = ()
    way: Way = "in-process"
    forced_async: bool = False
    one_engine: bool = False
    judged: bool = True
    obstacles: Mapping[Runner, Obstacle] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)

    def engine_settings(self, runner: Runner) -> dict[str, Any]:
        """What `kvscope.testing.engine.start` is called with, beside the model and kvscope's switches."""
        size = SIZES[runner]
        usual = {"num_blocks": 512, "max_num_seqs": size.seqs, "max_num_batched_tokens": 512, "max_model_len": 512}
        return usual | {"disable_log_stats": False} | dict(self.settings) | dict(self.of_runner.get(runner, {}))

    def rows(self, runner: Runner, usual: int) -> int:
        """How many rows the cell makes where a V1 cell usually makes so many."""
        return round(usual * self.v1_share) if runner == "v1" else usual // _V2_PART

    def requests(self, runner: Runner, rows: int) -> list[Call]:
        """The calls that make about so many rows; there are never so few that they would not meet in a step."""
        size = SIZES[runner]
        wanted = rows / self.rows_per_token / (3 if self.calls is traffic.sampled else 1)
        tokens = min(size.tokens, max(_FEWEST_TOKENS, round(wanted / size.requests)))
        return self.calls(max(size.requests, round(wanted / tokens)), tokens)


def _outlined(name: Outline) -> Callable[[], Path]:
    return lambda: outline(name)


def _architecture(name: Outline, about: str, *, rows_per_token: float = 1, **more: Any) -> Feature:
    settings = {"load_format": RANDOM_WEIGHTS} | more.pop("settings", {})
    evidence = ("prompt_dependent", *more.pop("evidence", ()))
    return Feature(
        name=name,
        about=about,
        model=_outlined(name),
        settings=settings,
        rows_per_token=rows_per_token,
        evidence=evidence,
        **more,
    )


def _drafting(name: str, about: str, target: Outline, method: str, head: Callable[[], Path] | None) -> Feature:
    draft: dict[str, Any] = {"method": method, "num_speculative_tokens": 1 if head is None else 3}
    if head is not None:
        draft["model"] = str(head())
    return Feature(
        name=name,
        about=about,
        model=_outlined(target),
        settings={"load_format": RANDOM_WEIGHTS, "speculative_config": draft},
        v1_share=0.5,
        evidence=("drafted", "prompt_dependent"),
    )


def features() -> dict[str, Feature]:
    """All features by name. Small models are written if they are not there yet."""
    qwen3 = str(models.build("qwen3"))
    table = [
        Feature(name="prefix-caching", about="two in three prompts share a prefix", evidence=("cached_tokens",)),
        Feature(
            name="chunked-prefill",
            about="64 tokens a step, prompts of up to 264",
            settings={"max_num_batched_tokens": 64},
            calls=lambda count, tokens: traffic.plain(count, tokens, longest=200),
            evidence=("chunked_prompts",),
        ),
        Feature(
            name="preemption",
            about="a pool in which the running requests do not fit",
            of_runner={"v1": {"num_blocks": 96}, "v2": {"num_blocks": 26}},
            evidence=("preemptions", "cached_tokens"),
        ),
        Feature(
            name="async-scheduling",
            about="forced on, with chunks and preemptions",
            settings={"async_scheduling": True, "max_num_batched_tokens": 64},
            of_runner={"v1": {"num_blocks": 96}, "v2": {"num_blocks": 26}},
            forced_async=True,
            evidence=("asynchronous", "preemptions", "chunked_prompts"),
        ),
        Feature(
            name="tensor-parallel",
            about="two ranks",
            settings={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
            rows_per_token=2,
            ranks=2,
        ),
        Feature(
            name="pipeline-parallel",
            about="two stages of one layer each",
            settings={"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
            # V1 eager has no `intermediate_tensors` on a CPU.
            of_runner={"v1": {"enforce_eager": False}},
            rows_per_token=2,
            ranks=2,
        ),
        Feature(name="data-parallel", about="a server with two engines", way="server", engines=2),
        Feature(
            name="draft-model",
            about="the model drafts for itself, so that drafts are accepted",
            settings={
                "speculative_config": {"method": "draft_model", "model": qwen3, "num_speculative_tokens": 3},
            },
            rows_per_token=0.3,
            evidence=("drafted", "accepted"),
        ),
        _drafting(
            "eagle", "a head with random weights, so that drafts are rejected", "llama", "eagle", _outlined("eagle")
        ),
        _drafting("eagle3", "as EAGLE, from three layers of the target", "llama-8", "eagle3", _outlined("eagle3")),
        _drafting("mtp", "the model's own prediction layer (MiMo)", "mimo", "mtp", None),
        Feature(
            name="ngram",
            about="drafts from what stands in the prompt",
            settings={
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 3,
                    "prompt_lookup_min": 2,
                    "prompt_lookup_max": 4,
                },
            },
            calls=traffic.repetitive,
            evidence=("drafted",),
            # It imports numba, after which vLLM cannot register its CPU kernels once more.
            one_engine=True,
            obstacles={
                "v2": Obstacle(
                    error="mask has unsupported dtype",
                    reason="Triton's interpreter, in which V2 runs here, refuses the kernel",
                )
            },
        ),
        Feature(
            name="gemma3",
            about="five groups with a sliding window, one without",
            model=lambda: models.build("gemma3"),
            rows_per_token=6,
            v1_share=8,
            evidence=("prompt_dependent",),
        ),
        _architecture("gpt-oss", "a group with a sliding window, one without", rows_per_token=2, v1_share=3),
        _architecture("llama4", "three groups of chunked-local attention, one full", rows_per_token=4, v1_share=6),
        Feature(
            name="deepseek-v2",
            about="latent attention",
            model=lambda: models.build("deepseek-v2"),
            v1_share=0.5,
            evidence=("prompt_dependent",),
        ),
        _architecture("deepseek-v3", "latent attention with a query rank", v1_share=0.5),
        _architecture(
            "qwen3-next", "three groups of linear attention, one full", settings={"dtype": "bfloat16"}, v1_share=0.5
        ),
        _architecture("mamba2", "states only, which no rule judges", judged=False),
        _architecture(
            "falcon-h1",
            "a state and attention in every layer",
            settings={"enable_prefix_caching": False, "num_blocks": None},
        ),
        _architecture(
            "whisper",
            "an encoder and a decoder",
            v1_share=0.2,
            calls=traffic.spoken,
            settings={"max_model_len": 448, "max_num_batched_tokens": 2048},
        ),
        Feature(
            name="torch-compile",
            about="not eager: compiled for the CPU",
            settings={"enforce_eager": False},
            evidence=("compiled",),
        ),
        Feature(name="abort", about="every third stream is given up", calls=traffic.aborting, evidence=("aborted",)),
        Feature(
            name="streaming-abort",
            about="AsyncLLM, scheduler and worker in one other process, every third stream is given up",
            settings={"distributed_executor_backend": "uni"},
            calls=traffic.aborting,
            way="streams",
            evidence=("aborted",),
        ),
        Feature(name="samples", about="n = 3", calls=traffic.sampled, evidence=("cached_tokens",)),
        Feature(
            name="lora",
            about="each prompt with and without an adapter",
            # In vLLM's LoRA for the CPU a request without an adapter gets that of the last slot
            # (`lora/ops/torch_ops/lora_ops.py` indexes with -1): the second slot stays empty.
            settings={"enable_lora": True, "max_lora_rank": 8, "max_loras": 2},
            calls=traffic.adapted,
            evidence=("adapted",),
        ),
    ]
    return {feature.name: feature for feature in table}


def adapters() -> dict[str, Any]:
    """vLLM's requests for the LoRA adapters that calls name."""
    from vllm.lora.request import LoRARequest

    return {"adapter": LoRARequest("adapter", 1, str(lora_adapter()))}
