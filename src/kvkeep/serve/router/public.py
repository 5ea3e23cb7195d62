"""`PublicKeys`: the keys of prompts that begin with a public prefix, which all salts share.

The salt of such a prompt counts from the first private block on. So the public part has one key
for all salts, as servers of ours announce it:

    PUBLIC_SALT ── public part ── mark of the salt + first private block ── …

vLLM announces the public part under each salt that sent it. With `KVKeepConnector` and the same
prefixes it shares that part in its tiers, of which there are no events. So where a whole public
part is held under one salt, it counts as held for the others.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.tokens import TOKEN_DTYPE
from kvkeep.serve.kv_events.wire import PUBLIC_SALT, salt_digest
from kvkeep.serve.router.keys import MAX_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.core.public import PublicPrefixes
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.router.keys import PrefixKeys

__all__ = ["PublicKeys"]

_SALTS = 2
"""Salts that are remembered of each place: those that stored the beginning of a prefix last."""


class PublicKeys:
    """Computes keys with ``keys``; ``prefixes`` are the declared rows. Thread safety: none.

    Cost: nothing without prefixes, or for prompts that begin with none; else that of one lookup
    more, and of one of the public part for each salt that is remembered: two a place.
    """

    def __init__(self, keys: PrefixKeys, prefixes: PublicPrefixes) -> None:
        self._keys = keys
        self._prefixes = prefixes
        self._salts: dict[object, deque[tuple[str, str]]] = {}

    def stored(
        self, place: object, lora: str, salt: str, tokens: Sequence[int], block_size: int
    ) -> None:
        """Note that a place stored the first blocks of a prompt, under a salt."""
        if salt == PUBLIC_SALT or not self._prefixes.begins(
            np.array(tokens[:block_size], TOKEN_DTYPE)
        ):
            return
        known = self._salts.setdefault(place, deque(maxlen=_SALTS))
        if (lora, salt) in known:
            known.remove((lora, salt))
        known.append((lora, salt))

    def forget(self, place: object) -> None:
        """Forget the salts of a place."""
        self._salts.pop(place, None)

    def after(self, tokens: TokenArray, step: int, lora: str, salt: str) -> list[int]:
        """Return the keys of the prefixes of a prompt, ``step`` tokens apart.

        Empty if it has no public part; then those of its salt are all.
        """
        tokens = tokens[:MAX_TOKENS]
        public = self._prefixes.length(tokens, step)
        if not public:
            return []
        shared = self._keys.after(self._keys.root(lora, PUBLIC_SALT), tokens[:public], step)
        marks = np.zeros((len(tokens) - public) // step, np.uint64)
        # As an event says of the first private block, see `CacheMirror`.
        marks[:1] = self._keys.mark(repr([salt_digest(salt)]))
        return shared + self._keys.after(shared[-1], tokens[public:], step, marks)

    def of_others(self, tokens: TokenArray, step: int, lora: str, salt: str) -> Iterator[list[int]]:
        """Yield the keys of the public part under other salts that are remembered.

        They count only where all of them are held: a part may be that of another prompt.
        """
        tokens = tokens[:MAX_TOKENS]
        public = self._prefixes.length(tokens, step)
        others = {one for known in self._salts.values() for one in known} if public else ()
        for adapter, other in others:
            if adapter == lora and other != salt:
                yield self._keys.after(self._keys.root(lora, other), tokens[:public], step)
