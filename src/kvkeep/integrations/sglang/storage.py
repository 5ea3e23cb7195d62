"""`KVKeepStorage`: what SGLang calls."""

from __future__ import annotations

import atexit
import functools
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolTransferResult,
)

from kvkeep.core.errors import KVKeepError
from kvkeep.integrations.sglang.naming import is_replicated, namespace_of, page_keys, pool_digest
from kvkeep.integrations.sglang.options import StorageOptions
from kvkeep.integrations.sglang.pages import HostPages, bytes_of, first_tokens, pages_of
from kvkeep.integrations.sglang.sidecars import restorable_prefixes
from kvkeep.integrations.sglang.transport import Transport
from kvkeep.store import BlockStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolTransfer,
    )
    from sglang.srt.observability.metrics_collector import StorageMetrics

    from kvkeep.integrations.records import Bytes
    from kvkeep.store.tiers import TierStats

__all__ = ["KVKeepStorage"]

_LOG = logging.getLogger("kvkeep.sglang")
_KV = "kv"
P = ParamSpec("P")
R = TypeVar("R")


def _at_worst(answer: Callable[..., R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a method say ``answer`` of its arguments, and log why, instead of raising.

    SGLang's threads go on after an exception, but count it as a fault of theirs.
    """

    def wrap(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except (KVKeepError, ValueError, IndexError, TypeError, RuntimeError):
                _LOG.exception("%s failed and is taken for a miss", method.__name__)
                return answer(*args, **kwargs)

        return call

    return wrap


@dataclass(frozen=True, slots=True)
class _Pool:
    """A host pool's pages, and what parts their keys from those of other pools."""

    pages: HostPages
    digest: bytes
    written_here: bool  # of ranks that hold the same, one writes


class KVKeepStorage(HiCacheStorage):  # type: ignore[misc]  # Any where SGLang is not installed
    """SGLang's third level of KV, over tiers of kvkeep's.

    SGLang makes one in every rank, names its host pools, and then calls from three threads: one
    that looks up, one that loads, one that saves. What is saved is in memory when a call returns;
    slower tiers follow. No call raises because a place fails: a load is shorter, a save is dropped.

    Thread safety: all methods, once the pools are registered.

    Raises:
        InvalidValue: an option that there is not, or a value that it cannot have.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: dict[str, object] | None = None
    ) -> None:
        del kwargs  # SGLang has nothing to say there
        self._config = storage_config
        self._options = StorageOptions.parse(storage_config.extra_config)
        self._transport: Transport | None = None
        self._pools: dict[str, _Pool] = {}
        self.registered_pools: dict[str, Any] = {}

    # --- what SGLang has -------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store for the pool of KV.

        Raises:
            InvalidValue: a tier's URL is wrong.
            UnsupportedModel: the pool does not give its pages to storage.
        """
        self.close()
        self.mem_pool_host = mem_pool_host
        pages = pages_of(mem_pool_host)
        namespace = namespace_of(self._config, self._options, mem_pool_host, pages.size)
        store = BlockStore(namespace, tiers=self._options.tiers)
        self._transport = Transport(store, self._options)
        self._transport.counting = bool(self._config.enable_storage_metrics)
        self._pools = {_KV: self._pool(_KV, mem_pool_host, pages)}
        atexit.register(self.close)
        _LOG.info("Pages of %d bytes are kept in %r as %s", pages.size, store, namespace)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Keep pages of another pool beside those of KV.

        Raises:
            UnsupportedModel: the pool does not give its pages to storage.
        """
        name = str(host_pool_name)
        self.registered_pools[host_pool_name] = host_pool
        known = self._pools.get(name)
        if known is None or known.pages.pool is not host_pool:
            self._pools[name] = self._pool(name, host_pool, pages_of(host_pool))

    def _pool(self, name: str, pool: Any, pages: HostPages) -> _Pool:
        digest = pool_digest(self._config, name, pool, pages.size)
        same = is_replicated(self._config, name, pool)
        return _Pool(pages, digest, not same or bool(self._config.is_storage_writer))

    # --- one page of KV, as a tensor -------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def get(
        self,
        key: str,
        target_location: torch.Tensor | None = None,
        target_sizes: object = None,
    ) -> torch.Tensor | None:
        """Fill ``target_location`` with a page and give it back; None: it is not there."""
        pages: list[torch.Tensor | None] = self.batch_get([key], [target_location])
        return pages[0]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Keep ``value`` as a page; whether it is kept."""
        return self.batch_set([key], [value])

    @_at_worst(lambda _self, keys, *_args, **_kwargs: [None] * len(keys))
    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor | None] | None = None,
        target_sizes: object = None,
    ) -> list[torch.Tensor | None]:
        """Fill ``target_locations`` with pages; None for each that did not come."""
        nothing: list[torch.Tensor | None] = [None] * len(keys)
        if self._transport is None:
            return nothing
        pages = self._pools[_KV].pages
        new_page = self.mem_pool_host.get_dummy_flat_data_page
        targets = [
            new_page() if target is None else target
            for target in (nothing if target_locations is None else target_locations)
        ]
        arrays = [self._page_bytes(target, pages) for target in targets]
        if len(arrays) != len(keys) or any(array is None for array in arrays):
            return nothing

        def sink(at: int, raw: memoryview) -> None:
            array = arrays[at]
            assert array is not None
            np.copyto(array, np.frombuffer(raw, np.uint8))

        came = self._transport.load(self._keys(_KV, keys), pages.size, sink)
        return [target if here else None for target, here in zip(targets, came, strict=True)]

    @_at_worst(lambda *_args, **_kwargs: False)
    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor | None] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Keep ``values`` as pages; whether all of them are kept."""
        if self._transport is None or values is None:
            return False
        pages = self._pools[_KV].pages
        arrays = [
            self._page_bytes(None if value is None else value.contiguous(), pages)
            for value in values
        ]
        if len(arrays) != len(keys) or any(array is None for array in arrays):
            return False
        if not self._pools[_KV].written_here:
            return True

        def fill(at: int, raw: memoryview) -> None:
            array = arrays[at]
            assert array is not None
            np.copyto(np.frombuffer(raw, np.uint8), array)

        return all(self._transport.save(self._keys(_KV, keys), pages.size, fill))

    @_at_worst(lambda *_args, **_kwargs: 0)
    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """How many of ``keys`` are there before the first that is not."""
        if self._transport is None:
            return 0
        return self._transport.lookup(self._keys(_KV, keys))

    # --- pages of KV, between the store and the pool ---------------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Write pages into the pool at ``host_indices``; which of them came."""
        return self._load(_KV, keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Keep pages that are in the pool at ``host_indices``; which of them are kept."""
        return self._save(_KV, keys, host_indices)

    @_at_worst(lambda _self, _name, keys, *_args: [False] * len(keys))
    def _load(self, name: str, keys: list[str], host_indices: torch.Tensor | None) -> list[bool]:
        pool = self._pools.get(name)
        if self._transport is None or pool is None or not keys:
            return [False] * len(keys)
        starts, pages = first_tokens(host_indices, len(keys), pool.pages), pool.pages
        return self._transport.load(
            self._keys(name, keys), pages.size, lambda at, raw: pages.load(starts[at], raw)
        )

    @_at_worst(lambda _self, _name, keys, *_args: [False] * len(keys))
    def _save(self, name: str, keys: list[str], host_indices: torch.Tensor | None) -> list[bool]:
        pool = self._pools.get(name)
        if self._transport is None or pool is None or not keys:
            return [False] * len(keys)
        starts, pages = first_tokens(host_indices, len(keys), pool.pages), pool.pages
        if not pool.written_here:
            return [True] * len(keys)
        return self._transport.save(
            self._keys(name, keys), pages.size, lambda at, raw: pages.save(starts[at], raw)
        )

    # --- pages of several pools ------------------------------------------------------------------

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Write pages into each pool; which of them came, by pool."""
        return {
            transfer.name: self._load(
                str(transfer.name), transfer.keys or [], transfer.host_indices
            )
            for transfer in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Keep pages of each pool; which of them are kept, by pool."""
        return {
            transfer.name: self._save(
                str(transfer.name), transfer.keys or [], transfer.host_indices
            )
            for transfer in transfers
        }

    @_at_worst(lambda *_args, **_kwargs: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The prefixes of ``keys`` that can be restored, from all pools that each of them needs.

        A pool with `ALL_PAGES` needs every page of a prefix, one with `TRAILING_PAGES` as many at
        its end as its transfer has keys. Where the time for looking up runs out, shorter prefixes
        are not found any more.
        """
        if self._transport is None:
            return PoolTransferResult.empty()
        until = time.monotonic() + self._options.lookup_timeout
        pages = self._transport.lookup(self._keys(_KV, keys), until)
        hits: dict[str, int] = {_KV: pages} if pages else {}
        restorable = set(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            named = self._keys(str(transfer.name), keys[:pages])
            found = restorable_prefixes(self._transport, transfer, named, until)
            if found is None:
                continue
            if found:
                hits[transfer.name] = max(found)
            restorable &= found
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    # --- the rest --------------------------------------------------------------------------------

    def clear(self) -> None:
        """Delete what is kept in this rank's namespace, in every tier."""
        if self._transport is not None:
            self._transport.store.clear()

    def close(self) -> None:
        """Write what waits, for ``flush_timeout`` at most, and give everything back."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        atexit.unregister(self.close)
        if not transport.close():
            _LOG.warning(
                "Not all that was kept is in the slower tiers: %s s were not enough "
                '("flush_timeout")',
                self._options.flush_timeout,
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Have the slower tiers hold what was saved; whether they do."""
        return self._transport is not None and self._transport.store.flush(timeout)

    def stats(self) -> list[TierStats]:
        """Every tier at this moment, fastest first; none before a pool is registered."""
        return [] if self._transport is None else self._transport.store.stats()

    def get_stats(self) -> StorageMetrics | None:
        """For SGLang's metrics: pages and GB/s of each call since the last time."""
        if self._transport is None or not self._transport.counting:
            return None
        from sglang.srt.observability.metrics_collector import (  # noqa: PLC0415 - heavy
            StorageMetrics,
        )

        loaded, saved = self._transport.batches()
        return StorageMetrics(
            prefetch_pgs=[batch.pages for batch in loaded],
            backup_pgs=[batch.pages for batch in saved],
            prefetch_bandwidth=[batch.bandwidth for batch in loaded],
            backup_bandwidth=[batch.bandwidth for batch in saved],
        )

    def _keys(self, name: str, hashes: list[str]) -> list[bytes]:
        """The keys of pages; none in a pool that is not registered."""
        return page_keys(self._pools[name].digest, hashes) if name in self._pools else []

    @staticmethod
    def _page_bytes(tensor: torch.Tensor | None, pages: HostPages) -> Bytes | None:
        """A page's memory, or None where a tensor is none of this pool's size."""
        if tensor is None or not tensor.is_contiguous() or tensor.device.type != "cpu":
            return None
        array = bytes_of(tensor)
        return array if array.size == pages.size else None
