"""`AnswerShares`: how much of its answers a conversation's next prompt contains; their kinds."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["AnswerShares", "FirstTokens"]

_MOST_TENANTS: Final = 1024
_MOST_CLASSES: Final = 64  # of a tenant
_BINS: Final = 9  # of positions in an answer, see `_bin`
# A class counts as much as the more general one once it has seen as many answers as this.
_WEIGHT: Final = 8.0
# Answers after which all counts are halved: what changes is noticed after half as many.
_MOST_SEEN: Final = 64.0
# Tokens are kept while the chance that they are read again is at least this.
_LEAST: Final = 0.2
# Of the first tokens of answers:
_COUNTED: Final = 16  # tokens of a tenant
_COMMON: Final = 1 / 8  # share of answers that begin with a common token
_LEAST_COUNT: Final = 4.0
_MOST_COUNTED: Final = 512.0  # answers after which all counts are halved


class _Class:
    """How many answers had tokens in each bin, and what share of these was read again."""

    __slots__ = ("had", "read")

    def __init__(self) -> None:
        self.had = array("d", bytes(8 * _BINS))
        self.read = array("d", bytes(8 * _BINS))

    def count(self, tokens: int, again: int) -> None:
        for place in range(_bin(tokens - 1) + 1):
            begin = _begin(place)
            end = min(_begin(place + 1), tokens)
            self.had[place] += 1
            self.read[place] += max(0, min(end, again) - begin) / (end - begin)
        if self.had[0] >= _MOST_SEEN:
            for place in range(_BINS):
                self.had[place] /= 2
                self.read[place] /= 2

    def chance(self, place: int, general: float) -> float:
        """Return the chance for a bin, where a more general class says ``general``."""
        return (self.read[place] + _WEIGHT * general) / (self.had[place] + _WEIGHT)


class AnswerShares:
    """Learns which tokens of answers are read again, by tenant, end and length of the answer.

    Chat templates drop reasoning from later prompts, so the next prompt of a conversation goes on
    where the answer began, and the KV of the answer is never read. No model's format is known here:
    all that counts is at which token of the answer the next prompt differs. Answers whose
    conversations never return say nothing.

    A tenant's answers teach about that tenant's answers alone, and until something is known, all of
    an answer is kept.

    Memory: at most 1,024 tenants with 64 classes of 300 bytes each; beyond, the tenants and the
    classes used longest ago are forgotten. Cost: about 5 µs a call. Thread safety: none; under a
    lock of its owner.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[Hashable, OrderedDict[tuple[str | None, int | None], _Class]] = (
            OrderedDict()
        )

    def returned(self, tenant: Hashable, stop: str | None, tokens: int, again: int) -> None:
        """Record that ``again`` leading tokens of an answer of ``tokens`` were in the next prompt.

        ``stop`` says why the answer ended, see `Ended.stop`.
        """
        assert 0 <= again <= tokens
        if not tokens:
            return
        classes = self._tenants.setdefault(tenant, OrderedDict())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _MOST_TENANTS:
            self._tenants.popitem(last=False)
        for kind in _kinds(stop, tokens):
            found = classes.get(kind)
            if found is None:
                found = classes[kind] = _Class()
            found.count(tokens, again)
            classes.move_to_end(kind)
        while len(classes) > _MOST_CLASSES:
            classes.popitem(last=False)

    def kept(self, tenant: Hashable, stop: str | None, tokens: int) -> int:
        """Return how many leading tokens of an answer of ``tokens`` are worth keeping."""
        classes = self._tenants.get(tenant)
        if not classes or not tokens:
            return tokens
        known = [found for kind in _kinds(stop, tokens) if (found := classes.get(kind))]
        for place in range(_bin(tokens - 1) + 1):
            chance = 1.0
            for found in known:
                chance = found.chance(place, chance)
            if chance < _LEAST:
                return _begin(place)
        return tokens

    def sure(self, tenant: Hashable, tokens: int) -> int:
        """Return how many tokens of an answer, which has ``tokens`` so far, are worth keeping.

        That is the least of `kept`, over all ends and lengths that it may have. Cost: that of
        `kept` for each of the tenant's classes, 64 at most.
        """
        classes = self._tenants.get(tenant, ())
        lengths = {
            (stop, tokens if bits is None else max(tokens, 1 << bits >> 1))
            for stop, bits in classes
            if bits is None or tokens < 1 << bits
        }
        return min([tokens, *(self.kept(tenant, stop, length) for stop, length in lengths)])


def _kinds(stop: str | None, tokens: int) -> tuple[tuple[str | None, int | None], ...]:
    """Return the classes of an answer, the most general one first."""
    return (None, None), (stop, None), (stop, tokens.bit_length())


def _bin(token: int) -> int:
    """Return the bin of a token of an answer: they begin at 0, 1, 4, 16 … 16,384."""
    return min(_BINS - 1, (token.bit_length() + 1) // 2)


def _begin(place: int) -> int:
    """Return the first token of a bin."""
    return 0 if not place else 1 << 2 * (place - 1)


class FirstTokens:
    """Finds the tokens that answers begin with, to tell kinds of answers apart.

    A model that reasons before some of its answers begins these with a token of its own; no format
    is known here. The counts are those of Misra and Gries (Finding repeated elements, 1982): too
    small by a seventeenth of all answers at most.

    Memory: 16 counts for each of 1,024 tenants. Cost: about a microsecond a call. Thread safety:
    none; under a lock of its owner.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[Hashable, dict[int, float]] = OrderedDict()
        self._seen: dict[Hashable, float] = {}

    def add(self, tenant: Hashable, token: int) -> None:
        """Count an answer."""
        counts = self._tenants.setdefault(tenant, {})
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _MOST_TENANTS:
            del self._seen[self._tenants.popitem(last=False)[0]]
        self._seen[tenant] = self._seen.get(tenant, 0.0) + 1
        if token in counts or len(counts) < _COUNTED:
            counts[token] = counts.get(token, 0.0) + 1
        else:
            self._shrink(counts, 1.0)
        if self._seen[tenant] >= _MOST_COUNTED:
            self._seen[tenant] /= 2
            for one in counts:
                counts[one] /= 2

    def kind(self, tenant: Hashable, stop: str | None, token: int | None) -> str | None:
        """Return ``stop``, with the first token of the answer if that is a common one."""
        counts = self._tenants.get(tenant)
        if counts is None or token is None:
            return stop
        least = max(_LEAST_COUNT, _COMMON * self._seen[tenant])
        return f"{stop}, from {token}" if counts.get(token, 0.0) >= least else stop

    def kind_of(self, tenant: Hashable, stop: str | None, token: int | None) -> str | None:
        """Count an answer, and return its `kind`."""
        if token is not None:
            self.add(tenant, token)
        return self.kind(tenant, stop, token)

    @staticmethod
    def _shrink(counts: dict[int, float], by: float) -> None:
        for token, count in list(counts.items()):
            if count > by:
                counts[token] = count - by
            else:
                del counts[token]
