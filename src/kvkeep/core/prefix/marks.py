"""`Marks`: negative ids that stand for a token together with its extras; `TokenRow`.

A prefix index compares int32 tokens, which are never negative. A token with extras
(`kvkeep.core.extras`) is replaced by a *mark*: a negative id that two rows share if and only if
the token and the digests are equal. So a row with marks is compared, split and stored like any
other: that is the `TokenRow` of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.events import frozen
from kvkeep.core.extras import Extra, numbered
from kvkeep.core.pages import GrowingArray

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from kvkeep.core.extras import Extras
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.tokens import TokenArray

__all__ = ["Marks", "TokenRow"]

_LAST = -(2**31)


def _after(mark_id: int) -> int:
    return mark_id - 1 if mark_id > _LAST else -1


@dataclass(slots=True)
class _Mark:
    token: int
    digests: tuple[bytes, ...]
    uses: int


class Marks:
    """The marks of one cache.

    A mark is in use while a sequence has it (`marked`, `retain`, `release`) or a stored page has it
    (`stored`, `forget`). So the table is as large as the cached extras, and a mark never stands for
    two contents at once. Ids count down from -1, and start again after 2³¹.

    Thread safety: changes are made under the cache's lock; `plain` may be called anywhere. Cost:
    nothing for rows without marks, else about 1 µs a mark. Memory: about 400 bytes a mark.
    """

    def __init__(self) -> None:
        self.living: dict[int, _Mark] = {}
        """The marks in use."""
        self._ids: dict[tuple[int, tuple[bytes, ...]], int] = {}
        self._pages: dict[int, tuple[int, ...]] = {}  # stored pages with marks
        self._next = -1

    # --- from extras to marks ----------------------------------------------------------------

    def lookup(self, tokens: TokenArray, extras: Extras) -> TokenArray:
        """Return the row with marks, up to the first token that has none yet. Changes nothing."""
        return numbered(tokens, extras, lambda *content: self._ids.get(content))

    def marked(self, tokens: TokenArray, extras: Extras) -> TokenArray:
        """Return the row with marks, and count one use of each. Missing marks are made."""
        return numbered(tokens, extras, self._use)

    def _use(self, token: int, digests: tuple[bytes, ...]) -> int:
        mark_id = self._ids.get((token, digests))
        if mark_id is None:
            mark_id = self._next
            while mark_id in self.living:
                mark_id = _after(mark_id)
            self._next = _after(mark_id)
            self._ids[token, digests] = mark_id
            self.living[mark_id] = _Mark(token, digests, 0)
        self.living[mark_id].uses += 1
        return mark_id

    # --- from marks to extras ----------------------------------------------------------------

    def plain(self, row: TokenArray) -> tuple[TokenArray, Extras]:
        """Return the tokens of a row, and its extras without their bytes.

        The marks of a row that was read without the lock may be in use no more: the result ends
        before the first of these.
        """
        positions = np.flatnonzero(row < 0) if self.living else ()
        if not len(positions):
            return row, ()
        tokens = row.copy()
        extras: list[Extra] = []
        for position in map(int, positions):
            mark = self.living.get(int(row[position]))
            if mark is None:
                return tokens[:position], tuple(extras)
            tokens[position] = mark.token
            extras += [Extra(position, digest) for digest in mark.digests]
        return tokens, tuple(extras)

    # --- uses --------------------------------------------------------------------------------

    def retain(self, row: TokenArray) -> None:
        """Count one more sequence that has this row."""
        for mark_id in row[row < 0].tolist():
            self.living[mark_id].uses += 1

    def release(self, row: TokenArray) -> None:
        """Count one sequence fewer that has this row."""
        self._drop(row[row < 0].tolist())

    def _drop(self, ids: Iterable[int]) -> None:
        for mark_id in ids:
            mark = self.living[mark_id]
            mark.uses -= 1
            if not mark.uses:
                del self.living[mark_id]
                del self._ids[mark.token, mark.digests]

    def stored(self, pages: PageArray, row: TokenArray) -> None:
        """Record that the index stores ``pages``, which hold this row."""
        size = len(row) // len(pages)
        positions = np.flatnonzero(row < 0)
        for position in positions.tolist():
            page, mark_id = int(pages[position // size]), int(row[position])
            self._pages[page] = (*self._pages.get(page, ()), mark_id)
            self.living[mark_id].uses += 1

    def forget(self, pages: PageArray) -> None:
        """Record that the index no longer stores these pages."""
        for page in pages.tolist():
            self._drop(self._pages.pop(page, ()))

    def check(self, stored: PageArray, rows: Iterable[TokenArray]) -> None:
        """Recount uses, given all stored pages and all rows of sequences. Asserts."""
        uses: dict[int, int] = {}
        for row in rows:
            for mark_id in row[row < 0].tolist():
                uses[mark_id] = uses.get(mark_id, 0) + 1
        for page, ids in self._pages.items():
            assert page in stored, f"marks are kept of page {page}, which is not stored"
            for mark_id in ids:
                uses[mark_id] = uses.get(mark_id, 0) + 1
        assert uses == {mark_id: mark.uses for mark_id, mark in self.living.items()}
        assert self._ids == {
            (mark.token, mark.digests): mark_id for mark_id, mark in self.living.items()
        }


class TokenRow(GrowingArray):
    """Tokens of a sequence, with marks for those with extras; it counts the uses of its marks.

    ``values`` is what the index compares. Thread safety: none; under the cache's lock.
    """

    __slots__ = ("_extras", "_marked", "_marks")

    def __init__(self, marks: Marks, tokens: TokenArray, extras: Extras = ()) -> None:
        super().__init__(marks.marked(tokens, extras) if extras else tokens)
        self._marks = marks
        self._marked = bool(extras)
        self._extras: Extras = ()  # once its marks were released

    @property
    def tokens(self) -> TokenArray:
        """The tokens: int32, read-only; a copy where some have extras."""
        return frozen(self.plain(self.values)[0]) if self._marked else self.view()

    @property
    def extras(self) -> Extras:
        """The digests of the bytes that belong to the tokens, by position."""
        return self.plain(self.values)[1] if self._marked else self._extras

    def plain(self, part: TokenArray) -> tuple[TokenArray, Extras]:
        """Return the tokens and extras of a part of ``values``."""
        return self._marks.plain(part) if self._marked else (part, ())

    def extend_with(self, tokens: TokenArray, extras: Extras) -> None:
        """Add tokens at the end; positions of ``extras`` count from the first of ``tokens``."""
        self.extend(self._marks.marked(tokens, extras))
        self._marked = True

    def mark(self, position: int, digest: bytes) -> None:
        """Give a token without extras one; does nothing at the end of the row."""
        token = self.values[position : position + 1]
        if len(token):
            token[:] = self._marks.marked(token, (Extra(0, digest),))
            self._marked = True

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens, and release the marks behind them."""
        if self._marked:
            self._marks.release(self.values[length:])
        super().cut(length)

    def fork(self) -> Self:
        """Return a second row with the same tokens and marks."""
        other = type(self)(self._marks, self.values)
        if self._marked:
            self._marks.retain(self.values)
            other._marked = True
        return other

    def release_marks(self) -> None:
        """Release the marks and put plain tokens in their place: the row stays readable."""
        if self._marked:
            tokens, self._extras = self.plain(self.values)
            self._marks.release(self.values)
            self._array, self._marked = tokens, False
