"""Alerts about what the checks found, and about checks that do not run."""

from __future__ import annotations

from ..metric import Text
from .alert import Alert, History
from .recording import ENGINE_BY

_ENGINE = {"job": "kvscope", "instance": "a:9460", "engine": "0"}
_OF = 'job="kvscope",instance="a:9460",engine="0"'
_STEADY = "0+8x60"

GUARD_ALERTS = (
    Alert(
        name="KvscopeViolation",
        severity="critical",
        # A series that is first seen above zero has increased as well, though increase() cannot know it.
        expr=f"sum by ({ENGINE_BY}, reason) (increase(@guard_violations_total[5m])) > 0 or "
        f"sum by ({ENGINE_BY}, reason) (@guard_violations_total) > 0 unless "
        f"sum by ({ENGINE_BY}, reason) (@guard_violations_total offset 5m)",
        wait="0m",
        summary="KV cache finding {reason} on engine {engine}",
        description="kvscope has found {reason} on engine {engine} of {instance} within the last five minutes.",
        means=Text(
            "Two independent sources disagree about a block, a slot or a message, or a value breaks an invariant. With "
            "action raise the engine has stopped, with isolate requests were ended. It does not say that values in the "
            "cache are wrong: the device is not looked at.",
            "两个独立来源对某个块、槽位或消息的说法不一致，或某个值违反了不变量。动作为 raise 时引擎已停止，为 "
            "isolate 时相关请求已被终止。"
            "它并不说明缓存中的数值有错：kvscope 不查看设备内存。",
        ),
        look=Text(
            "`kvscope check DIR` shows the finding with both sides and the history of its block; `kvscope rules "
            "REASON` "
            "says what it does not prove; incident-1.jsonl beside the trace has the steps before it. With action raise "
            "the front end, and with it the exporter, ends within about five seconds, unless "
            "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH=1 keeps it: a Prometheus that scrapes less often misses the finding and "
            "only sees its target go down. `kvscope exporter DIR` exports what the run that is over has left.",
            "`kvscope check DIR` 会显示该发现的双方依据与块的历史；`kvscope rules REASON` 说明它不能证明什么；"
            "轨迹旁的 incident-1.jsonl 保存了此前的若干步。动作为 raise 时，前端及其导出器会在约五秒内退出"
            "（除非设置 VLLM_KEEP_ALIVE_ON_ENGINE_DEATH=1）：抓取间隔更长的 Prometheus 看不到该发现，只会看到目标下线。"
            "`kvscope exporter DIR` 可导出已结束的运行留下的数值。",
        ),
        then=Text(
            "Compare with the list of known defects of the host. If it is none of them, keep the run's folder and "
            "report it; restart the engine if it has stopped. The alert clears five minutes after the last finding.",
            "与已知的宿主缺陷列表对照。若不在其中，请保留该次运行的目录并上报；若引擎已停止则重启。"
            "最后一次发现五分钟后告警自动解除。",
        ),
        labels={**_ENGINE, "reason": "write_foreign_block"},
        fires=History({f'@guard_violations_total{{{_OF},reason="write_foreign_block"}}': "0+0x27 1+0x10"}),
        silent=History({f'@guard_violations_total{{{_OF},reason="write_foreign_block"}}': "0+0x5 1+0x50"}),
    ),
    Alert(
        name="KvscopeGuardNotRunning",
        severity="critical",
        expr=f"sum by ({ENGINE_BY}) (rate(@guard_rows_audited_total[5m])) == 0 and sum by ({ENGINE_BY}) "
        "(rate(@kv_block_alloc_total[5m])) > 0",
        wait="5m",
        summary="No row is audited on engine {engine} while it serves",
        description="Engine {engine} of {instance} hands out blocks, and for ten minutes no plan of it was judged.",
        means=Text(
            "Requests run and nothing of them is checked: no findings now means nothing. Where trace and guard are off "
            "the alert cannot fire, since nobody counts rows then.",
            "有请求在运行，但没有任何内容被检查：此时没有发现并不说明任何问题。若 trace 与 guard 均关闭则无人计行数，"
            "本告警不会触发。",
        ),
        look=Text(
            "guard_checks_skipped_total names the cause; hook_faults_total shows a hook that has switched itself off; "
            "`kvscope doctor` says which functions of this vLLM are not found.",
            "guard_checks_skipped_total 给出原因；hook_faults_total 显示已自行关闭的钩子；`kvscope doctor` 列出本 "
            "vLLM 中缺失的函数。",
        ),
        then=Text(
            "Where a hook is off, restart and report the fault. Where the semantics of a cache group cannot be judged, "
            "that is announced at start and no fault; `unsupported: refuse` makes such a start fail.",
            "若是钩子关闭，请重启并上报故障。若某个缓存组的语义无法判断，启动时会有说明，不属于故障；`unsupported: "
            "refuse` 可使此类启动失败。",
        ),
        labels=_ENGINE,
        fires=History({f"@guard_rows_audited_total{{{_OF}}}": "5+0x60", f"@kv_block_alloc_total{{{_OF}}}": _STEADY}),
        silent=History({f"@guard_rows_audited_total{{{_OF}}}": _STEADY, f"@kv_block_alloc_total{{{_OF}}}": _STEADY}),
    ),
    Alert(
        name="KvscopeCheckStalled",
        severity="critical",
        expr=f"max by ({ENGINE_BY}, check) (@guard_checks_stalled) == 1",
        wait="1m",
        summary="Check {check} stands still on engine {engine}",
        description="For 100 steps of work nothing reached check {check} in some process of engine {engine} "
        "({instance}).",
        means=Text(
            "The place in vLLM where this check looks is not passed any more, in one process at least.",
            "至少在一个进程中，vLLM 已不再经过该检查的观察点。",
        ),
        look=Text(
            "kv.coverage in the trace has the step at which it last fired; `kvscope info DIR` says which process.",
            "轨迹中的 kv.coverage 记录了它最后一次触发的步；`kvscope info DIR` 指出是哪个进程。",
        ),
        then=Text(
            "Another tool may have wrapped the same function (`kvscope doctor` names it), or vLLM takes another path "
            "with this configuration: report it with kv.enabled of that process.",
            "可能有其他工具包装了同一函数（`kvscope doctor` 会指出），或 vLLM 在此配置下走了另一条路径："
            "请连同该进程的 kv.enabled 一起上报。",
        ),
        labels={**_ENGINE, "check": "C1"},
        fires=History({f'@guard_checks_stalled{{{_OF},check="C1"}}': "0+0x10 1+0x50"}),
        silent=History({f'@guard_checks_stalled{{{_OF},check="C1"}}': "0+0x60"}),
    ),
    Alert(
        name="KvscopeCoverageLow",
        severity="warning",
        expr="engine:@guard_coverage_ratio:rate5m < 0.99",
        wait="10m",
        summary="Less than 99 % of the rows of engine {engine} are judged",
        description="For ten minutes more than 1 % of the rows of engine {engine} ({instance}) had no plan to judge.",
        means=Text(
            "A verdict on these minutes would be inconclusive. Rows of groups that are not judged by design count, "
            "too.",
            "对这段时间的结论将是不确定的。按设计不予判断的组的行也计算在内。",
        ),
        look=Text(
            "guard_checks_skipped_total with check plan, by cause.",
            "查看 guard_checks_skipped_total 中 check 为 plan 的各个原因。",
        ),
        then=Text(
            "ring_full and not_arrived mean that copies from the device fall behind: fewer requests at once, or "
            "report it. semantics means a kind of cache that no rule knows. no_plan means a hook that does not fire.",
            "ring_full 与 not_arrived 表示从设备拷回的数据跟不上：请减少并发或上报。semantics "
            "表示没有规则认识的缓存类型。no_plan 表示钩子未触发。",
        ),
        labels=_ENGINE,
        fires=History(
            {
                f"@guard_rows_audited_total{{{_OF}}}": "0+90x60",
                f'@guard_checks_skipped_total{{{_OF},check="plan",cause="ring_full"}}': "0+10x60",
            }
        ),
        silent=History(
            {
                f"@guard_rows_audited_total{{{_OF}}}": "0+1000x60",
                f'@guard_checks_skipped_total{{{_OF},check="C1",cause="estimated_lengths"}}': "0+1000x60",
            }
        ),
    ),
)
