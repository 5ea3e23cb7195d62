"""`Overlap`: how far computing and loading have come on one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvkeep.core.cost.meeting import LoadablePrompt
from kvkeep.core.cost.turns import LoadProgress

if TYPE_CHECKING:
    from collections.abc import Callable

    ReadSeconds = Callable[[int, int], float]

__all__ = ["Overlap"]

_AHEAD: Final = 8  # blocks that a store reads at once: the first may come when all of them do


class Overlap:
    """A prompt whose head is computed while its stored tail is loaded, in tokens and seconds.

        computed  computing        reach            stop    tokens
    ───────┼──────────┼──────────────┼────────────────┼───────┼
      KV   │  a pass  │  to be read  │  KV has come   │

    Tokens `computed` … are computed from the front, blocks of `unit` tokens arrive from the back.
    A block that does not come leaves a hole, which is computed. With ``whole`` the stored tokens
    are of use only once all of them have come.

    Thread safety: none. Times are given, in seconds of any clock.
    """

    def __init__(self, computed: int, tokens: int, unit: int, *, whole: bool = False) -> None:
        self.tokens = tokens
        self.unit = unit
        self.computed = computed
        """KV of the tokens before this one is there."""
        self.computing = computed
        """The end of the pass under way; `computed` if there is none."""
        self.stop = tokens
        """The end of what is stored; unknown, all tokens, until it was looked up."""
        self.reach = tokens
        """The first token from which all up to `stop` have come."""
        self.over = False
        """Whether nothing more comes."""
        self._whole = whole
        self._since: float | None = None  # the last progress of the load, or its begin
        self._first = 0.0  # its begin
        self._came = 0  # tokens
        self._arrived: list[tuple[int, int]] = []  # all that came, in order
        self._coming: list[tuple[int, int]] = []  # that have come, and are not in their place
        self._parts: list[tuple[int, int]] = []  # whose KV is there, behind `computed`; in order

    # --- loading ---------------------------------------------------------------------------------

    def found(self, stop: int) -> None:
        """Note the end of what is stored; nothing was read yet."""
        self.stop = self.reach = max(stop, self.computed)
        self._since = None

    def begin(self, now: float) -> None:
        """Note that a lookup, or a read, begins."""
        self._since = self._first = now

    @property
    def begun(self) -> bool:
        """Whether a lookup or a read is under way, or is over."""
        return self._since is not None

    def came(self, start: int, stop: int, now: float) -> None:
        """Note that tokens have come; `take`, and `put` when their KV is in its place, follow."""
        self._arrived = _merged([*self._arrived, (start, stop)])
        begin, end = self._arrived[-1]
        if begin < self.reach <= end:
            self.reach = begin
        self._came += stop - start
        self._since = now
        self._coming.append((start, stop))

    def take(self) -> None:
        """Note that all tokens that have come are being brought to their places."""
        self._coming.clear()

    def put(self, start: int, stop: int) -> None:
        """Note that the KV of tokens that came is in its place."""
        self._parts.append((start, stop))
        self._parts.sort()

    # --- computing -------------------------------------------------------------------------------

    def compute(self, stop: int) -> None:
        """Note that a pass begins, up to ``stop``."""
        self.computing = stop

    def advance(self, computed: int) -> list[tuple[int, int]]:
        """Note that ``computed`` tokens are there; return the ranges that loads saved behind them.

        `computed` then is behind these.
        """
        saved: list[tuple[int, int]] = []
        self.computed = max(self.computed, computed)
        while self._parts and self._parts[0][0] <= self.computed:
            _, stop = self._parts.pop(0)
            if stop > self.computed:
                saved.append((self.computed, stop))
                self.computed = stop
        self.computing = self.computed
        return saved

    @property
    def met(self) -> bool:
        """Whether all that is stored is there, so that the load is of no more use."""
        return self.computed >= self.stop

    def limit(self) -> int:
        """Return where a pass has to end at the latest: tokens behind it have come."""
        ends = [
            max(start, self.computed)
            for start, stop in (*self._parts, *self._coming)
            if stop > self.computed
        ]
        return min([self.tokens, *ends])

    # --- planning --------------------------------------------------------------------------------

    def progress(self, now: float, read_s: ReadSeconds, *, waited_s: float = 0.0) -> LoadProgress:
        """Return what `take_turns` needs; ``read_s(start, stop)`` is 0 if nothing is known."""
        stop = max(self.stop, self.computing)
        reach = self.limit() if self.over else self.reach
        reach = max(min(reach, stop), self.computing)
        unit = stop if self._whole else self.unit
        prompt = LoadablePrompt(self.computing, reach, stop, self.tokens, max(1, unit))
        rate = 0.0
        if self._came and self._since is not None:
            rate = (self._since - self._first) / self._came

        def expected(tokens: int) -> float:
            begin, seconds, left = reach - tokens, 0.0, 0
            for start, end in (*self._arrived, (reach, reach)):
                if begin < min(start, reach):
                    seconds += read_s(begin, min(start, reach))
                    left += min(start, reach) - begin
                begin = max(begin, end)
            return seconds or rate * left

        left = reach - self.computing
        first = expected(left if self._whole else min(left, _AHEAD * self.unit)) if left else 0.0
        elapsed = None if self._since is None else now - self._since
        return LoadProgress(prompt, expected, first, elapsed, self.over, waited_s)


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ``ranges`` in order, without those that touch."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
