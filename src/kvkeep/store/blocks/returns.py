"""`BlockReturns`: follows conversations by the keys of their blocks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from kvkeep.core.returns import Returns
from kvkeep.store.tiers import Chain, TierReturns

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from kvkeep.core.returns import Ended, Wait
    from kvkeep.core.tokens import TokenArray

__all__ = [
    "BlockReturns",
    "PauseNote",
    "ReturnNote",
    "ReturnNotes",
    "ReturnRecorder",
    "ReturnReplay",
]


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
        returns: of the store that is told; None: no store is, and `worth` alone is of use.
        space: the bytes in front of the store's keys.
    """

    def __init__(
        self, block_tokens: int, returns: TierReturns | None = None, space: bytes = b""
    ) -> None:
        self._block_tokens = block_tokens
        self._returns = TierReturns(()) if returns is None else returns
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
        if len(self._returns.conversations):
            chain = self._chain(row, keys, tenant, public)
            self._returns.requested(chain)
            self._returns.used(chain.blocks)

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
        self._returns.ended(chain, prompt, ended, tenant, blocks)

    def worth(
        self,
        answer: int,
        *,
        ended: Ended | None = None,
        first: int | None = None,
        tenant: str | None = None,
    ) -> int:
        """Return how many leading tokens of an answer are worth storing; see `KVStore.worth`."""
        return self._returns.conversations.kept(tenant, answer, ended, first)

    def _chain(
        self, row: TokenArray, keys: Sequence[bytes], tenant: str | None, public: int
    ) -> Chain:
        # Prompts shorter than a block have no key that tells tenants apart.
        root = self._space + sha256(ascii(tenant).encode()).digest()
        blocks = [self._space + key for key in keys]
        return Chain(root, blocks, self._block_tokens, len(row), row, public)


_MOST: Final = 65_536  # waits that a learner follows
_MOST_BLOCKS: Final = 65_536  # named by the notes of one message


@dataclass(slots=True)
class PauseNote:
    """A conversation that waits for its next request since ``ago`` seconds.

    ``number`` is that of the wait, ``before`` that of its conversation's last one, which ended with
    this request; 0: none is known. It waits at the blocks ``keys``.
    """

    number: int
    before: int
    ended: Ended
    tokens: int
    tenant: str | None
    ago: float
    keys: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class ReturnNote:
    """A wait that is over since ``ago`` seconds.

    Its conversation ``came``, and left the blocks ``keys`` behind; or it is followed no longer.
    """

    number: int
    came: bool
    ago: float
    keys: list[bytes] = field(default_factory=list)


ReturnNotes = list[PauseNote | ReturnNote]
"""What happened, in order."""


class _Recorded(Returns):
    """A learner that notes what it is told; ``ago`` is the time until it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: ReturnNotes = []
        self.numbers: dict[Wait, int] = {}
        self._last = 0

    def began(
        self,
        ended: Ended,
        tokens: int,
        now: float,
        *,
        before: Wait | None = None,
        tenant: Hashable = None,
    ) -> Wait:
        wait = super().began(ended, tokens, now, before=before, tenant=tenant)
        self._last += 1
        known = 0 if before is None else self.numbers.pop(before, 0)
        self.numbers[wait] = self._last
        name = None if tenant is None else str(tenant)
        self.notes.append(PauseNote(self._last, known, ended, tokens, name, now))
        return wait

    def returned(self, wait: Wait, now: float) -> None:
        if not wait.over:  # its number is that of a conversation that runs until its next end
            self.notes.append(ReturnNote(self.numbers.get(wait, 0), True, now))
        super().returned(wait, now)

    def lost(self, wait: Wait, now: float) -> None:
        number = self.numbers.pop(wait, 0)
        if not wait.over:
            self.notes.append(ReturnNote(number, False, now))
        super().lost(wait, now)


class ReturnRecorder(BlockReturns):
    """As `BlockReturns`, for stores in other processes; those learn by the notes that it takes.

    Thread safety: none. Memory: what happened since the last `take`.
    """

    def __init__(self, block_tokens: int) -> None:
        self._recorded = _Recorded()
        super().__init__(block_tokens, TierReturns((), returns=self._recorded))

    def requested(
        self,
        row: TokenArray,
        keys: Sequence[bytes],
        *,
        tenant: str | None = None,
        public: int = 0,
    ) -> None:
        conversations = self._returns.conversations
        if len(conversations):
            self._leave(conversations.requested(self._chain(row, keys, tenant, public)))

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
        conversations = self._returns.conversations
        chain = self._chain(row, keys, tenant, public)
        wait, left = conversations.ended(chain, prompt, ended, tenant)
        self._leave(left)
        number = self._recorded.numbers[wait]
        for note in reversed(self._recorded.notes):
            if isinstance(note, PauseNote) and note.number == number:
                note.keys = [*keys, *beside]
                break

    def _leave(self, blocks: Sequence[bytes]) -> None:
        for note in reversed(self._recorded.notes if blocks else ()):
            if isinstance(note, ReturnNote) and note.came:
                note.keys = list(blocks)
                break

    def take(self) -> ReturnNotes:
        """Return what happened since the last call, in order; of more than 65,536 blocks, a part.

        The next calls return the rest.
        """
        notes, blocks, count = self._recorded.notes, 0, 0
        for note in notes:
            blocks += len(note.keys)
            if count and blocks > _MOST_BLOCKS:
                break
            count += 1
        taken, self._recorded.notes = notes[:count], notes[count:]
        now = time.monotonic()
        return [replace(note, ago=max(0.0, now - note.ago)) for note in taken]


class ReturnReplay:
    """Tells the tiers of one store what a `ReturnRecorder` in another process noted.

    Thread safety: none. Memory: a reference to each of 65,536 waits at most. Cost: that of
    `TierReturns.ended`, where a tier has ``policy=returns``; else nothing.
    """

    def __init__(self, returns: TierReturns, space: bytes) -> None:
        self._returns = returns
        self._space = space
        self._waits: dict[int, Wait] = {}

    def tell(self, notes: ReturnNotes) -> None:
        """Replay notes, in order."""
        if self._returns.waits is None:
            return
        now = time.monotonic()
        for note in notes:
            blocks = [self._space + key for key in note.keys]
            if isinstance(note, PauseNote):
                before = self._waits.pop(note.before, None)
                wait = self._returns.began(
                    blocks, note.ended, note.tokens, now - note.ago, before=before,
                    tenant=note.tenant,
                )  # fmt: skip
                self._waits[note.number] = wait
                if len(self._waits) > _MOST:
                    del self._waits[next(iter(self._waits))]
            elif (known := self._waits.get(note.number)) is not None:
                self._returns.over(blocks, known, now - note.ago, came=note.came)
                if not note.came:
                    del self._waits[note.number]
