"""Puts and gets: between a caller's tensors and the records in tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from kvkeep.core.errors import InvalidValue, check_type, whole
from kvkeep.store.blocks.base import Put, closed_is_illegal, seconds_of
from kvkeep.store.kv.forms import BASE, STATE, Snapshot, tokens_of
from kvkeep.store.kv.misses import first_miss
from kvkeep.store.kv.positions import (
    Position,
    PositionFinder,
    ids_and_sizes,
    stored_prefix,
)
from kvkeep.store.kv.prompts import Followers, load_pieces, tokens_by_tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from kvkeep.store.kv.forms import KV, KVForm, Parts, RecordForms, State
    from kvkeep.store.kv.paying import LoadChoice, LoadPiece
    from kvkeep.store.kv.positions import PositionPiece, PromptIds
    from kvkeep.store.tiers import Miss, Removed, TieredStore, Written

    Choose = Callable[[list[LoadPiece]], LoadChoice]
    Sink = Callable[[int, int, KV, str], bool]

__all__ = ["Get", "Loaded", "Transfers"]

_WAIT_S: Final = 60.0
"""Seconds that each slower tier has to write records for which a put waits."""

_NO_STATE: Final[Mapping[tuple[int, str], Tensor]] = {}
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
        tiers: yields ``(tier, tokens)`` in order, once.
    """

    get: Get
    snapshot: Snapshot | None = None
    tokens: int = 0
    tiers: Iterable[tuple[str, int]] = ()


class _Held(NamedTuple):
    """KV of one group of layers: its tensors, from token ``first`` on."""

    form: KVForm
    first: int
    tensors: Parts


class _Gap(Exception):
    """A record that the snapshot does not contain is not stored either."""


