"""Puts and gets: between a caller's tensors and the records in tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from kvkeep.core.errors import InvalidValue, check_type, whole
from kvkeep.store.blocks.stats import Put, closed_is_illegal, runs_of, seconds_of
from kvkeep.store.kv.forms import Snapshot
from kvkeep.store.kv.positions import BASE, STATE, Position, PositionFinder
from kvkeep.store.kv.prompts import first_miss, load_pieces, tokens_by_tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvkeep.store.kv.forms import KV, KVForm, RecordForms
    from kvkeep.store.kv.paying import LoadChoice, LoadPiece
    from kvkeep.store.kv.positions import PositionPiece, PromptIds
    from kvkeep.store.kv.prompts import Followers
    from kvkeep.store.tiers import Miss, ReadBlocks, TieredStore, Written

    Choose = Callable[[list[LoadPiece]], LoadChoice]

__all__ = ["Get", "Loaded", "Transfers"]

_WAIT_S: Final = 60.0
"""Seconds that each slower tier has to write records for which a put waits."""

_TRIES: Final = 16
"""Positions that a get tries: each one but the first because a record of the last was bad."""


class _KVAndTokens(NamedTuple):
    kv: KV | None
    tokens: int


class Get(_KVAndTokens):
    """The result of `KVStore.get`: ``(kv, tokens)``, and what is to be said of them.

    Attributes:
        kv: of ``tokens`` tokens; None if there are none, or a sink has them.
        tokens: how many were read.
        exact: how many leading tokens of the prompt are exact, if those before the get's ``start``
            are. None: all are. Hand it on: ``put(…, exact=result.exact)`` of the same request.
        miss: why the first block behind ``tokens`` did not come; None if nothing is missing.
    """

    exact: int | None
    miss: Miss | None

    def __new__(
        cls, kv: KV | None, tokens: int, exact: int | None = None, miss: Miss | None = None
    ) -> Self:
        """Return the pair with its attributes."""
        result = super().__new__(cls, kv, tokens)
        result.exact, result.miss = exact, miss
        return result


class Loaded(NamedTuple):
    """The result of a get, and what is said of it.

    Attributes:
        get: of blocks of all layers.
        snapshot: of records of each group of layers; None if no position was read.
        tokens: that it saves.
        tiers: ``(tier, tokens)`` in order; empty unless they were requested.
        slower: what was stored and not loaded because computing is faster.
    """

    get: Get
    snapshot: Snapshot | None = None
    tokens: int = 0
    tiers: tuple[tuple[str, int], ...] = ()
    slower: tuple[Miss, ...] = ()


class _Gap(Exception):
    """A record that the snapshot does not contain is not stored either."""


class Transfers:
    """Copies KV of one store into records and out of them.

    Thread safety: all methods. Replacements of any prompts wait for each other.
    """

    def __init__(self, forms: RecordForms, followers: Followers) -> None:
        self._forms = forms
        self._followers = followers
        self._replacing = threading.Lock()

    # --- blocks of all layers --------------------------------------------------------------------

    def put(
        self,
        tiered: TieredStore,
        prompt: PromptIds,
        kv: KV,
        *,
        stop: int,
        wait: bool,
        tail: bool,
        replace: bool,
        exact: int | None,
    ) -> Put:
        """See `KVStore.put`; ``kv`` is that of the prompt from its ``start`` on.

        Tokens from ``stop`` on are not stored, because they are never read again.
        """
        form, start, size = self._forms.base, prompt.start, prompt.size
        assert form is not None
        form.check(kv, len(prompt) - start)
        first = -(-start // size)  # the first block of which kv has all tokens
        old = prompt.behind(first * size) if replace else None
        unread = len(prompt) - stop
        if unread:
            prompt = prompt.cut(stop)
        end = stop - stop % size
        pieces = prompt.base_pieces(stop if tail and start <= end else end, first)

        def fill(at: int, raw: memoryview) -> None:
            form.write(kv, pieces[at].start - start, pieces[at].stop - start, raw)

        end = pieces[-1].stop if pieces else first * size
        written, failed = self._write(
            tiered, prompt, end, pieces, fill, old=old, wait=wait, exact=exact
        )
        lengths = [piece.stop - piece.start for piece in pieces]
        kept = sum(lengths[at] for at in written.kept)
        skipped = sum(lengths[at] for at in written.already)
        total = sum(lengths)
        return Put(kept, skipped, total - kept - skipped, stop - start - total, failed, unread)

    def get(
        self,
        tiered: TieredStore,
        prompt: PromptIds,
        out: KV | None,
        *,
        sink: Callable[[int, int, KV, str], bool] | None,
        tuples: bool,
        deadline: float | None,
        sources: bool,
        choose: Choose | None,
    ) -> Loaded:
        """See `KVStore.get`; ``sources``: whether the tiers are to be named.

        ``choose`` decides how much of what is stored to load; None: all of it.
        """
        form, start, since = self._forms.base, prompt.start, time.time()
        assert form is not None
        if out is not None:
            form.check_room(out, len(prompt) - start)
        until = _until(deadline)
        position = PositionFinder(tiered, prompt, until=until).longest()
        position = position or Position(start, [], [])
        choice = None
        slower: tuple[Miss, ...] = ()
        if choose is not None:
            choice = choose(load_pieces(position, prompt, tiered.names))
            position = _worth(tiered, position, choice)
            until, slower = _sooner(until, choice), choice.misses
        tokens, pieces, levels = position.tokens, position.pieces, position.levels
        if not pieces:
            miss = slower[0] if slower else first_miss(tiered, prompt, start, since)
            return Loaded(Get(None, 0, None, miss), slower=slower)
        into = out
        if into is None and sink is None:
            into = form.empty_block(tokens - start, tuples=tuples)
        read_from: list[str] = []
        wanted = True

        def take(at: int, raw: memoryview) -> None:
            nonlocal wanted
            _, _, first, stop, _ = pieces[at]
            begin = max(first, start)
            if into is not None:
                form.read(raw, stop - first, begin - first, into, begin - start)
            if sink is not None:
                kv = form.view(raw, stop - first, skip=begin - first)
                wanted = sink(begin, stop, kv, read_from[-1])

        count, exact = _read(
            tiered, position, take, until, sources=read_from, cancelled=lambda: not wanted
        )
        end = pieces[count - 1].stop if count else start
        if choice is not None and count < len(pieces) and until and time.monotonic() >= until:
            slower = (choice.overtaken(end, tiered.names[levels[count]]), *slower)
        miss = slower[0] if slower else None
        if wanted and not slower:
            miss = first_miss(tiered, prompt, end, since)
        if not count:
            return Loaded(Get(None, 0, None, miss), slower=slower)
        self._note(prompt, end, (), start // prompt.size)
        given = zip(pieces, read_from if sources else (), strict=False)
        until_exact = None if exact == count else pieces[exact - 1].stop if exact else start
        kv = None if into is None else form.cut(into, 0, end - start)
        return Loaded(
            Get(kv, end - start, until_exact, miss),
            tokens=end - start,
            tiers=runs_of(tokens_by_tier(given, end, start)),
            slower=slower,
        )

    # --- snapshots -------------------------------------------------------------------------------

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
        known = {layer for group in self._forms.kv for layer in group.layers}
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

    def put_snapshot(
        self,
        tiered: TieredStore,
        prompt: PromptIds,
        snapshot: Snapshot,
        *,
        wait: bool,
        replace: bool,
    ) -> Put:
        """See `KVStore.put_snapshot`; the prompt ends at the snapshot's position."""
        tokens, start, size = snapshot.tokens, snapshot.start, prompt.size
        firsts = {
            group: tokens - window.tokens_of(snapshot.layers)
            for group, window in enumerate(self._forms.windows)
        }
        firsts[BASE] = start
        pieces = self._pieces(tiered, prompt, tokens, firsts)
        old = prompt.behind(-(-start // size) * size) if replace else None

        def fill(at: int, raw: memoryview) -> None:
            self._fill(pieces[at], snapshot, firsts, raw)

        try:
            written, failed = self._write(
                tiered, prompt, tokens, pieces, fill, old=old, wait=wait, exact=snapshot.exact
            )
        except _Gap as gap:
            ids = [piece.id for piece in pieces]
            tiered.losses.note(ids, tiered.memory.name, "dropped", "no room")
            return Put(0, 0, tokens - start, 0, gap.args[0])
        return self._result(pieces, snapshot, firsts, written, failed)

    def _pieces(
        self, tiered: TieredStore, prompt: PromptIds, tokens: int, firsts: dict[int, int]
    ) -> list[PositionPiece]:
        """Return the records of a position in the order in which they are written.

        ``firsts`` are, for each group, the first token of which the snapshot has KV.

        The state comes last, so that it is stored only if all other records are. Blocks of a window
        that no position behind a state needs are left out. Without states, records are in the order
        of their blocks: if there is no room for all, those of the prompt's beginning are of use.
        """
        pieces = prompt.base_pieces(tokens)
        for group in range(len(self._forms.windows)):
            first = firsts[group]
            spans = list(prompt.spans(group, tokens))
            if self._forms.states is None:  # without states, every end of a block is a position
                begin = spans[-1][0] if spans else tokens
                begin -= begin % prompt.size
                while begin - prompt.size >= first:
                    spans.append((begin - prompt.size, begin))
                    begin -= prompt.size
            for start, stop in reversed(spans):
                begin = start - start % prompt.size
                whole = prompt.window_piece(group, begin, stop)
                if begin >= first or tiered.known([whole.id]):
                    pieces.append(whole)
                else:
                    pieces.append(prompt.window_piece(group, start, stop))
        if self._forms.states is not None:
            pieces.append(prompt.state_piece(tokens))
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
        first, base = firsts[piece.group], self._forms.base
        form = self._forms.windows[piece.group] if piece.group != BASE else base
        assert form is not None
        if piece.start < first:
            raise _Gap
        form.write(snapshot.layers, piece.start - first, piece.stop - first, raw)

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

    def get_snapshot(
        self,
        tiered: TieredStore,
        prompt: PromptIds,
        *,
        deadline: float | None,
        sources: bool,
        choose: Choose | None,
    ) -> Loaded:
        """See `KVStore.get_snapshot`; the position is not behind the prompt's end.

        ``choose`` decides whether a position is loaded; None: it is.
        """
        until, start = _until(deadline), prompt.start
        finder = PositionFinder(tiered, prompt, until=until)
        nothing = Loaded(Get(None, 0))
        for _ in range(_TRIES):
            position = finder.longest()
            if position is None:
                break
            choice, due = None, until
            if choose is not None:
                choice = choose(load_pieces(position, prompt, tiered.names))
                if not choice.pays:
                    _worth(tiered, position, choice)
                    return nothing._replace(slower=choice.misses)
                due = _sooner(until, choice)
            reading = _Reading(self._forms, start, position)
            read_from = list[str]()
            count, exact = _read(tiered, position, reading.take, due, sources=read_from)
            if count == len(position.pieces):
                self._note(prompt, position.tokens, position.pieces)
                given = zip(position.pieces, read_from if sources else (), strict=False)
                return Loaded(
                    nothing.get,
                    reading.snapshot(exact),
                    position.tokens - start,
                    runs_of(tokens_by_tier(given, position.tokens, start)),
                )
            if choice is not None and due is not None and time.monotonic() >= due:
                late = choice.overtaken(start, tiered.names[position.levels[count]])
                return nothing._replace(slower=(late,))
            # What was read is read again, most likely from memory, if a shorter position needs it:
            # then all records of a result were there at one time, also after a replacement.
            finder.bad(position.pieces[count])
        return nothing

    # --- both ------------------------------------------------------------------------------------

    def _write(
        self,
        tiered: TieredStore,
        prompt: PromptIds,
        tokens: int,
        pieces: list[PositionPiece],
        fill: Callable[[int, memoryview], None],
        *,
        old: PromptIds | None,
        wait: bool,
        exact: int | None,
    ) -> tuple[Written, tuple[str, ...]]:
        """Write records of the first ``tokens`` tokens; first delete those of ``old``, if given.

        ``old`` is deleted from its start on; ``exact`` counts tokens. Returns what was written, and
        the tiers that failed to delete.
        """
        failed: tuple[str, ...] = ()
        with nullcontext() if old is None else self._replacing, closed_is_illegal():
            if old is not None:  # what tenants share under public names stays
                ids = old.private().every(old.start)
                failed = self._followers.delete(ids, tiered.supersede).failed
            self._note(prompt, tokens, pieces)
            if exact is not None:  # in records from here on, not in tokens
                exact = next(
                    (at for at, piece in enumerate(pieces) if piece.stop > exact), len(pieces)
                )
            try:
                written = tiered.write(
                    [piece.id for piece in pieces], [piece.raw_bytes for piece in pieces], fill,
                    wait=_WAIT_S if wait else None, exact=exact,
                )  # fmt: skip
            except _Gap as gap:
                gap.args = (failed,)
                raise
        return written, failed

    def _note(
        self, prompt: PromptIds, tokens: int, pieces: Sequence[PositionPiece], first: int = 0
    ) -> None:
        """Remember which records belong to which block, so that a removal deletes them, too.

        ``first`` is the first block that counts. The blocks are a chain by their names, also where
        there are no base records: longer prompts follow shorter ones in any case.
        """
        self._followers.note(prompt.names.unshared(prompt.chain(tokens)[first:]))
        for piece in () if self._forms.whole else pieces:
            shared = not piece.id.startswith(prompt.names.space)
            if piece.group != BASE and not shared:
                self._followers.note([prompt.end(piece.stop), piece.id])


def _until(deadline: float | None) -> float | None:
    """Return when a get ends, on `time.monotonic`."""
    return None if deadline is None else time.monotonic() + seconds_of("deadline", deadline)


def _sooner(until: float | None, choice: LoadChoice) -> float | None:
    """Return when a get ends that is of use for a while only."""
    if choice.patience_s is None:
        return until
    due = time.monotonic() + choice.patience_s
    return due if until is None else min(until, due)


def _worth(tiered: TieredStore, position: Position, choice: LoadChoice) -> Position:
    """Return the records to load; read a few of the others if that may teach what reads take."""
    pieces, levels = position.pieces, position.levels
    at = sum(piece.stop <= choice.tokens for piece in pieces) if choice.pays else 0
    if at < len(pieces):
        some = pieces[at:]
        tiered.relearn(
            [piece.id for piece in some], [piece.raw_bytes for piece in some], levels[at]
        )
    return Position(pieces[at - 1].stop if at else 0, levels[:at], pieces[:at])


def _read(
    tiered: TieredStore,
    position: Position,
    take: Callable[[int, memoryview], None],
    until: float | None,
    *,
    sources: list[str],
    cancelled: Callable[[], bool] | None = None,
) -> ReadBlocks:
    """Read the records of a position."""
    left = None if until is None else max(0.0, until - time.monotonic())
    with closed_is_illegal():
        return tiered.read(
            [piece.id for piece in position.pieces],
            [piece.raw_bytes for piece in position.pieces],
            take, levels=position.levels, deadline=left, cancelled=cancelled, sources=sources,
        )  # fmt: skip


class _Reading:
    """The tensors that the records of one position are read into."""

    def __init__(self, forms: RecordForms, start: int, position: Position) -> None:
        self._forms = forms
        self._position = position
        self._start = start
        tokens = position.tokens
        firsts = {group: window.start_of(tokens) for group, window in enumerate(forms.windows)}
        self._into: dict[int, tuple[KVForm, int, dict[int, tuple[Tensor, ...]]]] = {
            group: (forms.windows[group], first, forms.windows[group].empty(tokens - first))
            for group, first in firsts.items()
        }
        if forms.base is not None:
            self._into[BASE] = forms.base, start, forms.base.empty(tokens - start)
        self._state: dict[tuple[int, str], Tensor] = {}

    def take(self, at: int, raw: memoryview) -> None:
        """Copy a record."""
        piece = self._position.pieces[at]
        if piece.group == STATE:
            assert self._forms.states is not None
            self._state = self._forms.states.read(raw)
            return
        form, first, into = self._into[piece.group]
        begin = max(piece.start, first)
        form.read(raw, piece.stop - piece.start, begin - piece.start, into, begin - first)

    def snapshot(self, exact: int) -> Snapshot:
        """Return the snapshot, after all records were read, ``exact`` leading ones as exact."""
        tokens, pieces = self._position.tokens, self._position.pieces
        layers = {key: kv for _, _, some in self._into.values() for key, kv in some.items()}
        # Behind the first that is not, no word is given; of a state, its last token is lost.
        until = min(
            (piece.start - (piece.group == STATE) for piece in pieces[exact:]), default=None
        )
        return Snapshot(tokens, self._start, dict(sorted(layers.items())), self._state, until)
