"""`ReturnBoard`: tells the learner of returns when requests begin and end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.cache.observers import CacheObserver
from kvkeep.core.events import Returned
from kvkeep.core.keys import chain_keys, root_key
from kvkeep.core.returns import Returns
from kvkeep.core.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvkeep.core.cache.opening import CacheQuery
    from kvkeep.core.cache.sequence import Sequence
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.prefix import PrefixIndex
    from kvkeep.core.prefix.waits import RunningPrompt
    from kvkeep.core.returns import Ended

__all__ = ["ReturnBoard"]


class ReturnBoard(CacheObserver):
    """Follows the requests of a cache whose policy orders by returns.

    A prompt that extends the end of an earlier request is the return of that conversation; no name
    is needed. What a longer prompt repeats of the last answer teaches which part of answers is
    never read; that part of later ones is left behind from the beginning. Cost: about 5 µs a
    request. Thread safety: none; under the cache's lock.
    """

    __slots__ = ("_block_tokens", "_marks", "_page_size", "_running", "_waits", "returns")

    def __init__(self, index: PrefixIndex, clock: Callable[[], float], block_tokens: int) -> None:
        self.returns = Returns()
        self._block_tokens = block_tokens
        self._marks = index.marks
        self._page_size = index.page_size
        self._waits = index.tree.keep_waits(self.returns, clock, index.page_size)
        self._running: dict[int, RunningPrompt] = {}  # by sequence

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of waits, in seconds."""
        return self._waits.clock

    def opened(self, sequence: Sequence, query: CacheQuery, cached: PageArray) -> None:
        """End the wait of the conversation that continues."""
        page = len(cached)

        def following() -> bytes:
            return sequence.encoder.pages(sequence.row, page, page + 1)

        assert sequence.hold.end == page
        self._running[sequence.id] = self._waits.opened(
            sequence.hold, len(query.tokens), sequence.namespace, following, session=query.session
        )

    def returned(self, sequence: int) -> Returned | None:
        """Return what the prompt of a running sequence continued, None for nothing known."""
        wait = self._running[sequence].arrival.before
        return None if wait is None else Returned(wait.gaps[-1], wait.turns)

    def forked(self, sequence: Sequence, fork: Sequence) -> None:
        """Let the fork continue the same conversation."""
        self._running[fork.id] = self._running[sequence.id]

    def closed(self, sequence: Sequence, *, keep: bool, ended: Ended | None) -> None:
        """Begin to wait for the next request of the conversation."""
        request = self._running.pop(sequence.id)
        arrival, prompt = request.arrival, request.tokens
        hold, listener = sequence.hold, arrival.listener
        if not keep or hold.parent is None:
            if listener is not None:
                listener.ended(arrival, None, (), 0, 0)
            return
        tokens = max(0, sequence.num_tokens - prompt)
        first = int(sequence.row[prompt]) if tokens else None
        wait, kept = self._waits.closed(hold, request, tokens, ended, first)
        if listener is not None:
            keys, place = self._answer(sequence, arrival.keys)
            read = -(-(prompt + kept) // self._block_tokens)
            listener.ended(arrival, wait, keys, place, read)

    def _answer(self, sequence: Sequence, keys: Iterable[bytes]) -> tuple[list[bytes], int]:
        """Return the keys of the stored blocks behind those of the prompt, and where they begin.

        ``keys`` are those of the prompt, which may have been truncated. Cost: that of hashing the
        blocks, and one more.
        """
        size = self._block_tokens
        row = sequence.row[: sequence.num_published]
        before = [root_key(sequence.space), *keys][: len(row) // size + 1]
        while True:
            place = len(before) - 1
            begin = max(0, place - 1) * size  # with the last block of the prompt
            tokens, extras = self._marks.plain(row[begin:])
            found = chain_keys(before[begin // size], tokens.tobytes(), size * TOKEN_BYTES, extras)
            if not place or found[0] == before[place]:
                return found[1:] if place else found, place
            before.pop()
