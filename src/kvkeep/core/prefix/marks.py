"""`Marks`: negative ids that stand for a token together with its extras.

A prefix index compares int32 tokens, which are never negative. A token with extras
(`kvkeep.core.extras`) is replaced by a *mark*: a negative id that two rows share if and only if
the token and the digests are equal. So a row with marks is compared, split and stored like any
other.
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
    from kvkeep.core.pages.tables import PageArray
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

    A mark lives while a sequence has it (`marked`, `again`, `release`) or a stored page has it
    (`stored`, `forget`). So the table is as large as the cached extras, and a mark never stands for
    two contents at once. Ids count down from -1, and start again after 2³¹.

    Thread safety: changes are made under the cache's lock; `plain` may be called anywhere. Cost:
    nothing for rows without marks, else about 1 µs a mark. Memory: about 400 bytes a mark.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[int, tuple[bytes, ...]], int] = {}
        self._marks: dict[int, _Mark] = {}
        self._pages: dict[int, tuple[int, ...]] = {}  # stored pages with marks
        self._next = -1

    def __len__(self) -> int:
        """Return the number of marks in use."""
        return len(self._marks)

    # --- from extras to marks ----------------------------------------------------------------

    def known(self, tokens: TokenArray, extras: Extras) -> TokenArray:
        """Return the row with marks, up to the first token whose mark does not exist."""
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
        """Return the row with marks, and count one use of each; makes missing ones."""
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

    def plain(self, row: TokenArray) -> tuple[TokenArray, Extras]:
        """Return the tokens of a row, and its extras without their bytes.

        In a row that was read without the lock, marks may have ended since: the result ends before
        the first of those.
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

    def plain_bytes(self, symbols: bytes) -> bytes:
        """Return the symbols of tokens as they are without their extras."""
        return self.plain(np.frombuffer(symbols, TOKEN_DTYPE))[0].tobytes()

    # --- uses --------------------------------------------------------------------------------

    def again(self, row: TokenArray) -> None:
        """Count one more sequence that has this row."""
        for found in row[row < 0].tolist():
            self._marks[found].uses += 1

    def release(self, row: TokenArray) -> None:
        """Count one sequence fewer that has this row."""
        self._drop(row[row < 0].tolist())

    def _drop(self, ids: Iterable[int]) -> None:
        for found in ids:
            mark = self._marks[found]
            mark.uses -= 1
            if not mark.uses:
                del self._marks[found]
                del self._ids[mark.token, mark.digests]

    def stored(self, pages: PageArray, row: TokenArray) -> None:
        """Record that the index stores ``pages``, which hold this row."""
        if not len(self._marks):
            return
        size = len(row) // len(pages)
        places = np.flatnonzero(row < 0)
        for place in places.tolist():
            page, found = int(pages[place // size]), int(row[place])
            self._pages[page] = (*self._pages.get(page, ()), found)
            self._marks[found].uses += 1

    def forget(self, pages: PageArray) -> None:
        """Record that the index no longer stores these pages."""
        if not self._pages:
            return
        for page in pages.tolist():
            self._drop(self._pages.pop(page, ()))

    def check(self, stored: PageArray, rows: Iterable[TokenArray]) -> None:
        """Recount uses, given all stored pages and all rows of sequences. Asserts."""
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
