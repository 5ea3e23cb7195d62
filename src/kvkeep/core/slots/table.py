"""`SlotTable`: which slots are empty, idle or running, their tokens and their guards."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.core.tokens import TOKEN_DTYPE, common_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray

__all__ = ["NOWHERE", "SlotCopy", "SlotGuards", "SlotPin", "SlotTable", "TokenRows"]

NOWHERE = -1  # no slot; as the number of a namespace: none

# Rows of a power-of-two length would all begin in the same set of the CPU cache, and the search
# reads one column of many rows. One more cache line per row spreads them.
_ROW_PADDING = 16


class TokenRows:
    """One row of int32 tokens per slot, with its published length and its namespace.

    The first ``published[slot]`` tokens of a row have KV that other requests may use;
    ``lengths[slot]`` is the length of the whole row. The rows are one matrix, of which the system
    allocates only what is written: at most 4 bytes a token, against tens of kilobytes for its KV.

    Thread safety: none. Tokens are compared by NumPy, never in Python.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self._tokens = np.zeros((num_slots, max_tokens + _ROW_PADDING), TOKEN_DTYPE)
        self.lengths = [0] * num_slots
        self.published = np.zeros(num_slots, np.int64)
        self._spaces = np.full(num_slots, NOWHERE, np.int64)
        self._numbers: dict[Namespace, int] = {}
        self._next_number = itertools.count()

    # -- writing ------------------------------------------------------------------------------

    def write(self, slot: int, namespace: Namespace, tokens: TokenArray, keep: int) -> None:
        """Make ``tokens`` the row of ``slot``; its first ``keep`` are there and stay published."""
        self._tokens[slot, keep : len(tokens)] = tokens[keep:]
        self.lengths[slot] = len(tokens)
        self.published[slot] = keep
        self._spaces[slot] = self._number_for(namespace)

    def extend(self, slot: int, tokens: TokenArray) -> None:
        """Append ``tokens`` to the row."""
        end = self.lengths[slot] + len(tokens)
        self._tokens[slot, self.lengths[slot] : end] = tokens
        self.lengths[slot] = end

    def cut(self, slot: int, length: int) -> None:
        """Drop all but the first ``length`` tokens of the row."""
        self.lengths[slot] = min(self.lengths[slot], length)
        self.published[slot] = min(int(self.published[slot]), length)

    def forget(self, slot: int) -> None:
        """Drop the row, and its namespace."""
        self.cut(slot, 0)
        self._spaces[slot] = NOWHERE

    def _number_for(self, namespace: Namespace) -> int:
        number = self._numbers.get(namespace)
        if number is None:
            # Tenants come and go: numbers of unused namespaces are dropped now and then.
            if len(self._numbers) >= 2 * len(self.lengths):
                used = set(self._spaces.tolist())
                self._numbers = {k: v for k, v in self._numbers.items() if v in used}
            number = self._numbers[namespace] = next(self._next_number)
        return number

    # -- reading ------------------------------------------------------------------------------

    def row(self, slot: int, length: int) -> TokenArray:
        """Return a view of the first ``length`` tokens of the row, published or not."""
        return self._tokens[slot, :length]

    def is_in(self, slot: int, namespace: Namespace) -> bool:
        """Whether the slot's data belongs to ``namespace``."""
        return bool(self._spaces[slot] == self._numbers.get(namespace, NOWHERE - 1))

    def common(self, slot: int, namespace: Namespace, prompt: TokenArray) -> int:
        """Return how many published tokens of ``slot`` the prompt begins with. O(that many)."""
        if not self.is_in(slot, namespace):
            return 0
        return common_length(self._tokens[slot, : int(self.published[slot])], prompt)

    def longest(
        self, namespace: Namespace, prompt: TokenArray, *, above: int, limit: int
    ) -> tuple[int, int]:
        """Return the slot with the longest published beginning of ``prompt``, and its length.

        The length is at most ``limit``; ``(NOWHERE, above)`` when no slot has more than ``above``.
        Among equals, the slot with more published tokens wins, then the lowest. Cost: one NumPy
        pass over the slots, and one comparison for each that may be longer than the best so far.
        """
        best, found = above, NOWHERE
        number = self._numbers.get(namespace)
        if number is None:
            return found, best
        reach = np.minimum(self.published, limit)
        rivals = np.flatnonzero((self._spaces == number) & (reach > best))
        for slot in rivals[np.argsort(-reach[rivals], kind="stable")].tolist():
            if reach[slot] <= best:
                break
            length = common_length(self._tokens[slot, : int(reach[slot])], prompt)
            if length > best:
                best, found = length, slot
        return found, best

    def beginnings(
        self, namespace: Namespace, prompt: TokenArray, among: npt.NDArray[np.bool_]
    ) -> Iterator[int]:
        """Yield slots of ``among`` whose whole published data begins the prompt, longest first."""
        number = self._numbers.get(namespace)
        if number is None:
            return
        published = self.published
        inside = (published > 0) & (published <= len(prompt))
        slots = np.flatnonzero(among & (self._spaces == number) & inside)
        last = published[slots] - 1
        slots = slots[self._tokens[slots, last] == prompt[last]]
        for slot in slots[np.argsort(-published[slots], kind="stable")].tolist():
            length = int(published[slot])
            if common_length(self._tokens[slot, :length], prompt) == length:
                yield slot

    def check(self) -> None:
        """Assert the invariants of each row."""
        lengths = np.asarray(self.lengths)
        assert (self.published >= 0).all(), "fewer than no tokens are published"
        assert (self.published <= lengths).all(), "more is published than the row holds"
        assert (lengths <= self._tokens.shape[1] - _ROW_PADDING).all(), "a row is too long"
        assert ((self._spaces != NOWHERE) >= (self.published > 0)).all(), "data of no namespace"
        numbers = list(self._numbers.values())
        assert len(set(numbers)) == len(numbers), "two namespaces share a number"
        used = set(self._spaces.tolist()) - {NOWHERE}
        assert used <= set(numbers), "a slot belongs to a namespace that is not known"


