"""The fault injector without kvscope: each fault happens once, reaches what attention gets, and leaves no trace."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvscope.testing.engine import Runner, environment, model_runner, running
from kvscope.testing.faults import FAULTS, PREEMPTING, SETTINGS, arm, occasion, workload
from kvscope.testing.faults.hooks import Hook

# The kit by itself; with kvscope beside it every fault is injected again in test_faults.py.
pytestmark = pytest.mark.long

STALE = "stale_row_after_preemption"
DECLARATION = "_scratch_declaration"
# Those of the allocator are looked at in test_allocator_faults_alone.py.
QUIET = [
    name
    for name, fault in FAULTS.items()
    if not fault.crashes and name != STALE and fault.point not in {"allocator", "connector"}
]
CRASHING = [name for name, fault in FAULTS.items() if fault.crashes]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "quiet" in metafunc.fixturenames:
        runner = metafunc.config.getoption("--runner")
        metafunc.parametrize("quiet", [name for name in QUIET if runner in FAULTS[name].runners])


@pytest.fixture(scope="module")
def llm(runner: Runner) -> Iterator[Any]:
    with running(**SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def clean_tokens(llm: Any) -> list[list[int]]:
    return workload(llm)


class Observer:
    """What reaches the forward pass: looked at where the runner opens the forward context, behind every fault."""

    def __init__(self, llm: Any, injection: Any) -> None:
        self.runner, self.injection = model_runner(llm), injection
        self.rows: list[str] = []
        self.seen: dict[str, Any] | None = None
        self.received: list[Any] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator["Observer"]:
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        module = sys.modules[next(c for c in type(self.runner).__mro__ if c.__name__ == "GPUModelRunner").__module__]
        opened = module.set_forward_context

        def opening(attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            if self.injection.fired and self.seen is None:
                self._look(attn_metadata, kwargs["slot_mapping"])
            return opened(attn_metadata, *args, **kwargs)

        def receive(original: Any, wrapper: Any, output: Any) -> Any:
            self.received.append((self.injection.times, output))
            return original(wrapper, output)

        def remember(original: Any, *args: Any) -> Any:
            batch = original(*args)
            self.rows = list(batch.req_ids)
            return batch

        hooks = [Hook(WorkerWrapperBase, "execute_model", receive)]
        if module.__name__.endswith(".gpu.model_runner"):
            hooks.append(Hook(module.GPUModelRunner, "prepare_inputs", remember))
        module.set_forward_context = opening
        try:
            yield self
        finally:
            module.set_forward_context = opened
            for hook in reversed(hooks):
                hook.remove()

    def _look(self, attn_metadata: Any, slots: Any) -> None:
        runner = self.runner
        is_v2 = hasattr(runner, "block_tables")
        rows = self.rows if is_v2 else list(runner.input_batch.req_ids)
        layer = next(iter(slots))
        self.seen = {"rows": rows, "slots": slots[layer].tolist()}
        self.seen["positions"] = (runner.input_buffers.positions if is_v2 else runner.positions).tolist()
        if attn_metadata is not None:
            self.seen["tables"] = attn_metadata[layer].block_table.tolist()
            self.seen["seq_lens"] = attn_metadata[layer].seq_lens.tolist()
        if is_v2:
            counts = runner.block_tables.num_blocks.np[0]
            self.seen["counts"] = {
                name: int(counts[index]) for name, index in runner.req_states.req_id_to_index.items()
            }
        else:
            counts = runner.input_batch.block_table[0].num_blocks_per_row
            self.seen["counts"] = {name: int(counts[index]) for index, name in enumerate(rows)}


def touched() -> dict[str, Any]:
    """Every host attribute that some fault wraps."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
    from vllm.v1.worker.gpu_worker import Worker

    owners = (Scheduler, Executor, UniProcExecutor, MultiprocExecutor, WorkerProc, Worker)
    allocator = (EngineCore, KVCacheManager, SingleTypeKVCacheManager, BlockPool)
    found = {
        f"{owner.__module__}.{owner.__qualname__}.{name}": value
        for owner in (*owners, *allocator, RunnerV1, RunnerV2, BlockTables)
        for name, value in vars(owner).items()
    }
    modules = [sys.modules[runner.__module__] for runner in (RunnerV1, RunnerV2)]
    return found | {module.__name__: module.set_forward_context for module in modules}


