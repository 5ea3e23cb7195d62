"""The tokens of one sequence, as the index compares them: with marks, and with salts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.events import frozen
from kvkeep.core.extras import Extra
from kvkeep.core.pages import GrowingArray

if TYPE_CHECKING:
    from typing import Self

    from kvkeep.core.extras import Extras
    from kvkeep.core.prefix.marks import Marks
    from kvkeep.core.tokens import TokenArray

__all__ = ["Border", "SaltedRow", "TokenRow"]


class TokenRow(GrowingArray):
    """Tokens in which marks stand for those with extras; it counts the uses of its marks.

    ``values`` is what the index compares. Thread safety: none; under the cache's lock.
    """

    __slots__ = ("_extras", "_marked", "_marks")

    def __init__(self, marks: Marks, tokens: TokenArray, extras: Extras = ()) -> None:
        super().__init__(marks.marked(tokens, extras) if extras else tokens)
        self._marks = marks
        self._marked = bool(extras)
        self._extras: Extras = ()  # of a row whose marks were released

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

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens, and release the marks behind them."""
        if self._marked:
            self._marks.release(self.values[length:])
        super().cut(length)

    def fork(self) -> Self:
        """Return a second row with the same tokens and marks."""
        other = type(self)(self._marks, self.values)
        if self._marked:
            self._marks.again(self.values)
            other._marked = True
        return other

    def release_marks(self) -> None:
        """Replace the marks by plain tokens, so that the row can be read after they end."""
        if self._marked:
            tokens, extras = self.plain(self.values)
            self._marks.release(self.values)
            GrowingArray.__init__(self, tokens)
            self._extras, self._marked = extras, False


class Border(NamedTuple):
    """The end of a row's public part, in tokens; the ``salt`` of the private tokens behind."""

    public: int
    page_size: int
    salt: bytes


class SaltedRow(TokenRow):
    """A row with a public prefix: the first token of its first private page has a salt.

    The public part ends at its border, and wherever the row is cut within it; tokens added
    from there on are private. So whatever is added, no private token is in a page without salt.
    """

    __slots__ = ("_border", "_private")

    def __init__(self, marks: Marks, tokens: TokenArray, extras: Extras, border: Border) -> None:
        """``extras`` have the salt at the border already, if there is a token."""
        super().__init__(marks, tokens, extras)
        self._border = border
        self._private = border.public

    def append(self, value: int) -> None:
        """Append one token, with the salt if it is the first private one."""
        if self._length == self._private:
            self.extend_with(np.array([value], np.int32), ())
        else:
            super().append(value)

    def extend(self, values: TokenArray) -> None:
        """Append tokens, the first private one of them with the salt."""
        if self._length == self._private:
            self.extend_with(values, ())
        else:
            super().extend(values)

    def extend_with(self, tokens: TokenArray, extras: Extras) -> None:
        """Add tokens at the end; positions of ``extras`` count from the first of ``tokens``."""
        if self._length == self._private and len(tokens):
            extras = (Extra(0, self._border.salt), *extras)
        GrowingArray.extend(self, self._marks.marked(tokens, extras))
        self._marked = self._marked or bool(extras)

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens; a page that keeps only some of them is private now."""
        super().cut(length)
        if length < self._private:
            at = self._private = length // self._border.page_size * self._border.page_size
            if at < length:
                token = self._array[at : at + 1]
                token[:] = self._marks.marked(token, (Extra(0, self._border.salt),))
                self._marked = True

    def fork(self) -> Self:
        """Return a second row with the same tokens and marks."""
        border = self._border._replace(public=self._private)
        other = type(self)(self._marks, self.values, (), border)
        if self._marked:
            self._marks.again(self.values)
            other._marked = True
        return other
