"""Every metric of kvscope. What is published about metrics, and the layout of the metrics file, is made from it."""

from __future__ import annotations

from .guard_metrics import GUARD_METRICS
from .metric import Metric, Section, Text
from .own_metrics import OWN_METRICS
from .pool_metrics import POOL_METRICS
from .reuse_metrics import REUSE_METRICS
from .transfer_metrics import OFFLOAD_METRICS, RECOVERY_METRICS, TRANSFER_METRICS

SECTIONS: dict[Section, Text] = {
    "pool": Text("Block pool", "块池"),
    "reuse": Text("Prefix cache", "前缀缓存"),
    "transfer": Text("Prefill to decode", "预填充到解码"),
    "offload": Text("Offload", "卸载"),
    "recovery": Text("Recovery", "恢复"),
    "guard": Text("Checks", "检查"),
    "own": Text("kvscope itself", "kvscope 自身"),
}

METRICS: dict[str, Metric] = {
    metric.name: metric
    for family in (
        POOL_METRICS,
        REUSE_METRICS,
        TRANSFER_METRICS,
        OFFLOAD_METRICS,
        RECOVERY_METRICS,
        GUARD_METRICS,
        OWN_METRICS,
    )
    for metric in family
}
"""Name without prefix -> metric. The order is that of the dictionary and of the cells in a metrics file."""
