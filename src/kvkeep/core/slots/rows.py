"""`TokenRows`: the tokens of each slot, and the search for the longest prefix among them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.tokens import TOKEN_DTYPE, common_length

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray

__all__ = ["NOWHERE", "TokenRows"]

NOWHERE = -1  # no slot; as the number of a namespace: none

# Rows of a power-of-two length would all begin in the same set of the CPU cache, and the search
# reads one column of many rows. One more cache line per row spreads them.
_ROW_PADDING = 16


class TokenRows:
    """One row of int32 tokens per slot, with its published length and its namespace.

    The first ``published[slot]`` tokens of a row have KV that other requests may use;
    ``lengths[slot]`` is the length of the whole row. The rows are one matrix, of which the system
    allocates only what is written: at most 4 bytes a token, against tens of kilobytes for its KV.

    Thread safety: none. Tokens are compared by NumPy, never in Python.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self._tokens = np.zeros((num_slots, max_tokens + _ROW_PADDING), TOKEN_DTYPE)
        self.lengths = [0] * num_slots
        self.published = np.zeros(num_slots, np.int64)
        self._spaces = np.full(num_slots, NOWHERE, np.int64)
        self._numbers: dict[Namespace, int] = {}
        self._next_number = itertools.count()

    # -- writing ------------------------------------------------------------------------------

    def write(self, slot: int, namespace: Namespace, tokens: TokenArray, keep: int) -> None:
        """Make ``tokens`` the row of ``slot``; its first ``keep`` are there and stay published."""
        self._tokens[slot, keep : len(tokens)] = tokens[keep:]
        self.lengths[slot] = len(tokens)
        self.published[slot] = keep
        self._spaces[slot] = self._number_for(namespace)

    def extend(self, slot: int, tokens: TokenArray) -> None:
        """Append ``tokens`` to the row."""
        end = self.lengths[slot] + len(tokens)
        self._tokens[slot, self.lengths[slot] : end] = tokens
        self.lengths[slot] = end

    def cut(self, slot: int, length: int) -> None:
        """Drop all but the first ``length`` tokens of the row."""
        self.lengths[slot] = min(self.lengths[slot], length)
        self.published[slot] = min(int(self.published[slot]), length)

    def forget(self, slot: int) -> None:
        """Drop the row, and its namespace."""
        self.cut(slot, 0)
        self._spaces[slot] = NOWHERE

    def _number_for(self, namespace: Namespace) -> int:
        number = self._numbers.get(namespace)
        if number is None:
            # Tenants come and go: numbers of unused namespaces are dropped now and then.
            if len(self._numbers) >= 2 * len(self.lengths):
                used = set(self._spaces.tolist())
                self._numbers = {k: v for k, v in self._numbers.items() if v in used}
            number = self._numbers[namespace] = next(self._next_number)
        return number

    # -- reading ------------------------------------------------------------------------------

    def row(self, slot: int, length: int) -> TokenArray:
        """Return a view of the first ``length`` tokens of the row, published or not."""
        return self._tokens[slot, :length]

    def is_in(self, slot: int, namespace: Namespace) -> bool:
        """Whether the slot's data belongs to ``namespace``."""
        return bool(self._spaces[slot] == self._numbers.get(namespace, NOWHERE - 1))

    def common(self, slot: int, namespace: Namespace, prompt: TokenArray) -> int:
        """Return how many published tokens of ``slot`` the prompt begins with. O(that many)."""
        if not self.is_in(slot, namespace):
            return 0
        return common_length(self._tokens[slot, : int(self.published[slot])], prompt)

    def longest(
        self, namespace: Namespace, prompt: TokenArray, *, above: int, limit: int
    ) -> tuple[int, int]:
        """Return the slot with the longest published beginning of ``prompt``, and its length.

        The length is at most ``limit``; ``(NOWHERE, above)`` when no slot has more than ``above``.
        Among equals, the slot with more published tokens wins, then the lowest. Cost: one NumPy
        pass over the slots per improvement, and one comparison for each slot that continues the
        best so far.
        """
        best, found = above, NOWHERE
        number = self._numbers.get(namespace)
        if number is None:
            return found, best
        reach = np.minimum(self.published, limit)
        rivals = np.flatnonzero((self._spaces == number) & (reach > best))
        rivals = rivals[np.argsort(-reach[rivals], kind="stable")]
        while len(rivals := self._that_continue(rivals, reach, prompt, best)):
            for at, slot in enumerate(rivals.tolist()):
                length = common_length(self._tokens[slot, : int(reach[slot])], prompt)
                if length > best:
                    best, found = length, slot
                    rivals = rivals[at + 1 :]
                    break
            else:
                break
        return found, best

    def _that_continue(
        self,
        slots: npt.NDArray[np.intp],
        reach: npt.NDArray[np.int64],
        prompt: TokenArray,
        at: int,
    ) -> npt.NDArray[np.intp]:
        """Return those of ``slots`` that have the prompt's token at position ``at``."""
        slots = slots[reach[slots] > at]
        if not len(slots):
            return slots
        continues: npt.NDArray[np.bool_] = self._tokens[slots, at] == prompt[at]
        return slots[continues]

    def beginnings(
        self, namespace: Namespace, prompt: TokenArray, among: npt.NDArray[np.bool_]
    ) -> Iterator[int]:
        """Yield slots of ``among`` whose whole published data begins the prompt, longest first."""
        number = self._numbers.get(namespace)
        if number is None:
            return
        published = self.published
        inside = (published > 0) & (published <= len(prompt))
        slots = np.flatnonzero(among & (self._spaces == number) & inside)
        last = published[slots] - 1
        slots = slots[self._tokens[slots, last] == prompt[last]]
        for slot in slots[np.argsort(-published[slots], kind="stable")].tolist():
            length = int(published[slot])
            if common_length(self._tokens[slot, :length], prompt) == length:
                yield slot

    def check(self) -> None:
        """Assert the invariants of each row."""
        lengths = np.asarray(self.lengths)
        assert (self.published >= 0).all(), "fewer than no tokens are published"
        assert (self.published <= lengths).all(), "more is published than the row holds"
        assert (lengths <= self._tokens.shape[1] - _ROW_PADDING).all(), "a row is too long"
        assert ((self._spaces != NOWHERE) >= (self.published > 0)).all(), "data of no namespace"
        numbers = list(self._numbers.values())
        assert len(set(numbers)) == len(numbers), "two namespaces share a number"
        used = set(self._spaces.tolist()) - {NOWHERE}
        assert used <= set(numbers), "a slot belongs to a namespace that is not known"
