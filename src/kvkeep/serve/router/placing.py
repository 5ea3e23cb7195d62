"""`choose`: the best place for a prompt among thousands, without a step for each of them.

Places that hold the same part of a prompt are compared at once, by their loads, beginning with
those that hold most. Groups that cannot be better than the best so far are not looked at.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvkeep.core.cost import PrefillCost, TransferCost, best_prefix
from kvkeep.core.errors import InvalidValue
from kvkeep.serve.router.held import HeldGroup, HeldPrefix

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt

    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.router.index import Place

    Slots = npt.NDArray[np.intp]
    Hashes = npt.NDArray[np.uint64]
    Seconds = npt.NDArray[np.float64]
    Flags = npt.NDArray[np.bool_]

__all__ = [
    "Fleet",
    "PlaceLoad",
    "PlaceLoads",
    "RoutingCost",
    "choose",
    "heaviest",
    "name_hash",
    "prompt_hash",
    "random_hash",
]


_WAIT_S: Final = 1.0
"""Seconds that a prompt waits at the least for the instance of its key."""
_SAME: Final = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Fleet:
    """The places, by slot: which may be chosen, what a prompt waits there, and what it costs there.

    ``balance_s`` is the penalty for recent work, ``cost`` that of a prompt at any of them.
    ``instance_hashes`` and ``place_hashes`` order the slots.
    """

    open: Flags
    wait_s: Seconds
    balance_s: Seconds
    cost: RoutingCost
    instance_hashes: Hashes
    place_hashes: Hashes


class Chosen(NamedTuple):
    """The slot that was chosen, and the prefill there."""

    slot: int
    held: HeldPrefix
    prefill_s: float


class _Option(NamedTuple):
    """Places where a prompt has the same prefill."""

    prefill_s: float
    held: HeldPrefix
    slots: Slots


def choose(
    tokens: int, groups: list[HeldGroup], fleet: Fleet, tie: int, key: int | None = None
) -> Chosen | None:
    """Return the best of the open places for a prompt of ``tokens`` tokens; None if none is open.

    ``groups`` are the places that hold some of it, those that hold most first. The best place has
    the fewest seconds of prefill, wait and penalty. Of the places with no more prefill, whose wait
    and penalty exceed its own by less than the slack (`RoutingCost.slack`, of the prompt's whole
    prefill), the first in the order of ``tie`` is taken: this order follows from names alone, so
    routers that see different parts of the load agree. A prompt with a ``key`` goes to the instance
    of that key, unless another place has less prefill left, or would begin sooner by more than the
    prompt's prefill there.

    Pure. Cost: about 50 µs, and 30 ns a place.
    """
    if not fleet.open.any():
        return None
    load = np.where(fleet.open, fleet.wait_s + fleet.balance_s, np.inf)
    options, best = _best(tokens, groups, fleet, load)
    limit = load[best.slot] + fleet.cost.slack * fleet.cost.prefill_s(tokens, None)
    near = [
        (option, slots)
        for option in options
        if option.prefill_s <= best.prefill_s * _SAME
        and len(slots := option.slots[load[option.slots] <= limit])
    ]
    slots = np.concatenate([some for _, some in near])
    slot = int(slots[heaviest(fleet.place_hashes[slots], tie)])
    for option, some in near:
        if slot in some:
            best = Chosen(slot, option.held, option.prefill_s)
    return best if key is None else _at_key(tokens, groups, fleet, key, load, best)


def _best(
    tokens: int, groups: list[HeldGroup], fleet: Fleet, load: Seconds
) -> tuple[list[_Option], Chosen]:
    """Return the place with the fewest seconds, and all options that are not worse for certain."""
    options: list[_Option] = []
    best, least_s = None, math.inf
    left = fleet.open.copy()
    floor = float(load.min())
    for places, held in (*groups, HeldGroup(0, HeldPrefix())):
        done = min(held.tokens, tokens - 1)
        if fleet.cost.prefill.prefill_s(done, tokens) + floor > least_s * _SAME:
            break
        mine = left & _flags(places, len(left)) if places else left
        left = left & ~mine
        slots = np.flatnonzero(mine)
        if not len(slots):
            continue
        option = _Option(fleet.cost.prefill_s(tokens, held), held, slots)
        options.append(option)
        at = int(slots[load[slots].argmin()])
        seconds = option.prefill_s + float(load[at])
        if seconds < least_s:
            best, least_s = Chosen(at, held, option.prefill_s), seconds
    assert best is not None, "a place is open"
    return options, best


def _at_key(  # noqa: PLR0917 - the state of a choice
    tokens: int, groups: list[HeldGroup], fleet: Fleet, key: int, load: Seconds, best: Chosen
) -> Chosen:
    """Return the place at the instance of the prompt's key, or ``best`` where that is worse."""
    slots = np.flatnonzero(fleet.open)
    first = slots[heaviest(fleet.instance_hashes[slots], key)]
    same = fleet.instance_hashes[slots] == fleet.instance_hashes[first]
    there = []
    for slot in slots[same].tolist():
        held = next((held for places, held in groups if places >> slot & 1), HeldPrefix())
        prefill_s = fleet.cost.prefill_s(tokens, held)
        if prefill_s <= best.prefill_s * _SAME:
            there.append(Chosen(slot, held, prefill_s))
    if not there:
        return best
    home = min(there, key=lambda choice: choice.prefill_s + load[choice.slot])
    late_s = fleet.wait_s[home.slot] - fleet.wait_s[best.slot]
    return home if late_s <= max(best.prefill_s, _WAIT_S) else best


