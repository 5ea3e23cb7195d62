"""`Conversations`: which prompts go on which conversations, and which blocks wait for that.

A process that sees requests, and has no store, notes what happens; another one, with the store,
replays the notes.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.core.returns import Returns
from kvkeep.core.tokens import TOKEN_BYTES, common_length
from kvkeep.store.tiers.block_waits import BlockWaits
from kvkeep.store.tiers.index import Index

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from kvkeep.core.returns import Ended, Wait
    from kvkeep.core.tokens import TokenArray
    from kvkeep.store.tiers.shared_memory import FrontOrder

__all__ = [
    "Chain",
    "Conversation",
    "Conversations",
    "PauseNote",
    "ReturnNote",
    "ReturnNotes",
]

_SLACK: Final = 5
"""Tokens at the end of a prompt that may differ in the conversation's next one.

Chat templates end a prompt with the beginning of an answer, for example "assistant\\n<think>\\n",
and leave a part of that out later.
"""
_ROW: Final = 1024  # tokens of answers that are compared one by one; others, by whole blocks
_MOST_BYTES: Final = 32 << 20  # of these tokens, and of blocks of answers, of all conversations
_BLOCK_BYTES: Final = 100
_MOST: Final = 32_768
_MOST_WAITS: Final = 65_536  # that a store follows by notes
_MOST_BLOCKS: Final = 65_536  # named by the notes of one message
_SAME_PLACE: Final = 16  # conversations whose prompts are the same, up to the slack

Place = tuple[bytes, bytes]
"""The last whole block of a prompt without its slack, and the tokens behind that block."""


class Chain(NamedTuple):
    """A prompt, or a prompt with its answer.

    Attributes:
        root: stands for the place before the first block.
        blocks: ids of the whole blocks, each of which stands for all tokens up to its end.
        size: tokens of a block.
        tokens: length of the prompt.
        row: its tokens, None if blocks are all that is known.
        public: number of leading blocks that other tenants share; ``root`` is this tenant's.
    """

    root: bytes
    blocks: Sequence[bytes]
    size: int
    tokens: int
    row: TokenArray | None = None
    public: int = 0

    def at(self, blocks: int) -> bytes:
        """Return the id of the place behind so many blocks: no other tenant has the same one."""
        if not blocks:
            return self.root
        last = self.blocks[blocks - 1]
        return self.root + last if blocks <= self.public else last

    def place(self, blocks: int, length: int) -> Place:
        """Return the place ``length`` tokens behind so many blocks; the chain may end before."""
        if not length or self.row is None:
            return self.at(blocks), b""
        start = blocks * self.size
        return self.at(blocks), self.row[start : start + length].tobytes()

    def beginning(self, tokens: int) -> Chain:
        """Return the first ``tokens`` tokens."""
        row = None if self.row is None else self.row[:tokens]
        return self._replace(blocks=self.blocks[: tokens // self.size], tokens=tokens, row=row)


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


class Conversation:
    """A conversation between two requests.

    ``number`` is that of its wait, from 1. ``begin`` is the number of blocks before its place;
    ``blocks`` and ``row`` are what follows, the latter only the first tokens. ``prompt`` and
    ``tokens`` are the lengths of its last prompt, and of that with the answer.
    """

    __slots__ = (
        "begin", "blocks", "nbytes", "number", "place", "prompt", "row", "size", "tenant", "tokens",
        "wait",
    )  # fmt: skip

    def __init__(
        self, number: int, wait: Wait, chain: Chain, prompt: int, tenant: Hashable
    ) -> None:
        self.number = number
        row, self.size = chain.row, chain.size
        self.begin, tail = divmod(prompt if row is None else max(0, prompt - _SLACK), self.size)
        start = self.begin * self.size
        # Copies: a slice would keep all tokens of the prompt.
        self.row = None if row is None else row[start : prompt + _ROW].copy()
        self.place = chain.place(self.begin, tail)
        self.blocks = tuple(chain.blocks[self.begin :])
        self.wait = wait
        self.prompt = prompt
        self.tokens = chain.tokens
        self.tenant = tenant
        self.nbytes = _BLOCK_BYTES * len(self.blocks) + len(self.place[1])
        self.nbytes += 0 if self.row is None else self.row.nbytes

    def common(self, chain: Chain) -> int:
        """Return how many leading tokens a prompt has in common, which has the `place`."""
        start = self.begin * self.size
        if self.row is not None and chain.row is not None:
            end = start + common_length(self.row, chain.row[start : start + len(self.row)])
            if end < start + len(self.row) or end == self.tokens:
                return end
        there = zip(self.blocks, chain.blocks[self.begin :], strict=False)
        count = next((at for at, (mine, other) in enumerate(there) if mine != other), None)
        if count is None:
            count = min(len(self.blocks), max(0, len(chain.blocks) - self.begin))
        # The rest of a block is not known; of the last one there is nothing to tell apart.
        return self.tokens if count == len(self.blocks) else start + count * self.size

    def goes_on(self, chain: Chain, common: int) -> bool:
        """Whether ``chain`` is a later prompt, not a part of this conversation."""
        if chain.tokens <= self.prompt:
            return False
        if self.row is None or chain.row is None:
            return True  # those who know no tokens ask for prompts alone
        if common < self.begin * self.size + len(self.row):
            return common < chain.tokens
        if common == self.tokens:
            return chain.tokens > common
        return common < len(chain.blocks) * self.size

    def left(self, common: int) -> tuple[bytes, ...]:
        """Return the blocks of the answer that the next prompt does not contain."""
        return self.blocks[max(0, common // self.size - self.begin) :]


class Conversations:
    """Recognises the returns of a store's conversations, learns from them, and tells its tiers.

    The next prompt of a conversation contains its last one, all but a few tokens at the end; so a
    conversation waits at the last whole block of its prompt. How much of the answer the next prompt
    contains is counted in tokens for the first 1,024 of them, then in blocks; in blocks alone where
    no tokens are at hand. Where several conversations wait, the one returns that has most tokens in
    common. At a place where several waited and no tokens are at hand, prompts that do not go on an
    answer count as new conversations.

    Tiers whose policy orders by waits learn of them at the end of each request. Where no one
    reports ends of requests, nothing is followed and nothing costs anything.

    Memory: 32,768 conversations at most, of a kilobyte each, and 32 MiB for tokens and blocks of
    their answers; beyond, those that wait longest are followed no longer. Cost: 0.1 µs a block of a
    prompt, and 20 µs for a return. Thread safety: all methods; tiers are told outside of all locks.

    Arguments:
        orders: of all levels of the store, fastest first, before any block is added to them.
        clock: returns seconds.
        noting: whether to note what happens, for `take_notes`.

    Attributes:
        returns: the learner.
        waits: at which blocks conversations wait; None if no tier orders by them.
    """

    def __init__(
        self,
        orders: Sequence[FrontOrder] = (),
        clock: Callable[[], float] = time.monotonic,
        *,
        noting: bool = False,
    ) -> None:
        self.returns = Returns()
        self._clock = clock
        # Memory that processes share has an order of its own.
        self._tiers = [order for order in orders if isinstance(order, Index) and order.awaits]
        self.waits = BlockWaits(self.returns, clock) if self._tiers else None
        for tier in self._tiers:
            assert self.waits is not None
            tier.attend(self.waits)
        self._lock = threading.Lock()  # all that follows
        self._followed: OrderedDict[Conversation, None] = OrderedDict()
        self._at: dict[Place, list[Conversation]] = {}
        self._lengths: dict[bytes, dict[int, int]] = {}  # by block: of places' tokens, counted
        self._bytes = 0
        self._number = 0
        self._notes: ReturnNotes | None = [] if noting else None  # their ``ago`` is a time as yet
        self._replayed: dict[int, Wait] = {}  # by number, of notes from elsewhere
        self._shared: OrderedDict[Place, bool] = OrderedDict()
        """Where conversations without tokens waited, and whether several did."""

    def __len__(self) -> int:
        """Return the number of conversations that are followed."""
        return len(self._followed)

    def requested(self, chain: Chain) -> Sequence[bytes]:
        """Record a prompt that is read, or stored: it may be the return of a conversation.

        Parts of a conversation's last prompt and answer are not its return. Returns the blocks that
        the conversation has left behind: those of its answer that the prompt lacks.
        """
        if not self._followed:
            return ()
        with self._lock:
            old = self._find(chain)
            blocks = () if old is None else self._return(old, chain)
        self._changed(blocks)
        return blocks

    def used(self, blocks: Sequence[bytes], stored: bool = False) -> None:
        """Record that a request used ``blocks``, before the tiers are told.

        If it ``stored`` them, that may be after its end.
        """
        if self.waits is not None:
            self.waits.used(blocks, stored=stored)

    def ended(
        self,
        chain: Chain,
        prompt: int,
        ended: Ended,
        tenant: Hashable = None,
        beside: Sequence[bytes] = (),
    ) -> Wait:
        """Record the end of a request; return the wait that begins.

        ``chain`` has all its tokens, of which the first ``prompt`` are the prompt's. If the prompt
        was not asked for here, this is also the return of its conversation. ``beside`` are records
        of ``chain`` beside its whole blocks.
        """
        assert 0 <= prompt <= chain.tokens
        answer = chain.tokens - prompt if ended.tokens is None else ended.tokens
        blocks: Sequence[bytes] = ()
        with self._lock:
            old = self._find(chain.beginning(prompt))
            if old is not None:
                blocks = self._return(old, chain)
            before = None if old is None else old.wait
            wait = self.returns.began(ended, answer, self._clock(), before=before, tenant=tenant)
            if old is not None:
                self._drop(old)
            first = ended.first
            if first is None and chain.row is not None and prompt < len(chain.row):
                first = int(chain.row[prompt])
            wait.answer, wait.answer_kind = answer, (ended.stop, first)
            self._number += 1
            if self._notes is not None:
                self._notes.append(PauseNote(
                    self._number, 0 if old is None else old.number, ended, answer,
                    None if tenant is None else str(tenant), self._clock(),
                    [*chain.blocks, *beside],
                ))  # fmt: skip
            self._add(Conversation(self._number, wait, chain, prompt, tenant))
        self._changed(blocks)
        self._begin(wait, [*chain.blocks, *beside])
        return wait

    def worth(
        self, tenant: Hashable, answer: int, ended: Ended | None = None, first: int | None = None
    ) -> int:
        """Return how many leading tokens of an answer, whose ``first`` is given, to keep.

        Without ``ended``, of an answer that may become longer, however it will end.
        """
        with self._lock:
            answers = self.returns.tenant(tenant).answers
            if ended is None:
                return answers.sure(answer)
            first = first if ended.first is None else ended.first
            return answers.worth((ended.stop, first), answer)

    def forget(self, chain: Chain, start: int) -> None:
        """Forget the conversations that wait in ``chain``, at token ``start`` or behind it."""
        with self._lock:
            for blocks in range(start // chain.size, len(chain.blocks) + 1):
                for length in list(self._lengths.get(chain.at(blocks), ())):
                    for old in list(self._at.get(chain.place(blocks, length), ())):
                        self._lose(old)

    def clear(self, tenant: Hashable) -> None:
        """Forget the conversations of a tenant."""
        with self._lock:
            for one in list(self._followed):
                if one.tenant == tenant:
                    self._lose(one)

    # --- in two processes ------------------------------------------------------------------------

    def take_notes(self) -> ReturnNotes:
        """Return what happened since the last call, in order; of more than 65,536 blocks, a part.

        The next calls return the rest.
        """
        with self._lock:
            notes, blocks, count = self._notes or [], 0, 0
            for note in notes:
                blocks += len(note.keys)
                if count and blocks > _MOST_BLOCKS:
                    break
                count += 1
            self._notes = notes[count:]
        now = self._clock()
        return [replace(note, ago=max(0.0, now - note.ago)) for note in notes[:count]]

    def replay(self, notes: ReturnNotes, space: bytes) -> None:
        """Tell the tiers what another process noted; ``space`` is in front of the keys.

        Calls must be in order, from one thread at a time. Memory: a reference to each of 65,536
        waits at most. Cost: that of `ended`, where a tier orders by waits; else nothing.
        """
        if self.waits is None:
            return
        now, waits = self._clock(), self._replayed
        for note in notes:
            blocks = [space + key for key in note.keys]
            if isinstance(note, PauseNote):
                before = waits.pop(note.before, None)
                wait = waits[note.number] = self.returns.began(
                    note.ended, note.tokens, now - note.ago, before=before, tenant=note.tenant
                )
                self._begin(wait, blocks)
                if len(waits) > _MOST_WAITS:
                    del waits[next(iter(waits))]
            elif note.number in waits:
                wait = waits[note.number] if note.came else waits.pop(note.number)
                (self.returns.returned if note.came else self.returns.lost)(wait, now - note.ago)
                self._changed(blocks)

    # --- internals -------------------------------------------------------------------------------

    def _begin(self, wait: Wait, blocks: Sequence[bytes]) -> None:
        if self.waits is not None:
            self.waits.begin(blocks, wait)
            self._changed(blocks)

    def _changed(self, blocks: Sequence[bytes]) -> None:
        for tier in self._tiers if blocks else ():
            tier.waits_changed(blocks)

    # The rest is under the lock.

    def _find(self, chain: Chain) -> Conversation | None:
        """Return the conversation that goes on with ``chain``, also if its return is known."""
        for blocks in range(len(chain.blocks), -1, -1):
            lengths = self._lengths.get(chain.at(blocks))
            for length in sorted(lengths or (), reverse=True):
                waiting = self._at.get(chain.place(blocks, length))
                if waiting:
                    return self._continued(waiting, chain)
        return None

    def _continued(self, waiting: list[Conversation], chain: Chain) -> Conversation | None:
        """Return the one of conversations at the same place that goes on with ``chain``."""
        common = [one.common(chain) for one in waiting]
        most = max(common)
        best = waiting[len(waiting) - 1 - common[::-1].index(most)]  # of equal ones, the latest
        if not best.goes_on(chain, most):
            return None
        unclear = len(waiting) > 1 if best.row is not None else self._shared.get(best.place)
        return None if unclear and most < best.prompt else best

    def _return(self, old: Conversation, chain: Chain) -> Sequence[bytes]:
        """Record the return of a conversation; return the blocks that it left behind."""
        wait = old.wait
        if wait.over:
            return ()
        self.returns.returned(wait, self._clock())
        common = old.common(chain)
        again = wait.answer if common == old.tokens else max(0, common - old.prompt)
        wait.tenant.answers.returned(wait.answer_kind, wait.answer, min(again, wait.answer))
        blocks = old.left(common)
        if self._notes is not None:
            self._notes.append(ReturnNote(old.number, True, self._clock(), list(blocks)))
        return blocks

    def _add(self, new: Conversation) -> None:
        self._followed[new] = None
        self._bytes += new.nbytes
        same = self._at.setdefault(new.place, [])
        same.append(new)
        block, tail = new.place
        lengths = self._lengths.setdefault(block, {})
        lengths[len(tail) // TOKEN_BYTES] = lengths.get(len(tail) // TOKEN_BYTES, 0) + 1
        if len(same) > _SAME_PLACE:
            self._lose(same[0])
        if new.row is None:
            self._shared[new.place] = new.place in self._shared
            self._shared.move_to_end(new.place)
            if len(self._shared) > _MOST:
                self._shared.popitem(last=False)
        while len(self._followed) > _MOST or self._bytes > _MOST_BYTES:
            self._lose(next(iter(self._followed)))

    def _lose(self, old: Conversation) -> None:
        """Follow a conversation no longer."""
        if self._notes is not None and not old.wait.over:
            self._notes.append(ReturnNote(old.number, False, self._clock()))
        self.returns.lost(old.wait, self._clock())
        self._drop(old)

    def _drop(self, old: Conversation) -> None:
        del self._followed[old]
        self._bytes -= old.nbytes
        same = self._at[old.place]
        same.remove(old)
        if not same:
            del self._at[old.place]
        block, tail = old.place
        lengths = self._lengths[block]
        length = len(tail) // TOKEN_BYTES
        lengths[length] -= 1
        if not lengths[length]:
            del lengths[length]
            if not lengths:
                del self._lengths[block]

    def check(self) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""
        with self._lock:
            places: dict[Place, int] = {}
            lengths: dict[bytes, dict[int, int]] = {}
            for one in self._followed:
                places[one.place] = places.get(one.place, 0) + 1
                block, tail = one.place
                counts = lengths.setdefault(block, {})
                counts[len(tail) // TOKEN_BYTES] = counts.get(len(tail) // TOKEN_BYTES, 0) + 1
            assert places == {place: len(same) for place, same in self._at.items()}
            assert lengths == self._lengths
            assert self._bytes == sum(one.nbytes for one in self._followed) <= _MOST_BYTES
            assert len(self._followed) <= _MOST
            waiting = [one.wait for one in self._followed if not one.wait.over]
            assert len(waiting) == len(set(waiting))