class SlotCopy(NamedTuple):
    """KV to copy before computing: positions ``start`` … ``tokens - 1`` of slot ``src``.

    To the same positions of slot ``dst``, K and V of every layer. Positions before ``start`` are in
    ``dst`` already; copying them too is harmless but costs time.
    """

    src: int
    dst: int
    tokens: int
    start: int = 0


class SlotPin:
    """A prefix of ``len(tokens)`` tokens that `SlotCache.pin` keeps in ``slot``.

    A ``hard`` pin never gives way. ``expires_at`` is in seconds of the cache's clock, infinite
    without a time to live. ``ended`` is the reason why the pin ended, else None.
    """

    __slots__ = ("_clock", "ended", "expires_at", "hard", "namespace", "slot", "tokens")

    def __init__(
        self,
        slot: int,
        tokens: TokenArray,
        namespace: Namespace,
        *,
        hard: bool,
        expires_at: float,
        clock: Callable[[], float],
    ) -> None:
        self.slot = slot
        self.tokens = tokens
        self.namespace = namespace
        self.hard = hard
        self.expires_at = expires_at
        self.ended: str | None = None
        self._clock = clock

    @property
    def held(self) -> bool:
        """Whether the prefix is still kept: not unpinned, expired, given way or cleared."""
        return self.ended is None and self._clock() < self.expires_at

    def __repr__(self) -> str:
        kind = "hard" if self.hard else "soft"
        state = "held" if self.held else self.ended or "expired"
        return f"<SlotPin {kind}, {len(self.tokens)} tokens in slot {self.slot}, {state}>"


