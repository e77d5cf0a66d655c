"""The texts of docs/configuration.md in Simplified Chinese, by what they are in English.

English stands in the code, beside what it describes, and the page is made from there in both languages. A text that is
changed there has no translation any more, which fails the generator and its test; so does a translation here that
nobody asks for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TEXTS: Mapping[str, str] = {
    # Around the settings
    "Configuration": "配置",
    "Everything is off until a key of vLLM's `--additional-config` (in Python: `additional_config`) switches it on:": (
        "默认全部关闭，由 vLLM 的 `--additional-config`（Python 中为 `additional_config`）中的键开启："
    ),
    "A key holds an object. An unknown field, a wrong type or a value out of range stops the start before the model "
    "loads, with the full name of the setting and what is allowed, also in a part that is off. Top-level keys other "
    "than those below are left alone, since they may be another plugin's; one that looks like a misspelled key of "
    "kvscope is named by a warning in vLLM's log.": (
        "每个键的值都是一个对象。未知字段、类型错误或超出范围的值会在加载模型之前中止启动，并给出该设置的完整名称与允许的取值；"
        "未开启的部分同样如此。下列之外的顶层键可能属于其他插件，不予处理；若某个键像是 kvscope 键的误拼，"
        "vLLM 的日志中会有一条警告指出。"
    ),
    "What is marked **not in this version** is validated, and nothing acts on it. The first record of every trace "
    "file, `kv.enabled`, says what is on, and which checks do not run and why.": (
        "标有**本版本不提供**的设置只做校验，不起作用。每个轨迹文件的第一条记录 `kv.enabled` "
        "说明开启了什么、哪些检查没有运行以及原因。"
    ),
    "The keys": "各个键",
    "key": "键",
    "what it is for": "用途",
    "in this version": "本版本",
    "**not in this version**": "**本版本不提供**",
    "works": "可用",
    "check": "检查",
    "field": "字段",
    "type": "类型",
    "default": "默认值",
    "allowed": "允许的取值",
    "meaning": "含义",
    "**Not in this version.** Switched on, it is `inactive: not in this version` in `kv.enabled`. With no other part "
    "on, a trace is recorded in which nothing is judged: `kvscope check` says *inconclusive*.": (
        "**本版本不提供。** 开启后，它在 `kv.enabled` 中为 `inactive: not in this version`。"
        "若没有开启其他部分，则会记录一份未作任何判断的轨迹：`kvscope check` 给出 *inconclusive*（无定论）。"
    ),
    "What a finding does": "发现会引起什么",
    "A finding takes the action of the part that its check belongs to:": "发现按其检查所属的部分采取动作：",
    "part": "部分",
    "Environment variables": "环境变量",
    "variable": "变量",
    "what it does": "作用",
    "Neither can switch anything on.": "两者都不能开启任何功能。",
    "Full example": "完整示例",
    "Every setting, as the command at the top leaves it:": "执行页首命令后全部设置的取值：",
    "This page": "关于本页",
    "It is made from the code (`src/kvscope/settings.py`), and a unit test fails while it is out of date:": (
        "本页由代码（`src/kvscope/settings.py`）生成；内容过期时会有一个单元测试失败："
    ),
    "`{name}`: as in {where}.": "`{name}`：同 {where}。",
    # Types
    "boolean": "布尔值",
    "string": "字符串",
    "string or null": "字符串或 null",
    "integer": "整数",
    "number": "数字",
    "list": "列表",
    # kv_trace, kv_guard_config
    "what the scheduler declares, and whether attention is handed the same.": (
        "调度器声明了什么，以及交给注意力的是否与之相同。"
    ),
    "whether blocks are used by their owner, in order, and after they were written.": (
        "块是否由其所有者、按正确的顺序、在写入之后使用。"
    ),
    "switches the part on": "开启该部分",
    "what a finding of this part does": "该部分的发现会引起什么",
    "the finding is recorded, one line goes to vLLM's log (unless `kv_output.log` is `off`), and the engine goes on; "
    "if the access is outside the cache and may crash it, the record is on disk before the launch": (
        "记录该发现，向 vLLM 的日志写一行（`kv_output.log` 为 `off` 时除外），引擎继续运行；"
        "若访问位于缓存之外并可能使进程崩溃，则在启动计算之前先把记录写入磁盘"
    ),
    "recorded and logged as well; the result of the faulty step is withheld, and the engine stops until its process is "
    "started anew; an access outside the cache is not even launched": (
        "同样记录并写入日志；扣下出错那一步的结果，引擎停止，直到其进程重新启动；缓存之外的访问根本不会启动"
    ),
    "recorded and logged as well; only the requests that the finding names, and those that have the damaged block, end "
    "with finish reason `error`, without the faulty step's token; their blocks are held back until the prefix cache is "
    "reset. The engine stops as with `raise` where more than 5 % of the pool would be held back, where a pooling "
    "request or a session would have to end, and, with `kv_output.request_ids` = `omitted`, for what a worker in a "
    "process of its own has found. A finding that names no request is only logged": (
        "同样记录并写入日志；只有发现所指的请求以及拥有受损块的请求以结束原因 `error` 结束，"
        "且不给出出错那一步的 token；它们的块会被扣住，直到前缀缓存被重置。"
        "以下情况引擎像 `raise` 那样停止：被扣住的块将超过块池的 5 %；"
        "必须结束的是池化请求或会话；以及 `kv_output.request_ids` = `omitted` 时由独立进程中的 worker 发现。"
        "未指明请求的发现只写入日志"
    ),
    "what happens where a check cannot judge a cache group": "检查无法判断某个缓存组时如何处理",
    "the check is skipped for that cache group, and its rows are counted as skipped": (
        "对该缓存组跳过此检查，其行计为已跳过"
    ),
    "start-up fails and names the group, what it is and the checks that could not run; so it does where this vLLM "
    "lacks a function that a check needs": (
        "启动失败，并指出该组、它的类型以及无法运行的检查；当前 vLLM 缺少某项检查所需的函数时也是如此"
    ),
    # kv_monitor
    "metrics, in a file of each process, and their exporter.": "指标（每个进程一个文件）及其导出器。",
    "address that the exporter listens on": "导出器监听的地址",
    "port of the exporter, the next free one where it is taken; an EngineCore that exports, as no front end is on its "
    "host, adds its data-parallel rank": (
        "导出器的端口，被占用时取下一个空闲端口；若 EngineCore 所在主机没有前端而由它导出，则再加上其数据并行 rank"
    ),
    "path that the exporter answers on": "导出器应答的路径",
    "the metrics are rendered at most once in this time": "在这段时间内最多渲染一次指标",
    "start of every metric's name": "每个指标名称的开头",
    "time over which the hit ratio is taken": "计算命中率所用的时间窗口",
    "writes one JSON line of aggregates into vLLM's log per scrape_interval": (
        "每个 scrape_interval 向 vLLM 的日志写一行 JSON 汇总"
    ),
    # kv_transfer
    "offload, P/D transfers and recoveries. (vLLM's own kv-transfer-config sets up the connector.)": (
        "卸载、P/D 传输与恢复。（连接器由 vLLM 自身的 kv-transfer-config 设置。）"
    ),
    "folder for copy descriptors; none are written without it (needs evidence_label)": (
        "存放拷贝描述符的文件夹；不设置则不写（需要 evidence_label）"
    ),
    "what the descriptors are evidence of (needs descriptor_dir)": "这些描述符是何种证据（需要 descriptor_dir）",
    "copied by an engine that served requests": "由正在服务请求的引擎拷贝",
    "replayed from a recording": "由记录重放",
    "simulated": "模拟所得",
    "transfers under way that are kept": "保留的进行中传输数",
    "admissions that are kept": "保留的接纳数",
    "memory regions that are kept": "保留的内存区域数",
    # kv_output
    "where records go, and how much is kept.": "记录写到哪里，以及保留多少。",
    "output folder; a relative one starts where the front end was started": (
        "输出文件夹；相对路径以启动前端的位置为起点"
    ),
    "how much of what happened is recorded": "记录的详细程度",
    "every field, block tables and slots spelled out step by step; every check can be replayed": (
        "全部字段，逐步写出块表与槽位；所有检查都可重放"
    ),
    "what suffices to replay every check": "足以重放所有检查的内容",
    "findings, errors and coverage only, with the last steps before a finding in `incident-<n>.jsonl`; such a trace "
    "cannot be replayed, and `kvscope check` says *inconclusive* (exit code 3)": (
        "只有发现、错误与覆盖情况，发现之前的最后若干步写入 `incident-<n>.jsonl`；这样的轨迹无法重放，"
        "`kvscope check` 给出 *inconclusive*（无定论，退出码 3）"
    ),
    "which records also go to vLLM's log, one line each": "哪些记录同时写入 vLLM 的日志，每条一行",
    "none; what kvscope says about itself, and that `raise` stops the engine, is logged all the same": (
        "都不写；kvscope 关于自身的消息以及 `raise` 停止引擎的消息仍会写入"
    ),
    "findings": "发现",
    "every record": "全部记录",
    "word at the start of those lines": "这些行开头的词",
    "records that may wait for the writer; what comes on top is dropped and counted": (
        "可等待写线程的记录数；超出的部分被丢弃并计数"
    ),
    "bytes that may wait for the writer; what comes on top is dropped and counted": (
        "可等待写线程的字节数；超出的部分被丢弃并计数"
    ),
    "bytes that the flight recorder keeps in memory": "飞行记录器在内存中保留的字节数",
    "modules to import in front end, EngineCore and workers, once any part is on; each registers what it has with "
    "`kvscope.monitor`": (
        "任一部分开启后，在前端、EngineCore 与各 worker 中导入的模块；每个模块通过 `kvscope.monitor` 注册自己的内容"
    ),
    "size at which a file is closed and the next one begun": "文件达到该大小后关闭并开始下一个",
    "files that a process keeps; older ones are deleted, and how many is recorded": (
        "每个进程保留的文件数；更早的会被删除，并记录删除了多少"
    ),
    "steps that the flight recorder keeps, to be written to `incident-<n>.jsonl` with a finding": (
        "飞行记录器保留的步数，出现发现时写入 `incident-<n>.jsonl`"
    ),
    "how request ids stand in records": "请求 ID 在记录中的写法",
    "as they are; a client can choose them": "原样写出；客户端可以自选请求 ID",
    "16 hex digits, from a hash whose key is made anew for every run and written nowhere": (
        "16 位十六进制数，取自哈希；其密钥每次运行重新生成，不写入任何地方"
    ),
    "null; requests cannot be told apart, so `kvscope check` says *inconclusive* (exit code 3)": (
        "null；无法区分各个请求，因此 `kvscope check` 给出 *inconclusive*（无定论，退出码 3）"
    ),
    # Checks
    "token destination: the slot of every scheduled token is where the declaration puts it": (
        "token 去向：每个已调度 token 的槽位都在声明所指的位置"
    ),
    "generation: no block is used through a reference from before it was freed": (
        "代次：任何块都不会通过其被释放之前的引用而被使用"
    ),
    "ownership: the block belongs to the request, alone or by a counted share": (
        "归属：块属于该请求，独占或按引用计数共享"
    ),
    "logical order: logical block i is the i-th declared block": "逻辑顺序：第 i 个逻辑块就是声明的第 i 个块",
    "initialized prefix: nothing reads, hits, stores or overwrites what was not written in this generation": (
        "已初始化的前缀：不会读取、命中、存储或覆盖本代次中未写入的内容"
    ),
    "null block: no real token is written to, none inside the visible window read from, the null block": (
        "空块：不会向空块写入真实 token，也不会在可见窗口内从空块读取"
    ),
    "lifecycle and mapping: messages between scheduler, worker and results agree": (
        "生命周期与映射：调度器、worker 与结果之间的消息一致"
    ),
    "allocator: the pool's own book-keeping": "分配器：块池自身的记账",
    "transfer: every transfer begins once, ends once per rank, and moves what was declared": (
        "传输：每次传输开始一次，每个 rank 结束一次，搬运的正是所声明的内容"
    ),
    # Environment variables
    "`1` switches everything off, and even skips the validation of the configuration": (
        "设为 `1` 时关闭一切，连配置校验也跳过"
    ),
    "overrides `kv_output.dir` without changing vLLM's compile-cache key": (
        "覆盖 `kv_output.dir`，且不改变 vLLM 的编译缓存键"
    ),
}

ALLOWED: Mapping[str, str] = {
    r"(.+) or null": r"\1，或 null",
    r"true or false": "true 或 false",
    r"one of (.+)": r"\1 之一",
    r"an integer from (\d+) to (\d+)": r"\1 到 \2 的整数",
    r"a number of seconds from ([\d.]+) to (\d+)": r"\1 到 \2 的秒数",
    r"a host name or address of 1 to 255 visible ASCII characters": "1 到 255 个可见 ASCII 字符的主机名或地址",
    r"a path that starts with '/', of at most 255 URL characters": "以 '/' 开头、至多 255 个 URL 字符的路径",
    r"1 to 64 letters, digits, '_' and ':', the first of them no digit": (
        "1 到 64 个字母、数字、'_' 与 ':'，首字符不能是数字"
    ),
    r"a path of 1 to 4096 characters, no control characters among them": "1 到 4096 个字符的路径，不含控制字符",
    r"1 to 64 visible ASCII characters, no spaces": "1 到 64 个可见 ASCII 字符，不含空格",
    r"a list of at most (\d+) module names": r"至多 \1 个模块名的列表",
}
"""What a setting accepts, which its kind says: regular expressions, and what they become; the first that fits."""


class Chinese:
    """``texts`` stand in ``source``. ``asked`` are those that were asked for, so that a test can name those that nobody
    needs any more.
    """

    def __init__(self, texts: Mapping[str, str] = TEXTS, source: str = "configuration_zh.py") -> None:
        self.texts = texts
        self.source = source
        self.asked: set[str] = set()

    def text(self, english: str) -> str:
        """The translation.

        Raises:
            LookupError: there is none.
        """
        if english not in self.texts:
            raise LookupError(f"scripts/{self.source} has no translation of {english!r}")
        self.asked.add(english)
        return self.texts[english]

    def allowed(self, english: str) -> str:
        """What a setting accepts.

        Raises:
            LookupError: nobody knows such a kind of setting in Chinese.
        """
        for pattern, chinese in ALLOWED.items():
            found = re.fullmatch(pattern, english)
            if found is not None:
                self.asked.add(pattern)
                inner = self.allowed(found[1]) if pattern.startswith("(.+)") else None
                return f"{inner}，或 null" if inner is not None else found.expand(chinese)
        raise LookupError(f"scripts/configuration_zh.py has no translation of what is allowed: {english!r}")
