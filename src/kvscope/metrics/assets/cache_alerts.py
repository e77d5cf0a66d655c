"""Alerts about the block pool and about transfers between prefill and decode."""

from __future__ import annotations

from ..metric import Text
from .alert import Alert, History
from .recording import ENGINE_BY

_ENGINE = {"job": "kvscope", "instance": "a:9460", "engine": "0"}
_OF = 'job="kvscope",instance="a:9460",engine="0"'

CACHE_ALERTS = (
    Alert(
        name="KvscopeCacheFull",
        severity="warning",
        expr=f"max by ({ENGINE_BY}) (@kv_cache_usage_percent) > 95",
        wait="10m",
        summary="The KV cache of engine {engine} is full",
        description="For ten minutes more than 95 % of the blocks of engine {engine} ({instance}) had a reference.",
        means=Text(
            "New requests wait and running ones may be preempted. Content that is merely cached does not count.",
            "新请求需要等待，运行中的请求可能被抢占。仅作缓存的内容不计入。",
        ),
        look=Text(
            "kv_blocks by state: used is work, held is waiting for a transfer or a late release. kv_token_fill_ratio "
            "shows slots that are allocated and empty.",
            "查看按状态的 kv_blocks：used 是正在进行的工作，held 是等待传输或延迟释放。kv_token_fill_ratio "
            "显示已分配而未写入的槽位。",
        ),
        then=Text(
            "If used: fewer or shorter requests at once, or more memory for the cache. If held: see "
            "KvscopeHeldBlocksGrow.",
            "若为 used：减少并发或缩短请求，或给缓存更多内存。若为 held：见 KvscopeHeldBlocksGrow。",
        ),
        labels=_ENGINE,
        fires=History({f"@kv_cache_usage_percent{{{_OF}}}": "99+0x60"}),
        silent=History({f"@kv_cache_usage_percent{{{_OF}}}": "99+0x25 60+0x30"}),
    ),
    Alert(
        name="KvscopeHeldBlocksGrow",
        severity="warning",
        expr=f'sum by ({ENGINE_BY}) (@kv_blocks{{state="held"}}) > 1.2 * (sum by ({ENGINE_BY}) '
        '(@kv_blocks{state="held"} offset 10m) > 0)',
        wait="10m",
        summary="More and more blocks of engine {engine} are held by nobody",
        description="On engine {engine} ({instance}) blocks that are referenced and owned by no running request "
        "keep growing.",
        means=Text(
            "References are taken and not given back: a transfer that never ends, or a leak. Holding some blocks for a "
            "while is normal.",
            "引用被持有而未归还：传输一直没有结束，或发生泄漏。短时间持有一些块是正常的。",
        ),
        look=Text(
            "kv_blocks with state held, by cause: deferred waits for a running step, connector for a transfer, "
            "isolated "
            "for a reset of the prefix cache.",
            "按 cause 查看 state 为 held 的 kv_blocks：deferred 等待运行中的步，connector 等待传输，isolated "
            "等待重置前缀缓存。",
        ),
        then=Text(
            "connector: look at the other engine and at pd_transfer_failures_total. deferred: an engine that does not "
            "finish its steps. isolated: reset the prefix cache when no request runs.",
            "connector：检查对端引擎与 pd_transfer_failures_total。deferred：引擎没有完成它的步。isolated："
            "在没有请求运行时重置前缀缓存。",
        ),
        labels=_ENGINE,
        fires=History({f'@kv_blocks{{{_OF},state="held",cause="connector"}}': "10+10x60"}),
        silent=History({f'@kv_blocks{{{_OF},state="held",cause="connector"}}': "40+0x60"}),
    ),
    Alert(
        name="KvscopeTransfersFail",
        severity="warning",
        expr="engine:@pd_transfer_failure_ratio:rate5m > 0.01",
        wait="5m",
        summary="Transfers of engine {engine} fail",
        description="For five minutes more than 1 % of the transfers that ended on engine {engine} ({instance}) "
        "failed.",
        means=Text(
            "KV does not reach decode, which then computes prompts anew or fails the requests.",
            "KV 未能到达解码端，解码端将重新计算提示或使请求失败。",
        ),
        look=Text(
            "pd_transfer_failures_total by cause, on both sides; the log of the connector.",
            "在两端按 cause 查看 pd_transfer_failures_total，并查看连接器日志。",
        ),
        then=Text(
            "load_failed points at the network or at blocks that P has released; aborted at clients that leave.",
            "load_failed 指向网络或 P 端已释放的块；aborted 指向客户端断开。",
        ),
        labels=_ENGINE,
        fires=History(
            {
                f"@pd_transfer_latency_seconds_count{{{_OF}}}": "0+90x60",
                f'@pd_transfer_failures_total{{{_OF},cause="load_failed"}}': "0+10x60",
            }
        ),
        silent=History({f"@pd_transfer_latency_seconds_count{{{_OF}}}": "0+90x60"}),
    ),
    Alert(
        name="KvscopeTransfersStuck",
        severity="critical",
        expr=f"min by ({ENGINE_BY}) (min_over_time(@pd_transfer_in_flight[5m])) > 0 and sum by ({ENGINE_BY}) "
        "(increase(@pd_transfer_latency_seconds_count[5m])) == 0",
        wait="5m",
        summary="Transfers of engine {engine} do not end",
        description="On engine {engine} ({instance}) transfers are under way, and none has ended for ten minutes.",
        means=Text(
            "Requests wait for KV that does not come, and their blocks are held.",
            "请求在等待始终不到的 KV，其块一直被持有。",
        ),
        look=Text(
            "The other engine: does it run, and does it report? kv_blocks with state held and cause connector shows "
            "how many "
            "blocks wait for it.",
            "检查对端引擎：是否在运行、是否有报告？state 为 held、cause 为 connector 的 kv_blocks "
            "显示有多少块在等待它。",
        ),
        then=Text(
            "Restart the side that does not answer; requests that wait have to be aborted.",
            "重启无响应的一端；等待中的请求需要终止。",
        ),
        labels=_ENGINE,
        fires=History(
            {f"@pd_transfer_in_flight{{{_OF}}}": "3+0x60", f"@pd_transfer_latency_seconds_count{{{_OF}}}": "7+0x60"}
        ),
        silent=History(
            {f"@pd_transfer_in_flight{{{_OF}}}": "3+0x60", f"@pd_transfer_latency_seconds_count{{{_OF}}}": "0+1x60"}
        ),
    ),
    Alert(
        name="KvscopeTransferQueueGrows",
        severity="warning",
        expr=f"min by ({ENGINE_BY}) (min_over_time(@pd_transfer_queue_depth[10m])) > 0 and sum by ({ENGINE_BY}) "
        f"(@pd_transfer_queue_depth) > sum by ({ENGINE_BY}) (@pd_transfer_queue_depth offset 10m)",
        wait="5m",
        summary="Requests of engine {engine} queue for their transfers",
        description="On engine {engine} ({instance}) the queue of transfers was never empty for ten minutes, and it "
        "grows.",
        means=Text(
            "More KV is asked for than comes. It may be blocks that are missing here, and not the network.",
            "需要的 KV 多于到达的 KV。原因可能是本端缺少块，而不是网络。",
        ),
        look=Text(
            "kv_cache_usage_percent here, pd_transfer_latency_seconds, and the rate of pd_transfer_tokens_total.",
            "查看本端的 kv_cache_usage_percent、pd_transfer_latency_seconds 以及 pd_transfer_tokens_total 的速率。",
        ),
        then=Text(
            "Where the cache is full, decode is the bottleneck; where latency grows, the network or prefill is.",
            "若缓存已满，瓶颈在解码端；若时延增长，瓶颈在网络或预填充端。",
        ),
        labels=_ENGINE,
        fires=History({f"@pd_transfer_queue_depth{{{_OF}}}": "1+2x60"}),
        silent=History(
            {f"@pd_transfer_queue_depth{{{_OF}}}": "1 4 0 6 0 3 1 0 5 0 2 0 6 0 1 0 3 0 7 0 2 0 4 0 1 0 2 0 9 9 9"}
        ),
    ),
)
