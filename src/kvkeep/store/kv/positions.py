"""The records that resuming at a position of a prompt needs, and their ids.

    base       its blocks from 0 to the position, the last of which may be a tail
    window     of each group the blocks from the first token that the position needs
    state      one record, exactly at the position

The key of a base record is the chain key of its tokens, as for a plain model. That of the others is

    SHA-256( "kvkeep record 1\\n" + tag + "\\n" + chain key of the record's end )

with the tag ``state``, ``window <group>``, or ``window <group> from <tokens>`` for a block whose
first tokens were not there when it was put: they had left the window. The namespace names the
geometry, so the numbers of groups are unambiguous.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.core.keys import SPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.store.kv.names import PromptBlocks
    from kvkeep.store.kv.records import RecordForms

__all__ = ["BASE", "STATE", "Position", "PositionNames", "PositionPiece"]

BASE: Final = -1
STATE: Final = -2
"""Groups of records that are no window's; windows count from 0."""


class PositionPiece(NamedTuple):
    """One record of a position.

    Attributes:
        id: its block id.
        group: the number of its window, or `BASE`, or `STATE`.
        start, stop: the tokens that it has; equal for a state.
        raw_bytes: its length.
    """

    id: bytes
    group: int
    start: int
    stop: int
    raw_bytes: int


class Position(NamedTuple):
    """A stored position, and all records that it needs, each with the fastest tier that has it."""

    tokens: int
    pieces: list[PositionPiece]
    levels: list[int]


class PositionNames:
    """The ids of all records of one prompt.

    ``prompt.start`` is ignored: it is about which tokens are loaded. Cost: about 1 µs a block for
    the chain, and as much for each other id.
    """

    def __init__(
        self, forms: RecordForms, prompt: PromptBlocks, full: list[bytes] | None = None
    ) -> None:
        """``full`` are the ids of its blocks, if they are at hand."""
        self.forms = forms
        self.row, _, self.names = prompt
        self.size = self.names.block_tokens
        self.full = self.names.full(self.row) if full is None else full
        self._tails: dict[int, list[bytes]] = {}
        self._hashes = {
            group: hashlib.sha256(b"kvkeep record 1\nwindow %d\n" % group)
            for group in range(len(forms.windows))
        }
        self._hashes[STATE] = hashlib.sha256(b"kvkeep record 1\nstate\n")

    def end(self, tokens: int) -> bytes:
        """Return the id that ends at a position: of a block, or of a tail."""
        number, rest = divmod(tokens, self.size)
        return self.tails(number)[rest - 1] if rest else self.full[number - 1]

    def chain(self, tokens: int) -> list[bytes]:
        """Return the ids of all blocks up to a position, the last of which may be a tail."""
        number, rest = divmod(tokens, self.size)
        return [*self.full[:number], self.end(tokens)] if rest else self.full[:number]

    def tails(self, number: int) -> list[bytes]:
        """Return the ids of the first 1, 2, … tokens of block ``number``."""
        found = self._tails.get(number)
        if found is None:
            begin = number * self.size
            before = self.full[max(0, number - 1) : number]
            tokens = self.row[begin : begin + self.size]
            found = self._tails[number] = self.names.tails(before, tokens, start=begin)
        return found

    def state(self, tokens: int) -> bytes:
        """Return the id of the state at a position."""
        return self._tagged(STATE, self.end(tokens))

    def window(self, group: int, stop: int, skip: int = 0) -> bytes:
        """Return the id of a window's record that ends at ``stop``, without ``skip`` tokens."""
        return self._tagged(group, self.end(stop), skip)

    def _tagged(self, group: int, block: bytes, skip: int = 0) -> bytes:
        digest = self._hashes[group].copy()
        if skip:
            digest = hashlib.sha256(b"kvkeep record 1\nwindow %d from %d\n" % (group, skip))
        digest.update(block[SPACE_BYTES:])
        return block[:SPACE_BYTES] + digest.digest()

    def base_pieces(self, tokens: int, first: int = 0) -> list[PositionPiece]:
        """Return the base records of a position, from block ``first`` on."""
        base, size = self.forms.base, self.size
        if base is None:
            return []
        whole = base.raw_bytes(size)
        pieces = [
            PositionPiece(self.full[number], BASE, number * size, (number + 1) * size, whole)
            for number in range(first, tokens // size)
        ]
        if rest := tokens % size:
            raw_bytes = base.raw_bytes(rest)
            pieces.append(PositionPiece(self.end(tokens), BASE, tokens - rest, tokens, raw_bytes))
        return pieces

    def window_piece(self, group: int, start: int, stop: int) -> PositionPiece:
        """Return the record of a window that has tokens ``start`` … ``stop - 1`` of one block."""
        raw_bytes = self.forms.windows[group].raw_bytes(stop - start)
        return PositionPiece(
            self.window(group, stop, start % self.size), group, start, stop, raw_bytes
        )

    def state_piece(self, tokens: int) -> PositionPiece:
        """Return the record of the state at a position."""
        assert self.forms.states is not None
        return PositionPiece(self.state(tokens), STATE, tokens, tokens, self.forms.states.raw_bytes)

    def spans(self, group: int, tokens: int) -> Iterator[tuple[int, int]]:
        """Yield what a position needs of a window, cut into blocks, the last one first."""
        start = self.forms.windows[group].start_of(tokens)
        stop = tokens
        while stop > start:
            begin = (stop - 1) // self.size * self.size
            yield max(begin, start), stop
            stop = begin

    def every(self, start: int) -> Iterator[bytes]:
        """Yield the ids of all records that have a token from ``start`` on, or end behind it.

        Cost: about 1 µs a token and group.
        """
        for tokens in range(start + 1, len(self.row) + 1):
            end = self.end(tokens)
            yield end
            for group in range(len(self.forms.windows)):
                yield self._tagged(group, end)
                yield from self._head(group, tokens, start)
            if self.forms.states is not None:
                yield self._tagged(STATE, end)

    def _head(self, group: int, tokens: int, least: int) -> Iterator[bytes]:
        """Yield the id of the cut first record of a position, if it ends behind ``least``."""
        start = self.forms.windows[group].start_of(tokens)
        stop = min(tokens, (start // self.size + 1) * self.size)
        if start % self.size and start < tokens and stop > least:
            yield self.window(group, stop, start % self.size)
