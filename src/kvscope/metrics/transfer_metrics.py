"""Metrics of KV that comes from, or goes to, another engine or another memory; and of requests that come back."""

from __future__ import annotations

from .labels import FAILURE_CAUSE, OFFLOAD_DIRECTION, OUTCOME, PD_DIRECTION
from .metric import Metric, Text

SECONDS = (0.002, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)
"""Upper bounds of every histogram of times: a transfer inside a host, over a network, and one that hangs."""

TRANSFER_METRICS = (
    Metric(
        name="pd_transfer_tokens_total",
        kind="counter",
        unit="tokens",
        section="transfer",
        feeder="connector",
        combine="sum",
        labels=(PD_DIRECTION,),
        required=True,
        meaning=Text(
            "Tokens whose KV was handed from prefill to decode: sent as P's connector reports the request done, "
            "received as D has loaded it and says so.",
            "从预填充移交到解码的 KV 对应的 token 数："
            "sent 在 P 端连接器报告请求完成时计，received 在 D 端报告加载完成时计。",
        ),
        not_read_as=Text(
            "bytes, or copies by rank: a token counts once, however many ranks hold a part of it. Sent and received of "
            "two engines differ while transfers are under way. Loads inside of a step, which nobody reports, and those "
            "of an offload connector are not among them.",
            "字节数或按 rank 的拷贝数：无论多少 rank 各持一部分，每个 token 只计一次。"
            "传输进行中时两端的 sent 与 received 不相等。步内完成（无人报告）的加载与卸载连接器的加载不计入。",
        ),
    ),
    Metric(
        name="pd_transfer_latency_seconds",
        kind="histogram",
        unit="seconds",
        section="transfer",
        feeder="connector",
        combine="sum",
        buckets=SECONDS,
        required=True,
        meaning=Text(
            "From the step in which a transfer was planned to the report that every rank is done, by the clock of the "
            "engine that observes it.",
            "从计划传输的那一步到所有 rank 报告完成的时间，以观察它的引擎自身时钟计。",
        ),
        not_read_as=Text(
            "time on the wire: waiting in queues and until the next step takes up the report is part of it.",
            "线路传输时间：其中包含排队时间，以及等待下一步取走报告的时间。",
        ),
    ),
    Metric(
        name="pd_transfer_queue_depth",
        kind="gauge",
        unit="requests",
        section="transfer",
        feeder="connector",
        combine="one",
        required=True,
        meaning=Text(
            "Requests that wait for a transfer to be planned: known to need one, and in no step's plan yet.",
            "等待计划传输的请求数：已知需要传输，但尚未进入任何一步的计划。",
        ),
        not_read_as=Text(
            "the queue inside the connector or the network, which nobody outside sees.",
            "连接器内部或网络中的队列，外部无法看到。",
        ),
    ),
    Metric(
        name="pd_transfer_in_flight",
        kind="gauge",
        unit="requests",
        section="transfer",
        feeder="connector",
        combine="one",
        required=True,
        meaning=Text(
            "Requests with a planned transfer that has been reported neither done nor failed.",
            "已计划传输、但尚未报告完成或失败的请求数。",
        ),
        not_read_as=Text(
            "transfers that move data right now: planned is not submitted.",
            "此刻正在搬运数据的传输：已计划不等于已提交。",
        ),
    ),
    Metric(
        name="pd_transfer_failures_total",
        kind="counter",
        unit="requests",
        section="transfer",
        feeder="connector",
        combine="sum",
        labels=(FAILURE_CAUSE,),
        meaning=Text(
            "Transfers of requests that ended otherwise than done, by cause: load_failed as the worker reports it, "
            "aborted where the request had ended before, host_shutdown what was under way when the engine ended.",
            "未以完成结束的请求传输数，按原因统计：load_failed 由 worker 报告，aborted 表示请求在此之前已结束，"
            "host_shutdown 为引擎结束时仍在进行的传输。",
        ),
        not_read_as=Text(
            "failed requests: vLLM may compute anew what could not be loaded. A send whose lease ran out is no failure "
            "here: vLLM's connectors report it as done.",
            "失败的请求数：vLLM 可能会重新计算未能加载的内容。"
            "租约到期的发送在此不算失败：vLLM 的连接器将其报告为完成。",
        ),
    ),
    Metric(
        name="pd_wait_seconds",
        kind="histogram",
        unit="seconds",
        section="transfer",
        feeder="connector",
        combine="sum",
        buckets=SECONDS,
        meaning=Text(
            "How long a request on D stood waiting for its remote KV before it could be scheduled.",
            "D 端请求在可被调度之前等待远端 KV 的时间。",
        ),
        not_read_as=Text(
            "added latency as the client sees it: without the transfer D would have computed the prompt.",
            "客户端感受到的额外延迟：若没有传输，D 端本来要自行计算提示。",
        ),
    ),
    Metric(
        name="pd_transfer_bytes_total",
        kind="counter",
        unit="bytes",
        section="transfer",
        feeder="transfer",
        combine="sum",
        labels=(PD_DIRECTION,),
        meaning=Text(
            "Bytes of KV that were handed from prefill to decode, over all ranks, as the connector declares them.",
            "从预填充移交到解码的 KV 字节数，为所有 rank 之和，以连接器声明为准。",
        ),
        not_read_as=Text(
            "bytes on the wire, which a connector may compress, repeat or add headers to.",
            "线路上的字节数：连接器可能压缩、重传或附加头部。",
        ),
    ),
    Metric(
        name="pd_lease_expired_total",
        kind="counter",
        unit="requests",
        section="transfer",
        feeder="transfer",
        combine="sum",
        meaning=Text(
            "Requests whose blocks P released because nobody fetched them in time.",
            "因无人及时取走而被 P 端释放其块的请求数。",
        ),
        not_read_as=Text(
            "data loss at P: D has to compute the prompt, or fails the request.",
            "P 端的数据丢失：D 端需要重新计算提示，或使该请求失败。",
        ),
    ),
)

