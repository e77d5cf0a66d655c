"""The table of every point of vLLM that is touched. ``kvscope doctor`` prints it; install and uninstall walk it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import frontend, graphs, isolation, results, runner_v1, runner_v2, scheduler, worker
from .block_work import block_work_seams
from .connector import connector_seams
from .drafts import draft_seams
from .ledger import Role, Seam
from .metering import metering_seams
from .pool_seams import pool_seams
from .wrapping import After, Before, around, creation

if TYPE_CHECKING:
    from .host import Hub

HOSTS = ("0.32",)
"""vLLM versions whose seams were read and run."""


def seam_table(hub: Hub) -> tuple[Seam, ...]:
    """All seams, in the order in which a request meets them. ``hub`` makes the observers."""
    engine = (*_engine(hub), *pool_seams(), *connector_seams(), *metering_seams())
    runners = (*_runners(), *_outputs(), *draft_seams(), *_graph_seams())
    return (*_bootstrap(hub), *_frontend(hub), *engine, *_worker(hub), *block_work_seams(hub), *runners)


def _bootstrap(hub: Hub) -> tuple[Seam, ...]:
    """What is wrapped before any configuration exists, and removed when the first one asks for nothing."""
    return (
        Seam(
            "config.create",
            "vllm.engine.arg_utils:EngineArgs.create_engine_config",
            "bootstrap",
            creation(after=lambda arguments, args, kwargs, config: hub.configure_frontend(config)),
            fact="the VllmConfig, as soon as it exists",
            lost="configuration errors are found only when the engine starts",
            when_loaded=True,
        ),
        Seam(
            "config.executor",
            "vllm.v1.executor.abstract:Executor.__init__",
            "bootstrap",
            creation(before=lambda executor, args, kwargs: hub.configure_engine(_config(args, kwargs))),
            fact="the VllmConfig in EngineCore, before the model loads",
            lost="the scheduler is not observed",
            needs=("vllm_config",),
            when_loaded=True,
        ),
        Seam(
            "config.worker",
            "vllm.v1.worker.worker_base:WorkerBase.__init__",
            "bootstrap",
            creation(
                before=lambda base, args, kwargs: hub.configure_worker(_config(args, kwargs)),
                after=lambda base, args, kwargs, result: hub.attach_worker(base),
            ),
            fact="the VllmConfig and the rank in a worker",
            lost="the worker is not observed",
            needs=("vllm_config",),
            when_loaded=True,
        ),
    )


def _config(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    return kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]


def _frontend(hub: Hub) -> tuple[Seam, ...]:
    return (
        Seam(
            "frontend.create",
            "vllm.v1.engine.output_processor:OutputProcessor.__init__",
            "frontend",
            creation(after=lambda processor, args, kwargs, result: hub.attach_frontend(processor)),
            fact="the front end's book of requests",
            lost="client ids cannot be joined with engine request ids",
        ),
        Seam(
            "frontend.admit",
            "vllm.v1.engine.output_processor:OutputProcessor.add_request",
            "frontend",
            around(after=frontend.after_add_request),
            fact="client id -> engine request ids",
            lost="client ids cannot be joined with engine request ids",
            needs=("request", "request_index"),
        ),
    )


def _engine(hub: Hub) -> tuple[Seam, ...]:
    return (
        Seam(
            "scheduler.create",
            "vllm.v1.core.sched.scheduler:Scheduler.__init__",
            "engine",
            creation(after=lambda host, args, kwargs, result: hub.attach_scheduler(host)),
            fact="the pool and its groups",
            lost="the scheduler is not observed",
            needs=("kv_cache_config",),
        ),
        Seam(
            "scheduler.schedule",
            "vllm.v1.core.sched.scheduler:Scheduler.schedule",
            "engine",
            around(before=scheduler.before_schedule, after=scheduler.after_schedule, settle=scheduler.mark_unobserved),
            fact="the declaration of each step",
            lost="nothing can be judged: every rule has the declaration on one side",
        ),
        Seam(
            "scheduler.update",
            "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
            "engine",
            around(before=results.before_update, after=results.after_update, settle=results.settle_update),
            fact="the result of each step, before it takes effect and after",
            lost="actions raise and isolate cannot withhold a result",
            needs=("scheduler_output", "model_runner_output"),
        ),
        Seam(
            "scheduler.reset",
            "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache",
            "engine",
            around(before=isolation.before_reset),
            fact="the prefix cache is about to be reset",
            lost="after action isolate has held blocks back the prefix cache cannot be reset",
        ),
        Seam(
            "engine.shutdown",
            "vllm.v1.engine.core:EngineCore.shutdown",
            "engine",
            # Ahead of everything else: stopping the workers alone may outlast what EngineCore is given to end.
            creation(before=lambda core, args, kwargs: hub.close_engine(core)),
            fact="the end of the run",
            lost="the last kv.coverage of EngineCore",
        ),
    )


def _worker(hub: Hub) -> tuple[Seam, ...]:
    return (
        Seam(
            "worker.cache",
            "vllm.v1.worker.gpu_worker:Worker.initialize_from_config",
            "worker",
            creation(after=lambda host, args, kwargs, result: hub.attach_runner(host, _cache_config(args, kwargs))),
            fact="the pool and its groups, in the worker",
            lost="the worker is not observed",
        ),
        Seam(
            "worker.execute",
            "vllm.v1.worker.worker_base:WorkerWrapperBase.execute_model",
            "worker",
            around(before=worker.before_execute, after=worker.after_execute),
            fact="the SchedulerOutput as the worker received it",
            lost="the plan has nothing to be compared with",
            needs=("scheduler_output",),
        ),
        Seam(
            "worker.sample",
            "vllm.v1.worker.gpu_worker:Worker.sample_tokens",
            "worker",
            around(after=worker.after_sample),
            fact="the result as the worker gives it back",
            lost="kv.boundary worker_result",
        ),
        Seam(
            "worker.shutdown",
            "vllm.v1.worker.gpu_worker:Worker.shutdown",
            "worker",
            around(before=worker.before_shutdown),
            fact="the end of the worker",
            lost="the last kv.coverage of the worker",
        ),
    )


def _cache_config(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    return kwargs["kv_cache_config"] if "kv_cache_config" in kwargs else args[0]


def _runners() -> tuple[Seam, ...]:
    v1, v2 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
    return (
        _runner_seam("runner_v1.slots", f"{v1}._get_slot_mappings", "worker_v1", runner_v1.after_slot_mappings),
        _dummy_seam(
            "runner_v1.dummy", f"{v1}._dummy_run", "worker_v1", runner_v1.after_dummy_run, runner_v1.before_dummy_run
        ),
        Seam(
            "runner_v1.forward",
            f"{v1}._model_forward",
            "worker_v1",
            around(before=runner_v1.before_forward),
            fact=_OPERATORS,
            lost=_WITHOUT_OPERATORS,
        ),
        _runner_seam("runner_v2.attn", f"{v2}.prepare_attn", "worker_v2", runner_v2.after_prepare_attn),
        _dummy_seam("runner_v2.dummy", f"{v2}.prepare_dummy_attn", "worker_v2", runner_v2.after_prepare_dummy_attn),
        _dummy_seam("runner_v2.capture", f"{v2}.capture_model", "worker_v2", runner_v2.after_capture),
        *_metadata_v2(),
        Seam(
            "runner_v2.forward",
            f"{v2}.execute_model",
            "worker_v2",
            around(after=runner_v2.after_forward),
            fact="the slots of each layer, after the forward",
            lost="a layer that writes by other slots than its metadata has is not seen",
        ),
    )


_OPERATORS = "what the attention operators are called with"
_WITHOUT_OPERATORS = "nothing is known of what builders of metadata make of the plan"


def _metadata_v2() -> tuple[Seam, ...]:
    """One for each class that makes metadata of its own, and one for batches that are cut in two."""
    states = "vllm.v1.worker.gpu.model_states"
    classes = (
        ("", f"{states}.default:DefaultModelState"),
        ("_hybrid", f"{states}.mamba_hybrid:MambaHybridModelState"),
        ("_encoder_decoder", f"{states}.encoder_decoder:EncoderDecoderModelState"),
    )
    micro_batches = Seam(
        "runner_v2.micro_batches",
        "vllm.v1.worker.gpu.ubatch_utils:UBatchRunner.prepare",
        "worker_v2",
        around(after=runner_v2.after_micro_batches),
        fact=_OPERATORS,
        lost=_WITHOUT_OPERATORS,
        needs=("input_batch",),
    )
    return (
        *(
            Seam(
                f"runner_v2.metadata{name}",
                f"{owner}.prepare_attn",
                "worker_v2",
                around(after=runner_v2.after_metadata),
                fact=_OPERATORS,
                lost=_WITHOUT_OPERATORS,
                needs=("input_batch", "ubatch_idx"),
            )
            for name, owner in classes
        ),
        micro_batches,
    )


def _outputs() -> tuple[Seam, ...]:
    """Where somebody takes a result that the device has yet to finish; wrapped only if plans are on a device."""
    v1, v2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.async_utils"
    return (
        _output_seam("runner_v1.output", f"{v1}:AsyncGPUModelRunnerOutput", "deferred_v1"),
        _output_seam("runner_v1.pooled", f"{v1}:AsyncGPUPoolingModelRunnerOutput", "deferred_v1"),
        _output_seam("runner_v2.output", f"{v2}:AsyncOutput", "deferred_v2"),
        _output_seam("runner_v2.pooled", f"{v2}:AsyncPoolingOutput", "deferred_v2"),
    )


def _output_seam(name: str, owner: str, role: Role) -> Seam:
    return Seam(
        name,
        f"{owner}.get_output",
        role,
        around(after=results.after_output, carrier=results.DUE),
        fact="that the result of a step is taken, which is when its plan on the device is judged",
        lost="plans on a device are judged late, when their step's result has taken effect",
    )


_NEEDS = {
    "_determine_batch_execution_and_padding": ("num_tokens",),
    "prepare_inputs": ("batch_desc",),
    "_get_slot_mappings": ("num_tokens_unpadded",),
    "_dummy_run": ("num_tokens",),
    "prepare_attn": ("input_batch",),
    "prepare_dummy_attn": ("input_batch",),
    "capture_model": (),
}


def _graph_seams() -> tuple[Seam, ...]:
    """Wrapped only where an engine may run steps as graphs."""
    v1, v2 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
    targets: tuple[tuple[str, str, Role, After], ...] = (
        ("runner_v1.graph", f"{v1}._determine_batch_execution_and_padding", "graphs_v1", graphs.after_dispatch_v1),
        ("runner_v2.graph", f"{v2}.prepare_inputs", "graphs_v2", graphs.after_inputs_v2),
    )
    return tuple(
        Seam(
            name,
            target,
            role,
            around(after=after),
            fact="how the step is run: eagerly, in pieces or as one graph",
            lost="kv.write says NONE for every step's graph_mode",
            needs=_NEEDS[target.rpartition(".")[2]],
        )
        for name, target, role, after in targets
    )


def _runner_seam(name: str, target: str, role: Role, after: After) -> Seam:
    return Seam(
        name,
        target,
        role,
        around(after=after),
        fact="final block tables and slots: the plan",
        lost="reads and writes are not judged",
        needs=_NEEDS[target.rpartition(".")[2]],
    )


def _dummy_seam(name: str, target: str, role: Role, after: After, before: Before | None = None) -> Seam:
    return Seam(
        name,
        target,
        role,
        around(before=before, after=after),
        fact="the slots of runs that serve no request, or that there were some in a capture",
        lost="dummy runs are not judged, or those of a capture not counted",
        needs=_NEEDS[target.rpartition(".")[2]],
    )
