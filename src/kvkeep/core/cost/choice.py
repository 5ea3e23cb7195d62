"""`best_prefix`: how much of a stored prefix to load; what is behind it is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["PrefixChoice", "best_prefix"]


class PrefixChoice(NamedTuple):
    """The prefix to load: ``tokens`` of it; the seconds it takes, and those without loading."""

    tokens: int
    seconds: float
    compute_s: float


def best_prefix(
    computed: int,
    tokens: int,
    runs: Iterable[tuple[int, float]],
    compute_s: Callable[[int, int], float],
    *,
    compute_free_s: float = 0.0,
    load_free_s: float = 0.0,
) -> PrefixChoice:
    """Return how much of a stored prefix to load, if the rest is computed behind it.

    ``runs`` are pieces of the prefix behind the ``computed`` first tokens, in order: the end of
    each, in tokens, and the seconds to load it. Loads begin after ``load_free_s``, computing after
    ``compute_free_s``, when older prompts leave them room. A piece is loaded whole or not at all:
    the longer the prefix, the more attention each token of it saves, so nothing in between is
    better than both ends. ``tokens`` are those of the prompt, of which the last is computed in any
    case.
    """
    alone = compute_free_s + compute_s(computed, tokens)
    best = PrefixChoice(computed, alone, alone)
    loading = load_free_s
    for end, seconds in runs:
        loading += seconds
        took = max(loading, compute_free_s) + compute_s(min(end, tokens - 1), tokens)
        if took < best.seconds:
            best = PrefixChoice(end, took, alone)
    return best
