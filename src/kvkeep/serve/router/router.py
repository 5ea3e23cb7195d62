"""`PrefixRouter`: which instance has to do the least for a prompt."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.tokens import as_tokens
from kvkeep.serve.kv_events.wire import AllBlocksCleared, BlockStored, salt_digest
from kvkeep.serve.router.cost import CostModel
from kvkeep.serve.router.held import HeldPrefix
from kvkeep.serve.router.index import Place, PlacementIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from kvkeep.core.tokens import TokensLike
    from kvkeep.serve.kv_events.wire import KVEvent

__all__ = ["PrefixRouter", "RouteTicket", "RouterStats", "Score"]

# What is being computed right now, as a tier of its own; in steps of so many tokens.
_COMING = "COMING"
_COMING_TOKENS = 256
# Kinds of attention whose blocks say that a prefix is there. A window's say that of its end only.
_WHOLE = {None, "full_attention", "mla_attention"}
_MARK_LENGTH = 4096
# Of an instance: adapters that are known by name, and groups of layers that are told apart.
_MOST_ADAPTERS = 1_000
_LONGEST_ADAPTER = 256
_MOST_GROUPS = 64
MOST_RANKS = 1024


class Score(NamedTuple):
    """What a prompt would cost at one rank of an instance; the smaller ``seconds`` the better.

    ``tokens`` of it are there already, in ``tiers``. ``prefill_s`` are for the rest, ``wait_s`` for
    what is before it; ``balance_s`` is no time, but what speaks against it for having had much.
    """

    place: Place
    tokens: int
    tiers: dict[str, int]
    prefill_s: float
    wait_s: float
    balance_s: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.prefill_s + self.wait_s + self.balance_s


@dataclass(slots=True, eq=False)
class _Load:
    """What an instance's rank is doing."""

    waiting_ns: int = 0
    """Expected time of prompts that have not brought a first token: whole numbers, that what
    comes and goes leaves nothing behind."""
    requests: int = 0
    recent_s: float = 0.0
    """Seconds of prefill it was given, fading."""
    noted: float = 0.0

    @property
    def waiting_s(self) -> float:
        return self.waiting_ns * 1e-9


@dataclass(slots=True, eq=False)
class RouteTicket:
    """A request that was sent to ``place``; give it back with `PrefixRouter.end`."""

    place: Place
    prefill_s: float
    load: _Load = field(repr=False)  # of the place as it was then: it may be gone, and come again
    coming: list[int] = field(default_factory=list, repr=False)
    waiting: bool = True
    ended: bool = False


@dataclass(frozen=True, slots=True)
class RouterStats:
    """What a router knows: blocks, and events that it could make nothing of."""

    instances: int
    places: int
    blocks: int
    prefixes: int
    orphans: int
    refused: int
    skipped: int
    evicted: int


