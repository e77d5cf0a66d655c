"""Metrics of kvscope itself: what it loses, what it costs, how old its numbers are."""

from __future__ import annotations

from .labels import CONNECTOR, DROP_CAUSE, HOOK
from .metric import Metric, Text

OWN_METRICS = (
    Metric(
        name="records_dropped_total",
        kind="counter",
        unit="records",
        section="own",
        feeder="process",
        combine="sum",
        labels=(DROP_CAUSE,),
        meaning=Text(
            "Records of the trace that were made and not written, by cause.",
            "已产生但未写入轨迹的记录数，按原因统计。",
        ),
        not_read_as=Text(
            "lost findings in general: a finding acts and is counted before its record is written.",
            "一般意义上的发现丢失：发现先生效并计数，然后才写记录。",
        ),
    ),
    Metric(
        name="hook_faults_total",
        kind="counter",
        unit="faults",
        section="own",
        feeder="hooks",
        combine="sum",
        labels=(HOOK,),
        meaning=Text(
            "Exceptions of kvscope's own hooks, which are swallowed; after 16 a hook is off.",
            "kvscope 自身钩子的异常数，均被吞掉；达到 16 次后该钩子关闭。",
        ),
        not_read_as=Text(
            "faults of vLLM: its exceptions pass through unchanged.",
            "vLLM 的故障：vLLM 的异常会原样抛出。",
        ),
    ),
    Metric(
        name="hook_seconds_total",
        kind="counter",
        unit="seconds",
        section="own",
        feeder="hooks",
        combine="sum",
        labels=(HOOK,),
        meaning=Text(
            "Wall time that kvscope spent inside each hook, in the thread that was hooked.",
            "kvscope 在每个钩子中花费的墙钟时间，发生在被挂钩的线程中。",
        ),
        not_read_as=Text(
            "CPU time, or all of the cost: the writer's thread has its own.",
            "CPU 时间或全部开销：写线程另有开销。",
        ),
    ),
    Metric(
        name="snapshot_age_seconds",
        kind="gauge",
        unit="seconds",
        section="own",
        feeder="reader",
        combine="max",
        meaning=Text(
            "Age of the oldest last snapshot among the engine's processes at the time of reading.",
            "读取时，该引擎各进程最近一次快照中最旧者的时长。",
        ),
        not_read_as=Text(
            "a fault by itself: nothing is published while nothing happens. It is one where requests are running.",
            "单凭它就是故障：没有事情发生时不会发布快照。有请求运行时才是故障。",
        ),
    ),
    Metric(
        name="kvscope_info",
        kind="gauge",
        unit="1",
        section="own",
        feeder="process",
        combine="max",
        labels=(CONNECTOR,),
        meaning=Text(
            "Always 1: this engine is observed, and this is its KV connector, to be joined with other series.",
            "恒为 1：表示该引擎正被观察，并给出其 KV 连接器，可与其他序列关联。",
        ),
        not_read_as=Text(
            "health: a dead process leaves it behind.",
            "健康状态：进程死亡后它仍会保留。",
        ),
    ),
)
