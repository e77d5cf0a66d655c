"""Real schedulers of vLLM without a model, whose block pool is read as in a live engine, and a ledger that follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
import torch
from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from kvscope.boundary.allocator import PoolReader
from kvscope.boundary.ledger import Ledger
from kvscope.boundary.pool_seams import pool_seams
from kvscope.boundary.results import read_result
from kvscope.boundary.scheduler import declare
from kvscope.boundary.topology import read_topology
from kvscope.facts.allocator import ALLOC, PoolOperation
from kvscope.facts.requests import Declaration
from kvscope.state.bindings import Bindings
from kvscope.state.blocks import BlockLedger
from kvscope.state.fences import Fences
from kvscope.state.legality import Legality

BLOCK_SIZE = 16
MAX_MODEL_LEN = 256
init_none_hash(sha256)


def full(block_size: int = BLOCK_SIZE) -> Any:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)


def sliding(window: int, block_size: int = BLOCK_SIZE) -> Any:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=window
    )


def state(block_size: int = BLOCK_SIZE) -> Any:
    """A group of Mamba states that are saved at the ends of blocks."""
    return MambaSpec(block_size=block_size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def make_scheduler(
    *specs: Any,
    num_blocks: int = 20,
    budget: int = 64,
    max_seqs: int = 8,
    hash_block_size: int | None = None,
    asynchronous: bool = False,
    caching: bool = True,
) -> Any:
    """A scheduler with one group for each spec, by default one of full attention."""
    specs = specs or (full(),)
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=caching),
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.async_scheduling = asynchronous  # the CPU platform switches it off
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.mamba_cache_mode = "align" if any(isinstance(s, MambaSpec) for s in specs) else "none"
    config.model_config = SimpleNamespace(
        uses_mrope=False,
        max_model_len=MAX_MODEL_LEN,
        runner_type="generate",
        is_diffusion=False,
        supports_multimodal_inputs=False,
        is_encoder_decoder=False,
        return_sampling_mask=False,
        multimodal_config=None,
        is_hybrid=False,
    )
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    output = SimpleNamespace(accept_tokens=lambda *_: True, should_advance=lambda *_: False)
    return (AsyncScheduler if asynchronous else Scheduler)(
        config,
        KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        output,
        block_size=max(spec.block_size for spec in specs),
        hash_block_size=hash_block_size,
    )


def request(
    name: str, tokens: Sequence[int], *, max_tokens: int = 64, hash_block_size: int = BLOCK_SIZE, **more: Any
) -> Any:
    return Request(
        name,
        list(tokens),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        None,
        block_hasher=get_request_block_hasher(hash_block_size, sha256),
        **more,
    )


class Follower:
    """Hears what the pool does and what is declared, as EngineCore and a worker do, and finds nothing wrong with it.

    Each operation's own numbers are held against the ledger at once.
    """

    def __init__(self, scheduler: Any) -> None:
        topology = read_topology(scheduler.kv_cache_config)
        self.bindings, self.worker_bindings = Bindings(topology, doubts=True), Bindings(topology)
        self.legality, self.worker = (
            Legality(topology, BlockLedger(topology.num_blocks, 0), side)
            for side in (self.bindings, self.worker_bindings)
        )
        self.fences = Fences()
        self.ledger = self.legality.ledger
        self.heard: list[PoolOperation] = []
        self.seams: list[str] = []
        self.handed_out: list[PoolOperation] = []
        self.errors: list[tuple[str, str]] = []
        self.step = 0
        self._interval: list[PoolOperation] = []
        self._scheduling = False

    def begin(self) -> None:
        self._scheduling = True

    def declare(self, scheduler: Any, output: Any) -> Declaration:
        self._scheduling = False
        self.step += 1
        declaration = declare(scheduler, output, self.step, str(self.step))
        declaration.operations, self._interval = self._interval, []
        for operation in declaration.operations:
            self.worker.take(operation)
        for bindings, side in ((self.bindings, self.legality), (self.worker_bindings, self.worker)):
            bindings.apply(declaration.requests)
            side.advance(declaration)
            assert (side.stale, side.unwritten, side.gaps, side.shared, side.exceeded) == ({}, [], [], [], [])
            assert side.aborted == {}
            assert side.unreleased() == []
            side.end_finished()
        self.fences.declare(declaration)
        return declaration

    def confirm(self, declaration: Declaration, output: Any) -> None:
        if not declaration.is_empty:
            self.legality.confirm(declaration, read_result(output))
            self.fences.returned(declaration.step)

    def on_pool(self, operation: PoolOperation, boundary: str) -> None:
        operation.step = self.step + self._scheduling
        operation.scheduling = self._scheduling
        self.heard.append(operation)
        self.seams.append(boundary)
        assert (
            operation.kind != ALLOC
            or not operation.reserved
            or self.fences.blocks.keys().isdisjoint(operation.block_ids)
        )
        self.legality.take(operation)
        self.fences.take(operation)
        self._interval.append(operation)
        if operation.ref_counts is not None:
            assert self.ledger.references_of(operation.block_ids).tolist() == operation.ref_counts, operation
        if operation.hash_counts is not None:
            assert self.ledger.hashes_of(operation.block_ids).tolist() == operation.hash_counts, operation

    def on_handing_out(self, operation: PoolOperation, boundary: str) -> None:
        assert boundary == "get_new_blocks"
        self.handed_out.append(operation)

    def on_native_error(self, boundary: str, error_type: str) -> None:
        self.errors.append((boundary, error_type))


class Connector(SupportsHMA):
    """Says that prompts are elsewhere, and takes its time with them: what a test sets in ``elsewhere`` and ``keeps``.

    ``elsewhere``: request -> (tokens of its prompt that can be loaded, whether that happens outside of the steps).
    ``keeps``: requests whose blocks it holds on to when they have finished.
    """

    requires_kv_delivery = False

    def __init__(self) -> None:
        self.elsewhere: dict[str, tuple[int, bool]] = {}
        self.keeps: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens, asynchronous = self.elsewhere.get(request.request_id, (0, False))
        more = max(tokens - num_computed_tokens, 0)
        return more, asynchronous and more > 0

    def request_finished_all_groups(self, request: Any, _: Any) -> tuple[bool, None]:
        return request.request_id in self.keeps, None

    def get_loaded_kv_cache_group_ids(self, _: Any) -> tuple[int, ...]:
        return ()

    def has_pending_block_frees(self) -> bool:
        return False

    def take_events(self) -> tuple[()]:
        return ()

    def __getattr__(self, name: str) -> Any:
        """Whatever else the scheduler tells it is of no interest."""
        return lambda *_, **__: None


class Host:
    """A scheduler whose pool is read, driven step by step as EngineCore does. ``waiting`` are steps on their way."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.manager = scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.follower = Follower(scheduler)
        self.reader = PoolReader(self.follower, scheduler)
        self.outputs: list[tuple[Any, set[str], Declaration]] = []

    @property
    def heard(self) -> list[PoolOperation]:
        return self.follower.heard

    def connect(self) -> Connector:
        connector = Connector()
        self.scheduler.connector = connector
        return connector

    def add(self, name: str, tokens: Sequence[int], **more: Any) -> None:
        self.scheduler.add_request(request(name, tokens, **more))

    def schedule(self) -> Any:
        """The next step is on its way."""
        self.follower.begin()
        output = self.scheduler.schedule()
        declaration = self.follower.declare(self.scheduler, output)
        ready = {name for name in output.num_scheduled_tokens if not self.scheduler.requests[name].is_prefill_chunk}
        self.outputs.append((output, ready, declaration))
        self.agrees()
        return output

    def finish_step(self, sampled: dict[str, list[int]] | None = None, **transfers: Any) -> None:
        """The oldest step on its way is back. ``sampled`` where it is not one token for whoever's prompt is done."""
        output, ready, declaration = self.outputs.pop(0)
        names = list(output.num_scheduled_tokens)
        tokens = [(sampled or {}).get(name, [7] if name in ready else []) for name in names]
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens,
            kv_connector_output=KVConnectorOutput(**transfers) if transfers else None,
        )
        self.follower.confirm(declaration, result)
        self.scheduler.update_from_output(output, result)
        self.agrees()

    def step(self, **transfers: Any) -> Any:
        output = self.schedule()
        while self.outputs:
            self.finish_step(**transfers)
        return output

    def of(self, kind: str, request_id: str | None = None) -> list[PoolOperation]:
        return [o for o in self.heard if o.kind == kind and (request_id is None or o.request_id == request_id)]

    def blocks_of(self, name: str, group: int = 0) -> list[int]:
        tables = self.reader.tables().get(name)
        return tables[group] if tables else []

    def agrees(self, *, tables: bool = True) -> None:
        """The ledger and the host's own books say the same, whatever has happened."""
        count = len(self.pool.blocks)
        found = self.follower.ledger.differences(
            self.reader.counts(0, count),
            self.reader.free_ids(count),
            self.reader.tables() if tables else None,
            [self.reader.hashes_of(block) for block in self.pool.blocks],
        )
        assert found == [], found
        assert self.reader.num_free == len(self.reader.free_ids(count))
        assert self.reader.scope == ("unknown", None)
        assert self.reader.allocating is None
        assert not self.reader.waiting


@contextmanager
def seams() -> Iterator[Ledger]:
    """All seams of the pool are wrapped."""
    ledger = Ledger()
    for seam in pool_seams():
        assert ledger.install(seam), ledger.absent
    try:
        yield ledger
        assert {name: hook.faults for name, hook in ledger.hooks.items() if hook.faults} == {}
    finally:
        ledger.uninstall_all()


def causes(operations: Iterable[PoolOperation]) -> list[tuple[str, str, str | None]]:
    return [(operation.kind, operation.cause, operation.request_id) for operation in operations]
