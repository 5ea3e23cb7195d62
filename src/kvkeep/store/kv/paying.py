"""`LoadChoice`: how much of a stored prefix is worth loading, where computing may be faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.core.cost import best_prefix
from kvkeep.store.tiers import Miss

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvkeep.core.cost import CostModel

__all__ = ["LoadChoice", "LoadPiece", "choose_load"]

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
    cost: CostModel, start: int, tokens: int, pieces: Sequence[LoadPiece]
) -> LoadChoice:
    """Return how much of a prompt of ``tokens`` tokens is worth loading behind its ``start`` first.

    ``pieces`` are what is stored of it, in order. As long as nothing is known of computing, all of
    them are worth loading. A tier of which nothing is known counts as free. Reads that wait in a
    tier delay new ones.
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
    best = best_prefix(
        start, tokens, zip([piece.stop for piece in pieces], loads, strict=True),
        computing.prefill_s,
    )  # fmt: skip
    load_s = sum(one for one, piece in zip(loads, pieces, strict=True) if piece.stop <= best.tokens)
    saved = best.compute_s - (best.seconds - load_s)
    error = max(cost.reading(tier).error for tier in waited) if waited else 1.0
    wait = max(_PATIENCE, 1 + 2 * error) * load_s + max(_SPARE * saved, _SPARE_S)
    # Of a tier that was never read, computing alone sets the limit.
    patience = saved if not load_s else min(saved, wait)
    all_s = sum(loads) + computing.prefill_s(min(found, tokens - 1), tokens)
    misses = []
    begin = best.tokens
    for piece in pieces:
        if piece.stop > begin:
            misses.append(
                Miss.slower(begin, piece.stop, piece.tier, load_s=all_s, compute_s=best.seconds)
            )
            begin = piece.stop
    return LoadChoice(
        start, found, best.tokens, load_s, best.seconds, best.compute_s, patience, tuple(misses)
    )
