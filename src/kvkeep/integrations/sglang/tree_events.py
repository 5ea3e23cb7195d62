"""`Placements`: SGLang's own events of which blocks are on the GPU, for routers."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from sglang.srt.disaggregation.kv_events import (
    BlockRemoved,
    BlockStored,
    StorageMedium,
    kv_event_namespace_seed,
    namespaced_block_hash,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder

if TYPE_CHECKING:
    import numpy.typing as npt
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from kvkeep.core.pages.tables import PageArray

__all__ = ["Placements", "Space"]

_DIGEST = 32
_WIDE = b"\xff"  # before the tokens of a page that has one beyond 32 bits


class Space(NamedTuple):
    """The namespace of a request in SGLang's words."""

    extra_key: str | None
    cache_salt: str | None


class Placements:
    """Records ``BlockStored`` and ``BlockRemoved`` for `KVKeepTree`, as SGLang's trees do.

    Hashes are SHA-256 chained over the tokens of pages, as SGLang computes them; they are kept by
    page number, so a removal hashes nothing. Without KV events in the server's settings every call
    does nothing.

    Thread safety: none. Cost: about 0.6 µs a stored page of 16 tokens. Memory: 40 bytes a page.
    """

    def __init__(self, params: CacheInitParams) -> None:
        self.recorder = KVCacheEventRecorder(
            enabled=params.enable_kv_cache_events,
            page_size=params.page_size,
            dynamo_format=params.dynamo_kv_event_format,
            lora_names=params.kv_event_lora_names,
        )
        self._page_size: int = params.page_size
        self._pairs: bool = params.is_eagle
        self._digests = np.empty((0, _DIGEST), np.uint8)
        self._published = np.empty(0, np.int64)

    def stored(self, symbols: bytes, pages: PageArray, parent: int, space: Space) -> None:
        """Record pages that were stored behind page ``parent``, -1 for none."""
        recorder = self.recorder
        if not recorder.enabled or not len(pages):
            return
        self._reserve(int(pages.max()))
        names = recorder.lora_names
        seed = self._seed(space)
        digests = self._chain(
            symbols, self._digests[parent].tobytes() if parent >= 0 else None, space
        )
        hashes = np.frombuffer(digests, ">i8").reshape(-1, _DIGEST // 8)[:, 0].tolist()
        if seed is not None:
            hashes = [namespaced_block_hash(one, namespace_seed=seed) for one in hashes]
        self._digests[pages] = np.frombuffer(digests, np.uint8).reshape(-1, _DIGEST)
        self._published[pages] = hashes
        recorder.enqueue(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=int(self._published[parent]) if parent >= 0 else None,
                token_ids=self._tokens(symbols),
                block_size=self._page_size,
                lora_id=None,
                medium=StorageMedium.GPU,
                cache_salt=space.cache_salt,
                lora_name=(
                    names.resolve(space.extra_key)
                    if recorder.dynamo_format
                    else names.get(space.extra_key)
                ),
            )
        )

    def removed(self, pages: PageArray) -> None:
        """Record pages that were evicted."""
        if self.recorder.enabled and len(pages):
            hashes = self._published[pages].tolist()
            self.recorder.enqueue(BlockRemoved(block_hashes=hashes, medium=StorageMedium.GPU))

    def _seed(self, space: Space) -> bytes | None:
        extra, salt = space
        if not self.recorder.dynamo_format:
            named = self.recorder.lora_names.get(extra) is not None
            extra, salt = (extra if named else None), None
        seed: bytes | None = kv_event_namespace_seed(extra_key=extra, cache_salt=salt)
        return seed

    def _chain(self, symbols: bytes, parent: bytes | None, space: Space) -> bytes:
        """Return the digests of pages, 32 bytes each, one after the other."""
        if parent is None and space.cache_salt is not None:
            parent = hashlib.sha256(b"sglang-cache-salt-v1\0" + space.cache_salt.encode()).digest()
        words = self._rows(symbols)
        if self._pairs:
            words = np.stack((words[:, :-1], words[:, 1:]), axis=2).reshape(len(words), -1)
        wide = np.any(words >> 32, axis=1).tolist()
        narrow = words.astype("<u4").tobytes()
        size = words.shape[1] * 4
        sha256 = hashlib.sha256
        above = parent or b""
        digests: list[bytes] = []
        for at in range(len(words)):
            if wide[at]:
                page = _WIDE + words[at].astype("<u8").tobytes()
            else:
                page = narrow[at * size : at * size + size]
            above = sha256(above + page).digest()
            digests.append(above)
        return b"".join(digests)

    def _tokens(self, symbols: bytes) -> list[int] | list[tuple[int, int]]:
        rows = self._rows(symbols)
        if not self._pairs:
            tokens: list[int] = rows.reshape(-1).tolist()
            return tokens
        firsts, seconds = rows[:, :-1].reshape(-1).tolist(), rows[:, 1:].reshape(-1).tolist()
        return list(zip(firsts, seconds, strict=True))

    def _rows(self, symbols: bytes) -> npt.NDArray[np.int64]:
        """Return the tokens of pages, a page a row; of pairs, one token more."""
        return np.frombuffer(symbols, np.int64).reshape(-1, self._page_size + self._pairs)

    def _reserve(self, page: int) -> None:
        if page >= len(self._published):
            more = max(page + 1, 2 * len(self._published))
            digests, published = self._digests, self._published
            self._digests = np.empty((more, _DIGEST), np.uint8)
            self._published = np.empty(more, np.int64)
            self._digests[: len(digests)] = digests
            self._published[: len(published)] = published
