"""Pools beside that of KV (states, windows, indexes): which prefixes they let SGLang restore."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    from kvkeep.integrations.sglang.transport import Transport

__all__ = ["restorable_prefixes"]


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
