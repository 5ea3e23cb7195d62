"""`TokenRows`: which tokens each slot holds, and the search for the longest prefix among them."""

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

NOWHERE = -1  # no slot; as a namespace's number: the slot belongs to none

# Rows of a power-of-two length would all begin in the same set of the processor's cache, and the
# search reads one column of many rows. One cache line more a row spreads them.
_ROW_PADDING = 16


class TokenRows:
    """One row of int32 tokens a slot, with how much of it is published, and in which namespace.

    The first ``published[slot]`` tokens of a row are the ones whose KV is computed and may be used
    by others; the ``lengths[slot]`` tokens are all that its holder has put there. Rows are one
    matrix that the system backs with memory only where something was written: at most 4 bytes a
    token, against tens of kilobytes for the token's KV.

    Thread safety: none. Cost: see each method; tokens are compared by NumPy, never in Python.
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
        """Drop what the row holds beyond ``length`` tokens."""
        self.lengths[slot] = min(self.lengths[slot], length)
        self.published[slot] = min(int(self.published[slot]), length)

    def forget(self, slot: int) -> None:
        """Drop all that the row holds, and its namespace."""
        self.cut(slot, 0)
        self._spaces[slot] = NOWHERE

    def _number_for(self, namespace: Namespace) -> int:
        number = self._numbers.get(namespace)
        if number is None:
            # Namespaces come and go with tenants: names that no slot uses are dropped now and then.
            if len(self._numbers) >= 2 * len(self.lengths):
                used = set(self._spaces.tolist())
                self._numbers = {k: v for k, v in self._numbers.items() if v in used}
            number = self._numbers[namespace] = next(self._next_number)
        return number

    # -- reading ------------------------------------------------------------------------------

    def row(self, slot: int, length: int) -> TokenArray:
        """The first ``length`` tokens of the row, as a view; not bounded by what is published."""
        return self._tokens[slot, :length]

    def is_in(self, slot: int, namespace: Namespace) -> bool:
        """Whether the slot's data belongs to ``namespace``."""
        return bool(self._spaces[slot] == self._numbers.get(namespace, NOWHERE - 1))

    def common(self, slot: int, namespace: Namespace, prompt: TokenArray) -> int:
        """How many published tokens of ``slot`` the prompt begins with. O(that many)."""
        if not self.is_in(slot, namespace):
            return 0
        return common_length(self._tokens[slot, : int(self.published[slot])], prompt)

    def longest(
        self, namespace: Namespace, prompt: TokenArray, *, above: int, limit: int
    ) -> tuple[int, int]:
        """The slot that has published the longest beginning of ``prompt``, and its length.

        The length counts at most ``limit`` tokens; ``(NOWHERE, above)`` when none has more than
        ``above``. Of equals the one that reaches further, then the lowest. One vectorised look at
        the slots each time the best gets better, and one comparison of tokens for each slot that
        has the right token just behind the best so far.
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
        """Of ``slots``, those that reach past position ``at`` and have the prompt's token there."""
        slots = slots[reach[slots] > at]
        if not len(slots):
            return slots
        continues: npt.NDArray[np.bool_] = self._tokens[slots, at] == prompt[at]
        return slots[continues]

    def beginnings(
        self, namespace: Namespace, prompt: TokenArray, among: npt.NDArray[np.bool_]
    ) -> Iterator[int]:
        """Slots of ``among`` whose whole published data the prompt begins with, longest first."""
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
        """Assert what must hold within each row."""
        lengths = np.asarray(self.lengths)
        assert (self.published >= 0).all(), "fewer than no tokens are published"
        assert (self.published <= lengths).all(), "more is published than the row holds"
        assert (lengths <= self._tokens.shape[1] - _ROW_PADDING).all(), "a row is too long"
        assert ((self._spaces != NOWHERE) >= (self.published > 0)).all(), "data of no namespace"
        numbers = list(self._numbers.values())
        assert len(set(numbers)) == len(numbers), "two namespaces share a number"
        used = set(self._spaces.tolist()) - {NOWHERE}
        assert used <= set(numbers), "a slot belongs to a namespace that is not known"
