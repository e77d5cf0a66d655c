"""Two pools with the same face: one of dicts, which says what is right, and vLLM's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol

NULL = 0


class Pool(Protocol):
    """``hashes`` are names of contents: blocks with the same name are found by the same hash."""

    def allocate(self, count: int) -> list[int]: ...
    def touch(self, block_ids: list[int]) -> None: ...
    def retain(self, block_id: int) -> None: ...
    def free(self, block_ids: list[int]) -> None: ...
    def cache(self, block_ids: list[int], contents: list[str]) -> None: ...
    def move(self, source: int, destination: int) -> None: ...
    def evict(self, block_ids: list[int]) -> None: ...
    def reset(self) -> bool: ...
    def ref_counts(self) -> list[int]: ...
    def hash_counts(self) -> list[int]: ...
    def free_ids(self) -> list[int]: ...


class DictPool:
    def __init__(self, num_blocks: int) -> None:
        self.references = dict.fromkeys(range(num_blocks), 0)
        self.hashes: dict[int, set[str]] = {block: set() for block in range(num_blocks)}
        self.free_list = list(range(1, num_blocks))

    def allocate(self, count: int) -> list[int]:
        taken, self.free_list = self.free_list[:count], self.free_list[count:]
        for block in taken:
            self.references[block] = 1
            self.hashes[block].clear()
        return taken

    def touch(self, block_ids: list[int]) -> None:
        for block in block_ids:
            self.references[block] += 1
        self.free_list = [block for block in self.free_list if block not in block_ids]

    def retain(self, block_id: int) -> None:
        self.references[block_id] += 1

    def free(self, block_ids: list[int]) -> None:
        for block in block_ids:
            self.references[block] -= 1
            if not self.references[block]:
                self.free_list.insert(len(self.free_list) if self.hashes[block] else 0, block)

    def cache(self, block_ids: list[int], contents: list[str]) -> None:
        for block, content in zip(block_ids, contents, strict=True):
            self.hashes[block] = {content}

    def move(self, source: int, destination: int) -> None:
        self.hashes[destination], self.hashes[source] = self.hashes[source], set()

    def evict(self, block_ids: list[int]) -> None:
        for block in block_ids:
            self.hashes[block] = set()

    def reset(self) -> bool:
        if len(self.free_list) == len(self.references) - 1:
            self.hashes = {block: set() for block in self.hashes}
            return True
        return False

    def ref_counts(self) -> list[int]:
        return list(self.references.values())

    def hash_counts(self) -> list[int]:
        return [len(hashes) for hashes in self.hashes.values()]

    def free_ids(self) -> list[int]:
        return list(self.free_list)


class VllmPool:
    """``BlockPool`` behind the same face. Blocks are hashed one at a time, as a block that has just become full."""

    def __init__(self, num_blocks: int) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.pool = BlockPool(num_gpu_blocks=num_blocks, enable_caching=True, hash_block_size=16)

    def _blocks(self, block_ids: list[int]) -> list[Any]:
        return [self.pool.blocks[block] for block in block_ids]

    def allocate(self, count: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(count)]

    def touch(self, block_ids: list[int]) -> None:
        self.pool.touch(self._blocks(block_ids))

    def retain(self, block_id: int) -> None:
        self.pool.blocks[block_id].ref_cnt += 1  # as _apply_cow does

    def free(self, block_ids: list[int]) -> None:
        self.pool.free_blocks(iter(self._blocks(block_ids)))

    def cache(self, block_ids: list[int], contents: list[str]) -> None:
        hashes = [content.encode() for content in contents]
        self.pool.cache_full_blocks(
            request=SimpleNamespace(block_hashes=hashes),
            blocks=self._blocks(block_ids),
            num_cached_blocks=0,
            num_full_blocks=len(block_ids),
            block_size=16,
            kv_cache_group_id=0,
        )

    def move(self, source: int, destination: int) -> None:
        self.pool.move_block_hashes(*self._blocks([source, destination]))

    def evict(self, block_ids: list[int]) -> None:
        self.pool.evict_blocks(set(block_ids))

    def reset(self) -> bool:
        done: bool = self.pool.reset_prefix_cache()
        return done

    def ref_counts(self) -> list[int]:
        return [block.ref_cnt for block in self.pool.blocks]

    def hash_counts(self) -> list[int]:
        more = self.pool.cached_block_hashes_by_block
        return [int(block.block_hash is not None) + len(more.get(block.block_id, ())) for block in self.pool.blocks]

    def free_ids(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
