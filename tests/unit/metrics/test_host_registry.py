"""Our series stand in the host's registry beside its own, and never take those away."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families as read_text

from kvscope.metrics.families import Family
from kvscope.metrics.host_registry import MULTIPROCESS_VARIABLE, HostRegistration
from unit.metrics.support import PREFIX, collected, process


class Source:
    def __init__(self) -> None:
        self.collections = 0
        self.error: Exception | None = None
        self.is_on = True
        self.now_s = 100.0

    def collect(self) -> list[Family]:
        self.collections += 1
        if self.error is not None:
            raise self.error
        return collected(process(kv_block_alloc_total={(): float(self.collections)}))


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MULTIPROCESS_VARIABLE, raising=False)


@pytest.fixture
def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Gauge("vllm:num_requests_running", "h", registry=made).set(3)
    return made


@pytest.fixture
def source() -> Source:
    return Source()


def registered(source: Source, registry: CollectorRegistry) -> HostRegistration:
    registration = HostRegistration(
        source.collect,
        prefix=PREFIX,
        interval_s=10,
        is_on=lambda: source.is_on,
        registry=registry,
        clock=lambda: source.now_s,
    )
    registration.begin()
    return registration


def told(registry: CollectorRegistry) -> dict[str, float]:
    text = generate_latest(registry).decode()
    return {sample.name: sample.value for family in read_text(text) for sample in family.samples}


OWN = {"vllm:num_requests_running": 3.0}
OURS = {f"{PREFIX}kv_block_alloc_total": 1.0, f"{PREFIX}snapshot_age_seconds": 0.25}


def test_both_are_served_and_ours_are_collected_once_an_interval(source: Source, registry: CollectorRegistry) -> None:
    registered(source, registry)
    assert told(registry) == OWN | OURS
    source.now_s += 9
    assert told(registry) == OWN | OURS
    source.now_s += 2
    assert told(registry)[f"{PREFIX}kv_block_alloc_total"] == 2


def test_a_collection_that_fails_leaves_the_hosts_own_series_and_is_said_once(
    source: Source, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    registered(source, registry)
    source.error = ValueError("torn file")
    with caplog.at_level(logging.WARNING, "vllm.kvscope"):
        for _ in range(3):
            assert told(registry) == OWN
            source.now_s += 20
    assert [record.getMessage() for record in caplog.records] == [
        "kvscope: our series are missing from vLLM's /metrics: torn file"
    ]
    source.error = None
    assert told(registry).keys() == (OWN | OURS).keys()


def test_switched_off_there_are_only_the_hosts_own(source: Source, registry: CollectorRegistry) -> None:
    registered(source, registry)
    source.is_on = False
    assert told(registry) == OWN
    assert source.collections == 0


def test_a_second_run_of_a_process_stays_out_until_the_first_has_ended(
    source: Source, registry: CollectorRegistry
) -> None:
    first = registered(source, registry)
    second = registered(Source(), registry)
    assert (first.is_registered, second.is_registered) == (True, False)
    assert generate_latest(registry).count(b"# TYPE vllm_ascend_kv_block_alloc_total ") == 1
    second.end()
    first.end()
    first.end()
    assert told(registry) == OWN
    assert registered(Source(), registry).is_registered


def test_where_several_processes_answer_the_registry_is_left_alone(
    source: Source, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MULTIPROCESS_VARIABLE, "/somewhere")
    assert not registered(source, registry).is_registered
    assert told(registry) == OWN


def test_names_that_start_as_vllms_do_stay_out(source: Source, registry: CollectorRegistry) -> None:
    registration = HostRegistration(source.collect, prefix="vllm:", interval_s=1, is_on=lambda: True, registry=registry)
    registration.begin()
    assert not registration.is_registered
    assert told(registry) == OWN


def test_a_registry_that_was_emptied_meanwhile_is_no_error(source: Source, registry: CollectorRegistry) -> None:
    registration = registered(source, registry)
    registry.unregister(registration)
    registration.end()
    assert told(registry) == OWN
