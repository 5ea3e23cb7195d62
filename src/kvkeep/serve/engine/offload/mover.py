"""`Mover`: copies KV between pages and a store; one kind for plain models, one for the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvkeep.serve.engine.offload.forms import Forms
from kvkeep.serve.engine.offload.loads import PageLoads
from kvkeep.serve.engine.offload.writes import Writes

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.serve.engine.offload.load import LoadChunk
    from kvkeep.serve.engine.offload.loads import Loads
    from kvkeep.serve.engine.offload.writes import Known
    from kvkeep.serve.engine.request import Answer
    from kvkeep.serve.engine.runner import Runner
    from kvkeep.serve.engine.stats import EngineStats
    from kvkeep.store import KVStore

__all__ = ["Mover", "PageMover"]


class Mover(ABC):
    """Moves KV of answers between the pages of a runner and a store.

    Thread safety: `flush` and ``known`` any; the rest belongs to the engine's thread.
    """

    known: Known
    loads: Loads

    @abstractmethod
    def restore(self, answer: Answer, chunk: LoadChunk) -> bool:
        """Write a chunk to the pages of ``answer``; False if there is no room for it.

        What is computed of its tokens stays, in pages that others may read.
        """

    @abstractmethod
    def has_news(self, answer: Answer) -> bool:
        """Whether there may be something new to `offer`; asked after each pass."""

    @abstractmethod
    def held_back(self, answer: Answer) -> tuple[int, int]:
        """Return the first token, and the end, of what is not written if ``answer`` ends now.

        That is what ``trail.held`` holds back.
        """

    @abstractmethod
    def offer(self, answer: Answer, tenant: str, *, last: bool) -> None:
        """Queue computed KV of ``answer`` up to ``trail.held``; ``last``: nothing more follows."""

    @abstractmethod
    def drop(self, answer: Answer) -> None:
        """Free what is held back of ``answer``, which has ended or lost its pages."""

    @abstractmethod
    def later(self, call: Callable[[], None], nbytes: int) -> None:
        """Call the store in the thread that writes to it, behind all that is queued now.

        ``call`` holds ``nbytes``. It is left out if the store is too slow.
        """

    @abstractmethod
    def flush(self, timeout: float) -> bool:
        """Wait ``timeout`` seconds until nothing is queued; return whether nothing is."""

    @abstractmethod
    def close(self, timeout: float) -> bool:
        """`flush`, and end the threads."""


class PageMover(Mover):
    """Moves blocks of pages, of a model in which every layer keeps every token."""

    def __init__(
        self, store: KVStore, runner: Runner, stats: EngineStats, *, timeout: float
    ) -> None:
        self._tensors = tensors = runner.tensors
        forms = Forms(tensors, store.layout)
        self._writes = Writes(store, tensors, forms, stats)
        self.known = self._writes.known
        self.loads = PageLoads(store, tensors, forms, self.known, timeout=timeout)

    def restore(self, answer: Answer, chunk: LoadChunk) -> bool:
        size = self._tensors.page_size
        first = chunk.start // size
        stop = first - (-chunk.tokens // size)
        # The first page not computed in full: others before it may be published.
        begin = max(first, answer.computed // size)
        pages = answer.running_sequence.pages[begin:stop]
        self._tensors.write(pages, chunk.block[begin - first : stop - first])
        return True

    def has_news(self, answer: Answer) -> bool:
        return answer.computed >= answer.trail.next

    def offer(self, answer: Answer, tenant: str, *, last: bool) -> None:
        sequence = answer.running_sequence
        self._writes.offer(answer.trail, sequence, answer.computed, tenant, last=last)

    def held_back(self, answer: Answer) -> tuple[int, int]:
        return max(answer.trail.held, answer.trail.offered), answer.computed

    def drop(self, answer: Answer) -> None:
        """Nothing: it is in the pages of the answer."""

    def later(self, call: Callable[[], None], nbytes: int) -> None:
        self._writes.later(call, nbytes)

    def flush(self, timeout: float) -> bool:
        return self._writes.flush(timeout)

    def close(self, timeout: float) -> bool:
        return self._writes.close(timeout)
