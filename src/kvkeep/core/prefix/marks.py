"""`Marks`: negative ids that stand for a token together with the bytes that belong to it.

A prefix index compares tokens, int32 and never negative. A token with extras
(`kvkeep.core.extras`) is a *mark* in its place: a negative id that two rows share if and only if
token and digests are equal. A row of tokens and marks is compared, split and stored like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.extras import Extra, by_position
from kvkeep.core.tokens import TOKEN_DTYPE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.core.extras import Extras
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.tokens import TokenArray

__all__ = ["Marks"]

_LAST = -(2**31)


@dataclass(slots=True)
class _Mark:
    token: int
    digests: tuple[bytes, ...]
    uses: int


class Marks:
    """The marks of one cache.

    A mark lives as long as something uses it: a sequence that has it, or a stored page
    (`stored`, `forget`). So the table is as large as what is in the cache, and a mark never
    stands for two contents at once. Ids are given out downwards from -1, and begin anew after 2³¹.

    Thread safety: changes are made under the cache's lock; `plain` may be called anywhere. Cost:
    nothing for rows without marks; about 1 µs a mark otherwise. Memory: about 400 bytes a mark.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[int, tuple[bytes, ...]], int] = {}
        self._marks: dict[int, _Mark] = {}
        self._pages: dict[int, tuple[int, ...]] = {}  # stored pages with marks
        self._next = -1

    def __len__(self) -> int:
        """Marks that are in use."""
        return len(self._marks)

    # --- from extras to marks ----------------------------------------------------------------

    def known(self, tokens: TokenArray, extras: Extras) -> TokenArray:
        """The row as far as it can be stored: it ends before the first mark that nothing uses."""
        if not extras:
            return tokens
        row = tokens.copy()
        for position, digests in by_position(extras):
            if position >= len(row):
                break
            found = self._ids.get((int(tokens[position]), digests))
            if found is None:
                return row[:position]
            row[position] = found
        return row

    def marked(self, tokens: TokenArray, extras: Extras) -> TokenArray:
        """The row with its marks, each used once more."""
        if not extras:
            return tokens
        row = tokens.copy()
        for position, digests in by_position(extras):
            row[position] = self._use((int(tokens[position]), digests))
        return row

    def _use(self, content: tuple[int, tuple[bytes, ...]]) -> int:
        found = self._ids.get(content)
        if found is None:
            while self._next in self._marks:
                self._step()
            found = self._ids[content] = self._next
            self._marks[found] = _Mark(*content, 0)
            self._step()
        self._marks[found].uses += 1
        return found

    def _step(self) -> None:
        self._next = -1 if self._next == _LAST else self._next - 1

    # --- from marks to extras ----------------------------------------------------------------

    def plain_bytes(self, symbols: bytes) -> bytes:
        """`plain`, the tokens alone, for rows as bytes."""
        row = np.frombuffer(symbols, TOKEN_DTYPE)
        return self.plain(row)[0].tobytes() if self._marks else symbols

    def plain(self, row: TokenArray) -> tuple[TokenArray, Extras]:
        """The tokens of a row, and its extras without their bytes.

        A row that was read without the lock may have marks that nothing uses any more: the result
        ends before the first of those.
        """
        places = np.flatnonzero(row < 0) if self._marks else ()
        if not len(places):
            return row, ()
        tokens = row.copy()
        extras: list[Extra] = []
        for position in map(int, places):
            mark = self._marks.get(int(row[position]))
            if mark is None:
                return tokens[:position], tuple(extras)
            tokens[position] = mark.token
            extras += [Extra(position, digest) for digest in mark.digests]
        return tokens, tuple(extras)

    # --- uses --------------------------------------------------------------------------------

    def again(self, row: TokenArray) -> None:
        """One more sequence has this row."""
        for found in row[row < 0].tolist():
            self._marks[found].uses += 1

    def release(self, row: TokenArray) -> None:
        """A sequence does not have this row any more."""
        self._drop(row[row < 0].tolist())

    def _drop(self, ids: Iterable[int]) -> None:
        for found in ids:
            mark = self._marks[found]
            mark.uses -= 1
            if not mark.uses:
                del self._marks[found]
                del self._ids[mark.token, mark.digests]

    def stored(self, pages: PageArray, row: TokenArray) -> None:
        """The index stores ``pages`` now, which hold this row."""
        if not len(self._marks):
            return
        size = len(row) // len(pages)
        places = np.flatnonzero(row < 0)
        for place in places.tolist():
            page, found = int(pages[place // size]), int(row[place])
            self._pages[page] = (*self._pages.get(page, ()), found)
            self._marks[found].uses += 1

    def forget(self, pages: PageArray) -> None:
        """The index does not store these pages any more."""
        if not self._pages:
            return
        for page in pages.tolist():
            self._drop(self._pages.pop(page, ()))

    def check(self, stored: PageArray, rows: Iterable[TokenArray]) -> None:
        """Recount: marks are used by these stored pages and by these rows of sequences."""
        uses: dict[int, int] = {}
        for row in rows:
            for found in row[row < 0].tolist():
                uses[found] = uses.get(found, 0) + 1
        for page, ids in self._pages.items():
            assert page in stored, f"marks are kept of page {page}, which is not stored"
            for found in ids:
                uses[found] = uses.get(found, 0) + 1
        assert uses == {found: mark.uses for found, mark in self._marks.items()}
        assert self._ids == {
            (mark.token, mark.digests): found for found, mark in self._marks.items()
        }
