"""Metrics of the checks: what was found, what was looked at, and what was not."""

from __future__ import annotations

from .labels import CHECK, REASON, SKIP_CAUSE, SKIPPED_CHECK, TAIL_STATE
from .metric import Metric, Text

GUARD_METRICS = (
    Metric(
        name="guard_violations_total",
        kind="counter",
        unit="findings",
        section="guard",
        feeder="checks",
        combine="sum",
        labels=(REASON,),
        meaning=Text(
            "Findings by reason, of all parts; repetitions that are folded in the trace are counted.",
            "按原因统计的发现数，包含所有部分；在轨迹中被折叠的重复也计入。",
        ),
        not_read_as=Text(
            "damaged requests, or proof of wrong values: kvscope sees what the host declares and plans. No findings "
            "means nothing where guard_checks_total stands still.",
            "受损请求数，也不证明数值错误：kvscope 只看到主机的声明与计划。"
            "若 guard_checks_total 停止增长，没有发现并不说明任何问题。",
        ),
    ),
    Metric(
        name="guard_checks_total",
        kind="counter",
        unit="rows, requests, operations or blocks",
        section="guard",
        feeder="checks",
        combine="sum",
        labels=(CHECK,),
        meaning=Text(
            "What each check has judged: C1 to C6 rows of plans, L requests handed over, A operations of the pool, T "
            "transfers, operators rows of operators' arguments, audit blocks held against the pool, dummy dummy runs.",
            "每项检查已判断的数量：C1 到 C6 为计划的行，L 为移交的请求，A 为块池操作，T 为传输，"
            "operators 为算子参数的行，audit 为与块池核对的块，dummy 为空跑。",
        ),
        not_read_as=Text(
            "a number that may be compared between checks: each counts its own unit.",
            "可在检查之间比较的数：每项检查的计数单位不同。",
        ),
    ),
    Metric(
        name="guard_checks_skipped_total",
        kind="counter",
        unit="rows, requests, operations or blocks",
        section="guard",
        feeder="checks",
        combine="sum",
        labels=(SKIPPED_CHECK, SKIP_CAUSE),
        meaning=Text(
            "What a check did not judge, by cause; plan where all checks of a plan fell away together.",
            "某项检查未判断的数量，按原因统计；plan 表示一个计划的全部检查同时缺失。",
        ),
        not_read_as=Text(
            "errors: what a check cannot judge is said and left out.",
            "错误数：检查无法判断的内容会被说明并略过。",
        ),
    ),
    Metric(
        name="guard_checks_stalled",
        kind="gauge",
        unit="0 or 1",
        section="guard",
        feeder="checks",
        combine="max",
        labels=(CHECK,),
        meaning=Text(
            "1 where a check's seam has not fired for 100 steps of work in some process of the engine.",
            "若引擎的某个进程在 100 个有工作的步内未触发该检查的接入点，则为 1。",
        ),
        not_read_as=Text(
            "an idle engine: steps without work are not counted.",
            "引擎空闲：没有工作的步不计。",
        ),
    ),
    Metric(
        name="guard_rows_audited_total",
        kind="counter",
        unit="rows",
        section="guard",
        feeder="checks",
        combine="sum",
        meaning=Text(
            "Rows whose plan was judged: one request in one step, one group and one rank.",
            "计划已被判断的行数：一个请求在一步、一个组、一个 rank 中为一行。",
        ),
        not_read_as=Text(
            "requests or tokens; coverage is this divided by it and what guard_checks_skipped_total has for plan.",
            "请求数或 token 数；覆盖率等于它除以它与 guard_checks_skipped_total 中 plan 之和。",
        ),
    ),
    Metric(
        name="tail_entries",
        kind="gauge",
        unit="block table entries",
        section="guard",
        feeder="checks",
        combine="sum",
        labels=(TAIL_STATE,),
        meaning=Text(
            "What block table entries lead to that attention does not follow, counted since start in a sample of "
            "plans: the null block, the row's own blocks, those of another live request, nobody's, or outside.",
            "注意力不会访问的块表项指向何处，自启动起在抽样的计划中累计：空块、本行自己的块、其他存活请求的块、"
            "无主的块或缓存之外。",
        ),
        not_read_as=Text(
            "findings: nothing reads these entries. They show what a kernel would meet that read too far.",
            "发现：没有任何代码读取这些表项。它们显示读越界的内核会碰到什么。",
        ),
    ),
)
