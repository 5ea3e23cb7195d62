"""`Shares`: which namespaces ask for most of the prompt tokens of late, and what they reuse."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NamespaceShare", "Shares"]


@dataclass(frozen=True, slots=True)
class NamespaceShare:
    """One namespace's part: of all prompt tokens, and of its own that were reused, each 0 … 1.

    ``name`` is None for all that are not named.
    """

    name: str | None
    prompt: float
    reused: float


@dataclass(slots=True)
class _Tokens:
    prompt: float = 0.0
    reused: float = 0.0


class Shares:
    """Prompt tokens by namespace; after ``half_life_s`` seconds a token counts half.

    At most ``names`` are told apart; the smaller half of more is forgotten, and counts among those
    without a name. ``clock`` gives seconds.

    Thread safety: all methods. Cost: `add` two dict look-ups; `top` one pass over the names.
    """

    def __init__(
        self,
        *,
        half_life_s: float = 600.0,
        names: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < half_life_s < float("inf"):
            raise InvalidValue(f"half_life_s is a time above zero that ends, got {half_life_s}")
        self._half_life_s = half_life_s
        self._most = whole("names", names, 2)
        self._clock = clock
        self._begun = clock()
        self._lock = threading.Lock()
        self._names: dict[str, _Tokens] = {}
        self._forgotten = _Tokens()
        self._all = _Tokens()

    def add(self, name: str, prompt: int, reused: int) -> None:
        """Namespace ``name`` asked for so many prompt tokens, of which so many were reused."""
        with self._lock:
            # What comes later weighs more: as if all else weighed less, and nobody is touched.
            weight = self._weight()
            known = self._names.get(name)
            if known is None:
                known = self._names[name] = _Tokens()
            for tokens in (known, self._all):
                tokens.prompt += weight * prompt
                tokens.reused += weight * reused
            if len(self._names) > self._most:
                self._forget()

    def top(self, most: int = 20) -> list[NamespaceShare]:
        """The ``most`` largest, largest first, then the rest as one where there is any.

        What they ask for adds up to 1; nothing before the first token.
        """
        with self._lock:
            if not self._all.prompt:
                return []
            largest = nlargest(most, self._names.items(), key=lambda item: item[1].prompt)
            shares = [self._share(name, tokens) for name, tokens in largest]
            if len(self._names) > most or self._forgotten.prompt:
                prompt = self._all.prompt - sum(tokens.prompt for _, tokens in largest)
                reused = self._all.reused - sum(tokens.reused for _, tokens in largest)
                shares.append(self._share(None, _Tokens(max(prompt, 0.0), max(reused, 0.0))))
            return shares

    def _share(self, name: str | None, tokens: _Tokens) -> NamespaceShare:
        reused = tokens.reused / tokens.prompt if tokens.prompt else 0.0
        return NamespaceShare(name, tokens.prompt / self._all.prompt, min(reused, 1.0))

    def _weight(self) -> float:
        """What a token weighs now; all that was counted is scaled down before it overflows."""
        now = self._clock()
        lives = (now - self._begun) / self._half_life_s
        if lives > 200:
            scale = 0.0 if lives > 1000 else 2.0**-lives
            for tokens in (*self._names.values(), self._forgotten, self._all):
                tokens.prompt *= scale
                tokens.reused *= scale
            self._begun, lives = now, 0.0
        return float(2.0**lives)

    def _forget(self) -> None:
        kept = nlargest(self._most // 2, self._names.items(), key=lambda item: item[1].prompt)
        gone = self._names.keys() - {name for name, _ in kept}
        for name in gone:
            tokens = self._names.pop(name)
            self._forgotten.prompt += tokens.prompt
            self._forgotten.reused += tokens.reused
