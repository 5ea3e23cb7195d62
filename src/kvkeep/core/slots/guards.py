"""Guards on the data of slots: pinned prefixes, and sources of pending copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvkeep.core.errors import IllegalStep, InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray

__all__ = ["SlotCopy", "SlotGuards", "SlotPin"]


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
