"""`PrefixRouter`: chooses the instance with the lowest cost for a prompt."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.tokens import TOKEN_BYTES, TOKEN_DTYPE, as_tokens
from kvkeep.serve.kv_events.wire import AllBlocksCleared, BlockStored, salt_digest
from kvkeep.serve.router.held import HeldPrefix, bits_of
from kvkeep.serve.router.index import Place, PlacementIndex
from kvkeep.serve.router.placing import (
    Fleet,
    PlaceLoad,
    PlaceLoads,
    RoutingCost,
    choose,
    name_hash,
    prompt_hash,
    random_hash,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from kvkeep.core.public import PublicPrefixes
    from kvkeep.core.tokens import TokenArray, TokensLike
    from kvkeep.serve.kv_events.wire import KVEvent
    from kvkeep.serve.router.held import HeldGroup

__all__ = ["PrefixRouter", "RouteTicket", "RouterStats", "Score", "Text"]

# The tiers of prompts being computed right now, of those that instances without events have
# computed, and of texts that any instance has computed; their blocks have so many tokens.
_COMING = "COMING"
_ROUTED = "ROUTED"
_TEXT = "TEXT"
_OWN_TIERS = frozenset({_COMING, _ROUTED, _TEXT})
_ROUTED_TOKENS = 64
# Kinds of attention whose blocks prove that a prefix is cached; sliding windows keep only its end.
_WHOLE = {None, "full_attention", "mla_attention"}
_TAIL = 4096  # bytes of an opening that decide, from its end
_MARK_LENGTH = 4096
# Bounds on the announcements of one instance.
_MOST_ADAPTERS = 1_000
_LONGEST_ADAPTER = 256
_MOST_GROUPS = 64
MOST_RANKS = 1024


@dataclass(frozen=True, slots=True)
class Text:
    """The beginning of a prompt as text, where its tokens are unknown.

    A later turn of the conversation has the same bytes in ``raw`` and more behind them. ``opening``
    is what all turns have in common: routers that know nothing else of the conversation send it to
    the same instance. Four bytes count as a token.
    """

    raw: bytes
    opening: bytes = b""

    @property
    def symbols(self) -> TokenArray:
        """Four bytes each; up to three bytes at the end are not compared."""
        size = len(self) * TOKEN_BYTES
        return np.frombuffer(self.raw[:size], TOKEN_DTYPE)

    def __len__(self) -> int:
        """About how many tokens it has."""
        return len(self.raw) // TOKEN_BYTES


class _Asked(NamedTuple):
    """A prompt as the index compares it. Texts are in namespaces of their own."""

    row: TokenArray
    lora: str
    salt: str
    text: bool
    tie: int

    @classmethod
    def of(cls, tokens: TokensLike | Text, lora: str, salt: str) -> _Asked:
        digest = salt_digest(salt) if salt else ""
        if isinstance(tokens, Text):
            opening = tokens.opening or tokens.raw
            tie = name_hash(lora, salt, str(len(opening)), opening[-_TAIL:].decode("latin-1"))
            return cls(tokens.symbols, lora, f"text {digest}", True, tie)
        row = as_tokens(tokens)
        return cls(row, lora, digest, False, prompt_hash(row, lora, salt))

    @property
    def length(self) -> int:
        return max(len(self.row), 1)


class Score(NamedTuple):
    """The expected cost of a prompt at one rank of an instance; fewer ``seconds`` are better.

    ``tokens`` of the prompt are cached there, in ``tiers``. ``prefill_s`` is the time for the rest,
    ``wait_s`` that of the load before it; ``balance_s`` is a penalty for recent work, not a time.
    """

    place: Place
    tokens: int
    tiers: dict[str, int]
    prefill_s: float
    wait_s: float
    balance_s: float

    @property
    def seconds(self) -> float:
        """The sum of prefill, wait and balance."""
        return self.prefill_s + self.wait_s + self.balance_s


@dataclass(slots=True, eq=False)
class RouteTicket:
    """A request sent to ``place``; end it with `PrefixRouter.end`."""

    place: Place
    prefill_s: float
    load: PlaceLoad = field(repr=False)  # kept, since the place may be removed and added meanwhile
    coming: list[int] = field(default_factory=list, repr=False)
    is_text: bool = False
    waiting: bool = True
    ended: bool = False


@dataclass(frozen=True, slots=True)
class RouterStats:
    """The size of the index, and the blocks and events that were not used."""

    instances: int
    places: int
    blocks: int
    prefixes: int
    orphans: int
    refused: int
    skipped: int
    evicted: int


class PrefixRouter:
    """Tracks which instance holds which prefix, from their KV events, and places prompts.

    It is a `kvkeep.serve.kv_events.Receiver`. Of an instance that announces no blocks, the prompts
    that it has begun to answer count as cached there; of a `Text`, whose tokens no event can be
    compared with, those of any instance. Instance names are the caller's; instances may differ in
    block size and hash function. Each prompt is scored as the seconds of prefill left there plus
    the expected wait plus the penalty of `RoutingCost.balance`. Routers that read the same events
    choose the same instance for a prompt, as far as they know the same load (`RoutingCost.slack`).

    An instance has at most ``ranks`` data-parallel ranks; events of other ranks count for rank 0,
    so that no prompt is sent to a rank that does not exist. The index keeps at most ``most_blocks``
    per instance, and as many of what was routed to it. ``public`` are prefixes that the instances
    share among salts, so a prompt of a new salt goes where they are cached.

    Thread safety: safe; every method takes one lock. Cost: see `PlacementIndex`. Raises
    `InvalidValue` for ``ranks`` out of range.
    """

    def __init__(
        self,
        instances: Iterable[str] = (),
        *,
        cost: RoutingCost | None = None,
        ranks: int = MOST_RANKS,
        most_blocks: int = 1_000_000,
        public: PublicPrefixes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = whole("ranks", ranks, 1, MOST_RANKS)
        self.cost = cost or RoutingCost()
        self._clock = clock
        self._lock = threading.Lock()
        ranked = sorted(self.cost.tiers, key=lambda tier: self.cost.tiers[tier].seconds(1 << 20))
        self._index = PlacementIndex(ranked, most_blocks=most_blocks, public=public)
        self._loads: dict[str, dict[Place, PlaceLoad]] = {}
        self._all_loads = PlaceLoads(self.cost.memory_s)
        self._windows: set[tuple[Place, int]] = set()
        self._adapters: dict[str, set[str]] = {}
        self._announcing: set[str] = set()  # instances whose events say what they hold
        self._skipped = 0
        for instance in instances:
            self.add(instance)

    # --- instances and their events ----------------------------------------------------------

    def add(self, instance: str) -> None:
        """Add an instance to send prompts to; a known one keeps its state."""
        with self._lock:
            if instance not in self._loads:
                self._loads[instance] = {}
                self._add_place(Place(instance))

    def shrink(self, instance: str, most: int) -> int:
        """Forget up to ``most`` blocks of an instance; return how many are left.

        To remove an instance of a million blocks in steps, between which prompts are placed.
        """
        with self._lock:
            return self._index.shrink(instance, most)

    def remove(self, instance: str) -> None:
        """Remove an instance with its blocks, load and counters. Cost: O(blocks), see `shrink`."""
        self.clear(instance)
        with self._lock:
            places = self._loads.pop(instance, {})
            self._adapters.pop(instance, None)
            self._announcing.discard(instance)
            self._index.remove_instance(instance)
            for load in places.values():
                self._all_loads.remove(load)

    def _add_place(self, place: Place) -> None:
        load = self._all_loads.add(place, self._index.slot(place))
        self._loads[place.instance][place] = load

    def apply(self, instance: str, events: Sequence[KVEvent], rank: int = 0) -> None:
        """Apply KV events of an instance, in order. Unusable events are counted and skipped.

        Raises `InvalidValue` for an unknown instance.
        """
        place = self._place(instance, rank)
        with self._lock:
            ranks = self._loads.get(instance)
            if ranks is None:
                raise InvalidValue(f"unknown instance {instance!r}; add it first")
            if place not in ranks:
                self._add_place(place)
        for event in events:
            with self._lock:  # per event, so that `score` does not wait for a whole batch
                self._apply(place, event)

    def clear(self, instance: str, rank: int | None = None) -> None:
        """Forget the blocks of an instance, or of one of its ranks."""
        only = None if rank is None else self._place(instance, rank)
        with self._lock:
            for place in self._loads.get(instance, {}):
                if only is None or place == only:
                    self._clear(place)

    def _place(self, instance: str, rank: int) -> Place:
        return Place(instance, rank if 0 <= rank < self._ranks else 0)

    def _clear(self, place: Place) -> None:
        self._index.clear(place)
        self._windows = {window for window in self._windows if window[0] != place}

    def _apply(self, place: Place, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self._clear(place)
        elif not 0 <= (event.group_idx or 0) < _MOST_GROUPS or event.medium in _OWN_TIERS:
            self._skipped += 1  # the router's own tiers
        elif isinstance(event, BlockStored):
            self._stored(place, event)
        elif (place, event.group_idx or 0) not in self._windows:
            self._index.remove(place, event.block_hashes, tier=event.medium or "GPU")

    def _stored(self, place: Place, event: BlockStored) -> None:
        if event.kv_cache_spec_kind not in _WHOLE:
            self._windows.add((place, event.group_idx or 0))
            self._skipped += 1
            return
        lora = event.lora_name or ""
        if 0 < len(lora) <= _LONGEST_ADAPTER:
            adapters = self._adapters.setdefault(place.instance, set())
            if len(adapters) < _MOST_ADAPTERS:
                adapters.add(lora)
        salt, marks = _extras(event, lora)
        if place.instance not in self._announcing:
            self._announcing.add(place.instance)
            for each in self._loads[place.instance]:  # what was routed there is a guess
                self._index.empty(each, _ROUTED)
        self._index.store(
            place,
            event.block_hashes,
            event.parent_block_hash,
            event.token_ids,
            event.block_size,
            tier=event.medium or "GPU",
            lora=lora,
            salt=salt,
            marks=marks,
        )

    # --- prompts -----------------------------------------------------------------------------

    def choose(
        self,
        tokens: TokensLike | Text | None,
        *,
        lora: str = "",
        salt: str = "",
        without: Collection[str] = (),
        key: str = "",
    ) -> Score | None:
        """Return the score of the place to send a prompt to; None if no instance is left.

        ``tokens`` is None if the prompt is unknown: then the least loaded place is chosen. ``salt``
        is the request's ``cache_salt``, ``lora`` the adapter's name; ``without`` are instances that
        must not get it. Prompts of one ``key`` go to one instance, where that costs nothing; see
        `kvkeep.serve.router.placing.choose`.

        Cost: that of a lookup (see `PlacementIndex`), 50 µs, and 30 ns a place.
        """
        asked = None if tokens is None else _Asked.of(tokens, lora, salt)
        length = 1 if asked is None else asked.length
        tie = random_hash() if asked is None else asked.tie
        with self._lock:
            groups = [] if asked is None else self._groups(asked)
            fleet = self._fleet(without)
            chosen = choose(length, groups, fleet, tie, name_hash(key) if key else None)
            if chosen is None:
                return None
            return self._score(fleet, chosen.slot, chosen.held, length, chosen.prefill_s)

    def score(
        self,
        tokens: TokensLike | Text,
        *,
        lora: str = "",
        salt: str = "",
        among: Collection[str] | None = None,
    ) -> list[Score]:
        """Return the scores of all places (of ``among``, if given) for this prompt, best first.

        For people, and to compare: `choose` takes one of the best without scoring all.
        """
        asked = _Asked.of(tokens, lora, salt)
        with self._lock:
            held = {slot: part for places, part in self._groups(asked) for slot in bits_of(places)}
            others = () if among is None else self._loads.keys() - set(among)
            fleet = self._fleet(others)
            scores = []
            for slot in np.flatnonzero(fleet.open).tolist():
                part = held.get(slot, HeldPrefix())
                prefill_s = self.cost.prefill_s(asked.length, part)
                scores.append(self._score(fleet, slot, part, asked.length, prefill_s))
        # Ties go to the place with the least recent work.
        scores.sort(key=lambda score: (score.seconds, score.balance_s))
        return scores

    def _groups(self, asked: _Asked) -> list[HeldGroup]:
        step = _ROUTED_TOKENS if asked.text else None
        return self._index.groups(asked.row, asked.lora, asked.salt, step=step)

    def _score(
        self, fleet: Fleet, slot: int, held: HeldPrefix, length: int, prefill_s: float
    ) -> Score:
        return Score(
            self._all_loads.at(slot).place,
            min(held.tokens, length),
            held.tiers,
            prefill_s,
            float(fleet.wait_s[slot]),
            float(fleet.balance_s[slot]),
        )

    def _fleet(self, without: Collection[str]) -> Fleet:
        """Return the places with their loads; those of ``without`` are not open."""
        loads = self._all_loads
        open_ = loads.in_use.copy()
        for instance in without:
            for load in self._loads.get(instance, {}).values():
                open_[load.slot] = False
        recent = loads.recent(self._clock())
        least = recent[open_].min() if open_.any() else 0.0
        return Fleet(
            open_,
            loads.waits(self.cost.running_s),
            self.cost.balance * (recent - least),
            self.cost,
            loads.instance_hashes,
            loads.place_hashes,
        )

    def begin(
        self,
        score: Score,
        tokens: TokensLike | Text | None = None,
        *,
        lora: str = "",
        salt: str = "",
    ) -> RouteTicket:
        """Note that a prompt is sent to this place: it waits there, its tokens count as coming."""
        place = score.place
        asked = None if tokens is None else _Asked.of(tokens, lora, salt)
        with self._lock:
            load = self._loads.get(place.instance, {}).get(place)
            if load is None:
                raise InvalidValue(f"{place} is not known to this router")
            ticket = RouteTicket(place, score.prefill_s, load)
            self._all_loads.begin(load, ticket.prefill_s)
            if asked is not None:
                ticket.is_text = asked.text
                ticket.coming = self._index.expect(
                    place, asked.row, _ROUTED_TOKENS, tier=_COMING, lora=lora, salt=asked.salt
                )
        return ticket

    def first_token(self, ticket: RouteTicket) -> None:
        """Note the first token: the prefill is done and counts as recent work; decoding remains.

        Not for a refusal: what an instance did not compute is neither work nor cached.
        """
        with self._lock:
            if not ticket.waiting:
                return
            self._arrived(ticket)
            if ticket.load.gone:
                return
            self._all_loads.computed(ticket.load, ticket.prefill_s, self._clock())
            tier = _TEXT if ticket.is_text else _ROUTED
            if ticket.coming and (ticket.is_text or ticket.place.instance not in self._announcing):
                self._index.keep(ticket.place, ticket.coming, _ROUTED_TOKENS, tier=tier)

    def end(self, ticket: RouteTicket) -> None:
        """Note the end of the request, however it ended. Idempotent."""
        with self._lock:
            if ticket.ended:
                return
            self._arrived(ticket)
            ticket.ended = True
            self._all_loads.end(ticket.load)

    def _arrived(self, ticket: RouteTicket) -> None:
        if not ticket.waiting:
            return
        ticket.waiting = False
        self._all_loads.arrived(ticket.load, ticket.prefill_s)
        self._index.remove(ticket.place, ticket.coming, tier=_COMING)

    def stats(self) -> RouterStats:
        """Return the statistics. Cost: O(places)."""
        with self._lock:
            return RouterStats(
                instances=len(self._loads),
                places=sum(map(len, self._loads.values())),
                blocks=len(self._index),
                prefixes=self._index.num_prefixes,
                orphans=self._index.orphans,
                refused=self._index.refused,
                skipped=self._skipped,
                evicted=self._index.evicted,
            )

    def is_adapter(self, name: str) -> bool:
        """Whether some instance has announced blocks of a LoRA adapter of this name."""
        with self._lock:
            return any(name in names for names in self._adapters.values())

    def num_ranks(self, instance: str) -> int:
        """Return how many ranks an instance has announced; 1 before it announces any."""
        with self._lock:
            return len(self._loads.get(instance, {}))

    def load(self, instance: str) -> tuple[int, float]:
        """Return an instance's running requests, and the expected prefill seconds that wait."""
        with self._lock:
            return self._all_loads.total(self._loads.get(instance, {}).values())

    def blocks(self, instance: str) -> tuple[int, int]:
        """Return an instance's number of announced blocks, and of evicted ones."""
        with self._lock:
            return self._index.instance_blocks(instance)

    def routed(self, instance: str) -> int:
        """Return the blocks of prompts that count as held since they were routed to an instance."""
        with self._lock:
            return self._index.routed_blocks(instance)

    def check(self) -> None:
        """Recount everything and assert that it agrees. Cost: O(blocks)."""
        with self._lock:
            self._index.check()


def _extras(event: BlockStored, lora: str) -> tuple[str, list[str] | None]:
    """Return the salt in an event's first block, and the further inputs of each block.

    Extra keys are untagged: an adapter's name, images with their positions, the salt (in a prompt's
    first block), digests of embeddings. Text in the first block counts as a salt.
    """
    if not event.extra_keys:
        return "", None
    salt = ""
    marks = []
    for number, extra in enumerate(event.extra_keys):
        rest = list(extra or ())
        if rest and rest[0] == lora:
            del rest[0]
        if number == 0 and event.parent_block_hash is None:
            salt = "".join(salt_digest(one) for one in rest if isinstance(one, str))
            rest = [one for one in rest if not isinstance(one, str)]
        marks.append(repr(rest)[:_MARK_LENGTH] if rest else "")
    return salt, marks if len(marks) == len(event.block_hashes) else None
