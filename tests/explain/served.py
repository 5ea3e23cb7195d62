"""A cache and its explainer, served by hand: what an engine would do, one request at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep import Namespace, PagedCache
from kvkeep.core.keys import as_namespace
from kvkeep.observe.explain import Explainer, Explanation

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Self

    from kvkeep.core.cache import Sequence
    from kvkeep.core.tokens import TokenArray

SIZE = 4


def tokens(*parts: Iterable[Any]) -> TokenArray:
    """One prompt of several parts."""
    return np.array([token for part in parts for token in part], np.int32)


class Served:
    """`PagedCache` and `Explainer` together, with a clock of its own."""

    def __init__(self, pages: int = 64, size: int = SIZE, **options: Any) -> None:
        index = options.pop("prefix", "radix")
        self.now = 1000.0
        self.cache = PagedCache(
            pages, size, prefix=index, eviction=options.pop("eviction", "lru"), clock=self._clock
        )
        self.explainer = Explainer(
            size,
            public=self.cache.public,
            clock=self._clock,
            cache_clock=self._clock,
            **options,
        )
        self.ids: dict[int, str] = {}

    def _clock(self) -> float:
        return self.now

    def open(
        self, name: str, prompt: Any, space: str | Namespace = "", *, store: bool = True
    ) -> Sequence:
        """Open a request and tell of it."""
        sequence = self.cache.open(prompt, space)
        sequence.copies()
        self.explainer.opened(
            name,
            sequence.tokens,
            as_namespace(space),
            sequence.miss,
            sequence=sequence.id,
            store=store,
            kind="/v1/completions",
        )
        self.ids[sequence.id] = name
        return sequence

    def end(self, sequence: Sequence, outcome: str = "done", *, generated: int = 0) -> None:
        """Close a sequence and tell of it."""
        sequence.close()
        self.explainer.ended(
            self.ids[sequence.id], outcome=outcome, generated=generated, ttft_s=0.1, seconds=0.2
        )

    def run(
        self, name: str, prompt: Any, space: str | Namespace = "", answer: Any = ()
    ) -> Explanation:
        """A whole request; its explanation."""
        sequence = self.open(name, prompt, space)
        sequence.publish()
        if len(answer):
            sequence.append(answer)
            sequence.publish()
        self.end(sequence, generated=len(answer))
        return self.why(name)

    def why(self, name: str) -> Explanation:
        """The explanation of a request, complete."""
        found = self.explainer.explain(name)
        assert found is not None
        assert self.explainer.failed == 0
        check(found)
        return found

    def close(self) -> None:
        """End the thread; nothing has failed."""
        self.explainer.summary()
        assert self.explainer.failed == 0
        self.explainer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def check(found: Explanation) -> None:
    """Each token is in one span, and has a source or a reason."""
    at = 0
    for span in found.spans:
        assert span.start == at < span.stop
        assert (span.source is None) != (span.reason is None)
        at = span.stop
    assert at == found.prompt_tokens
    assert sum(found.reused.values()) + sum(found.computed.values()) == found.prompt_tokens


def told(found: Explanation) -> list[tuple[int, int, str | None]]:
    """The spans in short."""
    return [(span.start, span.stop, span.source or span.reason) for span in found.spans]


def evidence(found: Explanation, reason: str) -> dict[str, Any]:
    """That of the first span of a reason."""
    return next(dict(span.evidence) for span in found.spans if span.reason == reason)
