"""The ledger of a pool beside vLLM's own ``BlockPool``."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from tests.budget import examples

from unit.state.block_lives import BlockLives
from unit.state.pools import VllmPool

pytest.importorskip("vllm.v1.core.block_pool", reason="vLLM is not installed")


class LivesInVllm(BlockLives):
    make_pool = VllmPool


TestLivesInVllm = LivesInVllm.TestCase
TestLivesInVllm.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
