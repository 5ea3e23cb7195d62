"""`SlotCache`: prefix reuse for engines whose KV cache is one contiguous tensor per request.

The states of a slot:

    EMPTY ──acquire──▶ RUNNING ──release──▶ IDLE ──acquire──▶ RUNNING ──▶ …
      ▲                   │                  │
      └─release: nothing──┴──────clear───────┘
                 to keep

An idle slot keeps its data, and can be acquired again or copied from. A request gets, in this
order:

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

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

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
from kvkeep.core.keys import as_namespace
from kvkeep.core.slots.lease import SlotLease
from kvkeep.core.slots.table import NOWHERE, SlotCopy, SlotPin, SlotTable
from kvkeep.core.tokens import as_tokens

if TYPE_CHECKING:
    from kvkeep.core.keys import Namespace, NamespaceLike
    from kvkeep.core.tokens import TokenArray, TokensLike

__all__ = ["SlotCache", "SlotStats"]


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
    acquires: int
    prompt_tokens: int
    hit_tokens: int  # prompt tokens that need no computing
    takeovers: int  # hits in the slot itself, without a copy
    copies: int
    copied_tokens: int
    evictions: int  # idle slots that lost data to a request, wholly or in part
    evicted_tokens: int

    @property
    def hit_rate(self) -> float:
        """Reused prompt tokens / prompt tokens."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True)
class _Totals:
    acquires: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    takeovers: int = 0
    copies: int = 0
    copied_tokens: int = 0
    evictions: int = 0
    evicted_tokens: int = 0


class _Choice(NamedTuple):
    """A slot for a request, how many of its tokens stay, and how many are lost."""

    slot: int
    kept: int
    lost: int


