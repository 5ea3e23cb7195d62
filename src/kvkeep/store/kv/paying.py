"""`LoadChoice`: how much of a stored prefix is worth loading, where computing may be faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.core.cost import PrefixChoice, best_prefix
from kvkeep.store.tiers import Miss

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvkeep.core.cost import CostModel, LearnedPrefill

__all__ = ["LoadChoice", "LoadPiece", "choose_load"]

_LEAST_GAIN: Final = 0.03  # of computing, that a load has to save at least
_FAR: Final = 4  # multiples of the largest pass observed, above which its cost is a guess
_PATIENCE: Final = 2.0  # times the expected seconds, at least, that a load may take, …
_SPARE: Final = 0.1  # … this part of what it saves …
_SPARE_S: Final = 0.005  # … and this, as threads wait for others now and then


class LoadPiece(NamedTuple):
    """A piece of a stored prefix that is loaded whole or not at all.

    Attributes:
        stop: the end of its tokens.
        tier: where most of it is.
        tier_bytes: its bytes by tier, those of tokens from the start of the load on.
    """

    stop: int
    tier: str
    tier_bytes: Mapping[str, int]


class LoadChoice(NamedTuple):
    """How many tokens of a stored prefix are worth loading.

    Attributes:
        start: the KV of the tokens before it is there.
        found: the KV of the tokens from ``start`` to here is stored.
        tokens: of it, the KV up to here is worth loading; ``start`` if none is.
        load_s: the expected seconds to load that.
        seconds: the expected seconds until the prompt's last token is computed, with this load.
        compute_s: the same if everything is computed.
        patience_s: the seconds after which a load ends: it is slower than computing, or much later
            than expected; None where the cost of computing is unknown.
        misses: why the rest of what was found is not loaded.
    """

    start: int
    found: int
    tokens: int
    load_s: float
    seconds: float
    compute_s: float
    patience_s: float | None
    misses: tuple[Miss, ...]

    @property
    def pays(self) -> bool:
        """Whether anything is worth loading."""
        return self.tokens > self.start

    def overtaken(self, at: int, tier: str) -> Miss:
        """Return why tokens from ``at`` on did not come: the load was slower than expected."""
        return Miss.slower(
            at, self.tokens, tier, load_s=self.patience_s or self.load_s,
            compute_s=self.compute_s, overtaken=True,
        )  # fmt: skip


def choose_load(
    cost: CostModel,
    start: int,
    tokens: int,
    pieces: Sequence[LoadPiece],
    *,
    compute_s: Callable[[int, int], float] | None = None,
    compute_free_s: float = 0.0,
    load_free_s: float = 0.0,
) -> LoadChoice:
    """Return how much of a prompt of ``tokens`` tokens is worth loading behind its ``start`` first.

    ``pieces`` are what is stored of it, in order. As long as nothing is known of computing, all of
    them are worth loading. A tier of which nothing is known counts as free. Reads that wait in a
    tier delay new ones. ``compute_s(start, stop)`` are the seconds to compute tokens; default: in
    one pass, as ``cost`` has learned. Computing and loading begin when older prompts leave them
    room: after ``compute_free_s`` and ``load_free_s``.
    """
    found = pieces[-1].stop if pieces else start
    waited: set[str] = set()
    loads: list[float] = []
    for piece in pieces:
        queued = sum(cost.reading(tier).busy_s for tier in {*piece.tier_bytes} - waited)
        waited |= {*piece.tier_bytes}
        loads.append(queued + cost.load_s(piece.tier_bytes))
    computing = cost.prefill
    if not computing.known:
        return LoadChoice(start, found, found, sum(loads), sum(loads), 0.0, None, ())
    compute = compute_s or computing.prefill_s
    alone = compute(start, tokens)
    best = best_prefix(
        start, tokens, zip([piece.stop for piece in pieces], loads, strict=True), compute,
        compute_free_s=compute_free_s, load_free_s=load_free_s + _LEAST_GAIN * alone,
    )  # fmt: skip
    if best.tokens > start and _is_guess(computing, start, tokens, sum(loads)):
        best = PrefixChoice(start, best.compute_s, best.compute_s)
    load_s = sum(one for one, piece in zip(loads, pieces, strict=True) if piece.stop <= best.tokens)
    behind = compute(min(best.tokens, tokens - 1), tokens)
    saved, seconds = alone - behind, best.compute_s
    if best.tokens > start:
        seconds = max(load_free_s + load_s, compute_free_s) + behind
    error = max(cost.reading(tier).error for tier in waited) if waited else 1.0
    wait = max(_PATIENCE, 1 + 2 * error) * load_s + max(_SPARE * saved, _SPARE_S)
    # Of a tier that was never read, computing alone sets the limit.
    patience = load_free_s + (saved if not load_s else min(saved, wait))
    all_s = load_free_s + sum(loads) + compute(min(found, tokens - 1), tokens)
    misses = []
    begin = best.tokens
    for piece in pieces:
        if piece.stop > begin:
            misses.append(
                Miss.slower(begin, piece.stop, piece.tier, load_s=all_s, compute_s=seconds)
            )
            begin = piece.stop
    return LoadChoice(
        start, found, best.tokens, load_s, seconds, best.compute_s, patience, tuple(misses)
    )


def _is_guess(computing: LearnedPrefill, start: int, tokens: int, load_s: float) -> bool:
    """Whether computing has to be tried, as it may well be faster than a guess says.

    Else a cost that was guessed too high, from passes over a few tokens, is never corrected.
    """
    largest = computing.largest
    if tokens - start <= _FAR * largest:
        return False
    return load_s > computing.prefill_s(start, start + largest)
