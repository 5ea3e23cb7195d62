"""A connector of vLLM that promises KV, loads none of it within the step, and says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engines import BLOCK
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


@dataclass
class Blocks(KVConnectorMetadata):
    ids: list[int] = field(default_factory=list)


class Failing(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._plan, self._failed = Blocks(), set()  # type: ignore[var-annotated]
        self._tried: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        if request.request_id in self._tried:
            return 0, False
        return max(0, (request.num_tokens - 1) // BLOCK * BLOCK - computed), False

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        self._tried.add(request.request_id)
        if external:
            self._plan.ids += blocks.get_block_ids()[0][: external // BLOCK]

    def build_connector_meta(self, output: Any) -> KVConnectorMetadata:
        plan, self._plan = self._plan, Blocks()
        return plan

    def start_load_kv(self, context: Any, **more: Any) -> None:
        plan = self._get_connector_metadata()
        assert isinstance(plan, Blocks)
        self._failed.update(plan.ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **more: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
