"""Which requests are kept: those whose KV is decided by what vLLM's block hashes contain.

The hashes contain token ids, an adapter's name and path, images and other media by their hashes,
and the cache salt. Whatever else a request brings may decide its KV, so such a request is neither
looked up nor stored: embeddings (two prompts that differ only in which positions are embeddings
have equal hashes), parameters of a pooler, and all fields that a later vLLM adds.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.engine import EngineCoreRequest

from kvkeep.integrations.vllm.adapters import Adapters

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from kvkeep.integrations.vllm.stats import Counts

__all__ = ["RequestContent"]

_LOG = logging.getLogger("kvkeep.vllm")
_HASHED: Final = {"prompt_token_ids", "mm_features", "lora_request", "cache_salt"}
# These decide what is sampled, or where and when a request runs, and no KV.
_NEUTRAL: Final = {
    "request_id", "external_req_id", "session_id", "client_index", "data_parallel_rank",
    "current_wave", "arrival_time", "priority", "trace_headers", "abort_immediately",
    "sampling_params", "pooling_params", "reasoning_ended", "reasoning_parser_kwargs", "kv_hints",
}  # fmt: skip
_DEFAULTS: Final = EngineCoreRequest.__struct_defaults__
_OTHERS: Final = {
    name: usual
    for name, usual in zip(
        EngineCoreRequest.__struct_fields__[-len(_DEFAULTS) :], _DEFAULTS, strict=True
    )
    if name not in _HASHED | _NEUTRAL
}
_WHY: Final = {
    "embeds": "its prompt has embeddings, whose positions are in no block hash of vLLM",
    "whole": "what it returns needs all its tokens computed (poolers as MEAN, routed experts)",
    "content": "vLLM's block hashes may not tell all that decides its KV",
    "adapter": "the weights of its LoRA are not known",
}


class RequestContent:
    """Decides which requests are kept, and counts the others by reason.

    Thread safety: none; it belongs to the scheduler's thread. Cost: a microsecond a request.
    """

    def __init__(self, vllm_config: VllmConfig, counts: Counts) -> None:
        self._counts = counts
        self._adapters = Adapters()
        self._logged: set[str] = set()
        model = vllm_config.model_config
        # vLLM's own condition for its prefix cache. A pooler over the whole prompt (MEAN, CLS,
        # STEP) ends the engine if states of some tokens were loaded instead of computed.
        pools = model.pooler_config is not None and not model.is_prefix_caching_supported
        returned = getattr(vllm_config, "aux_output_config", None)  # since 0.32
        self._whole = pools or (returned is not None and returned.enabled)

    def is_kept(self, request: Request) -> bool:
        """Return whether KV of ``request`` is stored and loaded; if not, count the request."""
        reason, field = "", ""
        if self._whole:
            reason = "whole"
        else:
            field = next(
                (name for name, usual in _OTHERS.items() if _given(request, name, usual)), ""
            )
            pooling = request.pooling_params
            if not field and pooling is not None and pooling.extra_kwargs:
                field = "pooling_params.extra_kwargs"
            if field:
                reason = "embeds" if "embeds" in field else "content"
        if reason:
            self._count(request, reason, field)
        return not reason

    def adapter(self, request: Request) -> bytes | None:
        """Return the digest of the LoRA weights of a request that has some, to mix into its keys.

        None if they are not known; the request is then not kept, and counted.
        """
        assert request.lora_request is not None
        digest = self._adapters.digest(request.lora_request)
        if digest is None:
            self._count(request, "adapter", "")
        return digest

    def _count(self, request: Request, reason: str, field: str) -> None:
        self._counts.add(**{f"unkept_{reason}": 1})
        if (reason + field) not in self._logged:
            self._logged.add(reason + field)
            _LOG.warning(
                "kvkeep neither stores nor loads KV of request %.100r: %s%s (further such requests "
                "are only counted, as unkept_%s)",
                request.request_id, _WHY[reason], f" ({field})" if field else "", reason,
            )  # fmt: skip


def _given(request: Request, name: str, usual: Any) -> bool:
    """Return whether the request has something in this field, which is usually ``usual``."""
    value = getattr(request, name, None)
    if isinstance(value, str | bytes | list | tuple | dict | set) and not value:
        return False
    alike = isinstance(value, bool | int | float | str | list | tuple | dict) and value == usual
    return value is not None and not alike
