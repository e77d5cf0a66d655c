"""A connector for vLLM whose loads never succeed: what a broken or emptied store does to a decoder.

    KVTransferConfig(kv_connector="LostLoads", kv_connector_module_path="kvscope.testing.connectors", kv_role="kv_both")

Source (0.32): ``vllm/distributed/kv_transfer/kv_connector/v1/base.py``.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

LOST_TOKENS = 64
"""How many tokens of a prompt are said to be elsewhere."""
LOST = "lost"
"""Requests whose names begin with it are those of which that is said, once each."""


class LoadsOfStep(KVConnectorMetadata):
    """``block_ids`` are to be filled before the step."""

    def __init__(self, block_ids: list[int]) -> None:
        self.block_ids = block_ids


class LostLoads(KVConnectorBase_V1):
    """Loads inside of the step, as most stores do, and reports each block of them as one that could not be loaded."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._asked: set[str] = set()
        self._loads: list[int] = []
        self._failed: set[int] = set()

    # In the scheduler -------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if not request.request_id.startswith(LOST) or request.request_id in self._asked:
            return 0, False
        return max(LOST_TOKENS - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._asked.add(request.request_id)
            self._loads += blocks.get_block_ids()[0][: LOST_TOKENS // self._block_size]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ARG002  vLLM's interface
        loads, self._loads = self._loads, []
        return LoadsOfStep(loads)

    # In the worker ----------------------------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002  vLLM's interface
        metadata = self._get_connector_metadata()
        if isinstance(metadata, LoadsOfStep):
            self._failed.update(metadata.block_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