class SlotCache:
    """Assigns slots to prompts, and finds the longest cached beginning of each.

    ``num_slots`` slots of ``max_tokens`` tokens each. A pure index: it holds slot numbers and
    tokens (at most 4 bytes each, `TokenRows`), never tensors. The engine makes the copies that
    leases name (`kvkeep.core.slots.tensors.copy_slot`) and computes ``tokens[lease.num_cached:]``.

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
        self._table = SlotTable(self.num_slots, self.max_tokens, clock)
        self._totals = _Totals()

    # -- requests -----------------------------------------------------------------------------

    def match(self, tokens: TokensLike, namespace: NamespaceLike = "") -> int:
        """Return how many leading ``tokens`` the best slot has published. Changes nothing."""
        prompt = as_tokens(tokens)
        space = as_namespace(namespace)
        return self._table.rows.longest(space, prompt, above=0, limit=len(prompt))[1]

    def acquire(self, tokens: TokensLike, namespace: NamespaceLike = "") -> SlotLease:
        """Return a slot for a prompt of 1 … ``max_tokens`` tokens.

        All but the last prompt token can come from the cache. Make ``lease.copy``, if there is one,
        before computing; its source does not change until then.

        Raises `InvalidValue` for wrong tokens, and `OutOfSlots` when every slot is running,
        hard-pinned or being copied from; neither changes anything. Cost: O(prompt) to compare and
        store the tokens, at memory speed, and O(slots) in NumPy.
        """
        prompt = self._checked(tokens)
        space = as_namespace(namespace)
        table = self._table
        if not table.empty | table.idle:
            raise OutOfSlots(table.num_running, self.num_slots)

        own = self._whole_beginning(space, prompt)
        source, num_cached = table.rows.longest(
            space, prompt, above=own.kept if own else 0, limit=len(prompt) - 1
        )
        slot, kept, lost = own or self._empty_slot() or self._victim(space, prompt)
        num_cached = max(num_cached, kept)
        copy = SlotCopy(source, slot, num_cached, kept) if num_cached > kept else None

        # Nothing fails from here on.
        version = table.take(slot)
        table.guards.give_way(slot, kept)
        table.rows.write(slot, space, prompt, kept)
        if copy is not None:
            assert source not in (slot, NOWHERE)
            table.guards.begin(copy)
            table.touch(source)
        self._count(len(prompt), num_cached, copy, lost)
        return SlotLease(
            table,
            space,
            slot=slot,
            version=version,
            kept=kept,
            num_cached=num_cached,
            copy=copy,
        )

    def _whole_beginning(self, space: Namespace, prompt: TokenArray) -> _Choice | None:
        """Return the idle slot with the longest data, all of it a beginning of the prompt."""
        table = self._table
        for slot in table.rows.beginnings(space, prompt, table.idle_mask()):
            # The last prompt token is computed again, so it does not stay even if it is there.
            kept = min(int(table.rows.published[slot]), len(prompt) - 1)
            if table.guards.guarded(slot) <= kept:
                return _Choice(slot, kept, lost=0)
        return None

    def _empty_slot(self) -> _Choice | None:
        slot = self._table.lowest_empty()
        return None if slot is None else _Choice(slot, kept=0, lost=0)

    def _victim(self, space: Namespace, prompt: TokenArray) -> _Choice:
        """Return the idle slot to evict: least recently used first, soft-pinned ones last."""
        table = self._table
        fallback: _Choice | None = None
        for slot in table.idle_by_age():
            kept = min(table.rows.common(slot, space, prompt), len(prompt) - 1)
            choice = _Choice(slot, kept, lost=int(table.rows.published[slot]) - kept)
            if table.guards.guarded(slot) <= kept:
                return choice
            if fallback is None and table.guards.locked(slot) <= kept:
                fallback = choice
        if fallback is None:
            raise OutOfSlots(table.num_running, self.num_slots)
        return fallback

    def _count(self, prompt: int, cached: int, copy: SlotCopy | None, lost: int) -> None:
        totals = self._totals
        totals.acquires += 1
        totals.prompt_tokens += prompt
        totals.hit_tokens += cached
        totals.takeovers += cached > 0 and copy is None
        if copy is not None:
            totals.copies += 1
            totals.copied_tokens += copy.tokens - copy.start
        totals.evictions += lost > 0
        totals.evicted_tokens += lost

    # -- pins ---------------------------------------------------------------------------------

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
        ttl = (
            None
            if ttl is None
            else number("ttl", ttl, "a positive number of seconds, or None,", above=0, ends=True)
        )
        hard = switch("hard", hard)
        table = self._table
        slot, _ = table.rows.longest(space, prefix, above=len(prefix) - 1, limit=len(prefix))
        if slot == NOWHERE:
            raise NotCached(
                f"of these {len(prefix)} tokens {self.match(prefix, space)} are cached; "
                f"publish them before pinning them"
            )
        if hard and len(self._hard_pinned() | {slot}) > self.num_slots - 1:
            raise IllegalStep(
                f"{self.num_slots - 1} of {self.num_slots} slots may be hard-pinned, and they are; "
                f"unpin one first"
            )
        return table.guards.pin(slot, prefix, space, ttl, hard=hard)

    def unpin(self, pin: SlotPin) -> bool:
        """End a pin. Return False if it had expired, given way or been cleared before.

        Raises `IllegalStep` for a pin that was unpinned before.
        """
        check_type("pin", pin, SlotPin, "a pin of SlotCache.pin")
        return self._table.guards.unpin(pin)

    def _hard_pinned(self) -> set[int]:
        return {pin.slot for pin in self._table.guards.pins() if pin.hard}

    # -- the whole cache ----------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything: data, pins, pending copies, and every lease, running ones too.

        Steps on those leases raise `IllegalStep` from now on. Call it when nothing is being
        computed: the slots are reused at once.
        """
        self._table.clear()

    def stats(self) -> SlotStats:
        """Return present counts and totals. O(slots + pins)."""
        table = self._table
        return SlotStats(
            num_slots=self.num_slots,
            empty=table.empty.bit_count(),
            idle=table.idle.bit_count(),
            running=table.num_running,
            pinned=len({pin.slot for pin in table.guards.pins()}),
            hard_pinned=len(self._hard_pinned()),
            pending_copies=sum(1 for _ in table.guards.copies()),
            cached_tokens=int(table.rows.published.sum()),
            **asdict(self._totals),
        )

    def check(self) -> None:
        """Assert every invariant, recounted from scratch. O(everything); for tests."""
        self._table.check()
        hard = len(self._hard_pinned())
        assert hard < self.num_slots, f"{hard} of {self.num_slots} slots are hard-pinned"

    def _checked(self, tokens: TokensLike) -> TokenArray:
        array = as_tokens(tokens)
        if not 0 < len(array) <= self.max_tokens:
            raise InvalidValue(f"a slot takes 1 … {self.max_tokens} tokens, got {len(array)}")
        return array

    def __repr__(self) -> str:
        table = self._table
        return (
            f"<SlotCache {self.num_slots} slots of {self.max_tokens} tokens: "
            f"{table.empty.bit_count()} empty, {table.idle.bit_count()} idle, "
            f"{table.num_running} running>"
        )
