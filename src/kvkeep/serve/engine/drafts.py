"""Guesses of what comes next, from what the sequence said before: prompt lookup.

The last tokens of a sequence are looked for earlier in it, and what followed there is proposed.
Answers that quote, edit or continue their prompt are often guessed many tokens at a time.
Source: Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["PromptLookup"]

# Lengths of what is looked for, tried in this order. The longer a match, the likelier it is the
# place that is being copied: in text edited every 30 tokens, 8-4-2 makes 4.1 tokens a step where
# 4-3-2 makes 3.5 and 2 alone 1.5; others that begin with 6 to 12 are within 5 % of it.
_LENGTHS = (8, 4, 2)
_LONGEST_REST = 64  # steps


class PromptLookup:
    """Drafts for one growing sequence, by the most recent earlier place that reads like its end.

    ``tokens`` are the prompt; at most ``max_draft`` tokens are proposed at a time. How many is
    tuned by what became of them, see `accepted`, and for each length of match by itself: two equal
    tokens mean less than four.

    Thread safety: none. Cost, whatever the length of the sequence: 0.3 µs a prompt token, 1 µs for
    each further one, 1 µs a proposal. Memory: about 400 bytes a token.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], max_draft: int) -> None:
        if max_draft < 1:
            raise InvalidValue(f"max_draft is 1 or more, got {max_draft}")
        self._tokens = array("i", np.asarray(tokens, np.int32).tobytes())
        # For each length: the bytes of as many tokens → where the token after them stands. What
        # stands at the very end is not in it, since nothing followed yet.
        self._after = {length: _index(self._tokens, length) for length in _LENGTHS}
        self._pace = {length: _Pace(max_draft) for length in _LENGTHS}
        self._matched = _LENGTHS[0]

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take what the sequence got: tokens that were chosen, never those only proposed."""
        ours = self._tokens
        for token in tokens:
            end = len(ours)
            for length, after in self._after.items():
                if length <= end:
                    after[ours[end - length :].tobytes()] = end
            ours.append(token)

    def propose(self, limit: int) -> list[int]:
        """At most ``limit`` tokens that may come next; none if nothing is known, or trusted.

        They are what followed an earlier match, the longest that there is. A match so close that
        fewer tokens followed is taken to repeat itself.
        """
        ours = self._tokens
        for length, after in self._after.items():
            found = after.get(ours[-length:].tobytes()) if length <= len(ours) else None
            if found is None:
                continue
            self._matched = length
            count = min(limit, self._pace[length].next())
            draft = ours[found : found + count].tolist() if count > 0 else []
            while 0 < len(draft) < count:
                draft += draft[: count - len(draft)]
            return draft
        return []

    def accepted(self, count: int, of: int) -> None:
        """Say how many tokens of the last proposal were right: ``count`` ``of`` those verified.

        If all were, twice as many are proposed next time, up to ``max_draft``; else two less, but
        more than were right. If none were time and again, it rests: for twice as many proposals
        each time, up to 64, so that text which repeats nothing is hardly slowed down.
        """
        assert 0 <= count <= of, (count, of)
        if of:
            self._pace[self._matched].learn(count, of)


class _Pace:
    """How many tokens to propose, and when not to."""

    __slots__ = ("_count", "_failures", "_max", "_rest")

    def __init__(self, max_draft: int) -> None:
        self._max = max_draft
        self._count = max_draft
        self._failures = 0  # in a row
        self._rest = 0  # proposals still to be left out

    def next(self) -> int:
        if self._rest:
            self._rest -= 1
            return 0
        return self._count

    def learn(self, count: int, of: int) -> None:
        if count == of:
            self._count = min(self._max, max(self._count, 2 * of))
        else:
            self._count = max(count + 1, self._count - 2)
        self._failures = 0 if count else self._failures + 1
        if self._failures > 1:
            self._rest = min(2**self._failures, _LONGEST_REST)


def _index(tokens: array[int], length: int) -> dict[bytes, int]:
    """Each ``length`` tokens, as bytes → where the token after their last occurrence stands."""
    if len(tokens) <= length:
        return {}
    row = np.frombuffer(tokens, np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(row, length)[:-1]  # the last has no next
    keys = np.ascontiguousarray(windows).view(f"V{row.itemsize * length}")[:, 0].tolist()
    return dict(zip(keys, range(length, len(tokens)), strict=True))
