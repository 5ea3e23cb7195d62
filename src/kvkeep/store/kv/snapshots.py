"""Puts and gets of snapshots: between a caller's tensors and the records of all groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.core.errors import InvalidValue, check_type, whole
from kvkeep.store.blocks.stats import Put, closed_is_illegal, runs_of, seconds_of
from kvkeep.store.kv.kept import delete_ids
from kvkeep.store.kv.paying import LoadPiece
from kvkeep.store.kv.positions import BASE, STATE, PositionFinder, PositionNames
from kvkeep.store.kv.records import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from kvkeep.store.kv.kept import Followers
    from kvkeep.store.kv.names import PromptBlocks
    from kvkeep.store.kv.paying import LoadChoice
    from kvkeep.store.kv.positions import Position, PositionPiece
    from kvkeep.store.kv.records import KVRecords, RecordForms
    from kvkeep.store.tiers import Miss, ReadBlocks, TieredStore, Written

    Layers = dict[int, tuple[Tensor, ...]]

__all__ = ["LoadedSnapshot", "SnapshotTransfers", "piece_of", "tokens_by_tier"]

_WAIT_S: Final = 60.0
"""Seconds that each slower tier has to write records for which a put waits."""

_TRIES: Final = 16
"""Positions that a get tries: each one but the first because a record of the last was bad."""


class LoadedSnapshot(NamedTuple):
    """A snapshot, the tokens that it saves, its raw bytes, and ``(tier, tokens)`` in order.

    ``slower`` says what was stored and not loaded because computing is faster.
    """

    snapshot: Snapshot | None = None
    tokens: int = 0
    raw_bytes: int = 0
    tiers: tuple[tuple[str, int], ...] = ()
    slower: tuple[Miss, ...] = ()


class _Gap(Exception):
    """A record that the snapshot does not contain is not stored either."""


class SnapshotTransfers:
    """Copies snapshots of one store into records and out of them.

    Thread safety: all methods. Replacements of any prompts wait for each other.
    """

    def __init__(self, forms: RecordForms, followers: Followers) -> None:
        self._forms = forms
        self._followers = followers
        self._replacing = threading.Lock()

    # --- put -------------------------------------------------------------------------------------

    def check(self, snapshot: Snapshot, length: int) -> None:
        """Raise `InvalidValue` unless the snapshot fits the geometry and a prompt of ``length``."""
        if not isinstance(snapshot, Snapshot):
            raise InvalidValue(f"snapshot is {type(snapshot).__name__}; a Snapshot is needed")
        tokens, start = snapshot.tokens, snapshot.start
        for name in ("tokens", "start"):
            whole(f"Snapshot.{name}", getattr(snapshot, name))
        for name in ("layers", "state"):
            check_type(f"Snapshot.{name}", getattr(snapshot, name), Mapping, "a dictionary")
        if not 0 < tokens <= length or not 0 <= start <= tokens:
            raise InvalidValue(
                f"the snapshot has tokens {start} … {tokens}; the prompt has {length}, and one "
                "token at least must be in front of the position"
            )
        known = {layer for group in self._kinds() for layer in group.layers}
        if more := set(snapshot.layers) - known:
            raise InvalidValue(
                f"the snapshot has KV of the layers {sorted(more)}, which have no attention"
            )
        if (base := self._forms.base) is not None:
            have = base.tokens_of(snapshot.layers)
            if have != tokens - start:
                raise InvalidValue(
                    f"layer {base.layers[0]} of the snapshot has {have} tokens; those from "
                    f"start={start} to tokens={tokens} are {tokens - start}"
                )
        for window in self._forms.windows:
            have, first = window.tokens_of(snapshot.layers), window.start_of(tokens)
            if have > tokens or tokens - have > first:
                raise InvalidValue(
                    f"layer {window.layers[0]} of the snapshot has {have} tokens; to go on behind "
                    f"{tokens} it needs those from {first} on, and at most all {tokens}"
                )
        if self._forms.states is not None:
            self._forms.states.check(snapshot.state)
        elif snapshot.state:
            raise InvalidValue("the snapshot has states, and the geometry has none")

    def _kinds(self) -> list[KVRecords]:
        base = self._forms.base
        return [*([] if base is None else [base]), *self._forms.windows]

    def put(
        self,
        tiered: TieredStore,
        prompt: PromptBlocks,
        snapshot: Snapshot,
        *,
        wait: bool,
        replace: bool,
    ) -> Put:
        """See `KVStore.put_snapshot`; the prompt ends at the snapshot's position."""
        tokens, start = snapshot.tokens, snapshot.start
        names = PositionNames(self._forms, prompt)
        firsts = {
            group: tokens - window.tokens_of(snapshot.layers)
            for group, window in enumerate(self._forms.windows)
        }
        firsts[BASE] = start
        pieces = self._pieces(tiered, names, tokens, firsts)
        failed: tuple[str, ...] = ()
        with self._replacing if replace else nullcontext(), closed_is_illegal():
            if replace:
                # What tenants share under public names stays.
                own = PositionNames(self._forms, prompt._replace(names=prompt.names.private()))
                ids = list(own.every(-(-start // names.size) * names.size))
                failed = delete_ids(ids, self._followers, tiered.supersede).failed
            self._note(names, tokens, pieces)

            def fill(at: int, raw: memoryview) -> None:
                self._fill(pieces[at], snapshot, firsts, raw)

            sizes = [piece.raw_bytes for piece in pieces]
            ids = [piece.id for piece in pieces]
            try:
                written = tiered.write(
                    ids, sizes, fill, wait=_WAIT_S if wait else None,
                    exact=_exact_pieces(pieces, snapshot.exact),
                )  # fmt: skip
            except _Gap:
                tiered.losses.note(ids, tiered.memory.name, "dropped", "no room")
                return Put(0, 0, tokens - start, 0, failed)
        return self._result(pieces, snapshot, firsts, written, failed)

    def _pieces(
        self, tiered: TieredStore, names: PositionNames, tokens: int, firsts: dict[int, int]
    ) -> list[PositionPiece]:
        """Return the records of a position in the order in which they are written.

        ``firsts`` are, for each group, the first token of which the snapshot has KV.

        The state comes last, so that it is stored only if all other records are. Blocks of a window
        that no position behind a state needs are left out. Without states, records are in the order
        of their blocks: if there is no room for all, those of the prompt's beginning are of use.
        """
        pieces = names.base_pieces(tokens)
        for group in range(len(self._forms.windows)):
            first = firsts[group]
            spans = list(names.spans(group, tokens))
            if self._forms.states is None:  # without states, every end of a block is a position
                begin = spans[-1][0] if spans else tokens
                begin -= begin % names.size
                while begin - names.size >= first:
                    spans.append((begin - names.size, begin))
                    begin -= names.size
            for start, stop in reversed(spans):
                begin = start - start % names.size
                whole = names.window_piece(group, begin, stop)
                if begin >= first or tiered.knows(whole.id):
                    pieces.append(whole)
                else:
                    pieces.append(names.window_piece(group, start, stop))
        if self._forms.states is not None:
            pieces.append(names.state_piece(tokens))
        else:
            pieces.sort(key=lambda piece: piece.stop)
        return pieces

    def _fill(
        self, piece: PositionPiece, snapshot: Snapshot, firsts: dict[int, int], raw: memoryview
    ) -> None:
        if piece.group == STATE:
            assert self._forms.states is not None
            self._forms.states.write(snapshot.state, raw)
            return
        base, first = piece.group == BASE, firsts[piece.group]
        records = self._forms.base if base else self._forms.windows[piece.group]
        assert records is not None
        if piece.start < first:
            raise _Gap
        records.write(snapshot.layers, piece.start - first, piece.stop - first, raw)

    def _result(
        self,
        pieces: list[PositionPiece],
        snapshot: Snapshot,
        firsts: dict[int, int],
        written: Written,
        failed: tuple[str, ...],
    ) -> Put:
        """Count tokens from ``start`` on. If a record had no room, what is behind it is of no use.

        Counted are the records of layers that keep every token, or else of the first window. A
        token is new only if its record is. Of states alone, all tokens are, or none.
        """
        total = snapshot.tokens - snapshot.start
        kept, already = set(written.kept), set(written.already)
        counted = BASE if self._forms.base is not None else 0 if self._forms.windows else STATE

        def tokens_of(which: set[int], most: int = snapshot.tokens) -> int:
            return sum(
                piece.stop - max(piece.start, snapshot.start)
                for at, piece in enumerate(pieces)
                if piece.group == counted and at in which and snapshot.start < piece.stop <= most
            )

        if len(kept) + len(already) < len(pieces):
            new = tokens_of(kept, self._longest_end(pieces, firsts, kept | already))
            skipped = tokens_of(already)
            return Put(new, skipped, total - skipped - new, 0, failed)
        new = tokens_of(kept)
        if counted == STATE and kept:
            new = total
        return Put(new, total - new, 0, 0, failed)

    def _longest_end(
        self, pieces: list[PositionPiece], firsts: dict[int, int], stored: set[int]
    ) -> int:
        """Return the last end of a block that is a position if only some ``pieces`` are stored."""
        if self._forms.states is not None:
            return 0
        missing = next(piece for at, piece in enumerate(pieces) if at not in stored)
        ends = {piece.stop for piece in pieces if piece.stop < missing.stop}
        for end in sorted(ends, reverse=True):
            if all(
                window.start_of(end) >= firsts[group]
                for group, window in enumerate(self._forms.windows)
            ):
                return end
        return 0

    def _note(self, names: PositionNames, tokens: int, pieces: list[PositionPiece]) -> None:
        """Remember which records belong to which block, so that a removal deletes them, too.

        The blocks are a chain by their names, also where no layer keeps every token and there are
        no base records: longer prompts follow shorter ones in any case.
        """
        self._followers.note(names.names.unshared(names.chain(tokens)))
        for piece in pieces:
            shared = not piece.id.startswith(names.names.space)
            if piece.group != BASE and not shared:
                self._followers.note([names.end(piece.stop), piece.id])

    # --- get -------------------------------------------------------------------------------------

    def get(
        self,
        tiered: TieredStore,
        prompt: PromptBlocks,
        *,
        deadline: float | None,
        sources: bool,
        choose: Callable[[list[LoadPiece]], LoadChoice] | None = None,
    ) -> LoadedSnapshot:
        """See `KVStore.get_snapshot`; the position is not behind the prompt's end.

        ``choose`` decides whether a position is loaded; None: it is.
        """
        until = None
        if deadline is not None:
            until = time.monotonic() + seconds_of("deadline", deadline)
        names = PositionNames(self._forms, prompt)
        finder = PositionFinder(tiered, names, start=prompt.start, until=until)
        tiers = tiered.names
        for _ in range(_TRIES):
            position = finder.longest()
            if position is None:
                break
            choice, due = None, until
            if choose is not None:
                choice = choose([piece_of(position, prompt.start, tiers)])
                if not choice.pays:
                    first = position.pieces[0]
                    tiered.relearn([first.id], [first.raw_bytes], position.levels[0])
                    return LoadedSnapshot(slower=choice.misses)
                if choice.patience_s is not None:
                    end = time.monotonic() + choice.patience_s
                    due = end if until is None else min(until, end)
            left = None if due is None else max(0.0, due - time.monotonic())
            reading = _Reading(self._forms, prompt.start, position)
            count, exact = reading.read(tiered, left, sources=sources)
            if count == len(position.pieces):
                self._note(names, position.tokens, position.pieces)
                return reading.loaded(exact)
            if choice is not None and due is not None and time.monotonic() >= due:
                late = choice.overtaken(prompt.start, tiers[position.levels[count]])
                return LoadedSnapshot(slower=(late,))
            # What was read is read again, most likely from memory, if a shorter position needs it:
            # then all records of a result were there at one time, also after a replacement.
            finder.bad(position.pieces[count])
        return LoadedSnapshot()


class _Reading:
    """The tensors that the records of one position are read into."""

    def __init__(self, forms: RecordForms, start: int, position: Position) -> None:
        self._forms = forms
        self._position = position
        tokens = position.tokens
        self._records: dict[int, tuple[KVRecords, int, Layers]] = {
            group: (window, window.start_of(tokens), window.empty(tokens - window.start_of(tokens)))
            for group, window in enumerate(forms.windows)
        }
        if forms.base is not None:
            self._records[BASE] = forms.base, start, forms.base.empty(tokens - start)
        self._start = start
        self._state: dict[tuple[int, str], Tensor] = {}
        self._sources: list[str] = []

    def read(self, tiered: TieredStore, left: float | None, *, sources: bool) -> ReadBlocks:
        """Read the records within ``left`` seconds; return how many leading ones were read."""
        pieces = self._position.pieces

        def take(at: int, raw: memoryview) -> None:
            self._take(pieces[at], raw)

        with closed_is_illegal():
            return tiered.read(
                [piece.id for piece in pieces], [piece.raw_bytes for piece in pieces], take,
                levels=self._position.levels, deadline=left,
                sources=self._sources if sources else None,
            )  # fmt: skip

    def _take(self, piece: PositionPiece, raw: memoryview) -> None:
        if piece.group == STATE:
            assert self._forms.states is not None
            self._state = self._forms.states.read(raw)
            return
        records, first, into = self._records[piece.group]
        begin = max(piece.start, first)
        records.read(raw, piece.stop - piece.start, begin - piece.start, into, begin - first)

    def loaded(self, exact: int) -> LoadedSnapshot:
        """Return the snapshot, after all records were read, ``exact`` leading ones as exact."""
        tokens, pieces = self._position.tokens, self._position.pieces
        layers = {key: kv for _, _, some in self._records.values() for key, kv in some.items()}
        lossy = pieces[exact:]  # behind the first of them, no word is given
        until = min((_last_exact(piece) for piece in lossy), default=None)
        snapshot = Snapshot(tokens, self._start, dict(sorted(layers.items())), self._state, until)
        tiers = runs_of(
            tokens_by_tier(zip(pieces, self._sources, strict=False), tokens, self._start)
        )
        size = sum(piece.raw_bytes for piece in pieces)
        return LoadedSnapshot(snapshot, tokens - self._start, size, tiers)


def _last_exact(piece: PositionPiece) -> int:
    """Return how many leading tokens are exact if this record is not."""
    return piece.start - (piece.group == STATE)  # behind a state, that token is lost


def _exact_pieces(pieces: list[PositionPiece], exact: int | None) -> int | None:
    """Return how many leading records have only ``exact`` leading tokens."""
    if exact is None:
        return None
    return next((at for at, piece in enumerate(pieces) if piece.stop > exact), len(pieces))


def piece_of(position: Position, start: int, tiers: Sequence[str]) -> LoadPiece:
    """Return a position as one piece to load; ``tiers`` are the names of all levels."""
    found: dict[str, int] = {}
    for piece, level in zip(position.pieces, position.levels, strict=True):
        part = 1.0
        if piece.group == BASE and piece.start < start:
            part = (piece.stop - start) / (piece.stop - piece.start)
        tier = tiers[level]
        found[tier] = found.get(tier, 0) + int(part * piece.raw_bytes)
    return LoadPiece(position.tokens, max(found, key=found.__getitem__), found)


def tokens_by_tier(
    found: Iterable[tuple[PositionPiece, str]], tokens: int, start: int
) -> Iterator[tuple[str, int]]:
    """Yield ``(tier, tokens)`` for tokens ``start`` … ``tokens - 1`` of a position.

    Counted are the records of layers that keep every token. If there are none, the last record
    stands for all.
    """
    last = ""
    for piece, name in found:
        last = name
        if piece.group == BASE and piece.stop > start:
            yield name, piece.stop - max(piece.start, start)
            start = piece.stop
    if last and start < tokens:
        yield last, tokens - start
