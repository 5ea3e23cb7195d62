"""`LoadedKV`: what was read of a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvkeep.store.kv.forms import KV
    from kvkeep.store.tiers import Miss

__all__ = ["LoadedKV"]


class LoadedKV(NamedTuple):
    """KV of the first ``tokens`` tokens from a prompt's ``start`` on.

    ``tiers`` are ``(tier, tokens)`` in order, the tiers the KV was read from; empty unless they
    were requested. ``slower`` says what was stored and not loaded because computing is faster.
    """

    kv: KV | None
    tokens: int
    tiers: tuple[tuple[str, int], ...] = ()
    slower: tuple[Miss, ...] = ()