class Transfers:
    """Copies KV of one store into records and out of them, and deletes records.

    Thread safety: all methods. Replacements of any prompts wait for each other.
    """

    def __init__(self, tiered: TieredStore, forms: RecordForms) -> None:
        self._tiered = tiered
        self._forms = forms
        self._followers = Followers()
        self._replacing = threading.Lock()

    # --- puts ------------------------------------------------------------------------------------

    def put(
        self,
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
        held = {BASE: _Held(form, start, form.tensors(kv, len(prompt) - start))}
        first = -(-start // size)  # the first block of which kv has all tokens
        old = prompt.behind(first * size) if replace else None
        unread = len(prompt) - stop
        if unread:
            prompt = prompt.cut(stop)
        end = stop - stop % size
        pieces = prompt.base_pieces(stop if tail and start <= end else end, first)

        end = pieces[-1].stop if pieces else first * size
        written, failed = self._write(prompt, end, pieces, held, old=old, wait=wait, exact=exact)
        lengths = [piece.stop - piece.start for piece in pieces]
        kept = sum(map(lengths.__getitem__, written.kept))
        skipped = sum(map(lengths.__getitem__, written.already))
        total = sum(lengths)
        return Put(kept, skipped, total - kept - skipped, stop - start - total, failed, unread)

    def put_snapshot(
        self, prompt: PromptIds, snapshot: Snapshot, *, wait: bool, replace: bool
    ) -> Put:
        """See `KVStore.put_snapshot`."""
        held = self._held(snapshot, len(prompt))
        tokens, start, prompt = snapshot.tokens, snapshot.start, prompt.cut(snapshot.tokens)
        pieces = self._pieces(prompt, tokens, held)
        old = prompt.behind(-(-start // prompt.size) * prompt.size) if replace else None
        try:
            written, failed = self._write(
                prompt, tokens, pieces, held, snapshot.state,
                old=old, wait=wait, exact=snapshot.exact,
            )  # fmt: skip
        except _Gap as gap:
            ids = [piece.id for piece in pieces]
            self._tiered.losses.note(ids, self._tiered.memory.name, "dropped", "no room")
            return Put(0, 0, tokens - start, 0, gap.args[0])
        return self._result(pieces, snapshot, held, written, failed)

    def _held(self, snapshot: Snapshot, length: int) -> dict[int, _Held]:
        """Return the tensors of a snapshot, by group.

        Raises:
            InvalidValue: it does not fit the geometry, or a prompt of ``length`` tokens.
        """
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
        known = {layer for form in self._forms.kv.values() for layer in form.layers}
        if more := set(snapshot.layers) - known:
            raise InvalidValue(
                f"the snapshot has KV of the layers {sorted(more)}, which have no attention"
            )
        held: dict[int, _Held] = {}
        for group, form in self._forms.kv.items():
            tensors = form.tensors_of(snapshot.layers)
            have, first = tokens_of(tensors), form.start_of(tokens)
            if group == BASE and have != tokens - start:
                raise InvalidValue(
                    f"layer {form.layers[0]} of the snapshot has {have} tokens; those from "
                    f"start={start} to tokens={tokens} are {tokens - start}"
                )
            if group != BASE and not tokens - first <= have <= tokens:
                raise InvalidValue(
                    f"layer {form.layers[0]} of the snapshot has {have} tokens; to go on behind "
                    f"{tokens} it needs those from {first} on, and at most all {tokens}"
                )
            held[group] = _Held(form, tokens - have, tensors)
        if self._forms.states is not None:
            self._forms.states.check(snapshot.state)
        elif snapshot.state:
            raise InvalidValue("the snapshot has states, and the geometry has none")
        return held

    def _pieces(
        self, prompt: PromptIds, tokens: int, held: dict[int, _Held]
    ) -> list[PositionPiece]:
        """Return the records of a position in the order in which they are written.

        The state comes last, so that it is stored only if all other records are. Blocks of a window
        that no position behind a state needs are left out. Without states, records are in the order
        of their blocks: if there is no room for all, those of the prompt's beginning are of use.
        """
        pieces = prompt.base_pieces(tokens)
        for group in range(len(self._forms.windows)):
            first = held[group].first
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
                if begin >= first or self._tiered.known([whole.id]):
                    pieces.append(whole)
                else:
                    pieces.append(prompt.window_piece(group, start, stop))
        if self._forms.states is not None:
            pieces.append(prompt.state_piece(tokens))
        else:
            pieces.sort(key=lambda piece: piece.stop)
        return pieces

    def _result(
        self,
        pieces: list[PositionPiece],
        snapshot: Snapshot,
        held: dict[int, _Held],
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

        def count(which: set[int], most: int = snapshot.tokens) -> int:
            return sum(
                piece.stop - max(piece.start, snapshot.start)
                for at, piece in enumerate(pieces)
                if piece.group == counted and at in which and snapshot.start < piece.stop <= most
            )

        if len(kept) + len(already) < len(pieces):
            new = count(kept, self._longest_end(pieces, held, kept | already))
            skipped = count(already)
            return Put(new, skipped, total - skipped - new, 0, failed)
        new = count(kept)
        if counted == STATE and kept:
            new = total
        return Put(new, total - new, 0, 0, failed)

    def _longest_end(
        self, pieces: list[PositionPiece], held: dict[int, _Held], stored: set[int]
    ) -> int:
        """Return the last end of a block that is a position if only some ``pieces`` are stored."""
        if self._forms.states is not None:
            return 0
        missing = next(piece for at, piece in enumerate(pieces) if at not in stored)
        ends = {piece.stop for piece in pieces if piece.stop < missing.stop}
        for end in sorted(ends, reverse=True):
            if all(
                window.start_of(end) >= held[group].first
                for group, window in enumerate(self._forms.windows)
            ):
                return end
        return 0

    # --- gets ------------------------------------------------------------------------------------

    def get(
        self,
        prompt: PromptIds,
        out: KV | None = None,
        *,
        sink: Sink | None = None,
        tuples: bool = False,
        deadline: float | None,
        choose: Choose | None,
    ) -> Loaded:
        """See `KVStore.get` and `KVStore.get_snapshot`; no position is behind the prompt's end.

        ``choose`` decides how many stored tokens to load; None: all of them. Of blocks of all
        layers, any leading ones are of use; of a snapshot, all records of a position.
        """
        tiered, whole, start, since = self._tiered, self._forms.whole, prompt.start, time.time()
        base, room = self._forms.base, None
        if out is not None and base is not None:
            room = out, base.room(out, len(prompt) - start)
        until = None if deadline is None else time.monotonic() + seconds_of("deadline", deadline)
        finder = None if whole else PositionFinder(tiered, prompt, until=until)
        slower: Miss | None = None  # why what is stored is not loaded
        for _ in range(1 if whole else _TRIES):
            position = stored_prefix(tiered, prompt, until) if finder is None else finder.longest()
            choice, due = None, until
            if position is not None and choose is not None:
                choice = choose(load_pieces(position, prompt, tiered.names))
                position = self._worth(position, choice)
                due, slower = _sooner(until, choice), next(iter(choice.misses), None)
            if position is None or not position.pieces:
                break
            reading = _Reading(self._forms, start, position, room, sink, tuples=tuples)
            count = self._read(reading, due)
            if choice and due and count < len(position.pieces) and time.monotonic() >= due:
                at = position.pieces[count - 1].stop if whole and count else start
                slower = choice.overtaken(at, tiered.names[position.levels[count]])
            if count == len(position.pieces) or (whole and count):
                return self._loaded(prompt, reading, count, slower, since)
            if finder is None or slower:
                break
            # What was read is read again, most likely from memory, if a shorter position needs it:
            # then all records of a result were there at one time, also after a replacement.
            finder.bad(position.pieces[count])
        if whole and slower is None:
            slower = first_miss(tiered, prompt, start, since)
        return Loaded(Get(None, 0, None, slower))

    def _loaded(
        self,
        prompt: PromptIds,
        reading: _Reading,
        count: int,
        miss: Miss | None,
        since: float,
    ) -> Loaded:
        """Return what was read: ``count`` records, of a snapshot all that it needs."""
        pieces, exact, start = reading.position.pieces, reading.exact, prompt.start
        end = reading.position.tokens if count == len(pieces) else pieces[count - 1].stop
        given = zip(pieces, reading.sources, strict=False)
        tiers = tokens_by_tier(given, end, start)
        if not self._forms.whole:
            self._note(prompt, end, pieces)
            return Loaded(Get(None, 0), reading.snapshot(), end - start, tiers)
        self._note(prompt, end, (), start // prompt.size)
        if reading.wanted and miss is None:
            miss = first_miss(self._tiered, prompt, end, since)
        until = None if exact == count else pieces[exact - 1].stop if exact else start
        return Loaded(Get(reading.kv(end), end - start, until, miss), None, end - start, tiers)

    def _worth(self, position: Position, choice: LoadChoice) -> Position:
        """Return the records to load; read some of the others if that may teach what reads take."""
        pieces, levels = position.pieces, position.levels
        at = sum(piece.stop <= choice.tokens for piece in pieces) if choice.pays else 0
        if at < len(pieces):
            self._tiered.relearn(*ids_and_sizes(pieces[at:]), levels[at])
        return Position(pieces[at - 1].stop if at else 0, levels[:at], pieces[:at])

    def _read(self, reading: _Reading, until: float | None) -> int:
        """Read the records of a position; return how many leading ones were."""
        position = reading.position
        left = None if until is None else max(0.0, until - time.monotonic())
        count, reading.exact = self._tiered.read(
            *ids_and_sizes(position.pieces), reading.take, levels=position.levels,
            deadline=left, sources=reading.sources,
            cancelled=None if reading.sink is None else lambda: not reading.wanted,
        )  # fmt: skip
        return count

    # --- common ----------------------------------------------------------------------------------

    def remove(self, prompt: PromptIds) -> Removed:
        """Delete all records with a token from the prompt's ``start`` on."""
        self._tiered.check_open()
        with closed_is_illegal():
            return self._followers.delete(prompt.private().every(prompt.start), self._tiered.remove)

    def _write(
        self,
        prompt: PromptIds,
        tokens: int,
        pieces: list[PositionPiece],
        held: dict[int, _Held],
        state: Mapping[tuple[int, str], Tensor] = _NO_STATE,
        *,
        old: PromptIds | None,
        wait: bool,
        exact: int | None,
    ) -> tuple[Written, tuple[str, ...]]:
        """Write records of the first ``tokens`` tokens; first delete those of ``old``, if given.

        ``old`` is deleted from its start on; ``exact`` counts tokens. Returns what was written, and
        the tiers that failed to delete.
        """

        def fill(at: int, raw: memoryview) -> None:
            _, group, start, stop, _ = pieces[at]
            if group == STATE:
                assert self._forms.states is not None
                self._forms.states.write(state, raw)
                return
            form, first, tensors = held[group]
            if start < first:
                raise _Gap
            form.write(tensors, start - first, stop - first, raw)

        failed: tuple[str, ...] = ()
        with nullcontext() if old is None else self._replacing:
            if old is not None:  # what tenants share under public names stays
                ids = old.private().every(old.start)
                with closed_is_illegal():
                    failed = self._followers.delete(ids, self._tiered.supersede).failed
            self._note(prompt, tokens, pieces)
            if exact is not None:  # in records from here on, not in tokens
                exact = next(
                    (at for at, piece in enumerate(pieces) if piece.stop > exact), len(pieces)
                )
            try:
                written = self._tiered.write(
                    *ids_and_sizes(pieces), fill, wait=_WAIT_S if wait else None, exact=exact
                )
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


def _sooner(until: float | None, choice: LoadChoice) -> float | None:
    """Return when a get ends that is of use for a while only."""
    if choice.patience_s is None:
        return until
    due = time.monotonic() + choice.patience_s
    return due if until is None else min(until, due)


class _Reading:
    """The tensors that the records of one position are read into.

    Attributes:
        sources: of each record that was read, the tier.
        wanted: whether the sink wants more.
        exact: how many leading records are exact, after all were read.
    """

    def __init__(
        self,
        forms: RecordForms,
        start: int,
        position: Position,
        room: tuple[KV, Parts] | None,
        sink: Sink | None,
        *,
        tuples: bool,
    ) -> None:
        self.position = position
        self.sources: list[str] = []
        self.wanted = True
        self.exact = 0
        self._forms = forms
        self._start = start
        self.sink = sink
        self._pieces = position.pieces
        tokens, base = position.tokens, forms.base
        self._held: dict[int, _Held] = {}
        self._kv: KV | None = None  # where blocks have all layers
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        self._state: State = {}
        if not forms.whole:
            for group, form in forms.kv.items():
                first = start if group == BASE else form.start_of(tokens)
                layers = form.empty(tokens - first)
                self._layers |= layers
                self._held[group] = _Held(form, first, form.tensors_of(layers))
        elif base is not None and room is not None:
            self._kv = room[0]
            self._held[BASE] = _Held(base, start, room[1])
        elif base is not None and sink is None:
            self._kv = base.empty_block(tokens - start, tuples=tuples)
            self._held[BASE] = _Held(base, start, base.tensors(self._kv, tokens - start))

    def take(self, at: int, raw: memoryview) -> None:
        """Copy a record."""
        _, group, start, stop, _ = self._pieces[at]
        if group == STATE:
            assert self._forms.states is not None
            self._state = self._forms.states.read(raw)
            return
        if group in self._held:
            form, first, tensors = self._held[group]
            begin = max(start, first)
            form.read(raw, stop - start, begin - start, tensors, begin - first)
        if self.sink is not None and self._forms.base is not None:
            begin = max(start, self._start)
            kv = self._forms.base.view(raw, stop - start, begin - start)
            self.wanted = self.sink(begin, stop, kv, self.sources[-1])

    def kv(self, end: int) -> KV | None:
        """Return the KV up to token ``end``, where blocks have all layers; None: a sink has it."""
        if self._kv is None or self._forms.base is None:
            return None
        return self._forms.base.cut(self._kv, end - self._start)

    def snapshot(self) -> Snapshot:
        """Return the snapshot, after all records were read."""
        tokens, pieces = self.position.tokens, self.position.pieces
        # Behind the first that is not, no word is given; of a state, its last token is lost.
        exact = min(
            (piece.start - (piece.group == STATE) for piece in pieces[self.exact :]), default=None
        )
        return Snapshot(tokens, self._start, dict(sorted(self._layers.items())), self._state, exact)
