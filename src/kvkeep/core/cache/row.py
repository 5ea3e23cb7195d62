"""`TokenRow`: the tokens of a sequence, as the prefix index compares them and as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.events import frozen
from kvkeep.core.pages import GrowingArray

if TYPE_CHECKING:
    from typing import Self

    from kvkeep.core.extras import Extras
    from kvkeep.core.prefix.marks import Marks
    from kvkeep.core.tokens import TokenArray

__all__ = ["TokenRow"]


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