class PrefixRouter:
    """Keeps who holds which prefix, from the events of many instances, and places prompts.

    It is the receiver of a `kvkeep.serve.kv_events.EventReader`. Instances are named as the caller
    likes; they may differ in block size and in how they hash. A prompt goes where it is through
    first: what is left to compute there, plus what waits there, plus what `CostModel.balance` says.

    An instance has ``ranks`` data-parallel ranks at most: what another one tells counts as the
    first one's, so that no prompt is sent to a rank that is not there. ``most_blocks`` of them are
    remembered of an instance, see `PlacementIndex`.

    Thread safety: every method takes one lock. Cost: see `PlacementIndex`. `InvalidValue` for ranks
    that are none.
    """

    def __init__(
        self,
        instances: Iterable[str] = (),
        *,
        cost: CostModel | None = None,
        ranks: int = MOST_RANKS,
        most_blocks: int = 1_000_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = whole("ranks", ranks, 1, MOST_RANKS)
        self.cost = cost or CostModel()
        self._clock = clock
        self._lock = threading.Lock()
        ranked = sorted(self.cost.tiers, key=lambda tier: self.cost.tiers[tier])
        self._index = PlacementIndex(ranked, most_blocks=most_blocks)
        self._loads: dict[str, dict[Place, _Load]] = {}
        self._windows: set[tuple[Place, int]] = set()
        self._adapters: dict[str, set[str]] = {}
        self._skipped = 0
        for instance in instances:
            self.add(instance)

    # --- instances and what they say ---------------------------------------------------------

    def add(self, instance: str) -> None:
        """An instance that prompts may be sent to; one that is known already stays as it is."""
        with self._lock:
            self._loads.setdefault(instance, {Place(instance): _Load()})

    def remove(self, instance: str) -> None:
        """Forget an instance."""
        self.clear(instance)
        with self._lock:
            self._loads.pop(instance, None)
            self._adapters.pop(instance, None)
            self._index.remove_instance(instance)

    def apply(self, instance: str, events: Sequence[KVEvent], rank: int = 0) -> None:
        """What an instance has stored and removed, in order. Events that make no sense are counted.

        `InvalidValue` for an instance that is not known.
        """
        place = self._place(instance, rank)
        with self._lock:
            ranks = self._loads.get(instance)
            if ranks is None:
                raise InvalidValue(f"{instance!r} is no instance of this router; add it")
            ranks.setdefault(place, _Load())
        for event in events:
            with self._lock:  # anew for each: a prompt does not wait for a whole batch
                self._apply(place, event)

    def clear(self, instance: str, rank: int | None = None) -> None:
        """Nothing is known of what an instance, or one rank of it, holds."""
        only = None if rank is None else self._place(instance, rank)
        with self._lock:
            for place in self._loads.get(instance, {}):
                if only is None or place == only:
                    self._clear(place)

    def _place(self, instance: str, rank: int) -> Place:
        return Place(instance, rank if 0 <= rank < self._ranks else 0)

    def _clear(self, place: Place) -> None:
        self._index.clear(place)
        self._windows = {known for known in self._windows if known[0] != place}

    def _apply(self, place: Place, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self._clear(place)
        elif not 0 <= (event.group_idx or 0) < _MOST_GROUPS or event.medium == _COMING:
            self._skipped += 1  # the name of our own tier would be taken for a promise
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
        adapters = self._adapters.setdefault(place.instance, set())
        if 0 < len(lora) <= _LONGEST_ADAPTER and len(adapters) < _MOST_ADAPTERS:
            adapters.add(lora)
        salt, marks = _extras(event, lora)
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

    def score(
        self,
        tokens: TokensLike,
        *,
        lora: str = "",
        salt: str = "",
        among: Collection[str] | None = None,
    ) -> list[Score]:
        """What this prompt would cost everywhere (or ``among`` some), the best first.

        ``salt`` is the request's ``cache_salt``, ``lora`` the adapter's name.
        """
        row = as_tokens(tokens)
        digest = salt_digest(salt) if salt else ""
        with self._lock:
            held = self._index.lookup(row, lora, digest)
            return self._scores(len(row), held, among)

    def least_loaded(self, among: Collection[str] | None = None) -> list[Score]:
        """`score` of a prompt of which nothing is known."""
        with self._lock:
            return self._scores(1, {}, among)

    def _scores(
        self, length: int, held: dict[Place, HeldPrefix], among: Collection[str] | None
    ) -> list[Score]:
        now = self._clock()
        cost = self.cost
        places = [
            (place, load)
            for instance, ranks in self._loads.items()
            if among is None or instance in among
            for place, load in ranks.items()
        ]
        for _, load in places:
            self._fade(load, now)
        least = min((load.recent_s for _, load in places), default=0.0)
        scores = []
        nothing = HeldPrefix()
        unknown_s = cost.prefill_s(length, None)
        for place, load in places:
            there = held.get(place, nothing)
            wait = load.waiting_s + load.requests * cost.running_s
            scores.append(
                Score(
                    place,
                    min(there.tokens, length),
                    there.tiers,
                    cost.prefill_s(length, there) if there.tokens else unknown_s,
                    wait,
                    cost.balance * (load.recent_s - least),
                )
            )
        # Among equals the one that had the least.
        scores.sort(key=lambda score: (score.seconds, score.balance_s))
        return scores

    def _fade(self, load: _Load, now: float) -> None:
        if load.recent_s:
            load.recent_s *= math.exp(-(now - load.noted) / self.cost.memory_s)
        load.noted = now

    def begin(
        self, score: Score, tokens: TokensLike | None = None, *, lora: str = "", salt: str = ""
    ) -> RouteTicket:
        """A prompt is sent there: it counts as load, and its ``tokens`` as coming there."""
        place = score.place
        row = None if tokens is None else as_tokens(tokens)
        digest = salt_digest(salt) if salt else ""
        with self._lock:
            load = self._loads.get(place.instance, {}).get(place)
            if load is None:
                raise InvalidValue(f"{place} is not known to this router")
            ticket = RouteTicket(place, score.prefill_s, load)
            self._fade(load, self._clock())
            load.waiting_ns += _ns(ticket.prefill_s)
            load.recent_s += ticket.prefill_s
            load.requests += 1
            if row is not None:
                ticket.coming = self._index.expect(
                    place, row, _COMING_TOKENS, tier=_COMING, lora=lora, salt=digest
                )
        return ticket

    def first_token(self, ticket: RouteTicket) -> None:
        """Its prompt is computed; what remains is writing."""
        with self._lock:
            self._arrived(ticket)

    def end(self, ticket: RouteTicket) -> None:
        """It has ended, however; a second time changes nothing."""
        with self._lock:
            if ticket.ended:
                return
            self._arrived(ticket)
            ticket.ended = True
            ticket.load.requests -= 1

    def _arrived(self, ticket: RouteTicket) -> None:
        if not ticket.waiting:
            return
        ticket.waiting = False
        ticket.load.waiting_ns -= _ns(ticket.prefill_s)
        self._index.remove(ticket.place, ticket.coming, tier=_COMING)

    def stats(self) -> RouterStats:
        """What is known. Cost: one pass over the places."""
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
        """Whether some instance told of blocks of a LoRA adapter of that name."""
        with self._lock:
            return any(name in names for names in self._adapters.values())

    def num_ranks(self, instance: str) -> int:
        """How many ranks an instance has told of; 1 before it did."""
        with self._lock:
            return len(self._loads.get(instance, {}))

    def load(self, instance: str) -> tuple[int, float]:
        """Requests that run there, and the expected seconds of prompts that wait."""
        with self._lock:
            ranks = self._loads.get(instance, {}).values()
            return sum(one.requests for one in ranks), sum(one.waiting_s for one in ranks)

    def blocks(self, instance: str) -> tuple[int, int]:
        """Blocks of an instance that are known, and such that were forgotten for their number."""
        with self._lock:
            return self._index.share_of(instance)

    def check(self) -> None:
        """Recount everything and assert that it agrees. Cost: all of it."""
        with self._lock:
            self._index.check()


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _extras(event: BlockStored, lora: str) -> tuple[str, list[str] | None]:
    """The salt of an event's first block, and what else each block depends on.

    They come untagged: adapter, images with their place, the salt (in a prompt's first block) and
    digests of embeddings. Text in the first block is taken for a salt.
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
