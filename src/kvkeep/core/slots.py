"""`SlotCache`: prefix reuse for engines whose KV cache is one contiguous tensor per request.

A slot is *running* while a lease holds it. Otherwise it is *idle* if it has data, which can be
used again or copied from, or *empty*. A request gets, in this order:

1. an idle slot whose whole data is a beginning of its prompt: nothing is lost;
2. the lowest empty slot;
3. the least recently used idle slot without guards; what it shares with the prompt stays;
4. the same at the cost of soft pins; else `OutOfSlots`.

If another slot has published a longer beginning of the prompt, the difference is to be copied. So
an idle slot that holds the prompt *and more* is copied from and keeps its longer data, unless it is
the slot to be evicted: then it is cut, not copied.

One rule keeps the data right: the holder of a slot writes at or after ``published`` only, and
guards of a slot (pins, and copies still to be made from it) protect tokens before that mark.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import numpy as np

from kvkeep.core.errors import (
    IllegalStep,
    InvalidValue,
    NotCached,
    OutOfSlots,
    check_type,
    number,
    switch,
    whole,
)
from kvkeep.core.keys import as_namespace, root_key
from kvkeep.core.tokens import TOKEN_DTYPE, as_tokens, common_length

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from kvkeep.core.keys import Namespace, NamespaceLike
    from kvkeep.core.tokens import TokenArray, TokensLike

__all__ = ["SlotCache", "SlotCopy", "SlotLease", "SlotPin", "SlotStats", "copy_slot"]

# Rows of a power-of-two length would all begin in the same set of the CPU cache, and the search
# reads the beginnings of many rows. One more cache line per row spreads them.
_ROW_PADDING = 16


class SlotCopy(NamedTuple):
    """KV to copy before computing: positions ``start`` … ``tokens - 1`` of slot ``src``.

    To the same positions of slot ``dst``, K and V of every layer. Positions before ``start`` are in
    ``dst`` already; copying them too is harmless but costs time.
    """

    src: int
    dst: int
    tokens: int
    start: int = 0


@dataclass(eq=False, slots=True)
class SlotPin:
    """A prefix of ``len(tokens)`` tokens that `SlotCache.pin` keeps in ``slot``.

    A ``hard`` pin never gives way. ``expires_at`` is in seconds of the cache's clock, infinite
    without a time to live. ``ended`` is the reason why the pin ended, else None.
    """

    slot: int
    tokens: TokenArray = field(repr=False)
    namespace: Namespace
    hard: bool
    expires_at: float
    _clock: Callable[[], float] = field(repr=False)
    ended: str | None = None

    @property
    def held(self) -> bool:
        """Whether the prefix is still kept: not unpinned, expired, given way or cleared."""
        if self.ended is None and self._clock() >= self.expires_at:
            self.ended = "expired"
        return self.ended is None


@dataclass(frozen=True, slots=True)
class SlotStats:
    """The present state (slots, tokens), and totals since the cache was made."""

    num_slots: int
    empty: int
    idle: int
    running: int
    pinned: int  # slots that at least one pin guards
    hard_pinned: int
    pending_copies: int
    cached_tokens: int  # published, in all slots
    acquires: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0  # prompt tokens that need no computing
    copies: int = 0
    copied_tokens: int = 0
    evicted_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Reused prompt tokens / prompt tokens."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class _Slot:
    """What the cache and the lease on a slot both change.

    The first ``length`` tokens of ``row`` are there; others may use KV of the first ``published``.
    """

    def __init__(self, number: int, row: TokenArray) -> None:
        self.number = number
        self.row = row
        self.root = b""  # the root key of the namespace
        self.length = self.published = self.version = 0
        self.lease: SlotLease | None = None  # while it runs
        self.readers: list[SlotLease] = []  # whose copies come from here, pending or not
        self.pins: list[SlotPin] = []  # ended ones, too
        self.used = 0  # the larger, the later

    def shared(self, root: bytes, prompt: TokenArray) -> int:
        """Return how many published tokens the prompt begins with."""
        if not self.published or self.root != root:
            return 0
        return common_length(self.row[: self.published], prompt)

    def pinned(self, *, soft: bool) -> int:
        """Return how many leading tokens hard pins guard, or with ``soft``, all pins."""
        if self.pins:
            self.pins = [pin for pin in self.pins if pin.held]
        return max((len(pin.tokens) for pin in self.pins if soft or pin.hard), default=0)

    def guarded(self, *, soft: bool) -> int:
        """Return how many leading tokens these pins guard, or pending copies."""
        if not self.pins and not self.readers:
            return 0
        copies = (reader.copy.tokens for reader in self.readers if reader.copy)
        return max(self.pinned(soft=soft), 0, *copies)

    def cut(self, length: int, why: str = "gave way") -> None:
        """Drop all but the first ``length`` tokens, and end the pins that guard more."""
        for pin in self.pins:
            if pin.held and len(pin.tokens) > length:
                pin.ended = why
        self.length = min(self.length, length)
        self.published = min(self.published, length)


@dataclass(eq=False, slots=True)
class SlotLease:
    """One request's hold on a slot, from `SlotCache.acquire` to `release`.

    ``slot`` and ``version`` identify the hold: the version grows with each lease of the slot.
    ``num_cached`` prompt tokens, fewer than the prompt, need no computing once ``copy`` is made.
    ``copy`` is None when there is none, and after it was made.

    As a context manager it releases the slot at the end and keeps what was published. Every step
    after that, or after the cache was cleared, raises `IllegalStep` and changes nothing.
    """

    _slot: _Slot = field(repr=False)
    _uses: Iterator[int] = field(repr=False)
    _inherited: int = field(repr=False)  # tokens that the slot held before and does not forget
    slot: int
    version: int
    namespace: Namespace
    num_cached: int
    copy: SlotCopy | None

    @property
    def running(self) -> bool:
        """Whether the lease still holds its slot."""
        return self._slot.lease is self

    @property
    def tokens(self) -> TokenArray:
        """A copy of the prompt and the tokens added to it."""
        slot = self._held()
        return slot.row[: slot.length].copy()

    @property
    def num_tokens(self) -> int:
        """Length of the prompt and the tokens added to it."""
        return self._held().length

    @property
    def published(self) -> int:
        """Leading tokens that other requests may use."""
        return self._held().published

    def copied(self) -> None:
        """Report that ``copy`` was made: publish its tokens, end the guard on its source."""
        self._held()
        if self.copy is None:
            raise IllegalStep(f"no copy into slot {self.slot} is pending")
        self.publish(self.copy.tokens)

    def extend(self, tokens: TokensLike) -> None:
        """Append generated tokens (or more of the prompt). O(tokens added).

        Raises `InvalidValue` when the slot cannot hold that many.
        """
        slot, added = self._held(), as_tokens(tokens)
        if (length := slot.length + len(added)) > len(slot.row):
            raise InvalidValue(
                f"a slot holds at most {len(slot.row)} tokens; slot {self.slot} would have {length}"
            )
        slot.row[slot.length : length] = added
        slot.length = length

    def publish(self, n: int) -> None:
        """Report that the KV of the first ``n`` tokens is computed, for others to copy. O(1).

        A smaller ``n`` than before changes nothing. While a copy is pending, ``n`` must cover it,
        which reports the copy as made; `IllegalStep` otherwise.
        """
        slot = self._held()
        n = whole("n, the number of tokens computed,", n, 0, slot.length)
        self._refuse_within_copy(n)
        self.copy = None
        slot.published = max(slot.published, n)

    def truncate(self, n: int) -> None:
        """Drop all but the first ``n`` tokens, such as rejected drafts. O(pins of the slot).

        Published tokens may be dropped too, which ends soft pins on them. Raises `IllegalStep` when
        a hard pin or a pending copy, from this slot or into it, needs them.
        """
        slot = self._held()
        n = whole("n, the number of tokens left,", n, 0, slot.length)
        self._refuse_within_copy(n)
        if n < (needed := slot.guarded(soft=False)):
            raise IllegalStep(
                f"slot {self.slot} cannot be cut to {n} tokens: "
                f"{needed} are hard-pinned or being copied from"
            )
        slot.cut(n)
        self._inherited = min(self._inherited, n)

    def release(self, *, keep: bool = True) -> None:
        """Return the slot. Published tokens stay for other requests; the rest is forgotten.

        ``keep=False`` also forgets what this request published, with the soft pins on it. Tokens
        that the slot held before, and hard-pinned ones, stay.
        """
        slot = self._held()
        stays = slot.published
        if not switch("keep", keep):
            stays = max(min(stays, self._inherited), slot.pinned(soft=False))
        self.copy = None
        slot.lease = None
        slot.cut(stays)
        slot.used = next(self._uses)

    def __enter__(self) -> Self:
        self._held()
        return self

    def __exit__(self, *error: object) -> None:
        if self.running:
            self.release()

    def _held(self) -> _Slot:
        """Return the slot, or raise if the lease is over."""
        if not self.running:
            raise IllegalStep(
                f"the lease on slot {self.slot} (version {self.version}) is over: it was released, "
                f"or the cache was cleared"
            )
        return self._slot

    def _refuse_within_copy(self, n: int) -> None:
        if self.copy is not None and n < self.copy.tokens:
            raise IllegalStep(f"{self.copy} is pending; make it and call copied() first")


class SlotCache:
    """Assigns slots to prompts, and finds the longest cached beginning of each.

    ``num_slots`` slots of ``max_tokens`` tokens each. A pure index: it holds slot numbers and
    tokens (at most 4 bytes each), never tensors. The engine makes the copies that leases name
    (`kvkeep.core.slots.copy_slot`) and computes ``tokens[lease.num_cached:]``.

    For models in which every layer keeps the KV of every token; layers with a window count as such
    if their tensors are as long as the others. Models with states need
    `kvkeep.core.cache.PagedCache` with a `GroupLayout`: a slot can be reused up to any token, and a
    state exists at one.

    ``clock`` returns seconds, for pins with a time to live; it must not run backwards.

    Thread safety: none. One engine loop owns it, or its callers share a lock.
    """

    def __init__(
        self, num_slots: int, max_tokens: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_type("clock", clock, Callable, "a function that returns seconds")
        self.num_slots = whole("num_slots", num_slots, 1, 2**31 - 1)
        self.max_tokens = whole("max_tokens", max_tokens, 1, 2**31 - 1)
        self._clock = clock
        self._totals = Counter[str]()
        rows = np.zeros((self.num_slots, self.max_tokens + _ROW_PADDING), TOKEN_DTYPE)
        self._slots = [_Slot(slot, row[: self.max_tokens]) for slot, row in enumerate(rows)]
        self._uses = itertools.count(1)

    def match(self, tokens: TokensLike, namespace: NamespaceLike = "") -> int:
        """Return how many leading ``tokens`` the best slot has published. Changes nothing."""
        return max(self._shared(as_tokens(tokens), as_namespace(namespace)))

    def acquire(self, tokens: TokensLike, namespace: NamespaceLike = "") -> SlotLease:
        """Return a slot for a prompt of 1 … ``max_tokens`` tokens.

        All but the last prompt token can come from the cache. Make ``lease.copy``, if there is one,
        before computing; its source does not change until then.

        Raises `InvalidValue` for wrong tokens, and `OutOfSlots` when every slot is running,
        hard-pinned or being copied from; neither changes anything. Cost: O(prompt) to store the
        tokens at memory speed, and up to 4 µs a slot to compare them, plus what they share.
        """
        prompt = self._checked(tokens)
        space = as_namespace(namespace)
        shared = self._shared(prompt, space)
        limit = len(prompt) - 1  # the last prompt token is computed again even if it is there
        slot = self._choose(shared, limit)
        start, num_cached = min(shared[slot.number], limit), min(max(shared), limit)
        source = self._slots[shared.index(max(shared))]
        lost = slot.published - shared[slot.number]

        # Nothing fails from here on.
        slot.cut(start)
        slot.row[start : len(prompt)] = prompt[start:]
        slot.length, slot.root = len(prompt), root_key(space)
        slot.version += 1
        slot.lease = lease = SlotLease(
            slot, self._uses, start, slot.number, slot.version, space, num_cached, copy=None
        )
        if num_cached > start:
            lease.copy = SlotCopy(source.number, slot.number, num_cached, start)
            source.readers = [reader for reader in source.readers if reader.copy] + [lease]
            source.used = next(self._uses)
        self._totals.update(
            acquires=1,
            prompt_tokens=len(prompt),
            hit_tokens=num_cached,
            copies=num_cached > start,
            copied_tokens=num_cached - start,
            evicted_tokens=lost,
        )
        return lease

    def _shared(self, prompt: TokenArray, space: Namespace) -> list[int]:
        """Return how many published tokens of each slot the prompt begins with."""
        root = root_key(space)
        return [slot.shared(root, prompt) for slot in self._slots]

    def _choose(self, shared: list[int], limit: int) -> _Slot:
        """Return a slot, given what each shares with a prompt; at most ``limit`` of that stays."""

        def order(slot: _Slot) -> tuple[int, int]:
            if slot.guarded(soft=True) > min(shared[slot.number], limit):
                return 2, slot.used
            if 0 < slot.published == shared[slot.number]:
                return 0, -slot.published
            return 1, slot.used if slot.published else 0

        free = [slot for slot in self._slots if slot.lease is None]
        may = [slot for slot in free if slot.guarded(soft=False) <= min(shared[slot.number], limit)]
        if not may:
            raise OutOfSlots(self.num_slots - len(free), self.num_slots)
        return min(may, key=order)

    def pin(
        self,
        tokens: TokensLike,
        namespace: NamespaceLike = "",
        *,
        ttl: float | None = None,
        hard: bool = False,
    ) -> SlotPin:
        """Keep a cached prefix in its slot, for ``ttl`` seconds or until `unpin`.

        Eviction avoids pinned slots. A soft pin gives way before `OutOfSlots` is raised, a hard one
        never does; one slot always stays without hard pins. A pin guards the prefix only: requests
        that begin with it may still use its slot.

        Raises `NotCached` when no slot has published all of ``tokens``, `IllegalStep` when too many
        slots would be hard-pinned. Cost: that of `match`.
        """
        prefix = self._checked(tokens).copy()
        space = as_namespace(namespace)
        if ttl is not None:
            ttl = number("ttl", ttl, "a positive number of seconds, or None,", above=0, ends=True)
        hard = switch("hard", hard)
        shared = self._shared(prefix, space)
        if max(shared) < len(prefix):
            raise NotCached(
                f"of these {len(prefix)} tokens {max(shared)} are cached; "
                f"publish them before pinning them"
            )
        slot = self._slots[shared.index(len(prefix))]
        if hard and all(other.pinned(soft=False) for other in self._slots if other is not slot):
            raise IllegalStep(
                f"{self.num_slots - 1} of {self.num_slots} slots may be hard-pinned, and they are; "
                f"unpin one first"
            )
        expires_at = float("inf") if ttl is None else self._clock() + ttl
        pin = SlotPin(slot.number, prefix, space, hard, expires_at, self._clock)
        slot.pins.append(pin)
        return pin

    def unpin(self, pin: SlotPin) -> bool:
        """End a pin. Return False if it had expired, given way or been cleared before.

        Raises `IllegalStep` for a pin that was unpinned before.
        """
        check_type("pin", pin, SlotPin, "a pin of SlotCache.pin")
        if pin.ended == "unpinned":
            raise IllegalStep(f"{pin!r} was unpinned before")
        holders = [slot for slot in self._slots if pin in slot.pins]
        if (held := pin.held) and not holders:
            raise InvalidValue(f"{pin!r} is not a pin of this cache")
        for slot in holders:
            slot.pins.remove(pin)
        pin.ended = "unpinned"
        return held

    def clear(self) -> None:
        """Forget everything: data, pins, pending copies, and every lease, running ones too.

        Steps on those leases raise `IllegalStep` from now on. Call it when nothing is being
        computed: the slots are reused at once.
        """
        for slot in self._slots:
            slot.lease = None
            slot.readers = []
            slot.cut(0, "cleared")

    def stats(self) -> SlotStats:
        """Return present counts and totals. O(slots + pins)."""
        slots = self._slots
        running = sum(slot.lease is not None for slot in slots)
        # A slot whose data was forgotten stays idle until the last copy from it is made.
        empty = sum(
            not (slot.lease or slot.published or slot.guarded(soft=False)) for slot in slots
        )
        return SlotStats(
            num_slots=self.num_slots,
            empty=empty,
            idle=self.num_slots - empty - running,
            running=running,
            pinned=sum(slot.pinned(soft=True) > 0 for slot in slots),
            hard_pinned=sum(slot.pinned(soft=False) > 0 for slot in slots),
            pending_copies=sum(bool(slot.lease and slot.lease.copy) for slot in slots),
            cached_tokens=sum(slot.published for slot in slots),
            **self._totals,
        )

    def check(self) -> None:
        """Assert every invariant, recounted from scratch. O(everything); for tests."""
        assert not all(slot.pinned(soft=False) for slot in self._slots), "all are hard-pinned"
        for slot in self._slots:
            lease = slot.lease
            assert 0 <= slot.published <= slot.length <= self.max_tokens, vars(slot)
            assert lease or slot.length == slot.published, "a free slot has unpublished tokens"
            for pin in slot.pins:
                shared = slot.shared(root_key(pin.namespace), pin.tokens)
                assert not pin.held or shared == len(pin.tokens), f"{pin!r}: {shared} are there"
            if lease and (copy := lease.copy):
                source = self._slots[copy.src]
                assert copy.dst == slot.number != copy.src, f"{copy} copies onto itself"
                assert lease in source.readers, f"{copy}: its source is not guarded"
                assert slot.published == copy.start < copy.tokens <= slot.length, vars(slot)
                same = source.row[: copy.tokens] == slot.row[: copy.tokens]
                assert same.all(), f"{copy}: the source was overwritten"

    def _checked(self, tokens: TokensLike) -> TokenArray:
        array = as_tokens(tokens)
        if not 0 < len(array) <= self.max_tokens:
            raise InvalidValue(f"a slot takes 1 … {self.max_tokens} tokens, got {len(array)}")
        return array


def copy_slot(
    kv: Sequence[tuple[Tensor, Tensor]],
    copy: SlotCopy,
    *,
    layout: Literal["HND", "NHD"] = "HND",
) -> None:
    """Copy the K and V of a prefix from one slot to another, layer by layer, in place.

    ``kv``: K and V of each layer, shaped [slots, heads, tokens, dim] ("HND") or [slots, tokens,
    heads, dim] ("NHD"); widths may differ between K, V and layers, and tensors may be views. Other
    positions and slots are unchanged. Raises `InvalidValue`, with nothing copied, when a tensor has
    no such slot or position: a slice would be cut silently.

    Cost: one device copy each for K and V of a layer, queued on the current stream. Thread safety:
    none; nothing else may write to these positions at the same time.
    """
    if layout not in ("HND", "NHD"):
        raise InvalidValue(f"layout is 'HND' or 'NHD', got {layout!r}")
    if not 0 <= copy.start <= copy.tokens or min(copy.src, copy.dst) < 0:
        raise InvalidValue(f"slots and positions count from 0, start … tokens; got {copy}")
    axis = 2 if layout == "HND" else 1
    for layer, pair in enumerate(kv):
        for name, tensor in zip("KV", pair, strict=True):
            shape = tuple(tensor.shape)
            if len(shape) != 4 or max(copy.src, copy.dst) >= shape[0] or copy.tokens > shape[axis]:
                raise InvalidValue(
                    f"{name} of layer {layer} is shaped {shape}; {copy} needs four axes, "
                    f"{max(copy.src, copy.dst) + 1} slots and {copy.tokens} tokens in {layout}"
                )
    for pair in kv:
        for tensor in pair:
            span = tensor.narrow(axis, copy.start, copy.tokens - copy.start)
            span[copy.dst] = span[copy.src]