def _flags(mask: int, count: int) -> Flags:
    """Return the bits of a mask, from the lowest on."""
    raw = (mask & ((1 << count) - 1)).to_bytes((count + 7) // 8, "little")
    flags = np.unpackbits(np.frombuffer(raw, np.uint8), count=count, bitorder="little")
    return flags.view(np.bool_)


_TAIL: Final = 4096  # tokens of a prompt that decide, from its end


def name_hash(*names: str) -> int:
    """Return 64 bits for a name, or several; the same in every process."""
    text = "\n".join(names).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def prompt_hash(tokens: TokenArray, lora: str, salt: str) -> int:
    """Return 64 bits for a prompt: its end, its length and its namespace. Cost: below 20 µs."""
    digest = hashlib.blake2b(tokens[-_TAIL:].tobytes(), digest_size=8)
    digest.update(repr((len(tokens), lora, salt)).encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "little")


def random_hash() -> int:
    """Return 64 bits for a request of which nothing is known, to spread such requests."""
    return secrets.randbits(64)


def heaviest(hashes: Hashes, key: int) -> int:
    """Return the position of the first in the order of ``key``. Cost: 2 ns each.

    The order is the same at every router (rendezvous hashing): if an instance goes, only its keys
    move, and they spread over all others. The weight is SplitMix64's finalizer over both (Steele
    et al., 2014).
    """
    weights = hashes ^ np.uint64(key)
    weights ^= weights >> np.uint64(30)
    weights *= np.uint64(0xBF58476D1CE4E5B9)
    weights ^= weights >> np.uint64(27)
    weights *= np.uint64(0x94D049BB133111EB)
    weights ^= weights >> np.uint64(31)
    return int(weights.argmax())


_FIRST = 64


@dataclass(slots=True, eq=False)
class PlaceLoad:
    """The place whose load it is, and its slot in the arrays; ``gone``: it was removed."""

    place: Place
    slot: int
    gone: bool = False


class PlaceLoads:
    """Requests, waiting prefill and recent work of each place, by its slot.

    Recent work decays exponentially: to a third in ``memory_s``. Waiting prefill is in whole
    nanoseconds: additions and subtractions then return to exactly 0. What ends at a place that was
    removed meanwhile changes nothing.

    Thread safety: none. Memory: 50 bytes a place.
    """

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._all: list[PlaceLoad | None] = []
        self._waiting_ns = np.zeros(0, np.int64)
        self._requests = np.zeros(0, np.int64)
        self._recent_s = np.zeros(0)
        self._noted = np.zeros(0)
        self.in_use: Flags = np.zeros(0, np.bool_)
        """Slots that have a place."""
        self.instance_hashes = np.zeros(0, np.uint64)
        self.place_hashes = np.zeros(0, np.uint64)

    def add(self, place: Place, slot: int) -> PlaceLoad:
        """Add a place without load at a free slot."""
        while slot >= len(self._all):
            self._all.append(None)
        if slot >= len(self.in_use):
            self._grow(slot + 1)
        load = self._all[slot] = PlaceLoad(place, slot)
        for values in (self._waiting_ns, self._requests, self._recent_s, self._noted):
            values[slot] = 0
        self.in_use[slot] = True
        self.instance_hashes[slot] = name_hash(place.instance)
        self.place_hashes[slot] = name_hash(place.instance, str(place.rank))
        return load

    def remove(self, load: PlaceLoad) -> None:
        """Remove a place, whose slot is free then."""
        load.gone = True
        self._all[load.slot] = None
        self.in_use[load.slot] = False

    def at(self, slot: int) -> PlaceLoad:
        """Return the load of the place at a slot."""
        load = self._all[slot]
        assert load is not None, "a slot without a place"
        return load

    # --- requests ----------------------------------------------------------------------------

    def begin(self, load: PlaceLoad, seconds: float) -> None:
        """Count a request whose prefill takes so many seconds."""
        self._waiting_ns[load.slot] += _ns(seconds)
        self._requests[load.slot] += 1

    def computed(self, load: PlaceLoad, seconds: float, now: float) -> None:
        """Count a prefill as recent work."""
        slot = load.slot
        faded = self._recent_s[slot] * math.exp((self._noted[slot] - now) / self._memory_s)
        self._recent_s[slot] = faded + seconds
        self._noted[slot] = now

    def arrived(self, load: PlaceLoad, seconds: float) -> None:
        """Count its prefill as waiting no longer."""
        if not load.gone:
            self._waiting_ns[load.slot] -= _ns(seconds)

    def end(self, load: PlaceLoad) -> None:
        """Count a request as ended."""
        if not load.gone:
            self._requests[load.slot] -= 1

    # --- sums --------------------------------------------------------------------------------

    def waits(self, running_s: float) -> Seconds:
        """Return the seconds that a prompt waits at each slot; a running request counts too."""
        return self._waiting_ns * 1e-9 + self._requests * running_s

    def recent(self, now: float) -> Seconds:
        """Return the recent work at each slot, in seconds."""
        return self._recent_s * np.exp((self._noted - now) / self._memory_s)

    def total(self, loads: Iterable[PlaceLoad]) -> tuple[int, float]:
        """Return the running requests at some places, and the prefill seconds that wait there."""
        slots = [load.slot for load in loads]
        return int(self._requests[slots].sum()), float(self._waiting_ns[slots].sum() * 1e-9)

    def _grow(self, least: int) -> None:
        size = max(_FIRST, least, 2 * len(self.in_use))

        def longer(values: Any) -> Any:
            return np.concatenate((values, np.zeros(size - len(values), values.dtype)))

        self._waiting_ns, self._requests = longer(self._waiting_ns), longer(self._requests)
        self._recent_s, self._noted = longer(self._recent_s), longer(self._noted)
        self.in_use = longer(self.in_use)
        self.instance_hashes = longer(self.instance_hashes)
        self.place_hashes = longer(self.place_hashes)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


# An 8-billion-parameter model on one large GPU.
_PREFILL: Final = PrefillCost(
    seconds_per_token=1 / 15_000, seconds_per_token_pair=2e-9, kv_bytes_per_token=128 * 1024
)
_TOKEN_BYTES: Final = 128 * 1024  # where the cost of prefill does not say
_FREE: Final = TransferCost(seconds_per_byte=0.0)
_STORAGE: Final = TransferCost(seconds_per_byte=1e-9)  # a store on the network at 1 GB/s
_TIERS: Final = {
    "GPU": _FREE,
    "COMING": _FREE,
    "ROUTED": _FREE,
    "TEXT": _FREE,
    "CPU": TransferCost(seconds_per_byte=1 / 20e9),
    "DISK": TransferCost(seconds_per_byte=1 / 3e9),
    "STORAGE": _STORAGE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingCost:
    """Estimates the part of the time to the first token that depends on the choice of instance.

    ``prefill`` is the cost to compute a prompt; the default is for an 8-billion-parameter model on
    one large GPU. ``tiers`` are the costs to load bytes from each medium of KV events,
    ``other_tier`` from a medium not listed; a token has the bytes that ``prefill`` says, or
    128 KiB. Each running request delays a new prompt on its instance by ``running_s``.

    ``balance`` is the weight of an instance's recent work: prefill seconds, averaged over
    ``memory_s``, beyond those of the least busy instance. With 0 only the current load counts, and
    a conversation stays where it began.

    Places whose load differs by less than ``slack`` of the seconds that the whole prompt would
    take count as equally loaded, and a hash of the prompt chooses one of them: so several routers,
    each of which knows its own part of the load, agree. With 0 the least loaded place is chosen.

    Raises `InvalidValue` for seconds that are no numbers, and for prompts that cost nothing.
    """

    prefill: PrefillCost = _PREFILL
    tiers: Mapping[str, TransferCost] = field(default_factory=lambda: dict(_TIERS))
    other_tier: TransferCost = _STORAGE
    running_s: float = 0.005
    balance: float = 0.02
    memory_s: float = 60.0
    slack: float = 0.1

    def __post_init__(self) -> None:
        for name in ("running_s", "balance", "memory_s", "slack"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise InvalidValue(f"{name} must be a number, 0 or more; got {seconds}")
        if not self.memory_s:
            raise InvalidValue("memory_s must be above 0")
        if not self.prefill.prefill_s(0, 1):
            raise InvalidValue("computing a prompt takes time; the cost of prefill is 0")

    def prefill_s(self, tokens: int, held: HeldPrefix | None) -> float:
        """Return the seconds to prefill ``tokens`` tokens, of which ``held`` is cached.

        The last token is always computed, and so is what is slower to load than to compute.
        """
        compute_s = self.prefill.prefill_s
        if held is None or not held.tokens:
            return compute_s(0, tokens)
        nbytes = self.prefill.kv_bytes_per_token or _TOKEN_BYTES
        runs, at = [], 0
        for tier, length in held.tiers.items():
            stop = min(at + length, tokens - 1)
            cost = self.tiers.get(tier, self.other_tier)
            runs.append((stop, cost.seconds(nbytes * (stop - at))))
            at = stop
        return best_prefix(0, tokens, runs, compute_s).seconds
