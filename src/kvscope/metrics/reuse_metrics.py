"""Metrics of prefix caching: what was asked for when a request was admitted, and what was there."""

from __future__ import annotations

from .labels import UNIT
from .metric import Metric, Text

REUSE_METRICS = (
    Metric(
        name="prefix_cache_queries_total",
        kind="counter",
        unit="tokens or blocks",
        section="reuse",
        feeder="admission",
        combine="sum",
        labels=(UNIT,),
        meaning=Text(
            "Prompt tokens, and the blocks that hold them, looked up in the prefix cache when a request was "
            "admitted for the first time.",
            "请求首次被接纳时在前缀缓存中查询的提示 token 数，以及存放它们的块数。",
        ),
        not_read_as=Text(
            "vLLM's own query counter where requests are preempted: a request that comes back is not counted again "
            "here.",
            "存在抢占时 vLLM 自身的查询计数：恢复的请求在此不重复计数。",
        ),
    ),
    Metric(
        name="prefix_cache_hits_total",
        kind="counter",
        unit="tokens or blocks",
        section="reuse",
        feeder="admission",
        combine="sum",
        labels=(UNIT,),
        required=True,
        meaning=Text(
            "Prompt tokens, and the blocks that hold them, that were taken from this engine's prefix cache when a "
            "request was admitted for the first time.",
            "请求首次被接纳时从本引擎前缀缓存中取得的提示 token 数，以及存放它们的块数。",
        ),
        not_read_as=Text(
            "tokens loaded by a connector from elsewhere, or blocks times block_size: a hit may end inside a block, "
            "and each is counted once whatever the number of groups.",
            "连接器从别处加载的 token；也不等于块数乘以 block_size：命中可能止于块内，且无论组数多少都只计一次。",
        ),
    ),
    Metric(
        name="prefix_cache_hit_ratio",
        kind="gauge",
        unit="ratio",
        section="reuse",
        feeder="admission",
        combine="one",
        labels=(UNIT,),
        required=True,
        meaning=Text(
            "Hits divided by queries over the last window seconds (kv_monitor.window); absent while nothing was "
            "queried in it.",
            "最近 window 秒（kv_monitor.window）内命中数除以查询数；期间没有查询时不输出。",
        ),
        not_read_as=Text(
            "a ratio since start, or one that may be averaged over engines: use the recording rule, which divides the "
            "sums.",
            "启动以来的比率；也不能对多个引擎取平均：请使用对总和做除法的记录规则。",
        ),
    ),
)