class SlotGuards:
    """The pins and the pending copies of all slots.

    Each guards a number of tokens from the front of a slot, which are not overwritten. Expired pins
    are dropped when their slot is next read. Thread safety: none. Cost: O(guards of the slot).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pins: dict[int, list[SlotPin]] = {}
        self._copies: dict[int, list[SlotCopy]] = {}  # by the slot that is copied from

    # -- pins ---------------------------------------------------------------------------------

    def pin(
        self, slot: int, tokens: TokenArray, namespace: Namespace, ttl: float | None, *, hard: bool
    ) -> SlotPin:
        """Guard the first ``len(tokens)`` tokens of ``slot``; ``ttl`` is in seconds."""
        expires_at = float("inf") if ttl is None else self._clock() + ttl
        pin = SlotPin(slot, tokens, namespace, hard=hard, expires_at=expires_at, clock=self._clock)
        self._pins.setdefault(slot, []).append(pin)
        return pin

    def unpin(self, pin: SlotPin) -> bool:
        """End a pin; return False if it had ended by itself. `IllegalStep` if it was unpinned."""
        if pin.ended == "unpinned":
            raise IllegalStep(f"{pin!r} was unpinned before")
        if held := pin in self.pins_of(pin.slot):
            self._drop(pin, "unpinned")
        elif pin.ended is None:
            raise InvalidValue(f"{pin!r} is not a pin of this cache")
        pin.ended = "unpinned"
        return held

    def pins_of(self, slot: int) -> list[SlotPin]:
        """Return the pins of ``slot``, without expired ones."""
        for pin in [p for p in self._pins.get(slot, ()) if not p.held]:
            self._drop(pin, "expired")
        return self._pins.get(slot, [])

    def pins(self) -> Iterator[SlotPin]:
        """Yield every pin that is held."""
        for slot in list(self._pins):
            yield from self.pins_of(slot)

    def give_way(self, slot: int, kept: int) -> None:
        """End the pins of ``slot`` that guard more than its first ``kept`` tokens."""
        for pin in [p for p in self.pins_of(slot) if len(p.tokens) > kept]:
            assert not pin.hard, "a hard pin gave way"
            self._drop(pin, "gave way")

    def _drop(self, pin: SlotPin, why: str) -> None:
        pin.ended = why
        pins = self._pins[pin.slot]
        pins.remove(pin)
        if not pins:
            del self._pins[pin.slot]

    # -- copies -------------------------------------------------------------------------------

    def begin(self, copy: SlotCopy) -> None:
        """Guard the source of ``copy`` until it is `done`."""
        self._copies.setdefault(copy.src, []).append(copy)

    def done(self, copy: SlotCopy) -> None:
        """End the guard of ``copy``, made or abandoned."""
        copies = self._copies[copy.src]
        copies.remove(copy)
        if not copies:
            del self._copies[copy.src]

    def copies(self) -> Iterator[SlotCopy]:
        """Yield every pending copy."""
        for copies in self._copies.values():
            yield from copies

    # -- how many tokens, from the front of a slot ----------------------------------------------

    def to_copy(self, slot: int) -> int:
        """Return how many tokens pending copies still read."""
        return max((copy.tokens for copy in self._copies.get(slot, ())), default=0)

    def hard(self, slot: int) -> int:
        """Return how many tokens hard pins guard."""
        return max((len(pin.tokens) for pin in self.pins_of(slot) if pin.hard), default=0)

    def locked(self, slot: int) -> int:
        """Return how many tokens nothing may overwrite: pending copies and hard pins."""
        return max(self.to_copy(slot), self.hard(slot))

    def guarded(self, slot: int) -> int:
        """Return how many tokens should stay: the locked ones, and those of soft pins."""
        pinned = max((len(pin.tokens) for pin in self.pins_of(slot)), default=0)
        return max(self.to_copy(slot), pinned)

    def clear(self) -> None:
        """End every pin and forget every copy."""
        for pin in list(self.pins()):
            self._drop(pin, "cleared")
        self._copies.clear()


class SlotTable:
    """The state shared by a `SlotCache` and its leases.

    A slot is empty or idle, one bit each in two ints, else running. Each transition is one method,
    which asserts the state it starts from.

    Thread safety: none. Cost: O(1) a step, a machine word per 30 slots in the bit masks.
    """

    def __init__(self, num_slots: int, max_tokens: int, clock: Callable[[], float]) -> None:
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.rows = TokenRows(num_slots, max_tokens)
        self.guards = SlotGuards(clock)
        self.empty = (1 << num_slots) - 1
        self.idle = 0
        self.versions = [0] * num_slots
        self._last_used = np.zeros(num_slots, np.int64)
        self._time = 0

    # -- reading ------------------------------------------------------------------------------

    def is_empty(self, slot: int) -> bool:
        """Whether the slot is free and holds no data."""
        return bool(self.empty >> slot & 1)

    def is_idle(self, slot: int) -> bool:
        """Whether the slot is free and holds data."""
        return bool(self.idle >> slot & 1)

    def is_running(self, slot: int) -> bool:
        """Whether a lease holds the slot."""
        return not (self.empty | self.idle) >> slot & 1

    @property
    def num_running(self) -> int:
        """Slots held by leases."""
        return self.num_slots - self.empty.bit_count() - self.idle.bit_count()

    def lowest_empty(self) -> int | None:
        """Return the lowest empty slot; None if there is none."""
        return (self.empty & -self.empty).bit_length() - 1 if self.empty else None

    def idle_mask(self) -> npt.NDArray[np.bool_]:
        """Return a bool per slot: whether it is idle."""
        packed = np.frombuffer(self.idle.to_bytes((self.num_slots + 7) // 8, "little"), np.uint8)
        return np.unpackbits(packed, count=self.num_slots, bitorder="little").view(np.bool_)

    def idle_by_age(self) -> Iterator[int]:
        """Yield the idle slots, least recently used first; sorts only beyond the first."""
        idle = np.flatnonzero(self.idle_mask())
        if not len(idle):
            return
        used = self._last_used[idle]
        yield int(idle[used.argmin()])
        yield from idle[used.argsort()][1:].tolist()

    # -- steps --------------------------------------------------------------------------------

    def touch(self, slot: int) -> None:
        """Record a use of the slot."""
        self._time += 1
        self._last_used[slot] = self._time

    def take(self, slot: int) -> int:
        """Change empty or idle to running; return the version of the new lease."""
        assert not self.is_running(slot), f"slot {slot} was given out twice"
        self.empty &= ~(1 << slot)
        self.idle &= ~(1 << slot)
        self.versions[slot] += 1
        return self.versions[slot]

    def give_back(self, slot: int, keep: int) -> None:
        """Change running to idle with the first ``keep`` tokens, or to empty."""
        assert self.is_running(slot), f"slot {slot} was given back twice"
        self.guards.give_way(slot, keep)
        self.rows.cut(slot, keep)
        self.idle |= 1 << slot
        self.touch(slot)
        self._empty_if_spent(slot)

    def settle(self, copy: SlotCopy) -> None:
        """End the guard of ``copy``, made or abandoned, on its source."""
        self.guards.done(copy)
        self._empty_if_spent(copy.src)

    def _empty_if_spent(self, slot: int) -> None:
        # A slot whose data was forgotten stays idle until the last copy from it is made: no search
        # finds it, and nothing may overwrite it yet.
        if self.is_idle(slot) and not self.rows.published[slot] and not self.guards.to_copy(slot):
            self.rows.forget(slot)
            self.idle &= ~(1 << slot)
            self.empty |= 1 << slot

    def clear(self) -> None:
        """Make every slot empty; all leases end, as their slots do not run."""
        self.guards.clear()
        for slot in range(self.num_slots):
            self.rows.forget(slot)
        self.empty, self.idle = (1 << self.num_slots) - 1, 0

    def check(self) -> None:
        """Assert, recounting everything, that states, rows and guards agree."""
        rows, guards = self.rows, self.guards
        rows.check()
        assert not self.empty & self.idle, "a slot is empty and idle at once"
        assert (self.empty | self.idle) >> self.num_slots == 0, "a slot that does not exist is free"
        for slot in range(self.num_slots):
            length, published = rows.lengths[slot], int(rows.published[slot])
            if self.is_empty(slot):
                assert length == 0, f"empty slot {slot} holds {length} tokens"
                assert not guards.guarded(slot), f"empty slot {slot} is guarded"
            elif self.is_idle(slot):
                assert length == published, f"idle slot {slot} holds unpublished tokens"
                assert published or guards.to_copy(slot), f"idle slot {slot} should be empty"
        for pin in guards.pins():
            n = len(pin.tokens)
            assert n <= rows.published[pin.slot], f"{pin!r} guards what is not there"
            assert rows.common(pin.slot, pin.namespace, pin.tokens) == n, f"{pin!r}: other tokens"
        targets = [copy.dst for copy in guards.copies()]
        assert len(set(targets)) == len(targets), "two copies into one slot are pending"
        for copy in guards.copies():
            assert copy.src != copy.dst, f"{copy} copies onto itself"
            assert self.is_running(copy.dst), f"{copy}: its target is not running"
            assert 0 <= copy.start < copy.tokens <= rows.lengths[copy.dst], f"{copy} makes no sense"
            assert rows.published[copy.dst] == copy.start, f"{copy} overwrites published tokens"
            source, target = (rows.row(slot, copy.tokens) for slot in (copy.src, copy.dst))
            assert (source == target).all(), f"{copy}: the source was overwritten"
