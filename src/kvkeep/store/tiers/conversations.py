"""`Conversations`: which conversations of a store wait, and which prompts are their returns."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.core.tokens import TOKEN_BYTES, common_length

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from kvkeep.core.returns import Ended, Returns, Wait
    from kvkeep.core.tokens import TokenArray
    from kvkeep.store.tiers.tier_shares import IndexedBlock

__all__ = ["BlockWaits", "Chain", "Conversations"]

_WAITS: Final = 4  # of conversations that share a block: those worth most
_MOST_BLOCKS: Final = 1 << 17
_SLACK: Final = 5
"""Tokens at the end of a prompt that may differ in the conversation's next one.

Chat templates end a prompt with the beginning of an answer, for example "assistant\\n<think>\\n",
and leave a part of that out later.
"""
_ROW: Final = 1024  # tokens of answers that are compared one by one; others, by whole blocks
_MOST_BYTES: Final = 32 << 20  # of these tokens, and of blocks of answers, of all conversations
_BLOCK_BYTES: Final = 100
_MOST: Final = 32_768
_SAME_PLACE: Final = 16  # conversations whose prompts are the same, up to the slack

Blocks = tuple[bytes, ...]
Place = tuple[bytes, bytes]
"""The last whole block of a prompt without its slack, and the tokens behind that block."""


class _Conversation:
    """A conversation between two requests.

    ``begin`` is the number of blocks before its place; ``blocks`` and ``row`` are what follows, the
    latter only the first tokens. ``prompt`` and ``tokens`` are the lengths of its last prompt, and
    of that with the answer.
    """

    __slots__ = (
        "begin", "blocks", "place", "prompt", "row", "size", "tenant", "tokens", "wait",
    )  # fmt: skip

    def __init__(self, wait: Wait, chain: Chain, prompt: int) -> None:
        row, self.size = chain.row, chain.size
        placed = prompt if row is None else max(0, prompt - _SLACK)
        self.begin = placed // self.size
        start = self.begin * self.size
        # Copies: a slice would keep all tokens of the prompt.
        self.row: TokenArray | None = None if row is None else row[start : prompt + _ROW].copy()
        tail = b"" if row is None else row[start:placed].tobytes()
        self.place: Place = chain.at(self.begin), tail
        self.blocks = tuple(chain.blocks[self.begin :])
        self.wait = wait
        self.prompt = prompt
        self.tokens = chain.tokens
        self.tenant: Hashable = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, but for a few hundred."""
        row = 0 if self.row is None else self.row.nbytes
        return row + len(self.place[1]) + _BLOCK_BYTES * len(self.blocks)

    def common(self, chain: Chain) -> int:
        """Return how many leading tokens a prompt has in common, which has the `place`."""
        start = self.begin * self.size
        if self.row is not None and chain.row is not None:
            end = start + common_length(self.row, chain.row[start : start + len(self.row)])
            if end < start + len(self.row) or end == self.tokens:
                return end
        blocks = self._blocks_in(chain)
        # The rest of a block is not known; of the last one there is nothing to tell apart.
        return self.tokens if blocks == len(self.blocks) else start + blocks * self.size

    def _blocks_in(self, chain: Chain) -> int:
        for count, block in enumerate(self.blocks):
            at = self.begin + count
            if at >= len(chain.blocks) or chain.blocks[at] != block:
                return count
        return len(self.blocks)

    def goes_on(self, chain: Chain, common: int) -> bool:
        """Whether ``chain`` is a later prompt, not a part of this conversation."""
        if chain.tokens <= self.prompt:
            return False
        if self.row is None or chain.row is None:
            return True  # those who know no tokens ask for prompts alone
        if common < self.begin * self.size + len(self.row):
            return common < chain.tokens
        if common == self.tokens:
            return chain.tokens > self.tokens
        return common < len(chain.blocks) * self.size

    def left(self, common: int) -> Blocks:
        """Return the blocks of the answer that the next prompt does not contain."""
        return self.blocks[max(0, common // self.size - self.begin) :]


class Conversations:
    """Recognises the returns of conversations, and learns from them.

    The next prompt of a conversation contains its last one, all but a few tokens at the end; so a
    conversation waits at the last whole block of its prompt. How much of the answer the next prompt
    contains is counted in tokens for the first 1,024 of them, then in blocks; in blocks alone where
    no tokens are at hand. Where several conversations wait, the one returns that has most tokens in
    common. At a place where several waited and no tokens are at hand, prompts that do not go on an
    answer count as new conversations.

    Memory: 32,768 conversations at most, of a kilobyte each, and 32 MiB for tokens and blocks of
    their answers; beyond, those that wait longest are followed no longer. Cost: 0.1 µs a block of a
    prompt, and 20 µs for a return. Thread safety: all methods.
    """

    def __init__(self, returns: Returns, clock: Callable[[], float]) -> None:
        self.returns = returns
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[_Conversation, None] = OrderedDict()
        self._at: dict[Place, list[_Conversation]] = {}
        self._lengths: dict[bytes, dict[int, int]] = {}  # by block: of places' tokens, counted
        self._bytes = 0
        self._places: OrderedDict[Place, bool] = OrderedDict()
        """Where conversations without tokens waited, and whether several did."""

    def __len__(self) -> int:
        """Return the number of conversations that are known."""
        return len(self._known)

    def requested(self, chain: Chain) -> Blocks:
        """Record a prompt that is read, or stored: it may be the return of a conversation.

        Parts of a conversation's last prompt and answer are not its return. Returns the blocks
        that the conversation has left behind: those of its answer that the prompt lacks.
        """
        if not self._known:
            return ()
        with self._lock:
            found = self._find(chain)
            return () if found is None else self._return(found, chain)

    def ended(
        self, chain: Chain, prompt: int, ended: Ended, tenant: Hashable
    ) -> tuple[Wait, Blocks]:
        """Record the end of a request; return the wait that begins, and blocks as `requested`.

        ``chain`` has all its tokens, of which the first ``prompt`` are the prompt's. If the prompt
        was not asked for here, this is also the return of its conversation.
        """
        assert 0 <= prompt <= chain.tokens
        answer = chain.tokens - prompt if ended.tokens is None else ended.tokens
        left: Blocks = ()
        with self._lock:
            found = self._find(chain.beginning(prompt))
            if found is not None:
                left = self._return(found, chain)
                self._drop(found)
            before = None if found is None else found.wait
            wait = self.returns.began(ended, answer, self._clock(), before=before, tenant=tenant)
            new = _Conversation(wait, chain, prompt)
            new.tenant = tenant
            first = ended.first
            if first is None and chain.row is not None and prompt < len(chain.row):
                first = int(chain.row[prompt])
            wait.answer, wait.answer_kind = answer, (ended.stop, first)
            self._add(new)
        return wait, left

    def kept(
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
                at = chain.at(blocks)
                for length in list(self._lengths.get(at, ())):
                    for found in list(self._at.get(_place(chain, blocks, length), ())):
                        self._lose(found)

    def clear(self, tenant: Hashable = None) -> None:
        """Forget the conversations of a tenant; None: of all."""
        with self._lock:
            for one in list(self._known):
                if tenant is None or one.tenant == tenant:
                    self._lose(one)

    # --- internals, under the lock ---------------------------------------------------------------

    def _find(self, chain: Chain) -> _Conversation | None:
        """Return the conversation that goes on with ``chain``, also if that is known."""
        for blocks in range(len(chain.blocks), -1, -1):
            lengths = self._lengths.get(chain.at(blocks))
            for length in sorted(lengths or (), reverse=True):
                found = self._at.get(_place(chain, blocks, length))
                if found:
                    return self._continued(found, chain)
        return None

    def _continued(self, found: list[_Conversation], chain: Chain) -> _Conversation | None:
        """Return the one of conversations at the same place that goes on with ``chain``."""
        common = [one.common(chain) for one in found]
        most = max(common)
        best = found[len(found) - 1 - common[::-1].index(most)]  # of equal ones, the latest
        if not best.goes_on(chain, most):
            return None
        unclear = len(found) > 1 if best.row is not None else self._places.get(best.place, False)
        return None if unclear and most < best.prompt else best

    def _return(self, found: _Conversation, chain: Chain) -> Blocks:
        wait = found.wait
        if wait.over:
            return ()
        self.returns.returned(wait, self._clock())
        common = found.common(chain)
        again = wait.answer if common == found.tokens else max(0, common - found.prompt)
        wait.tenant.answers.returned(wait.answer_kind, wait.answer, min(again, wait.answer))
        return found.left(common)

    def _add(self, new: _Conversation) -> None:
        self._known[new] = None
        self._bytes += new.nbytes
        same = self._at.setdefault(new.place, [])
        same.append(new)
        block, tail = new.place
        lengths = self._lengths.setdefault(block, {})
        length = len(tail) // TOKEN_BYTES
        lengths[length] = lengths.get(length, 0) + 1
        if len(same) > _SAME_PLACE:
            self._lose(same[0])
        if new.row is None:
            self._places[new.place] = new.place in self._places
            self._places.move_to_end(new.place)
            if len(self._places) > _MOST:
                self._places.popitem(last=False)
        while len(self._known) > _MOST or self._bytes > _MOST_BYTES:
            self._lose(next(iter(self._known)))

    def _lose(self, old: _Conversation) -> None:
        """Follow a conversation no longer."""
        self.returns.lost(old.wait, self._clock())
        self._drop(old)

    def _drop(self, old: _Conversation) -> None:
        del self._known[old]
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
            for one in self._known:
                places[one.place] = places.get(one.place, 0) + 1
                block, tail = one.place
                counts = lengths.setdefault(block, {})
                counts[len(tail) // TOKEN_BYTES] = counts.get(len(tail) // TOKEN_BYTES, 0) + 1
            assert places == {place: len(same) for place, same in self._at.items()}
            assert lengths == self._lengths
            assert self._bytes == sum(one.nbytes for one in self._known) <= _MOST_BYTES
            assert len(self._known) <= _MOST
            waiting = [one.wait for one in self._known if not one.wait.over]
            assert len(waiting) == len(set(waiting))


def _place(chain: Chain, blocks: int, length: int) -> Place:
    """Return the place ``length`` tokens behind a block of ``chain``, which may end before."""
    if not length or chain.row is None:
        return chain.at(blocks), b""
    start = blocks * chain.size
    return chain.at(blocks), chain.row[start : start + length].tobytes()


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

    def beginning(self, tokens: int) -> Chain:
        """Return the first ``tokens`` tokens."""
        row = None if self.row is None else self.row[:tokens]
        return self._replace(blocks=self.blocks[: tokens // self.size], tokens=tokens, row=row)


class BlockWaits:
    """The waits of the blocks used last, `_MOST_BLOCKS` of them, whatever tier holds them.

    A block that several conversations wait behind has the waits of up to four, those worth most.
    A request that has not ended counts as a wait of the most general class.

    Thread safety: all methods. Cost: about a microsecond a block. Memory: up to 400 bytes a block,
    and nothing before the first request.
    """

    def __init__(self, returns: Returns, clock: Callable[[], float]) -> None:
        self.returns = returns
        self.clock = clock
        self._lock = threading.Lock()
        self._at: OrderedDict[bytes, tuple[Wait, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of blocks with waits."""
        return len(self._at)

    def used(self, blocks: Sequence[bytes], *, stored: bool = False) -> None:
        """Record that a request, which runs now, used ``blocks``.

        If it ``stored`` them, conversations that wait there already were that request's.
        """
        waits = self._at
        used = [block for block in blocks if not stored or not _awaited(waits.get(block))]
        if used:
            running = self.returns.unknown(self.clock())
            self._add(used, running)

    def begin(self, blocks: Sequence[bytes], wait: Wait) -> None:
        """Record that the conversation of ``wait`` waits at ``blocks``: all of its last request."""
        self._add(blocks, wait)

    def _add(self, blocks: Sequence[bytes], wait: Wait) -> None:
        at, alone = self._at, (wait,)
        with self._lock:
            for block in blocks:
                others = at.pop(block, None)
                if others is None:
                    at[block] = alone
                    continue
                # Requests that ran may run still; they used the block just now as well.
                live = [other for other in others if other.turns and not other.over]
                if len(live) >= _WAITS:
                    live.remove(min(live, key=self.worth))
                at[block] = (*live, wait)
            while len(at) > _MOST_BLOCKS:
                at.popitem(last=False)

    def best(self, block: bytes) -> tuple[Wait | None, int]:
        """Return the wait at ``block`` that is worth most, and how many there are."""
        waits = self._at.get(block, ())
        if len(waits) == 1 and not waits[0].over:
            return waits[0], 1
        live = [wait for wait in waits if not wait.over]
        if len(live) <= 1:
            return (live[0] if live else None), len(live)
        return max(reversed(live), key=self.worth), len(live)

    def outlives(self, entry: IndexedBlock) -> bool:
        """Take over another wait at a victim's block if it is worth more by now; whether it is."""
        wait, others = self.best(entry.block)
        known = entry.wait
        if wait is None or wait is known or others < 2:
            return False
        if known is not None and not known.over and self.worth(wait) <= self.worth(known):
            return False
        entry.wait, entry.followers = wait, others
        return True

    def worth(self, wait: Wait) -> float:
        """Return what keeping KV for the end of ``wait`` is worth now; see `Returns.worth`."""
        return self.returns.worth(wait, self.clock())


def _awaited(waits: tuple[Wait, ...] | None) -> bool:
    """Whether a conversation is among ``waits``."""
    return waits is not None and any(wait.turns and not wait.over for wait in waits)
