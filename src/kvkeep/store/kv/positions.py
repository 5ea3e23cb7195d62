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
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.blocks.base import closed_is_illegal
from kvkeep.store.kv.forms import BASE, STATE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvkeep.core.tokens import TokenArray
    from kvkeep.store.kv.forms import RecordForms
    from kvkeep.store.kv.names import Names
    from kvkeep.store.tiers import TieredStore

__all__ = [
    "Position",
    "PositionFinder",
    "PositionPiece",
    "PromptIds",
    "ids_and_sizes",
    "stored_prefix",
]

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


def ids_and_sizes(pieces: Sequence[PositionPiece]) -> tuple[list[bytes], list[int]]:
    """Return the ids of records, and their lengths."""
    return [*map(_ID, pieces)], [*map(_RAW_BYTES, pieces)]


_ID: Any = itemgetter(0)
_RAW_BYTES: Any = itemgetter(4)


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
        other = PromptIds(self.forms, self.row, start, self.names)
        other._full = self._full
        return other

    def private(self) -> PromptIds:
        """Return the same with all blocks named in its own namespace: no public ones."""
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
        whole, full = base.raw_bytes(size), self.full
        pieces = [
            PositionPiece(full[number], BASE, number * size, (number + 1) * size, whole)
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


def stored_prefix(
    tiered: TieredStore, prompt: PromptIds, until: float | None = None
) -> Position | None:
    """Return the longest stored prefix behind the prompt's start, where blocks have all layers.

    Tiers that other processes write to are queried about whole blocks and about the end of the
    prompt; about other tails only what is known here counts. None if nothing is stored.

    Cost: a few µs a block, and about 2 µs for each token of the first block that is missing.
    """
    size, first = prompt.size, prompt.start // prompt.size
    with closed_is_illegal():
        levels = tiered.locate(prompt.full[first:], until)
        tokens = (first + len(levels)) * size
        if tokens < len(prompt):
            for tail in _tails(tiered, prompt, first + len(levels)):
                (level,) = tiered.locate_each([prompt.end(tail)], until)
                if level is not None:
                    levels.append(level)
                    tokens = tail
                    break
    if tokens <= prompt.start:
        return None
    return Position(tokens, levels, lambda: prompt.base_pieces(tokens, first))


def _tails(
    tiered: TieredStore,
    prompt: PromptIds,
    number: int,
    *,
    ask: bool = True,
    stored: Callable[[int], bool] | None = None,
) -> Iterator[int]:
    """Yield ends behind ``start`` inside of block ``number`` that may be stored, longest first.

    ``stored`` says of an end whether it may be; by default its base record is. The end of the
    prompt is one if tiers may be asked: it is one name, not one a token.
    """
    begin = number * prompt.size
    most = min(prompt.size - 1, len(prompt) - begin)
    least = max(0, prompt.start - begin)
    if ask and most > least and begin + most == len(prompt):
        yield begin + most
        most -= 1
    ends = range(begin + most, begin + least, -1)
    if stored is not None:
        yield from filter(stored, ends)
    elif ends:
        held = tiered.holders(prompt.tails(number)[least:most])
        yield from (end for end, levels in zip(ends, reversed(held), strict=True) if levels)


class PositionFinder:
    """Finds the longest position of a prompt at which the records of all groups are stored.

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
        prompt, last = self._names, self._reach
        forms = prompt.forms
        stored = None if forms.base is not None and forms.states is None else self._marked
        with closed_is_illegal():
            for number in range(self._reach, self._first - 1, -1):
                for tokens in _tails(self._tiered, prompt, number, ask=self._ask, stored=stored):
                    if isinstance(position := self._at(tokens), Position):
                        return position
                if self._first < number <= last:
                    position = self._at(number * prompt.size)
                    if isinstance(position, Position):
                        return position
                    # No end of a block behind a missing record of a window can do without it.
                    last = number if position is None else position // prompt.size
        return None

    def _find_reach(self) -> int:
        """Return how many leading blocks the layers that keep every token have."""
        full, first = self._names.full, self._first
        if self._names.forms.base is None:
            return len(full)
        with closed_is_illegal():
            if self._ask:
                leading = self._tiered.locate(full[first:], self._until)
            else:
                held = takewhile(bool, self._tiered.holders(full[first:]))
                leading = [min(levels) for levels in held]
        self._levels |= zip(full[first:], leading, strict=False)
        return first + len(leading)

    def _at(self, tokens: int) -> Position | int | None:
        """Return the position at ``tokens``; None if it is none.

        Where a window's record is missing, return its block's first token.
        """
        prompt, size = self._names, self._names.size
        forms, tail = prompt.forms, tokens % size
        needed = [prompt.end(tokens)] if tail and forms.base is not None else []
        if forms.states is not None:
            needed.append(prompt.state(tokens))
        if tail:
            ends = [
                prompt.window(group, stop, start % size)
                for group in range(len(forms.windows))
                for start, stop in prompt.spans(group, tokens)
                if start >= tokens - tail or start % size
            ]
            self._look_up([*needed, *ends])
        elif forms.states is not None:
            self._look_up_states(tokens // size)
        if any(self._levels[block] is None for block in needed):
            return None
        windows = list[PositionPiece]()
        for group in range(len(forms.windows)):
            found = self._window(group, tokens)
            if isinstance(found, int):
                return found
            windows += found
        pieces = prompt.base_pieces(tokens, self._first) + windows
        if forms.states is not None:
            pieces.append(prompt.state_piece(tokens))
        levels = [level for piece in pieces if (level := self._levels[piece.id]) is not None]
        assert len(levels) == len(pieces)
        # Where chunks end, no record may be needed; then it is none.
        return Position(tokens, levels, pieces) if pieces else None

    def _look_up_states(self, number: int) -> None:
        """Look up the state at the end of block ``number``, with those of some ends before it."""
        while self._states_from > number:
            batch = _BATCHES[min(self._batches, len(_BATCHES) - 1)]
            begin = max(1, self._states_from - batch)
            ends = range(self._states_from - 1, begin - 1, -1)
            self._look_up([self._names.state(end * self._names.size) for end in ends])
            self._states_from = begin
            self._batches += 1

    def _marked(self, tokens: int) -> bool:
        """Whether a state or window is known to end at ``tokens``: every position has one."""
        names = self._names
        if names.forms.states is not None:
            return bool(self._tiered.known([names.state(tokens)]))
        ids = [names.window(0, tokens)]
        ids += [
            names.window(0, stop, start % names.size)
            for start, stop in names.spans(0, tokens)
            if stop == tokens and start % names.size
        ]
        return bool(self._tiered.known(ids))

    def _window(self, group: int, tokens: int) -> list[PositionPiece] | int:
        """Return a window's records of a position; of a missing one, its block's first token."""
        names = self._names
        found: list[PositionPiece] = []
        for start, stop in names.spans(group, tokens):
            begin = start - start % names.size
            whole = names.window_piece(group, begin, stop)
            if self._window_level(whole, group) is not None:
                found.append(whole)
                continue
            cut = names.window_piece(group, start, stop)
            if start == begin or self._level(cut.id) is None:
                return begin
            found.append(cut)
        return found[::-1]

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

    def _look_up(self, blocks: Iterable[bytes]) -> None:
        """Record the levels of ``blocks``, with one query of each tier that must be queried."""
        new = [block for block in dict.fromkeys(blocks) if block not in self._levels]
        if self._ask:
            self._levels |= zip(new, self._tiered.locate_each(new, self._until), strict=True)
        else:
            held = self._tiered.holders(new)
            self._levels |= zip(new, (min(one) if one else None for one in held), strict=True)