def assert_reached(what: dict[str, Any], seen: dict[str, Any]) -> None:
    """The noted values stand in the memory that the forward pass gets, and the right ones do not."""
    point = FAULTS[what["fault"]].point
    if "slot" in what:
        assert seen["slots"][what["token_index"]] == what["slot"] != what["expected_slot"]
    if "expected_position" in what:
        assert seen["positions"][what["token_index"]] == what["position"] != what["expected_position"]
    if "seq_len" in what:
        assert seen["seq_lens"][what["row"]] == what["seq_len"] != what["expected_seq_len"]
    if "counted" in what and point == "plan":
        assert seen["counts"][what["request_id"]] == what["counted"]
    if point == "plan":
        assert seen["rows"][what["row"]] == what["request_id"]
    if "logical_index" in what and "block_id" in what and "counted" not in what:
        row = seen["rows"].index(what["request_id"])
        assert seen["tables"][row][what["logical_index"]] == what["block_id"] != what["expected_block_id"]
    if "stale_indices" in what:
        assert what["logical_index"] in what["stale_indices"]


def run(llm: Any, name: str, **settings: Any) -> tuple[Any, Observer]:
    before = touched()
    with arm(name, **settings) as injection:
        observer = Observer(llm, injection)
        with observer.watching():
            workload(llm, until=lambda: injection.fired, **occasion(FAULTS[name])[1])
        during = touched()
    after = touched()
    assert any(during[key] is not before[key] for key in before)
    assert all(after[key] is before[key] for key in before)
    return injection, observer


@contextlib.contextmanager
def declaring() -> Iterator[None]:
    """Attach something to each output, as kvscope does, for the fault that takes it away."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def declare(original: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        setattr(output, DECLARATION, {"step": 1})
        return output

    hook = Hook(Scheduler, "schedule", declare)
    try:
        yield
    finally:
        hook.remove()


def test_a_fault_happens_once_and_reaches_attention(llm: Any, runner: Runner, quiet: str) -> None:
    name, fault = quiet, FAULTS[quiet]
    with declaring():
        injection, observer = run(llm, name, after_steps=3, attribute=DECLARATION)
    what = injection.what
    assert what is not None, "the workload gave no occasion"
    assert injection.times == 1
    assert what["step"] > 3
    assert what["expected"] in {fault.expected, *fault.alternatives}
    if fault.point in {"plan", "dummy"}:
        assert what["runner"] == runner
    assert json.loads(json.dumps(what)) == what
    assert observer.seen is not None
    assert_reached(what, observer.seen)
    # The first output that a worker received after the fault (at a plan's fault: received just before it).
    received = next(output for times, output in observer.received if times == 1)
    if name == "delta_dropped":
        cached = received.scheduled_cached_reqs
        assert cached.new_block_ids[cached.req_ids.index(what["request_id"])] is None
        assert what["expected_block_id"] not in observer.seen["tables"][observer.seen["rows"].index(what["request_id"])]
    if name == "request_dropped_in_handover":
        later = [output.finished_req_ids for times, output in observer.received if times == 1]
        assert what["request_id"] not in later[0]
        assert what["request_id"] in later[1]
    if name == "tokens_cut_in_handover":
        assert received.num_scheduled_tokens[what["request_id"]] == what["num_tokens"]
        assert received.total_num_scheduled_tokens == sum(received.num_scheduled_tokens.values())
    if name == "computed_shifted_in_handover":
        cached = received.scheduled_cached_reqs
        assert cached.num_computed_tokens[cached.req_ids.index(what["request_id"])] == what["num_computed"]
    if name == "bind_shortfall":
        assert observer.seen["counts"][what["request_id"]] == what["counted"]
    if name == "padding_slot_enabled":
        assert len(observer.seen["slots"]) == what["token_index"] + 8
        assert observer.seen["slots"][what["token_index"] + 1 :] == [-1] * 7
    lost = [not hasattr(output, DECLARATION) for times, output in observer.received if times == 1]
    assert lost[:2] == [name == "declaration_lost", False]


def test_the_engine_is_sound_afterwards(llm: Any, clean_tokens: list[list[int]]) -> None:
    with arm("slot_foreign_block", after_steps=6) as injection:
        workload(llm)
    assert injection.times == 1
    assert workload(llm) == clean_tokens


def test_a_fault_of_another_rank_does_not_happen(llm: Any) -> None:
    with arm("table_null_in_tail", rank=1) as injection:
        workload(llm, max_tokens=4)
    assert not injection.fired


def test_without_once_a_fault_happens_in_every_step(llm: Any) -> None:
    with arm("seq_len_minus", once=False) as injection:
        workload(llm, max_tokens=8)
    assert injection.times > 3


def test_a_resumed_request_reads_through_its_old_blocks(llm: Any, runner: Runner) -> None:
    with running(**PREEMPTING) as small:
        injection, observer = run(small, STALE)
        what = injection.what
        assert what is not None, "nothing was preempted and resumed in other blocks"
        assert what["expected"] in {"read_target_mismatch", "read_foreign_block"}
        assert injection.times == 1
        assert observer.seen is not None
        assert_reached(what, observer.seen)
        assert workload(small)


CRASH = """
import sys
from kvscope.testing.engine import apply_environment, running
from kvscope.testing.faults import SETTINGS, arm, workload
name, runner = sys.argv[1:]
apply_environment(runner)
with running(**SETTINGS) as llm, arm(name, on_fire=lambda what: print("FIRED", what, flush=True)):
    workload(llm)
