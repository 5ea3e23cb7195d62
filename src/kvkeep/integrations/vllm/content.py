"""Which requests are kept: those whose KV is decided by what vLLM's block hashes contain.

The hashes contain token ids, an adapter's name and path, images and other media by their hashes,
and the cache salt. Whatever else a request brings may decide its KV, so such a request is neither
looked up nor stored: embeddings (two prompts that differ only in which positions are embeddings
have equal hashes), parameters of a pooler, and all fields that a later vLLM adds.

`Resets`: after a reset of vLLM's caches, KV of before it is not stored any more.

A trainer puts other weights into a running engine, and then resets its caches. Requests that run on
have KV of the old weights, and compute more from it. vLLM's own prefix cache keeps such KV as well,
if requests held pages during the reset. Both must not be stored under hashes that say nothing of
weights.

vLLM's hashes contain an adapter's name and path, which stay the same when the adapter is trained
again into the same files. So the identity of its files goes into the keys as well, taken at the
first request for the adapter. vLLM may have loaded the adapter earlier (``--lora-modules``,
``/v1/load_lora_adapter``): if its files were written after this process began, they may not be what
was loaded, and only this process finds KV of that adapter. If the files change later, it is unknown
which version is in use, and no KV of that adapter is stored until a restart.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.engine import EngineCoreRequest

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations import loaded
from kvkeep.integrations.vllm.groups import whole_hashes
from kvkeep.store.identity import model_identity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

    from kvkeep.integrations.vllm.stats import Counts

__all__ = ["Adapters", "RequestContent", "Resets"]


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


class Resets:
    """Tells which requests have KV of before the last reset.

    Such a request is stale until it ends or begins again from token 0 with KV that is newer.

    Thread safety: none; it belongs to the scheduler's thread. Cost: constant for each call, except
    `reset`, which looks at all requests.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._begun: dict[str, Request] = {}
        self._stale: set[str] = set()
        self._old_cache: object | None = None  # vLLM's prefix cache, if it has KV of before

    def bind(self, pool: BlockPool) -> None:
        """Take vLLM's pool of pages, which has its prefix cache."""
        self._pool = pool

    def begin(self, request: Request, local: int) -> None:
        """Note that a request begins, or begins again, behind ``local`` tokens of vLLM's cache."""
        self._begun[request.request_id] = request
        if local and self._old_cache is not None and self._cache() is self._old_cache:
            self._stale.add(request.request_id)
        else:
            self._stale.discard(request.request_id)

    def end(self, request_id: str) -> None:
        """Forget a request."""
        self._begun.pop(request_id, None)
        self._stale.discard(request_id)

    def is_stale(self, request_id: str) -> bool:
        """Return whether KV of the request may be of before the last reset, so is not stored."""
        return request_id in self._stale

    def reset(self) -> None:
        """Note a reset: requests with computed or loaded tokens are stale from now on."""
        self._begun = {
            name: request for name, request in self._begun.items() if not request.is_finished()
        }
        self._stale = {
            name for name, request in self._begun.items() if request.num_computed_tokens > 0
        }
        self._old_cache = None if self._emptied() else self._cache()

    def _emptied(self) -> bool:
        """Return whether vLLM has emptied its own cache: it does if no request holds pages."""
        if self._pool is None:
            return not self._stale
        used: int = self._pool.num_gpu_blocks - self._pool.get_num_free_blocks()
        return used == 1  # vLLM's null block

    def _cache(self) -> object:
        """Return vLLM's index of its prefix cache, which is another object after a reset."""
        return getattr(self._pool, "cached_block_hash_to_block", self)


_Files = tuple[tuple[str, int, int, int], ...]


class Adapters:
    """Digests of adapters, by their numbers. Thread safety: none; the scheduler's thread."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[str, _Files, bytes | None]] = {}

    def digest(self, adapter: LoRARequest) -> bytes | None:
        """Return the digest to mix into the adapter's keys; None if its KV cannot be stored."""
        path, number = str(adapter.lora_path), int(adapter.lora_int_id)
        files = _files(path)
        known = self._seen.get(number)
        if known is None:
            digest = self._first(adapter.lora_name, path, files)
            if adapter.load_inplace and digest is not None:
                _LOG.warning(
                    "LoRA %s is loaded in place, so it is not known which weights a request is "
                    "computed with; kvkeep does not store its KV", adapter.lora_name,
                )  # fmt: skip
                digest = None
            self._seen[number] = (path, files, digest)
            return digest
        if known[2] is not None and known[:2] != (path, files):
            _LOG.warning(
                "the files of LoRA %s changed while vLLM may still use the old ones; kvkeep does "
                "not store its KV until vLLM is restarted", adapter.lora_name,
            )  # fmt: skip
            self._seen[number] = (path, files, None)
            return None
        return known[2]

    def _first(self, name: str, path: str, files: _Files) -> bytes | None:
        reason = "it is not a local directory"
        if files:
            try:
                identity = model_identity(path)  # with alpha and rank in adapter_config.json
            except InvalidValue as error:
                reason = str(error)
            else:
                if changed := loaded.changed_since(Path(path), loaded.process_began()):
                    _LOG.info(
                        "%s was written after this process began: only this process will find KV "
                        "of LoRA %s", changed, name,
                    )  # fmt: skip
                    identity += secrets.token_hex(16)
                return hashlib.sha256(identity.encode()).digest()
        _LOG.warning("kvkeep does not store KV of LoRA %s (%s): %s", name, path, reason)
        return None

    @staticmethod
    def mixed(hashes: Sequence[bytes], digest: bytes) -> list[bytes]:
        """Return the hashes of blocks for one adapter. Cost: 0.5 µs each.

        Hashes that have not 32 bytes count as `whole_hashes` makes them, as beside public ones.
        """
        return [hashlib.sha256(digest + each).digest() for each in whole_hashes(hashes)]


def _files(path: str) -> _Files:
    """Return name, size, time and inode of an adapter's files; empty if it is no directory."""
    try:
        found = sorted(Path(path).iterdir())
        stats = [(file.name, file.stat()) for file in found if file.is_file()]
    except OSError:
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
