"""`KVKeepStorage`: the storage backend that SGLang calls."""

from __future__ import annotations

import atexit
import functools
import logging
import time
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

from kvkeep.core.errors import KVKeepError
from kvkeep.integrations.options import FLUSH_S, LOOKUP_S
from kvkeep.integrations.sglang.naming import is_replicated, namespace_of, page_keys, pool_digests
from kvkeep.integrations.sglang.options import StorageOptions
from kvkeep.integrations.sglang.pages import bytes_of, first_tokens, head_parts, pages_of
from kvkeep.integrations.sglang.settings import one_node
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
    from kvkeep.integrations.sglang.pages import HeadParts, HostPages
    from kvkeep.store.tiers import TierStats

__all__ = ["KVKeepStorage"]


_LOG = logging.getLogger("kvkeep.sglang")
_KV = "kv"
P = ParamSpec("P")
R = TypeVar("R")


def restorable_prefixes(
    transport: Transport, transfer: PoolTransfer, keys: Sequence[bytes], until: float
) -> set[int] | None:
    """Return the lengths of the prefixes of ``keys`` for which one pool has all it needs, in pages.

    Returns None if the pool sets no condition. Shared tiers are queried until ``until``. Pages that
    only the end of a prefix needs are queried from the last one on, because SGLang wants the
    longest prefix.
    """
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, transport.lookup(keys, until) + 1))
    if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
        return None
    window = max(1, len(transfer.keys or []))
    found: set[int] = set()
    run = 0  # consecutive stored pages from ``at`` on
    for at in reversed(range(len(keys))):
        run = run + 1 if transport.lookup(keys[at : at + 1], until) else 0
        if run >= window:
            found.add(at + window)
    # A prefix that is shorter than the window needs all of itself.
    return found | set(range(1, min(run, window - 1) + 1))