print("SURVIVED")
"""


@pytest.mark.parametrize("name", CRASHING)
def test_an_access_outside_the_cache_ends_the_process(runner: Runner, name: str) -> None:
    result = subprocess.run([sys.executable, "-c", CRASH, name, runner], capture_output=True, text=True, check=False)
    assert "FIRED" in result.stdout
    assert "SURVIVED" not in result.stdout
    assert result.returncode == -signal.SIGSEGV


REMOTE = """
import sys
from kvscope.testing.engine import apply_environment, running
from kvscope.testing.faults import SETTINGS, workload
runner, report, name, rank, size = sys.argv[1:]
apply_environment(runner, in_process=False)
fault = {"name": name, "after_steps": 4, "report": report}
if rank != "-":
    fault["rank"] = int(rank)
if __name__ == "__main__":
    settings = SETTINGS | {"in_process": False, "tensor_parallel_size": int(size)}
    with running(additional_config={"kvscope_fault": fault}, **settings) as llm:
        workload(llm, max_tokens=8)
    print("SURVIVED")
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "rank", "size"),
    [
        ("slot_plus_one", "1", 2),
        ("delta_dropped", "1", 2),
        ("table_ids_swapped", "-", 1),
        ("bind_duplicate", "-", 1),
        ("delta_dropped", "-", 1),
    ],
)
def test_the_plugin_carries_a_fault_into_other_processes(
    runner: Runner, tmp_path: Path, name: str, rank: str, size: int
) -> None:
    script, report = tmp_path / "remote.py", tmp_path / "{rank}.json"
    script.write_text(REMOTE, encoding="utf-8")
    command = [sys.executable, str(script), runner, str(report), name, rank, str(size)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment(runner), timeout=280)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(tmp_path.glob("*.json"))]
    assert [what["fault"] for what in reports] == [name]
    if rank != "-":
        assert reports[0]["rank"] == int(rank)


def _environment(runner: Runner) -> dict[str, str]:
    return dict(os.environ) | environment(runner, in_process=False)
