"""Random lives of blocks in vLLM's own ``BlockPool``: nothing is found but what is changed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from tests.budget import examples

from unit.checks.test_pool_lives import JudgedLives
from unit.state.pools import VllmPool

pytest.importorskip("vllm.v1.core.block_pool", reason="vLLM is not installed")


class JudgedLivesInVllm(JudgedLives):
    make_pool = VllmPool


TestJudgedLivesInVllm = JudgedLivesInVllm.TestCase
TestJudgedLivesInVllm.settings = settings(
    max_examples=examples(40), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