def _at_worst(answer: Callable[..., R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a method log an exception and return ``answer(*arguments)``, a miss.

    SGLang's threads survive an exception, but count it as their own error.
    """

    def wrap(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except (KVKeepError, ValueError, IndexError, TypeError, RuntimeError):
                _LOG.exception("%s failed and counts as a miss", method.__name__)
                return answer(*args, **kwargs)

        return call

    return wrap


class KVKeepStorage(HiCacheStorage):  # type: ignore[misc]  # Any where SGLang is not installed
    """The third level of SGLang's hierarchical cache, over tiers of kvkeep.

    SGLang makes one in every rank, registers its host pools, and then calls from three threads: one
    looks up, one loads, one saves. Saved pages are in memory when a call returns; slower tiers
    follow. A failing tier makes no call raise: fewer pages are loaded, or pages are dropped.

    Options are those of `kvkeep.integrations.sglang.options.StorageOptions`.

    Thread safety: all methods, once the pools are registered.

    Raises:
        InvalidValue: an unknown option, or a value that an option cannot have.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: dict[str, object] | None = None
    ) -> None:
        del kwargs  # empty in SGLang
        self._config = storage_config
        self._options = StorageOptions.parse(storage_config.extra_config)
        self._transport: Transport | None = None
        self._pools: dict[str, StoredPool] = {}
        self.registered_pools: dict[str, Any] = {}

    # --- host pools ------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store for the pool of KV.

        Raises:
            InvalidValue: a tier's URL is wrong.
            UnsupportedModel: the pool gives no access to its pages.
        """
        self.close()
        self.mem_pool_host = mem_pool_host
        heads = head_parts(self._config, mem_pool_host)
        pages = pages_of(mem_pool_host, heads)
        namespace = namespace_of(self._config, self._options, mem_pool_host, pages.size, heads)
        token_bytes = pages.size * pages.records // int(mem_pool_host.page_size)
        store = BlockStore(namespace, tiers=self._options.tiers, token_bytes=token_bytes)
        self._transport = Transport(store, self._options.load_timeout)
        self._transport.counting = bool(self._config.enable_storage_metrics)
        self._pools = {_KV: self._pool(_KV, pages, heads)}
        atexit.register(self.close)
        _LOG.info("Records of %d bytes are stored in %r as %s", pages.size, store, namespace)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Store pages of another pool beside those of KV.

        Raises:
            UnsupportedModel: the pool gives no access to its pages.
        """
        name = str(host_pool_name)
        self.registered_pools[host_pool_name] = host_pool
        known = self._pools.get(name)
        if known is None or known.pages.pool is not host_pool:
            self._pools[name] = self._pool(name, pages_of(host_pool))

    def _pool(self, name: str, pages: HostPages, heads: HeadParts | None = None) -> StoredPool:
        assert self._transport is not None, "SGLang registers the pool of KV first"
        config, pool = self._config, pages.pool
        digests = pool_digests(config, name, pool, pages.size, heads)
        if heads is not None:
            # A rank that might not see what another one writes, writes it too.
            seen = self._transport.store.must_ask and one_node()
            writes = not heads.copy or not seen
        else:
            writes = not is_replicated(config, name, pool) or bool(config.is_storage_writer)
        return StoredPool(self._transport, pages, digests, writes=writes)

    # --- one page of KV, as a tensor -------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return whether a page is stored."""
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        """Load a page into ``target_location`` and return it; None: it is not stored."""
        pages: list[torch.Tensor | None] = self.batch_get([key], [target_location])
        return pages[0]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Store ``value`` as a page; return whether it is stored."""
        return self.batch_set([key], [value])

    @_at_worst(lambda _self, keys, *_args, **_kwargs: [None] * len(keys))
    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor | None] | None = None,
        target_sizes: object = None,
    ) -> list[torch.Tensor | None]:
        """Load pages into ``target_locations`` and return them, None for each that is missing."""
        nothing: list[torch.Tensor | None] = [None] * len(keys)
        if self._transport is None:
            return nothing
        new_page = self.mem_pool_host.get_dummy_flat_data_page
        targets = [
            new_page() if target is None else target
            for target in (nothing if target_locations is None else target_locations)
        ]
        if len(targets) != len(keys):
            return nothing
        came = self._pools[_KV].load_into(keys, targets)
        return [target if here else None for target, here in zip(targets, came, strict=True)]

    @_at_worst(lambda *_args, **_kwargs: False)
    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor | None] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Store ``values`` as pages; return whether all of them are stored."""
        if self._transport is None or values is None:
            return False
        return all(self._pools[_KV].save_from(keys, values))

    @_at_worst(lambda *_args, **_kwargs: 0)
    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many leading ``keys`` are stored."""
        if self._transport is None:
            return 0
        return self._pools[_KV].lookup(keys)

    # --- pages of KV, between the store and the pool ---------------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages into the pool at ``host_indices``; return which of them were loaded."""
        return self._load(_KV, keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store the pages in the pool at ``host_indices``; return which of them are stored."""
        return self._save(_KV, keys, host_indices)

    @_at_worst(lambda _self, _name, keys, *_args: [False] * len(keys))
    def _load(self, name: str, keys: list[str], host_indices: torch.Tensor | None) -> list[bool]:
        pool = self._pools.get(name)
        if self._transport is None or pool is None or not keys:
            return [False] * len(keys)
        return pool.load(keys, host_indices)

    @_at_worst(lambda _self, _name, keys, *_args: [False] * len(keys))
    def _save(self, name: str, keys: list[str], host_indices: torch.Tensor | None) -> list[bool]:
        pool = self._pools.get(name)
        if self._transport is None or pool is None or not keys:
            return [False] * len(keys)
        return pool.save(keys, host_indices)

    # --- pages of several pools ------------------------------------------------------------------

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages into each pool; return which of them were loaded, by pool."""
        return {
            transfer.name: self._load(
                str(transfer.name), transfer.keys or [], transfer.host_indices
            )
            for transfer in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of each pool; return which of them are stored, by pool."""
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
        """Return the prefixes of ``keys`` that can be restored from all the pools they need.

        A pool with `ALL_PAGES` needs every page of a prefix, one with `TRAILING_PAGES` as many
        pages at its end as the transfer has keys. The search for shorter prefixes ends after
        `LOOKUP_S`.
        """
        if self._transport is None:
            return PoolTransferResult.empty()
        until = time.monotonic() + LOOKUP_S
        pages = self._pools[_KV].lookup(keys, until)
        hits: dict[str, int] = {_KV: pages} if pages else {}
        restorable = set(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            pool = self._pools.get(str(transfer.name))
            named = pool.keys(keys[:pages]) if pool else []
            found = restorable_prefixes(self._transport, transfer, named, until)
            if found is None:
                continue
            if found:
                hits[transfer.name] = max(found)
            restorable &= found
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    # --- the rest --------------------------------------------------------------------------------

    def clear(self) -> None:
        """Delete all blocks of this rank's namespace from every tier."""
        if self._transport is not None:
            self._transport.store.clear()

    def close(self) -> None:
        """Write queued blocks, for at most `FLUSH_S`, and release all resources."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        atexit.unregister(self.close)
        if not transport.close():
            _LOG.warning(
                "Some saved pages are not in the slower tiers: %g s were not enough to write them",
                FLUSH_S,
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the slower tiers hold everything saved; return whether they do."""
        return self._transport is not None and self._transport.store.flush(timeout)

    def stats(self) -> list[TierStats]:
        """Return the state of every tier, fastest first; empty before a pool is registered."""
        return [] if self._transport is None else self._transport.store.stats()

    def get_stats(self) -> StorageMetrics | None:
        """Return pages and GB/s of each call since the last time, for SGLang's metrics."""
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


class StoredPool:
    """The pages of one pool as records in a store.

    Thread safety: all methods.

    Args:
        transport: what moves the records.
        pages: the pool's pages.
        digests: a digest for each record of a page, which separates its keys from all others.
        writes: whether this rank writes; False if another rank writes the same records.
    """

    def __init__(
        self, transport: Transport, pages: HostPages, digests: Sequence[bytes], *, writes: bool
    ) -> None:
        assert len(digests) == pages.records, (len(digests), pages.records)
        self.pages = pages
        self._transport = transport
        self._digests = digests
        self._writes = writes

    def keys(self, hashes: list[str]) -> list[bytes]:
        """Return the keys of the records of these pages, page after page."""
        return page_keys(self._digests, hashes)

    def lookup(self, hashes: list[str], until: float | None = None) -> int:
        """Return how many leading pages are stored; shared tiers are queried until ``until``."""
        return self._transport.lookup(self.keys(hashes), until, self.pages.records)

    def load(self, hashes: list[str], host_indices: torch.Tensor | None) -> list[bool]:
        """Load pages into the pool; return which of them were loaded.

        Raises:
            ValueError: there are not as many indices as these pages have tokens.
        """
        pages, records = self.pages, self.pages.records
        starts = first_tokens(host_indices, len(hashes), pages)

        def sink(at: int, raw: memoryview) -> None:
            pages.load(starts[at // records], raw, at % records)

        return self._transport.load(self.keys(hashes), pages.size, sink, records)

    def save(self, hashes: list[str], host_indices: torch.Tensor | None) -> list[bool]:
        """Store pages of the pool; return which of them are stored. Raises as `load` does."""
        pages, records = self.pages, self.pages.records
        starts = first_tokens(host_indices, len(hashes), pages)
        if not self._writes:
            return [True] * len(hashes)

        def fill(at: int, raw: memoryview) -> None:
            pages.save(starts[at // records], raw, at % records)

        return self._transport.save(self.keys(hashes), pages.size, fill, records)

    def load_into(self, hashes: list[str], targets: Sequence[torch.Tensor | None]) -> list[bool]:
        """Load pages into tensors, one a page; return which of them were loaded.

        Nothing is loaded if a tensor is not as long as a page, or not in memory of the CPU.
        """
        if (arrays := self._memory(hashes, targets)) is None:
            return [False] * len(hashes)
        pages, records = self.pages, self.pages.records

        def sink(at: int, raw: memoryview) -> None:
            part = pages.part(arrays[at // records], at % records)
            np.copyto(part, np.frombuffer(raw, np.uint8).reshape(part.shape))

        return self._transport.load(self.keys(hashes), pages.size, sink, records)

    def save_from(self, hashes: list[str], values: Sequence[torch.Tensor | None]) -> list[bool]:
        """Store tensors as pages; return which of them are stored. None is, as in `load_into`."""
        given = [None if value is None else value.contiguous() for value in values]
        if (arrays := self._memory(hashes, given)) is None:
            return [False] * len(hashes)
        if not self._writes:
            return [True] * len(hashes)
        pages, records = self.pages, self.pages.records

        def fill(at: int, raw: memoryview) -> None:
            part = pages.part(arrays[at // records], at % records)
            np.copyto(np.frombuffer(raw, np.uint8).reshape(part.shape), part)

        return self._transport.save(self.keys(hashes), pages.size, fill, records)

    def _memory(
        self, hashes: list[str], tensors: Sequence[torch.Tensor | None]
    ) -> list[Bytes] | None:
        """Return the memory of pages; None if it is not what these pages need."""
        size = self.pages.size * self.pages.records
        arrays = [
            bytes_of(tensor)
            for tensor in tensors
            if tensor is not None and tensor.is_contiguous() and tensor.device.type == "cpu"
        ]
        fits = len(arrays) == len(tensors) == len(hashes)
        return arrays if fits and all(array.size == size for array in arrays) else None
