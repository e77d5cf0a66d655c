"""How much of what was asked of the prefix cache was there: totals, and the ratio of the last while."""

from __future__ import annotations

from collections import deque

import msgspec

_SAMPLES = 120
"""A window is looked at in so many parts: what it covers is right to one of them."""


class Reuse(msgspec.Struct, frozen=True, gc=False):
    """Totals since start: prompt tokens looked up, those that were there, and the same in blocks that hold them."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    queried_blocks: int = 0
    hit_blocks: int = 0

    def admitted(self, prompt_tokens: int, hit_tokens: int, block_size: int) -> Reuse:
        """The totals with one request more. A block counts where a token of the prompt, or of the hit, is in it."""
        return Reuse(
            self.queried_tokens + prompt_tokens,
            self.hit_tokens + hit_tokens,
            self.queried_blocks - (-prompt_tokens // block_size),
            self.hit_blocks - (-hit_tokens // block_size),
        )


class HitRatio:
    """Hits divided by queries over the last ``window`` seconds."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._samples: deque[tuple[float, Reuse]] = deque()

    def take(self, now: float, totals: Reuse) -> tuple[float | None, float | None]:
        """The ratio by token and by block at ``now`` seconds of any steady clock, None where nothing was queried. To be
        called again and again, with totals that only grow.
        """
        samples = self._samples
        if not samples:
            samples.append((now, Reuse()))
        elif now - samples[-1][0] >= self._window / _SAMPLES:
            samples.append((now, totals))
        while len(samples) > 1 and samples[1][0] <= now - self._window:
            samples.popleft()
        before = samples[0][1]
        return (
            _ratio(totals.hit_tokens - before.hit_tokens, totals.queried_tokens - before.queried_tokens),
            _ratio(totals.hit_blocks - before.hit_blocks, totals.queried_blocks - before.queried_blocks),
        )


def _ratio(hits: int, queries: int) -> float | None:
    return hits / queries if queries else None
