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
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.blocks.stats import closed_is_illegal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvkeep.core.tokens import TokenArray
    from kvkeep.store.kv.forms import RecordForms
    from kvkeep.store.kv.names import Names
    from kvkeep.store.tiers import TieredStore

__all__ = ["BASE", "STATE", "Position", "PositionFinder", "PositionPiece", "PromptIds"]

BASE: Final = -1
STATE: Final = -2
"""Groups of records that are no window's; windows count from 0."""

_BATCHES: Final = (16, 64, 256, 1024)
"""Positions in a query for states, nearest to the end first: the last one stored is wanted."""


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


class Position:
    """A stored position.

    Attributes:
        tokens: before it.
        levels: of its records, the fastest tier that has each.
    """

    __slots__ = ("_pieces", "levels", "tokens")

    def __init__(
        self,
        tokens: int,
        levels: list[int],
        pieces: list[PositionPiece] | Callable[[], list[PositionPiece]],
    ) -> None:
        self.tokens = tokens
        self.levels = levels
        self._pieces = pieces

    @property
    def pieces(self) -> list[PositionPiece]:
        """All records that it needs."""
        if not isinstance(self._pieces, list):
            self._pieces = self._pieces()
        return self._pieces


class PromptIds:
    """A prompt as one call to a store names it, and the ids of its records.

    Cost: about 1 µs a block for the ids of blocks, once they are needed, and as much for each other
    id. Thread safety: none.

    Attributes:
        forms: of its records.
        row: its tokens.
        start: the first token that the call is about.
        names: the names of its blocks.
        size: tokens of a block.
    """

    def __init__(self, forms: RecordForms, row: TokenArray, start: int, names: Names) -> None:
        self.forms = forms
        self.row = row
        self.start = start
        self.names = names
        self.size = names.block_tokens
        self._full: list[bytes] | None = None
        self._tails: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self.row)

    @property
    def full(self) -> list[bytes]:
        """The ids of its full blocks."""
        if self._full is None:
            self._full = self.names.full(self.row)
        return self._full

    def cut(self, tokens: int) -> PromptIds:
        """Return its first ``tokens`` tokens."""
        part = PromptIds(self.forms, self.row[:tokens], min(self.start, tokens), self.names)
        part._full = None if self._full is None else self._full[: tokens // self.size]
        return part

    def behind(self, start: int) -> PromptIds:
        """Return the same with another ``start``."""
        if start == self.start:
            return self
        other = PromptIds(self.forms, self.row, start, self.names)
        other._full = self._full
        return other

    def copied(self) -> PromptIds:
        """Return the same with tokens of its own, for what is named after the call returns."""
        return PromptIds(self.forms, self.row.copy(), self.start, self.names)

    def private(self) -> PromptIds:
        """Return the same with all blocks named in its own namespace: no public ones."""
        if not self.names.public:
            return self
        return PromptIds(self.forms, self.row, self.start, self.names.private())

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
        digest = hashlib.sha256(_tag(group, skip) + block[SPACE_BYTES:])
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


@lru_cache(1024)
def _tag(group: int, skip: int) -> bytes:
    """Return what is hashed before the key of a record's end."""
    tag = b"state" if group == STATE else b"window %d" % group
    if skip:
        tag += b" from %d" % skip
    return b"kvkeep record 1\n" + tag + b"\n"


class PositionFinder:
    """Finds the longest position of a prompt at which all records are stored.

    ``bad`` records count as missing: a read of them failed. Tiers that other processes write to
    are queried about the ends of blocks, and about the end of the prompt, in few queries; about
    other tails only what is known here counts. With ``ask`` False, nothing is queried.

    Cost: a few µs a block, and about 2 µs for each token between the result and the end of the
    stored prefix, which would have to be computed anyway.
    """

    def __init__(
        self,
        tiered: TieredStore,
        prompt: PromptIds,
        *,
        until: float | None = None,
        ask: bool = True,
    ) -> None:
        self._tiered = tiered
        self._names = prompt
        self._until = until
        self._ask = ask
        self._first = prompt.start // prompt.size
        self._start = prompt.start
        self._levels: dict[bytes, int | None] = {}
        self._leading: list[int] = []
        self._reach = self._find_reach()
        self._states_from = self._reach + 1  # blocks whose states were looked up, from the end
        self._batches = 0

    def bad(self, piece: PositionPiece) -> None:
        """Count the record as missing from now on."""
        self._levels[piece.id] = None
        if piece.group == BASE and not piece.stop % self._names.size:
            self._reach = min(self._reach, piece.start // self._names.size)

    @property
    def stored(self) -> int:
        """How many tokens all layers that keep every token have, in whole blocks."""
        return self._reach * self._names.size

    def longest(self) -> Position | None:
        """Return the longest position behind ``start``, None if there is none."""
        with closed_is_illegal():
            return self._longest()

    def _longest(self) -> Position | None:
        size = self._names.size
        block = self._longest_block()
        at = 0 if block is None else block.tokens // size
        for number in range(self._reach, max(at, self._first) - 1, -1):
            found = self._longest_tail(number)
            if found is not None:
                return found
        return block

    def _find_reach(self) -> int:
        """Return how many leading blocks the layers that keep every token have."""
        full, first = self._names.full, self._first
        if self._names.forms.base is None:
            return len(full)
        with closed_is_illegal():
            if self._ask:
                self._leading = list(self._tiered.locate(full[first:], self._until))
            else:
                held = takewhile(bool, self._tiered.holders(full[first:]))
                self._leading = [min(levels) for levels in held]
        if not self._names.forms.whole:
            self._levels |= zip(full[first:], self._leading, strict=False)
        return first + len(self._leading)

    # --- ends of blocks --------------------------------------------------------------------------

    def _longest_block(self) -> Position | None:
        number, names = self._reach, self._names
        least = self._start // names.size
        while number > least:
            if names.forms.states is not None and not self._has_state(number):
                number -= 1
                continue
            tokens = number * names.size
            windows = self._windows(tokens)
            if isinstance(windows, list):
                if (found := self._position(tokens, windows)) is not None:
                    return found
                number -= 1
                continue
            # No end of a block behind the missing record can do without it.
            number = min(number - 1, windows // names.size)
        return None

    def _has_state(self, number: int) -> bool:
        while self._states_from > number:
            batch = _BATCHES[min(self._batches, len(_BATCHES) - 1)]
            begin = max(1, self._states_from - batch)
            ends = range(self._states_from - 1, begin - 1, -1)
            self._look_up([self._names.state(end * self._names.size) for end in ends])
            self._states_from = begin
            self._batches += 1
        return self._levels[self._names.state(number * self._names.size)] is not None

    # --- tails -----------------------------------------------------------------------------------

    def _longest_tail(self, number: int) -> Position | None:
        """Return the longest position inside of block ``number``, whose beginning is stored."""
        for tokens in self._ends(number):
            pieces = self._tail(tokens)
            if pieces is not None and (found := self._position(tokens, pieces)) is not None:
                return found
        return None

    def _ends(self, number: int) -> Iterator[int]:
        """Yield where a position may be inside of block ``number``, the longest first."""
        names, begin, known = self._names, number * self._names.size, self._tiered.known
        most = min(names.size - 1, len(names.row) - begin)
        least = max(0, self._start - begin)
        if self._ask and most > least and begin + most == len(names.row):
            yield begin + most  # it is asked for: one name, not one a token
            most -= 1
        if names.forms.base is not None and names.forms.states is None:
            ends = names.tails(number) if most > least else []
            there = known(ends[least:most])
            yield from (begin + n for n in range(most, least, -1) if ends[n - 1] in there)
        else:
            ahead = range(begin + most, begin + least, -1)
            yield from (at for at in ahead if known(self._markers(at)))

    def _markers(self, tokens: int) -> list[bytes]:
        """Return ids of which every position has one: of a state or window that ends there."""
        names = self._names
        if names.forms.states is not None:
            return [names.state(tokens)]
        whole = [names.window(0, tokens)]
        return whole + [
            names.window(0, stop, start % names.size)
            for start, stop in names.spans(0, tokens)
            if stop == tokens and start % names.size
        ]

    def _tail(self, tokens: int) -> list[PositionPiece] | None:
        names, begin = self._names, tokens - tokens % self._names.size
        needed = [names.end(tokens)] if names.forms.base is not None else []
        needed += [names.state(tokens)] if names.forms.states is not None else []
        for group in range(len(names.forms.windows)):
            for start, stop in names.spans(group, tokens):
                if start >= begin or start % names.size:
                    needed.append(names.window(group, stop, start % names.size))
        self._look_up(needed)
        fixed = needed[: (names.forms.base is not None) + (names.forms.states is not None)]
        if any(self._levels[one] is None for one in fixed):
            return None
        windows = self._windows(tokens)
        return windows if isinstance(windows, list) else None

    # --- windows ---------------------------------------------------------------------------------

    def _windows(self, tokens: int) -> list[PositionPiece] | int:
        """Return the windows' records of a position; of a missing one, its block's first token."""
        names, size = self._names, self._names.size
        found: list[PositionPiece] = []
        for group in range(len(names.forms.windows)):
            mine: list[PositionPiece] = []
            for start, stop in names.spans(group, tokens):
                begin = start - start % size
                whole = names.window_piece(group, begin, stop)
                cut = names.window_piece(group, start, stop)
                if self._window_level(whole, group) is not None:
                    mine.append(whole)
                elif start > begin and self._level(cut.id) is not None:
                    mine.append(cut)
                else:
                    return begin
            found += reversed(mine)
        return found

    def _window_level(self, piece: PositionPiece, group: int) -> int | None:
        """Return the level of a window's record; look up those of blocks before it, too."""
        if piece.id not in self._levels:
            names, size = self._names, self._names.size
            ids = [piece.id]
            if not piece.stop % size:
                first = max(0, piece.stop // size - _BATCHES[1])
                for number in range(piece.stop // size, first, -1):
                    ids.append(names.window(group, number * size))
                    start = names.forms.windows[group].start_of(number * size)
                    if start % size and start < number * size:
                        stop = min(number * size, (start // size + 1) * size)
                        ids.append(names.window(group, stop, start % size))
            self._look_up(ids)
        return self._levels[piece.id]

    def _level(self, block: bytes) -> int | None:
        if block not in self._levels:
            self._look_up([block])
        return self._levels[block]

    # --- common ----------------------------------------------------------------------------------

    def _look_up(self, blocks: Iterable[bytes]) -> None:
        """Record the levels of ``blocks``, with one query of each tier that must be queried."""
        new = [block for block in dict.fromkeys(blocks) if block not in self._levels]
        if self._ask:
            self._levels |= zip(new, self._tiered.locate_each(new, self._until), strict=True)
        else:
            held = self._tiered.holders(new)
            self._levels |= zip(new, (min(one) if one else None for one in held), strict=True)

    def _position(self, tokens: int, windows: list[PositionPiece]) -> Position | None:
        """Return the position, None if it has no record: where chunks end, none may be needed."""
        names, first = self._names, self._first
        if names.forms.whole:
            leading = self._leading
            if tokens % names.size and (level := self._levels[names.end(tokens)]) is not None:
                leading = [*leading, level]
            return Position(tokens, leading, lambda: names.base_pieces(tokens, first))
        pieces = names.base_pieces(tokens, first) + windows
        if names.forms.states is not None:
            pieces.append(names.state_piece(tokens))
        if not pieces:
            return None
        levels = [self._levels[piece.id] for piece in pieces]
        assert None not in levels
        return Position(tokens, [level for level in levels if level is not None], pieces)
