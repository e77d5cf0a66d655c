"""Registering collectors: what may be registered, what its values become, and what stays the parent's in a fork."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kvscope.errors import RegistrationError
from kvscope.metrics import collectors
from kvscope.metrics.collectors import BUCKETS, Collector, CollectorContext, Collectors, Series
from kvscope.metrics.families import CustomValue
from kvscope.metrics.metric import Kind
from kvscope.metrics.readout import Readout
from kvscope.monitor import register_collector


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Collectors:
    """Of a process in which nothing is registered yet."""
    made = Collectors()
    monkeypatch.setattr(collectors, "COLLECTORS", made)
    monkeypatch.setattr("kvscope.monitor.COLLECTORS", made)
    return made


def one(ctx: CollectorContext) -> float:
    """A number.

    This is not for the help text.
    """
    return 1.0


def registered(name: str = "vllm_ascend_mine", kind: Any = "gauge", process: Any = "exporter") -> Any:
    return register_collector(name=name, metric_type=kind, process=process)(one)


@pytest.fixture(autouse=True)
def _function_is_new() -> Any:
    yield
    one.__dict__.pop("close", None)


# What may be registered -----------------------------------------------------------------------------------------------


def test_the_decorator_returns_the_function_itself_with_a_close(registry: Collectors) -> None:
    def mine(ctx: CollectorContext) -> float:
        return 4.0

    decorated = register_collector(name="vllm_ascend_mine", metric_type="gauge")(mine)
    assert decorated is mine  # type: ignore[comparison-overlap]  # the same object, with one attribute more
    (collector,) = registry.of(["exporter"])
    assert collector.active
    decorated.close()
    decorated.close()
    assert not collector.active
    assert registry.of(["exporter"]) == []


def test_what_is_no_plain_function_or_has_a_close_of_its_own_is_wrapped(registry: Collectors) -> None:
    class Opened:
        closed = 0

        def __call__(self, _: CollectorContext) -> float:
            return 5.0

        def close(self) -> None:
            self.closed += 1

    opened = Opened()
    context: Any = None
    for number, function in enumerate([opened, functools.partial(one), one, one]):
        decorated = register_collector(name=f"vllm_ascend_{number}", metric_type="gauge")(function)
        assert decorated(context) == (5.0 if function is opened else 1.0)
        decorated.close()
        assert registry.of(["exporter"]) == []
    assert opened.closed == 0


@pytest.mark.parametrize("kind", ["gauge", "counter", "histogram"])
@pytest.mark.parametrize("process", ["exporter", "engine", "worker"])
def test_each_type_and_each_process_can_be_registered(kind: Kind, process: Any, registry: Collectors) -> None:
    registered(kind=kind, process=process)
    (collector,) = registry.of([process])
    assert (collector.kind, collector.process) == (kind, process)
    assert collector.name == ("vllm_ascend_mine_total" if kind == "counter" else "vllm_ascend_mine")
    assert collector.help == "A number."
    assert not registry.of({"exporter", "engine", "worker"} - {process})


def test_exporter_is_the_process_where_none_is_said(registry: Collectors) -> None:
    register_collector(name="vllm_ascend_mine", metric_type="gauge")(lambda _: 1.0)
    assert registry.of(["exporter"])[0].help == f"What {__name__}.{_lambda_name()} says."


def _lambda_name() -> str:
    return "test_exporter_is_the_process_where_none_is_said.<locals>.<lambda>"


TAKEN = f"name: 'vllm_ascend_mine' is registered already, by {__name__}.one"


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        ({"name": "mine"}, "name: 'mine' does not begin with 'vllm_ascend_', as kv_monitor.prefix has it"),
        ({"name": "vllm:mine"}, "name: 'vllm:mine' does not begin with 'vllm_ascend_', as kv_monitor.prefix has it"),
        ({"name": "vllm_ascend_"}, "name: 'vllm_ascend_' has nothing behind kv_monitor.prefix"),
        (
            {"name": "vllm_ascend_mine-2"},
            "name: 'vllm_ascend_mine-2' is not 1 to 200 letters, digits, '_' and ':', the first of them no digit",
        ),
        ({"name": 7}, "name: 7 is not 1 to 200 letters, digits, '_' and ':', the first of them no digit"),
        ({"metric_type": "summary"}, "metric_type: 'summary' is not one of 'gauge', 'counter', 'histogram'"),
        ({"metric_type": ["gauge"]}, "metric_type: ['gauge'] is not one of 'gauge', 'counter', 'histogram'"),
        ({"process": "frontend"}, "process: 'frontend' is not one of 'exporter', 'engine', 'worker'"),
        ({"name": "vllm_ascend_mine"}, TAKEN),
        ({"name": "vllm_ascend_mine", "process": "worker"}, TAKEN),
        (
            {"name": "vllm_ascend_kv_blocks"},
            "name: 'vllm_ascend_kv_blocks' is kvscope's own gauge vllm_ascend_kv_blocks",
        ),
        (
            {"name": "vllm_ascend_kv_block_alloc", "metric_type": "counter"},
            "name: 'vllm_ascend_kv_block_alloc' is kvscope's own counter vllm_ascend_kv_block_alloc_total",
        ),
        (
            {"name": "vllm_ascend_pd_wait_seconds_sum"},
            "name: 'vllm_ascend_pd_wait_seconds_sum' is kvscope's own histogram vllm_ascend_pd_wait_seconds",
        ),
    ],
)
def test_what_cannot_be_registered_is_refused_at_once_and_in_one_line(
    wanted: dict[str, Any], line: str, registry: Collectors
) -> None:
    registered()
    asked = {"name": "vllm_ascend_other", "metric_type": "gauge", "process": "exporter", **wanted}
    with pytest.raises(RegistrationError) as raised:
        register_collector(**asked)
    assert str(raised.value) == line
    assert isinstance(raised.value, ValueError)
    assert len(registry.of(["exporter", "engine", "worker"])) == 1


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [("counter", "gauge", "vllm_ascend_mine_total"), ("histogram", "gauge", "vllm_ascend_mine_count")],
)
def test_a_name_that_would_be_a_sample_of_another_is_a_duplicate(
    first: Kind, second: Kind, name: str, registry: Collectors
) -> None:
    registered(kind=first)
    with pytest.raises(RegistrationError, match="registered already"):
        registered(name, second)


def test_of_two_decorators_with_one_name_the_second_is_refused(registry: Collectors) -> None:
    both = [register_collector(name="vllm_ascend_mine", metric_type="gauge") for _ in range(2)]
    both[0](one)
    with pytest.raises(RegistrationError, match="registered already"):
        both[1](lambda _: 2.0)


def test_a_name_is_free_again_when_its_registration_has_ended(registry: Collectors) -> None:
    registered().close()
    registered().close()


def test_the_configured_prefix_counts_as_soon_as_it_is_known(registry: Collectors) -> None:
    registered("vllm_ascend_early").close()
    registry.expect("p_")
    registered("p_mine")
    with pytest.raises(RegistrationError, match="does not begin with 'p_', as"):
        registered("vllm_ascend_mine")
    with pytest.raises(RegistrationError, match="kvscope's own gauge p_kv_blocks"):
        registered("p_kv_blocks")
    registry.expect("q_")
    registered("q_mine")
    with pytest.raises(RegistrationError, match="'p_' or 'q_'"):
        registered("r_mine")


async def _coroutine(ctx: CollectorContext) -> float:
    return 1.0


@pytest.mark.parametrize("function", [None, 3, _coroutine])
def test_what_cannot_be_called_is_refused(function: Any, registry: Collectors) -> None:
    with pytest.raises(TypeError):
        register_collector(name="vllm_ascend_mine", metric_type="gauge")(function)
    assert registry.of(["exporter"]) == []


def test_a_context_can_only_be_read_and_reads_once() -> None:
    reads: list[int] = []

    def read() -> Readout:
        reads.append(1)
        return Readout([("kv_blocks", {"engine": "0", "state": "used"}, 3.0)], at_s=1.0)

    context = CollectorContext(engine="0", engine_id="run.0", wall_ns=7, read=read)
    assert (context.engine, context.engine_id, context.wall_ns, reads) == ("0", "run.0", 7, [])
    assert context.metrics.total("kv_blocks", state="used") == 3
    assert context.metrics is context.metrics
    assert reads == [1]
    for name in ("engine", "engine_id", "wall_ns", "metrics", "more"):
        with pytest.raises(AttributeError):
            setattr(context, name, None)


# What its values become -----------------------------------------------------------------------------------------------


def series(kind: Kind, *values: Any) -> Series:
    made = Series(Collector(one, name="p_mine", kind=kind, process="engine"))
    for value in values:
        made.take(value)
    return made


def said(of: Series) -> CustomValue:
    assert of.said is not None
    return of.said


def test_a_gauge_is_the_value_as_it_is_now() -> None:
    made = series("gauge", 3, -2.5)
    assert made.said == CustomValue("p_mine", "gauge", "A number.", -2.5)
    made.take(math.inf)
    assert said(made).value == math.inf
    made.take(math.nan)
    assert made.said is None


def test_a_counter_is_a_total_that_never_goes_down() -> None:
    made = series("counter", 3, 3, 7.5)
    with pytest.raises(ValueError, match="less than the total before"):
        made.take(7)
    for infinite in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not finite"):
            made.take(infinite)
    assert made.said == CustomValue("p_mine_total", "counter", "A number.", 7.5)
    with pytest.raises(ValueError, match="less than the total before"):
        series("counter", -1)


def test_a_histogram_has_one_sample_of_each_interval_in_fixed_buckets() -> None:
    made = series("histogram", 0.0005, 1.0, 5, 10**6)
    with pytest.raises(ValueError, match="not finite"):
        made.take(math.inf)
    assert said(made).value == 1_000_006.0005
    assert said(made).buckets == (
        *((0.001, 1), (0.01, 1), (0.1, 1), (1.0, 2), (10.0, 3)),
        *((100.0, 3), (1000.0, 3), (10_000.0, 3), (100_000.0, 3), (math.inf, 4)),
    )
    assert 8 <= len(BUCKETS) + 1 <= 10


@pytest.mark.parametrize("number", [True, np.float32(1), np.int64(1), Fraction(1)])
def test_every_kind_of_real_number_will_do(number: Any) -> None:
    assert said(series("gauge", number)).value == 1.0


@pytest.mark.parametrize("value", [None, "1", [1.0], 1j])
def test_what_is_no_number_is_a_fault(value: Any) -> None:
    with pytest.raises(TypeError, match=r"p_mine: .* is no number"):
        series("gauge", value)


def test_after_a_fault_a_gauge_has_no_value_and_totals_stand_still() -> None:
    for kind, value in (("gauge", None), ("counter", 2.0), ("histogram", 2.0)):
        made = series(kind, 2.0)  # type: ignore[arg-type]  # one of the three
        made.miss()
        assert (made.said.value if made.said else None) == value


# In a forked child ----------------------------------------------------------------------------------------------------

FORKING = """
import json, os
from kvscope.metrics.collectors import COLLECTORS
from kvscope.monitor import register_collector

def register():
    return register_collector(name="vllm_ascend_mine", metric_type="gauge")(lambda ctx: 1.0)

parents = register()
out, into = os.pipe()
child = os.fork()
if not child:
    inherited = len(COLLECTORS.of(["exporter"]))
    parents.close()
    parents.close()
    own = register()
    os.write(into, json.dumps([inherited, len(COLLECTORS.of(["exporter"]))]).encode())
    os._exit(0)
os.waitpid(child, 0)
print(json.dumps({"child": json.loads(os.read(out, 4096)), "parent": len(COLLECTORS.of(["exporter"]))}))
"""


def test_registrations_do_not_survive_a_fork_and_the_parents_are_left_alone() -> None:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=60, check=True, env=variables
    )
    assert json.loads(done.stdout) == {"child": [0, 1], "parent": 1}
