"""`BlockReturns`: follows conversations by the keys of their blocks."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from kvkeep.store.tiers import Chain, Conversations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.returns import Ended
    from kvkeep.core.tokens import TokenArray
    from kvkeep.store.tiers import ReturnNotes

__all__ = ["BlockReturns", "ReturnRecorder"]


class BlockReturns:
    """Follows the conversations of a store whose caller names the blocks.

    A conversation's next prompt contains its last one, all but a few tokens at the end. It is
    recognised by that; then the tiers with ``policy=returns`` know how long conversations wait, and
    `worth` how much of answers later prompts contain.

    Keys are those of the whole blocks of a prompt, in order, each of which stands for all tokens up
    to its end. Thread safety: all methods. Cost and memory: as
    `kvkeep.store.tiers.conversations.Conversations`.

    Args:
        block_tokens: tokens of a block.
        conversations: of the store that is told; None: no store is, and `worth` alone is of use.
        space: the bytes in front of the store's keys.
    """

    def __init__(
        self, block_tokens: int, conversations: Conversations | None = None, space: bytes = b""
    ) -> None:
        self._block_tokens = block_tokens
        self._conversations = Conversations() if conversations is None else conversations
        self._space = space

    def requested(
        self,
        row: TokenArray,
        keys: Sequence[bytes],
        *,
        tenant: str | None = None,
        public: int = 0,
    ) -> None:
        """Record a prompt: it may be the return of a conversation.

        What the store holds of it counts as used, also if the engine had it in its own memory. The
        first ``public`` blocks have keys that other tenants share: conversations are told apart
        by their tenants there.
        """
        if len(self._conversations):
            chain = self._chain(row, keys, tenant, public)
            self._conversations.requested(chain)
            self._conversations.used(chain.blocks)

    def ended(
        self,
        row: TokenArray,
        keys: Sequence[bytes],
        *,
        prompt: int,
        ended: Ended,
        tenant: str | None = None,
        public: int = 0,
        beside: Sequence[bytes] = (),
    ) -> None:
        """Record the end of a request: of its tokens ``row``, those from ``prompt`` on are answer.

        ``beside`` are keys of what else was stored of it, as by other groups of layers; ``public``
        as for `requested`.
        """
        blocks = [self._space + key for key in beside]
        chain = self._chain(row, keys, tenant, public)
        self._conversations.ended(chain, prompt, ended, tenant, blocks)

    def worth(
        self,
        answer: int,
        *,
        ended: Ended | None = None,
        first: int | None = None,
        tenant: str | None = None,
    ) -> int:
        """Return how many leading tokens of an answer are worth storing; see `KVStore.worth`."""
        return self._conversations.worth(tenant, answer, ended, first)

    def _chain(
        self, row: TokenArray, keys: Sequence[bytes], tenant: str | None, public: int
    ) -> Chain:
        # Prompts shorter than a block have no key that tells tenants apart.
        root = self._space + sha256(ascii(tenant).encode()).digest()
        blocks = [self._space + key for key in keys]
        return Chain(root, blocks, self._block_tokens, len(row), row, public)


class ReturnRecorder(BlockReturns):
    """As `BlockReturns`, for stores in other processes; those learn by the notes that it takes.

    Thread safety: all methods. Memory: what happened since the last `take`.
    """

    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens, Conversations(noting=True))

    def take(self) -> ReturnNotes:
        """Return what happened since the last call, in order, for `BlockStore.replay`.

        Of more than 65,536 blocks, a part; the next calls return the rest.
        """
        return self._conversations.take_notes()
