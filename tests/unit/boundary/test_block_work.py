"""What a worker clears and copies reaches its observer, whichever runner it is and whoever's function it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from kvscope.boundary import block_work
from kvscope.boundary.ledger import OBSERVER
from unit.boundary.fakes import Told


class Copy(NamedTuple):
    src_block_id: int
    dst_block_id: int


class GPUModelRunner:
    def _zero_block_ids(self, block_ids: list[int]) -> None:
        """Clear them."""


class CPUModelRunner(GPUModelRunner):
    def _zero_block_ids(self, block_ids: list[int]) -> None:
        """Clear them in another way."""


def test_a_runner_says_by_which_seam_it_clears() -> None:
    told = Told()
    zeroer = SimpleNamespace()
    block_work.observe_block_work(GPUModelRunner(), told)
    block_work.observe_block_work(CPUModelRunner(), told)
    block_work.observe_block_work(SimpleNamespace(kv_block_zeroer=zeroer), told)
    block_work.observe_block_work(SimpleNamespace(kv_block_zeroer=None), told)
    assert [arguments for _, arguments in told.calls] == [
        ("runner_v1.zero", "runner_v1.copy"),
        ("runner_v1.zero_cpu", "runner_v1.copy"),
        ("runner_v2.zero", "runner_v2.copy"),
        (None, "runner_v2.copy"),
    ]
    assert getattr(zeroer, OBSERVER) is told


def test_what_was_cleared_and_copied_is_told_as_lists_of_its_own() -> None:
    told, blocks = Told(), [3, 4]
    block_work.after_zero(told, None, (blocks,), {}, None)
    block_work.after_zero(told, None, (), {"block_ids": blocks}, None)
    blocks.clear()
    hub: Any = Told(worker_of=lambda caches: told if caches == "caches" else None)
    block_work.after_copy(hub, ("caches", 8, [Copy(1, 2)]), {})
    block_work.after_copy(hub, (), {"kv_caches": "caches", "num_blocks": 8, "kv_cache_block_copies": [Copy(3, 4)]})
    block_work.after_copy(hub, ("another's", 8, [Copy(5, 6)]), {})
    assert told.calls == [
        ("on_cleared", ([3, 4],)),
        ("on_cleared", ([3, 4],)),
        ("on_copied", ([(1, 2)],)),
        ("on_copied", ([(3, 4)],)),
    ]
