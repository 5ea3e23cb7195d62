"""`BlockReturns`: follows conversations by the keys of their blocks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from kvkeep.core.returns import Ended
from kvkeep.store.tiers.conversations import Chain, Conversations

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from kvkeep.core.returns import Wait
    from kvkeep.core.tokens import TokenArray
    from kvkeep.store.tiers.conversations import Conversation

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


class _Noted(Conversations):
    """Conversations that note what happens; ``ago`` is the time until the notes are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: ReturnNotes = []
        self._numbers: dict[Wait, int] = {}
        self._pause = PauseNote(0, 0, Ended(), 0, None, 0.0)

    def _began(self, old: Conversation | None, ended: Ended, answer: int, tenant: Hashable) -> Wait:
        wait = super()._began(old, ended, answer, tenant)
        before = 0 if old is None else self._numbers[old.wait]
        name = None if tenant is None else str(tenant)
        number = self._numbers[wait] = self._pause.number + 1
        self._pause = PauseNote(number, before, ended, answer, name, time.monotonic())
        self.notes.append(self._pause)
        return wait

    def _begin(self, wait: Wait, blocks: Sequence[bytes]) -> None:
        self._pause.keys = list(blocks)

    def _return(self, old: Conversation, chain: Chain) -> Sequence[bytes]:
        came = not old.wait.over  # else its number is that of a conversation that runs
        blocks = super()._return(old, chain)
        if came:
            number = self._numbers[old.wait]
            self.notes.append(ReturnNote(number, True, time.monotonic(), list(blocks)))
        return blocks

    def _lose(self, old: Conversation) -> None:
        if not old.wait.over:
            self.notes.append(ReturnNote(self._numbers[old.wait], False, time.monotonic()))
        super()._lose(old)

    def _drop(self, old: Conversation) -> None:
        super()._drop(old)
        del self._numbers[old.wait]


class ReturnRecorder(BlockReturns):
    """As `BlockReturns`, for stores in other processes; those learn by the notes that it takes.

    Thread safety: none. Memory: what happened since the last `take`.
    """

    def __init__(self, block_tokens: int) -> None:
        self._noted = _Noted()
        super().__init__(block_tokens, self._noted)

    def take(self) -> ReturnNotes:
        """Return what happened since the last call, in order; of more than 65,536 blocks, a part.

        The next calls return the rest.
        """
        notes, blocks, count = self._noted.notes, 0, 0
        for note in notes:
            blocks += len(note.keys)
            if count and blocks > _MOST_BLOCKS:
                break
            count += 1
        taken, self._noted.notes = notes[:count], notes[count:]
        now = time.monotonic()
        return [replace(note, ago=max(0.0, now - note.ago)) for note in taken]


class ReturnReplay:
    """Tells the tiers of one store what a `ReturnRecorder` in another process noted.

    Thread safety: none. Memory: a reference to each of 65,536 waits at most. Cost: that of
    `Conversations.ended`, where a tier has ``policy=returns``; else nothing.
    """

    def __init__(self, conversations: Conversations, space: bytes) -> None:
        self._conversations = conversations
        self._space = space
        self._waits: dict[int, Wait] = {}

    def tell(self, notes: ReturnNotes) -> None:
        """Replay notes, in order."""
        if self._conversations.waits is None:
            return
        now = time.monotonic()
        for note in notes:
            blocks = [self._space + key for key in note.keys]
            if isinstance(note, PauseNote):
                before = self._waits.pop(note.before, None)
                wait = self._conversations.began(
                    blocks, note.ended, note.tokens, now - note.ago, before=before,
                    tenant=note.tenant,
                )  # fmt: skip
                self._waits[note.number] = wait
                if len(self._waits) > _MOST:
                    del self._waits[next(iter(self._waits))]
            elif (known := self._waits.get(note.number)) is not None:
                self._conversations.over(blocks, known, now - note.ago, came=note.came)
                if not note.came:
                    del self._waits[note.number]
