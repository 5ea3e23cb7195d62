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
    from collections.abc import Sequence

    from torch import Tensor

    from kvkeep.core.keys import Namespace, NamespaceLike
    from kvkeep.core.tokens import TokenArray, TokensLike

__all__ = ["SlotCache", "SlotCopy", "SlotLease", "SlotPin", "SlotStats", "copy_slot"]

_RUNNING = np.iinfo(np.int64).max


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


class _Slots:
    """The state of all slots, which the cache and its leases change.

    Others may use KV of the first ``published[slot]`` tokens of ``rows[slot]``. What a search reads
    first lies in columns, for a few passes of NumPy.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.rows = np.zeros((num_slots, max_tokens), TOKEN_DTYPE)
        self.published = np.zeros(num_slots, np.int64)
        # The larger, the later; 0 for a free slot without data.
        self.used = np.zeros(num_slots, np.int64)
        self.hashes = np.zeros(num_slots, np.int64)  # of the root keys
        self.roots = [b""] * num_slots  # the root keys of the namespaces
        self.versions = [0] * num_slots
        self.leases: dict[int, SlotLease] = {}
        self.copies: dict[int, SlotCopy] = {}  # pending ones, by their target
        self.pins: list[SlotPin] = []  # ended ones, too
        self._uses = itertools.count(1)

    def touch(self, slot: int) -> None:
        """Record that a slot was used, if no lease holds it."""
        if slot not in self.leases:
            self.used[slot] = next(self._uses) if self.published[slot] else 0

    def shared(self, slot: int, root: bytes, prompt: TokenArray) -> int:
        """Return how many published tokens of a slot the prompt begins with."""
        if self.roots[slot] != root:
            return 0
        return common_length(self.rows[slot, : self.published[slot]], prompt)

    def longest(self, root: bytes, prompt: TokenArray) -> tuple[int, int]:
        """Return the slot that shares most with the prompt, and how much; (0, 0) if none does.

        Only slots that have the prompt's next token behind the most so far can share more. Where
        slots leave the prompt one after another, each comparison from the middle halves them.
        """
        best, most = 0, 0
        rivals = np.flatnonzero(self.hashes == hash(root))
        while most < len(prompt):
            rivals = rivals[self.published[rivals] > most]
            rivals = rivals[self.rows[rivals, most] == prompt[most]]
            if not len(rivals):
                break
            middle = len(rivals) // 2
            slot = int(rivals[middle])
            rivals = np.delete(rivals, middle)
            if (shared := self.shared(slot, root, prompt)) > most:
                best, most = slot, shared
        return best, most

    def held_pins(self) -> list[SlotPin]:
        """Return the pins that still hold. O(pins)."""
        self.pins = [pin for pin in self.pins if pin.held]
        return self.pins

    def guards(self, *, soft: bool) -> dict[int, int]:
        """Return how many leading tokens of slots hard pins and pending copies guard, or all."""
        guards = [(pin.slot, len(pin.tokens)) for pin in self.held_pins() if soft or pin.hard]
        guards += [(copy.src, copy.tokens) for copy in self.copies.values()]
        return dict(sorted(guards))  # the last of a slot is its longest


@dataclass(eq=False, slots=True)
class SlotLease:
    """One request's hold on a slot, from `SlotCache.acquire` to `release`.

    ``slot`` and ``version`` identify the hold: the version grows with each lease of the slot.
    ``num_cached`` prompt tokens, fewer than the prompt, need no computing once ``copy`` is made.

    As a context manager it releases the slot at the end and keeps what was published. Every step
    after that, or after the cache was cleared, raises `IllegalStep` and changes nothing.
    """

    _slots: _Slots = field(repr=False)
    _length: int = field(repr=False)
    slot: int
    version: int
    namespace: Namespace
    num_cached: int

    @property
    def running(self) -> bool:
        """Whether the lease still holds its slot."""
        return self._slots.leases.get(self.slot) is self

    @property
    def copy(self) -> SlotCopy | None:
        """The copy to make before computing; None when there is none, and after it was made."""
        return self._slots.copies.get(self.slot) if self.running else None

    @property
    def tokens(self) -> TokenArray:
        """A copy of the prompt and the tokens added to it."""
        return self._slots.rows[self.slot, : self.num_tokens].copy()

    @property
    def num_tokens(self) -> int:
        """Length of the prompt and the tokens added to it."""
        self._held()
        return self._length

    @property
    def published(self) -> int:
        """Leading tokens that other requests may use."""
        return int(self._held().published[self.slot])

    def copied(self) -> None:
        """Report that ``copy`` was made: publish its tokens, end the guard on its source."""
        copy = self._held().copies.get(self.slot)
        if copy is None:
            raise IllegalStep(f"no copy into slot {self.slot} is pending")
        self.publish(copy.tokens)

    def extend(self, tokens: TokensLike) -> None:
        """Append generated tokens (drafts once they are accepted). O(tokens added).

        Raises `InvalidValue` when the slot cannot hold that many.
        """
        start, added = self.num_tokens, as_tokens(tokens)
        row = self._slots.rows[self.slot]
        if (stop := start + len(added)) > len(row):
            raise InvalidValue(
                f"a slot holds at most {len(row)} tokens; slot {self.slot} would have {stop}"
            )
        row[start:stop] = added
        self._length = stop

    def publish(self, n: int) -> None:
        """Report that the KV of the first ``n`` tokens is computed, for others to copy. O(1).

        A smaller ``n`` than before changes nothing. While a copy is pending, ``n`` must cover it,
        which reports the copy as made; `IllegalStep` otherwise.
        """
        n = whole("n, the number of tokens computed,", n, 0, self.num_tokens)
        if (copy := self.copy) is not None and n < copy.tokens:
            raise IllegalStep(f"{copy} is pending; make it and call copied() first")
        self._slots.copies.pop(self.slot, None)
        if n > self.published:
            self._slots.published[self.slot] = n

    def release(self) -> None:
        """Return the slot. Published tokens stay for other requests; the rest is forgotten."""
        slots = self._held()
        slots.copies.pop(self.slot, None)
        del slots.leases[self.slot]
        slots.touch(self.slot)

    def __enter__(self) -> Self:
        self._held()
        return self

    def __exit__(self, *error: object) -> None:
        if self.running:
            self.release()

    def _held(self) -> _Slots:
        """Return the slots, or raise if the lease is over."""
        if not self.running:
            raise IllegalStep(
                f"the lease on slot {self.slot} (version {self.version}) is over: it was released, "
                f"or the cache was cleared"
            )
        return self._slots


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
        self._slots = _Slots(self.num_slots, self.max_tokens)

    def match(self, tokens: TokensLike, namespace: NamespaceLike = "") -> int:
        """Return how many leading ``tokens`` the best slot has published. Changes nothing."""
        prompt = as_tokens(tokens)
        return self._slots.longest(root_key(as_namespace(namespace)), prompt)[1]

    def acquire(self, tokens: TokensLike, namespace: NamespaceLike = "") -> SlotLease:
        """Return a slot for a prompt of 1 … ``max_tokens`` tokens.

        All but the last prompt token can come from the cache. Make ``lease.copy``, if there is one,
        before computing; its source does not change until then.

        Raises `InvalidValue` for wrong tokens, and `OutOfSlots` when every slot is running,
        hard-pinned or being copied from; neither changes anything. Cost: O(prompt) to compare and
        store the tokens at memory speed, and some passes of NumPy over the slots; a few µs more for
        each slot that has to be compared.
        """
        prompt = self._checked(tokens)
        space = as_namespace(namespace)
        root = root_key(space)
        slots = self._slots
        source, most = slots.longest(root, prompt)
        limit = len(prompt) - 1  # the last prompt token is computed again even if it is there
        slot, shared = self._choose(root, prompt, most)
        start, num_cached = min(shared, limit), min(most, limit)
        lost = int(slots.published[slot]) - shared

        # Nothing fails from here on.
        for pin in slots.pins:
            if pin.slot == slot and len(pin.tokens) > start:
                pin.ended = "gave way"
        slots.published[slot] = start
        slots.rows[slot, start : len(prompt)] = prompt[start:]
        slots.roots[slot], slots.hashes[slot] = root, hash(root)
        slots.versions[slot] += 1
        slots.used[slot] = _RUNNING
        version = slots.versions[slot]
        lease = SlotLease(slots, len(prompt), slot, version, space, num_cached)
        slots.leases[slot] = lease
        if num_cached > start:
            slots.copies[slot] = SlotCopy(source, slot, num_cached, start)
            slots.touch(source)
        self._totals.update(
            acquires=1,
            prompt_tokens=len(prompt),
            hit_tokens=num_cached,
            copies=int(num_cached > start),
            copied_tokens=num_cached - start,
            evicted_tokens=lost,
        )
        return lease

    def _choose(self, root: bytes, prompt: TokenArray, most: int) -> tuple[int, int]:
        """Return a free slot for the prompt, of which the best has ``most``, and what it shares."""
        slots, limit = self._slots, len(prompt) - 1
        guards = slots.guards(soft=True)
        whole = (slots.published > 0) & (slots.published <= most) & (slots.used < _RUNNING)
        free = np.flatnonzero(whole & (slots.hashes == hash(root)))
        last = slots.published[free] - 1
        free = free[slots.rows[free, last] == prompt[last]]
        for slot in free[np.argsort(-slots.published[free], kind="stable")].tolist():
            shared = slots.shared(slot, root, prompt)
            if shared == slots.published[slot] and guards.get(slot, 0) <= min(shared, limit):
                return slot, shared
        by_age = np.argsort(slots.used, kind="stable").tolist()  # empty ones first
        for guarded in (guards, slots.guards(soft=False)):
            for slot in by_age[: self.num_slots - len(slots.leases)]:
                shared = slots.shared(slot, root, prompt)
                if guarded.get(slot, 0) <= min(shared, limit):
                    return slot, shared
        raise OutOfSlots(len(slots.leases), self.num_slots)

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
        slots would be hard-pinned. Cost: that of `match`, and O(slots + pins).
        """
        prefix = self._checked(tokens).copy()
        space = as_namespace(namespace)
        if ttl is not None:
            ttl = number("ttl", ttl, "a positive number of seconds, or None,", above=0, ends=True)
        hard = switch("hard", hard)
        slots, root = self._slots, root_key(space)
        _, most = slots.longest(root, prefix)
        if most < len(prefix):
            raise NotCached(
                f"of these {len(prefix)} tokens {most} are cached; publish them before pinning them"
            )
        every = range(self.num_slots)
        slot = next(slot for slot in every if slots.shared(slot, root, prefix) == most)
        pinned = {pin.slot for pin in slots.held_pins() if pin.hard}
        if hard and len(pinned | {slot}) == self.num_slots:
            raise IllegalStep(
                f"{self.num_slots - 1} of {self.num_slots} slots may be hard-pinned, and they are; "
                f"unpin one first"
            )
        expires_at = float("inf") if ttl is None else self._clock() + ttl
        pin = SlotPin(slot, prefix, space, hard, expires_at, self._clock)
        slots.pins.append(pin)
        return pin

    def unpin(self, pin: SlotPin) -> bool:
        """End a pin. Return False if it had expired, given way or been cleared before.

        Raises `IllegalStep` for a pin that was unpinned before.
        """
        check_type("pin", pin, SlotPin, "a pin of SlotCache.pin")
        if pin.ended == "unpinned":
            raise IllegalStep(f"{pin!r} was unpinned before")
        if (held := pin.held) and pin not in self._slots.pins:
            raise InvalidValue(f"{pin!r} is not a pin of this cache")
        pin.ended = "unpinned"
        return held

    def clear(self) -> None:
        """Forget everything: data, pins, pending copies, and every lease, running ones too.

        Steps on those leases raise `IllegalStep` from now on. Call it when nothing is being
        computed: the slots are reused at once.
        """
        slots = self._slots
        slots.leases.clear()
        slots.copies.clear()
        slots.published[:] = slots.used[:] = 0
        for pin in slots.held_pins():
            pin.ended = "cleared"

    def stats(self) -> SlotStats:
        """Return present counts and totals. O(slots + pins)."""
        slots = self._slots
        pins = slots.held_pins()
        idle = int(np.count_nonzero((slots.used > 0) & (slots.used < _RUNNING)))
        return SlotStats(
            num_slots=self.num_slots,
            empty=self.num_slots - idle - len(slots.leases),
            idle=idle,
            running=len(slots.leases),
            pinned=len({pin.slot for pin in pins}),
            hard_pinned=len({pin.slot for pin in pins if pin.hard}),
            pending_copies=len(slots.copies),
            cached_tokens=int(slots.published.sum()),
            **self._totals,
        )

    def check(self) -> None:
        """Assert every invariant, recounted from scratch. O(everything); for tests."""
        slots = self._slots
        pins = slots.held_pins()
        assert len({pin.slot for pin in pins if pin.hard}) < self.num_slots, "all are hard-pinned"
        for pin in pins:
            shared = slots.shared(pin.slot, root_key(pin.namespace), pin.tokens)
            assert shared == len(pin.tokens), f"{pin!r}: {shared} are there"
        for slot in range(self.num_slots):
            lease, used, published = slots.leases.get(slot), slots.used[slot], slots.published[slot]
            state = f"slot {slot}: {published} tokens published, used {used}, {lease}"
            if lease is None:
                assert (0 < used < _RUNNING) == (published > 0), state
            else:
                assert used == _RUNNING, state
                assert 0 <= published <= lease.num_tokens <= self.max_tokens, state
        for dst, copy in slots.copies.items():
            assert copy.src != copy.dst == dst, f"{copy} has no target"
            length = slots.leases[dst].num_tokens
            assert slots.published[dst] == copy.start < copy.tokens <= length, copy
            source, target = slots.rows[[copy.src, dst], : copy.tokens]
            assert (source == target).all(), f"{copy}: the source was overwritten"

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
