"""Alerts about kvscope itself: what it loses, and whether its numbers are fresh."""

from __future__ import annotations

from ..metric import Text
from .alert import Alert, History
from .recording import ENGINE_BY

_ENGINE = {"job": "kvscope", "instance": "a:9460", "engine": "0"}
_OF = 'job="kvscope",instance="a:9460",engine="0"'

OWN_ALERTS = (
    Alert(
        name="KvscopeHookFaults",
        severity="warning",
        expr=f"sum by ({ENGINE_BY}, hook) (increase(@hook_faults_total[10m])) > 0",
        wait="0m",
        summary="Hook {hook} of kvscope fails on engine {engine}",
        description="kvscope's hook {hook} has raised on engine {engine} ({instance}) within the last ten minutes.",
        means=Text(
            "A defect of kvscope, or a vLLM that it does not know. Serving is not affected; after 16 faults the hook "
            "is "
            "off and what it feeds is no longer checked.",
            "kvscope 的缺陷，或它不认识的 vLLM。服务不受影响；16 次故障后钩子关闭，其提供的内容不再被检查。",
        ),
        look=Text(
            "hook_faults in kv.coverage, and `kvscope doctor` for the versions.",
            "查看 kv.coverage 中的 hook_faults，并用 `kvscope doctor` 查看版本。",
        ),
        then=Text(
            "Report it with both. A restart brings the hook back until it fails again.",
            "请连同两者一起上报。重启可恢复该钩子，直到再次失败。",
        ),
        labels={**_ENGINE, "hook": "pool.alloc"},
        fires=History({f'@hook_faults_total{{{_OF},hook="pool.alloc"}}': "0+0x25 2+0x30"}),
        silent=History({f'@hook_faults_total{{{_OF},hook="pool.alloc"}}': "2+0x60"}),
    ),
    Alert(
        name="KvscopeRecordsDropped",
        severity="warning",
        expr=f"sum by ({ENGINE_BY}, cause) (increase(@records_dropped_total[10m])) > 0",
        wait="0m",
        summary="The trace of engine {engine} loses records ({cause})",
        description="Records of engine {engine} ({instance}) were made and not written within the last ten minutes, "
        "because of {cause}.",
        means=Text(
            "The trace has gaps, and a check of it may be inconclusive. Live checks and their actions are not "
            "affected.",
            "轨迹出现缺口，对它的检查可能不确定。在线检查及其动作不受影响。",
        ),
        look=Text(
            "write_error: the disk. queue_records and queue_bytes: more records than the writer can take.",
            "write_error：磁盘问题。queue_records 与 queue_bytes：记录多于写线程的处理能力。",
        ),
        then=Text(
            "Give the disk room or write elsewhere (`kv_output.dir`); write less (`kv_output.records`), or let more "
            "wait (`kv_output.queue_bytes`).",
            "给磁盘腾出空间或改写到别处（`kv_output.dir`）；减少记录（`kv_output.records`），"
            "或加大队列（`kv_output.queue_bytes`）。",
        ),
        labels={**_ENGINE, "cause": "write_error"},
        fires=History({f'@records_dropped_total{{{_OF},cause="write_error"}}': "0+0x25 7+0x30"}),
        silent=History({f'@records_dropped_total{{{_OF},cause="write_error"}}': "7+0x60"}),
    ),
    Alert(
        name="KvscopeSnapshotStale",
        severity="warning",
        expr=f"max by ({ENGINE_BY}) (@snapshot_age_seconds) > 60 and sum by ({ENGINE_BY}) "
        '(@kv_blocks{state="used"}) > 0',
        wait="2m",
        summary="Engine {engine} has requests and says nothing",
        description="A process of engine {engine} ({instance}) has published no numbers for over a minute while "
        "blocks are in use.",
        means=Text(
            "A process of the engine is dead or hangs; what is shown is what it said last.",
            "引擎的某个进程已死亡或卡住；当前显示的是它最后的数值。",
        ),
        look=Text(
            "Whether the processes are there, and vLLM's own log, where each line names its process.",
            "检查各进程是否存在，并查看 vLLM 日志：每行都带有进程名。",
        ),
        then=Text(
            "Restart the engine. Its last values stay readable in the run's folder.",
            "重启引擎。其最后的数值仍可在该次运行的目录中读取。",
        ),
        labels=_ENGINE,
        fires=History(
            {f"@snapshot_age_seconds{{{_OF}}}": "0+0x10 60+60x40", f'@kv_blocks{{{_OF},state="used"}}': "12+0x60"}
        ),
        silent=History(
            {f"@snapshot_age_seconds{{{_OF}}}": "0+0x10 60+60x40", f'@kv_blocks{{{_OF},state="used"}}': "0+0x60"}
        ),
    ),
    Alert(
        name="KvscopeEngineGone",
        severity="warning",
        expr=f"count by ({ENGINE_BY}) (last_over_time(@kvscope_info[10m])) unless "
        f"count by ({ENGINE_BY}) (@kvscope_info)",
        wait="1m",
        summary="Engine {engine} is not observed any more",
        description="Engine {engine} of {instance} was scraped within the last ten minutes, and has not been for one.",
        means=Text(
            "The engine has ended, or its exporter is off or out of reach. With action raise this is how a finding "
            "looks to a Prometheus that scrapes less often than every second: the exporter ends with its front end, "
            "before the finding has been scraped. An engine that was ended on purpose looks the same.",
            "引擎已结束，或其导出器已关闭、无法访问。动作为 raise 时，对抓取间隔超过一秒的 Prometheus 而言，"
            "发现就是这个样子：导出器随前端退出，来不及被抓取。有意停止的引擎看起来也一样。",
        ),
        look=Text(
            "`kvscope check DIR` and `kvscope top DIR` on the run's folder, which has the last values of every "
            "process; the engine's log for KV_GUARD.",
            "对该次运行的目录执行 `kvscope check DIR` 与 `kvscope top DIR`，其中保留了每个进程的最后数值；"
            "并在引擎日志中查找 KV_GUARD。",
        ),
        then=Text(
            "Restart it if nobody has: vLLM's server ends with exit code 0 when its engine has died, so that a "
            "supervisor must restart it always and not on failure. The alert clears when the engine is back, or ten "
            "minutes after it was last scraped.",
            "若尚未重启则重启：引擎死亡时 vLLM 服务以退出码 0 结束，因此守护程序必须总是重启，而不能仅在失败时重启。"
            "引擎恢复后，或最后一次抓取十分钟后，告警解除。",
        ),
        labels=_ENGINE,
        fires=History({f'@kvscope_info{{{_OF},connector="none"}}': "1+0x22 _x40"}),
        silent=History({f'@kvscope_info{{{_OF},connector="none"}}': "1+0x60"}),
    ),
    Alert(
        name="KvscopeNothingObserved",
        severity="warning",
        expr="absent(@kvscope_info)",
        wait="5m",
        summary="No engine is observed by kvscope",
        description="For five minutes Prometheus has no series of kvscope at all.",
        means=Text(
            "The exporter is not scraped, is off, or its process has ended. It does not say that serving has stopped.",
            "导出器未被抓取、已关闭或其进程已结束。这并不说明服务已停止。",
        ),
        look=Text(
            "The targets page of Prometheus, and vLLM's log for the address that the exporter has.",
            "查看 Prometheus 的 targets 页面，并在 vLLM 日志中查找导出器的地址。",
        ),
        then=Text(
            "Mend the scrape configuration, or start the engine with kv_monitor.",
            "修正抓取配置，或在启动引擎时启用 kv_monitor。",
        ),
        labels={},
        fires=History({f'@kvscope_info{{{_OF},connector="none"}}': "1+0x10 _x50"}),
        silent=History({f'@kvscope_info{{{_OF},connector="none"}}': "1+0x60"}),
    ),
)
