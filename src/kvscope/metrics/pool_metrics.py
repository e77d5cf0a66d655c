"""Metrics of the block pool that attention uses: how full it is, and what it does."""

from __future__ import annotations

from .labels import BLOCK_STATE, GROUP, HOLD_CAUSE
from .metric import Metric, Text

POOL_METRICS = (
    Metric(
        name="kv_cache_usage_percent",
        kind="gauge",
        unit="percent",
        section="pool",
        feeder="pool",
        combine="one",
        required=True,
        meaning=Text(
            "vLLM's own KV cache usage of this engine, times 100: blocks with a reference, of all blocks but the null "
            "block.",
            "本引擎中 vLLM 自身的 KV 缓存使用率乘以 100：有引用的块占除空块外全部块的百分比。",
        ),
        not_read_as=Text(
            "the share of tokens stored (kv_token_fill_ratio), nor of cached content: a cached block without a "
            "reference counts as free here. Percentages of several engines must not be added.",
            "已存 token 的占比（见 kv_token_fill_ratio），也不是缓存内容的占比：没有引用的已缓存块在此按空闲计。"
            "多个引擎的百分比不能相加。",
        ),
    ),
    Metric(
        name="kv_blocks",
        kind="gauge",
        unit="blocks",
        section="pool",
        feeder="pool",
        combine="one",
        labels=(BLOCK_STATE, HOLD_CAUSE),
        series=(
            ("free", ""),
            ("used", ""),
            ("cached", ""),
            ("null", ""),
            *(("held", cause) for cause in HOLD_CAUSE.values),
        ),
        meaning=Text(
            "Blocks of the pool by state; all states together are the pool. free: no reference, no hash. cached: no "
            "reference, hashed. used: owned by a live request, receives in progress included. held: referenced, but "
            "owned by no running request; its cause says why (deferred free, connector, isolated). null: the null "
            "block.",
            "按状态统计的块数，各状态之和即整个块池。free：无引用、无哈希。cached：无引用、有哈希。used："
            "归存活请求所有，包括正在接收的块。"
            "held：有引用但不归任何运行中的请求，cause 说明原因（延迟释放、连接器、隔离）。null：空块。",
        ),
        not_read_as=Text(
            "memory that is occupied: the pool's memory is taken once at start. cached is no shortage: such a block is "
            "handed out like a free one.",
            "占用的内存：块池内存在启动时一次性分配。cached 不表示不足：这类块与空闲块一样可以分配。",
        ),
    ),
    Metric(
        name="kv_token_fill_ratio",
        kind="gauge",
        unit="ratio",
        section="pool",
        feeder="pool",
        combine="one",
        labels=(GROUP,),
        meaning=Text(
            "Tokens stored, divided by slots allocated, over the used blocks of one KV-cache group (0 to 1).",
            "单个 KV 缓存组的 used 块中，已存 token 数除以已分配槽位数（0 到 1）。",
        ),
        not_read_as=Text(
            "how full the pool is. A low value means slots that are allocated ahead or at the end of sequences; a "
            "block that several requests share counts once.",
            "块池的占用程度。数值低表示有预先分配的槽位或序列末尾的空槽；多个请求共享的块只计一次。",
        ),
    ),
    Metric(
        name="kv_block_alloc_total",
        kind="counter",
        unit="blocks",
        section="pool",
        feeder="pool",
        combine="sum",
        required=True,
        meaning=Text(
            "Blocks that got their first reference: handed out by the pool (BlockPool.get_new_blocks), or taken back "
            "out "
            "of the cache by a hit. Minus kv_block_free_total it is the number of blocks that are referenced now.",
            "获得首个引用的块数：由块池分配（BlockPool.get_new_blocks），或因命中而从缓存取回。"
            "减去 kv_block_free_total 即为当前被引用的块数。",
        ),
        not_read_as=Text(
            "references taken (a hit on a block that somebody uses adds one and allocates nothing), nor pressure: a "
            "short prompt allocates and frees as well.",
            "新增的引用数（命中正被使用的块只增加引用而不分配）；也不反映压力：短提示同样会分配与释放。",
        ),
    ),
    Metric(
        name="kv_block_free_total",
        kind="counter",
        unit="blocks",
        section="pool",
        feeder="pool",
        combine="sum",
        required=True,
        meaning=Text(
            "Blocks whose last reference was released.",
            "最后一个引用被释放的块数。",
        ),
        not_read_as=Text(
            "calls that free, nor references released (kv_refs_released_total). A freed block may keep its content as "
            "cached.",
            "释放调用的次数，也不是释放的引用数（见 kv_refs_released_total）。被释放的块仍可作为 cached 保留内容。",
        ),
    ),
    Metric(
        name="kv_refs_released_total",
        kind="counter",
        unit="references",
        section="pool",
        feeder="pool",
        combine="sum",
        meaning=Text(
            "References to blocks that were released, whether or not others remained.",
            "被释放的块引用数，无论该块是否还有其他引用。",
        ),
        not_read_as=Text(
            "blocks that became available (kv_block_free_total).",
            "变为可用的块数（见 kv_block_free_total）。",
        ),
    ),
    Metric(
        name="kv_block_touch_total",
        kind="counter",
        unit="references",
        section="pool",
        feeder="pool",
        combine="sum",
        meaning=Text(
            "References added to blocks that had content already (BlockPool.touch): prefix hits, pins and copies.",
            "为已有内容的块新增的引用数（BlockPool.touch）：前缀命中、固定与复制。",
        ),
        not_read_as=Text(
            "hits of requests (prefix_cache_hits_total): a request that is preempted and comes back touches again, and "
            "each group touches for itself.",
            "请求的命中数（见 prefix_cache_hits_total）：被抢占后恢复的请求会再次触碰，且每个组各自触碰。",
        ),
    ),
    Metric(
        name="kv_block_evict_total",
        kind="counter",
        unit="blocks",
        section="pool",
        feeder="pool",
        combine="sum",
        meaning=Text(
            "Cached blocks that lost their content's hash, because they were handed out anew or evicted.",
            "因重新分配或被驱逐而失去内容哈希的已缓存块数。",
        ),
        not_read_as=Text(
            "preemptions, or running requests that lost blocks: only blocks without a reference are evicted. A reset "
            "of the prefix cache is not counted.",
            "抢占次数或运行中请求丢失的块数：只有没有引用的块才会被驱逐。重置前缀缓存不计入。",
        ),
    ),
    Metric(
        name="kv_deferred_free_blocks",
        kind="gauge",
        unit="blocks",
        section="pool",
        feeder="pool",
        combine="one",
        meaning=Text(
            "Blocks that nobody uses any more and whose release waits for a step that is still running.",
            "已无人使用、但要等仍在运行的步结束才释放的块数。",
        ),
        not_read_as=Text(
            "a leak: they are released within a few steps. One that only grows is one.",
            "泄漏：它们会在几步之内释放。只有持续增长才是泄漏。",
        ),
    ),
)
