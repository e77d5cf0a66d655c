"""KV Monitor on a real engine: after every step its numbers are those of the engine's own state."""

from __future__ import annotations

import random
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvscope.boundary.ledger import OBSERVER
from kvscope.boundary.metering import METER
from kvscope.metrics.families import Family, Sample, families, runs
from kvscope.metrics.place import places_in
from kvscope.metrics.reader import read_run
from kvscope.runtime.pool_meter import PoolMeter
from kvscope.testing import engine
from kvscope.testing.metering import blocks_by_state, referenced_blocks

SETTINGS: dict[str, Any] = {
    "num_blocks": 20,
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "disable_log_stats": False,
}
REQUESTS: dict[engine.Runner, int] = {"v1": 40, "v2": 8}
COUNTERS = (
    *("kv_block_alloc_total", "kv_block_free_total", "kv_block_evict_total", "kv_block_touch_total"),
    *("kv_refs_released_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
)
PARTS = {"alone": [], "with trace and guard": ["kv_trace", "kv_guard_config"]}


EXTENSION = """
from kvscope.monitor import register_collector

calls = [0]

@register_collector(name="p_of_exporter", metric_type="gauge")
def exporter(ctx):
    "Blocks that were allocated."
    return ctx.metrics.total("kv_block_alloc_total") or float("nan")

@register_collector(name="p_of_engine", metric_type="counter", process="engine")
def engine(ctx):
    calls[0] += 1
    return calls[0]

@register_collector(name="p_of_worker", metric_type="histogram", process="worker")
def worker(ctx):
    return 0.5

@register_collector(name="p_fails", metric_type="gauge", process="worker")
def fails(ctx):
    raise ValueError(ctx.engine_id)

registered = [exporter, engine, worker, fails]
"""


class Watched:
    """An engine in this process whose numbers are read as everybody reads them, after each of its steps."""

    def __init__(self, llm: Any, folder: Path) -> None:
        self.llm = llm
        self.scheduler = engine.scheduler(llm)
        self.run_folder = folder / str(llm.llm_engine.vllm_config.instance_id)
        self.meter: PoolMeter = getattr(self.scheduler, METER)
        self.last: dict[tuple[str, str], float] = {}
        self.steps = self.states_seen = 0

    def families(self) -> dict[str, Family]:
        (run,) = runs(read_run(self.run_folder).processes)
        return {family.name.removeprefix("p_"): family for family in families(run.processes, prefix="p_")}

    def value(self, name: str, **labels: str) -> float:
        (sample,) = self.samples(name, **labels)
        return sample.value

    def samples(self, name: str, **labels: str) -> list[Sample]:
        family = self.families().get(name)
        return [] if family is None else [s for s in family.samples if labels.items() <= dict(s.labels).items()]

    def states(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for sample in self.samples("kv_blocks"):
            state = sample.labels["state"]
            found[state] = found.get(state, 0) + sample.value
        return found

    def agrees(self) -> None:
        """What was published last is what the engine has."""
        scheduler = self.scheduler
        total = len(scheduler.kv_cache_manager.block_pool.blocks)
        assert self.states() == blocks_by_state(scheduler)
        assert sum(self.states().values()) == total
        assert self.value("kv_cache_usage_percent") == scheduler.get_kv_cache_usage() * 100
        assert self.value("kv_block_alloc_total") - self.value("kv_block_free_total") == referenced_blocks(scheduler)
        for fill in self.samples("kv_token_fill_ratio"):
            assert 0 <= fill.value <= 1
        for name in COUNTERS:
            for sample in self.samples(name):
                key = (name, sample.labels.get("unit", ""))
                assert sample.value >= self.last.get(key, 0)
                self.last[key] = sample.value

    def step(self) -> list[Any]:
        outputs: list[Any] = self.llm.llm_engine.step()
        self.meter.publish()  # else every 100 ms, and when nothing runs
        self.agrees()
        self.steps += 1
        return outputs


@pytest.fixture(params=["alone", pytest.param("with trace and guard", marks=pytest.mark.long_v2)])
def watched(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Watched]:
    parts = {part: {"enabled": True} for part in PARTS[request.param]}
    monitor = {"kv_monitor": {"enabled": True, "prefix": "p_"}, "kv_output": {"dir": str(tmp_path)}}
    with engine.running(additional_config=parts | monitor, **SETTINGS) as llm:
        yield Watched(llm, tmp_path)


def add(watched: Watched, count: int, dice: random.Random, answer: Callable[[], int]) -> list[str]:
    """The names of new requests, most of which begin like others."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    names = [f"{watched.steps}-{number}" for number in range(count)]
    prefixes = [[seed + token for token in range(4, 68)] for seed in range(3)]
    for number, name in enumerate(names):
        tail = [dice.randrange(4, 260) for _ in range(dice.randrange(1, 70))]
        prompt = (dice.choice(prefixes) if number % 4 else []) + tail
        parameters = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=answer())
        watched.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), parameters)
    return names


def finish(watched: Watched) -> list[Any]:
    """All outputs of the requests that end."""
    found = []
    while watched.llm.llm_engine.has_unfinished_requests():
        found += [output for output in watched.step() if output.finished]
    return found


def test_every_number_is_the_engines_own_after_every_step(
    watched: Watched, runner: engine.Runner, cell: Callable[[str], None]
) -> None:
    dice, llm = random.Random(5), watched.llm
    watched.agrees()
    add(watched, REQUESTS[runner], dice, lambda: dice.randrange(2, 60))
    outputs = finish(watched)
    preemptions = counter(llm, "vllm:num_preemptions")
    assert len(outputs) == REQUESTS[runner]
    assert runner == "v2" or preemptions

    hits = sum(output.num_cached_tokens for output in outputs)
    assert hits > 0
    assert watched.value("prefix_cache_hits_total", unit="token") == hits
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    assert watched.value("prefix_cache_queries_total", unit="token") == prompts
    assert watched.value("prefix_cache_hits_total", unit="block") == hits / 32

    names = add(watched, 4, dice, lambda: 100)
    for _ in range(6):
        watched.step()
    gauge = next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:kv_cache_usage_perc")
    assert watched.value("kv_cache_usage_percent") == pytest.approx(gauge * 100)
    assert gauge > 0

    steps = watched.steps
    llm.llm_engine.abort_request(names)
    assert watched.value("kv_cache_usage_percent") == 0  # nobody has made a step, or published
    watched.agrees()
    assert (watched.states()["used"], watched.steps) == (0, steps)

    before = dict(watched.last)
    assert llm.reset_prefix_cache()
    watched.agrees()
    assert watched.states()["cached"] == 0
    assert watched.last == before
    add(watched, 2, dice, lambda: 3)
    finish(watched)
    assert watched.last["kv_block_alloc_total", ""] > before["kv_block_alloc_total", ""]
    cell(f"{watched.steps} steps, {preemptions} preemptions, {hits} hit tokens: every number is the engine's own")


def counter(llm: Any, name: str) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == name)


def test_a_run_stays_readable_when_it_is_over_and_the_next_one_begins_at_zero(
    runner: engine.Runner, tmp_path: Path
) -> None:
    config = {"kv_monitor": {"enabled": True, "prefix": "p_"}, "kv_output": {"dir": str(tmp_path)}}
    ended = []
    for _ in range(2):
        with engine.running(additional_config=config, **SETTINGS) as llm:
            first = Watched(llm, tmp_path)
            engine.generate(llm, [list(range(4, 80))], max_tokens=3)
            assert getattr(first.scheduler, OBSERVER, None) is None  # nothing is recorded or judged
            assert not hasattr(engine.worker(llm), OBSERVER)
            assert not hasattr(engine.model_runner(llm), OBSERVER)
        ended.append(first)
    for watched in ended:
        (run,) = runs(read_run(watched.run_folder).processes)
        assert run.is_over
        assert all(process.has_ended for process in run.processes)
        assert watched.value("kv_block_alloc_total") == watched.value("kv_block_free_total") == 3
        assert watched.value("kv_cache_usage_percent") == 0
        assert watched.value("kvscope_info", connector="none") == 1
        events = [line for path in watched.run_folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        assert not [line for line in events if '"kv.bind"' in line or '"kv.alloc"' in line]


@pytest.fixture
def collectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An extension that can be imported here, with a collector for each process and one that fails."""
    name = f"kvscope_collectors_{time.monotonic_ns()}"  # a process imports a name once
    (tmp_path / f"{name}.py").write_text(EXTENSION)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for collector in sys.modules[name].registered:
        collector.close()


def page_with(folder: Path, *wanted: str) -> list[str]:
    """The lines that the run's exporter answers with, once all of these stand in them."""
    (place,) = places_in(folder)
    ends = time.monotonic() + 20
    while True:
        with urllib.request.urlopen(place.metrics_url, timeout=10) as answer:
            text = answer.read().decode()
        if all(each in text for each in wanted):
            return list(text.splitlines())
        assert time.monotonic() < ends, text
        time.sleep(0.05)


def test_the_checks_count_what_they_looked_at_and_collectors_stand_beside_it(
    runner: engine.Runner, tmp_path: Path, collectors: str
) -> None:
    parts = {part: {"enabled": True} for part in ("kv_trace", "kv_guard_config")}
    monitor = {
        "kv_monitor": {"enabled": True, "prefix": "p_", "scrape_interval": 0.05},
        "kv_output": {"dir": str(tmp_path), "extensions": [collectors]},
    }
    with engine.running(additional_config=parts | monitor, **SETTINGS) as llm:
        watched = Watched(llm, tmp_path)
        engine.generate(llm, [list(range(4, 80)), list(range(4, 40))], max_tokens=3)
        coverage = getattr(watched.scheduler, OBSERVER)._run.coverage
        removed = 'p_hook_faults_total{engine="0",hook="collectors"} 16.0'
        allocated = f'p_of_exporter{{engine="0"}} {watched.value("kv_block_alloc_total")}'
        page = page_with(watched.run_folder, allocated, "p_of_engine_total", "p_of_worker_count", removed)
        values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in page if line.startswith("p_of_")}
        assert values["p_of_engine_total"] > 1
        assert values["p_of_worker_sum"] == 0.5 * values["p_of_worker_count"] > 1
        assert not [line for line in page if line.startswith("p_fails")]
        assert "# TYPE p_of_engine_total counter" in page
        assert "# HELP p_of_exporter Blocks that were allocated." in page
    assert watched.value("guard_rows_audited_total") == coverage.rows > 0
    assert watched.value("guard_checks_total", check="C2") == coverage.rows
    assert watched.value("guard_checks_total", check="A") == coverage.pool_operations > 0
    assert {sample.value for sample in watched.samples("guard_violations_total")} == {0}
    assert {sample.value for sample in watched.samples("records_dropped_total")} == {0}
    faults = {sample.labels["hook"]: sample.value for sample in watched.samples("hook_faults_total")}
    assert faults.pop("collectors") == 16
    assert set(faults.values()) == {0}
    assert watched.value("hook_seconds_total", hook="scheduler.schedule") > 0
