"""From counting to what Prometheus reads, with every series that the catalog has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvscope.metrics.catalog import METRICS
from kvscope.metrics.families import families
from kvscope.metrics.reader import read_run
from kvscope.metrics.rendering import TEXT
from kvscope.metrics.store import MetricsStore

PREFIX = "vllm_ascend_"


@pytest.fixture
def everything(tmp_path: Path) -> bytes:
    """The text of two processes that count all there is."""
    for process in ("engine", "worker"):
        store = MetricsStore(tmp_path, process=process, rank=0, engine="0", prefix=PREFIX)
        slab = store.slab()
        for metric in METRICS.values():
            for key in metric.combinations():
                labels = {name: value for name, value in zip(metric.label_names, key, strict=True) if value}
                if metric.feeder == "reader":
                    continue
                if metric.kind == "counter":
                    slab.counter(metric.name, **labels).add(2)
                elif metric.kind == "gauge":
                    slab.gauge(metric.name, **labels).set(1)
                else:
                    slab.histogram(metric.name, **labels).observe(0.3)
        slab.publish()
        store.close()
    return TEXT.render(families(read_run(tmp_path).processes, prefix=PREFIX))


def test_every_series_of_the_catalog_arrives_once(everything: bytes) -> None:
    lines = everything.decode().splitlines()
    values = [line for line in lines if not line.startswith("#")]
    assert len({line.rpartition(" ")[0] for line in values}) == len(values)
    expected = sum(
        len(metric.combinations()) * (len(metric.buckets) + 3 if metric.kind == "histogram" else 1)
        for metric in METRICS.values()
    )
    assert len(values) == expected
    assert f'{PREFIX}kv_block_alloc_total{{engine="0"}} 4.0' in values, "two processes are added"
    assert f'{PREFIX}kv_blocks{{engine="0",state="free"}} 1.0' in values
    assert f'{PREFIX}pd_wait_seconds_bucket{{engine="0",le="0.5"}} 2.0' in values
    typed = [line for line in lines if line.startswith("# TYPE ")]
    assert typed == [f"# TYPE {PREFIX}{metric.name} {metric.kind}" for metric in METRICS.values()]


def test_prometheus_has_nothing_against_names_and_texts(everything: bytes) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    checked = subprocess.run([promtool, "check", "metrics"], input=everything, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