OFFLOAD_METRICS = (
    Metric(
        name="offload_jobs_in_flight",
        kind="gauge",
        unit="jobs",
        section="offload",
        feeder="transfer",
        combine="sum",
        labels=(OFFLOAD_DIRECTION,),
        meaning=Text(
            "Offload jobs that were submitted and have not ended: d2h to the host, h2d back to the device.",
            "已提交且尚未结束的卸载作业数：d2h 为写到主机，h2d 为取回设备。",
        ),
        not_read_as=Text("queued jobs: queued is not submitted.", "排队中的作业：排队不等于已提交。"),
    ),
    Metric(
        name="offload_receipts_missing",
        kind="gauge",
        unit="receipts",
        section="offload",
        feeder="transfer",
        combine="sum",
        meaning=Text(
            "Completions that ranks still owe for jobs of which another rank has reported already.",
            "其他 rank 已报告而本应报告的 rank 尚未给出的完成回执数。",
        ),
        not_read_as=Text(
            "failures: it is above zero for a moment in every job of several ranks.",
            "失败数：多 rank 作业中它总会短暂大于零。",
        ),
    ),
)

RECOVERY_METRICS = (
    Metric(
        name="recovery_seconds",
        kind="histogram",
        unit="seconds",
        section="recovery",
        feeder="transfer",
        combine="sum",
        buckets=SECONDS,
        meaning=Text(
            "From a request's preemption to its first computed token after it.",
            "从请求被抢占到其后首次计算 token 的时间。",
        ),
        not_read_as=Text(
            "the time that a load took: requeueing and admission are part of it.",
            "加载所用的时间：其中包含重新排队与接纳。",
        ),
    ),
    Metric(
        name="recovery_total",
        kind="counter",
        unit="episodes",
        section="recovery",
        feeder="transfer",
        combine="sum",
        labels=(OUTCOME,),
        meaning=Text(
            "Preemption-to-resume episodes by how they ended; incomplete where a process vanished.",
            "从抢占到恢复的过程数，按结局统计；进程消失时为 incomplete。",
        ),
        not_read_as=Text(
            "prefix-cache loads: a load is no recovery, and a finished load no admission.",
            "前缀缓存加载：加载不是恢复，加载完成也不是接纳。",
        ),
    ),
)
