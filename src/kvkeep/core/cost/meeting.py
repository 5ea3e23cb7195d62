"""What to load and what to compute: decided on numbers, before or while either happens.

A prompt's KV can be computed from its front while stored KV is loaded from its back, until both
meet (Cake, arXiv 2410.03065). An engine that loads prefixes alone computes behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["LEAST_GAIN", "LoadablePrompt", "Meeting", "PrefixChoice", "best_prefix", "meet"]


# Both at once has to save this share of the better one alone. Less is lost again: a pass holds up
# what arrives meanwhile, and both share processors and memory.
LEAST_GAIN: Final = 0.05


class LoadablePrompt(NamedTuple):
    """A prompt of which the store has KV.

    Attributes:
        computed: KV of the tokens before this one is there; computing goes on here.
        loaded: KV of the tokens from here to ``stop`` is there; loading goes on before it.
        stop: the end of what the store has; the last token of the prompt is computed in any case.
        tokens: of the whole prompt.
        unit: tokens of a block; what is loaded begins at a multiple of it.
    """

    computed: int
    loaded: int
    stop: int
    tokens: int
    unit: int


class Meeting(NamedTuple):
    """Where computing and loading should meet.

    Attributes:
        at: tokens before it are computed, those from it on are loaded. ``loaded`` of the prompt:
            nothing more is worth loading; ``computed``: nothing before it is worth computing.
        seconds: until the prompt's last token is computed.
        compute_s, load_s: of these, until computing, and until loading, has reached ``at``.
        all_computed_s, all_loaded_s: the same as ``seconds`` if nothing more was loaded, and if
            everything that is stored was.
    """

    at: int
    seconds: float
    compute_s: float
    load_s: float
    all_computed_s: float
    all_loaded_s: float


class _Place(NamedTuple):
    """Where both could meet; see `Meeting`."""

    at: int
    seconds: float
    compute_s: float
    load_s: float


def meet(
    prompt: LoadablePrompt,
    compute_s: Callable[[int, int], float],
    load_s: Callable[[int], float],
    *,
    compute_free_s: float = 0.0,
    load_free_s: float = 0.0,
    least_gain: float = LEAST_GAIN,
) -> Meeting:
    """Return where computing and loading ``prompt`` should meet, so that it is done first.

    ``compute_s(start, stop)`` are the seconds to compute tokens, ``load_s(tokens)`` to load as
    many; the first grows with ``stop``, the second with ``tokens``. Both begin when older prompts
    leave them room: after ``compute_free_s`` and ``load_free_s``. Both at once have to save the
    share ``least_gain``, else it is the better one alone. Cost: O(log blocks).
    """
    start, end, unit = prompt.computed, prompt.loaded, prompt.unit
    behind = compute_s(prompt.stop, prompt.tokens)
    alone = compute_s(start, prompt.tokens)

    def at(position: int) -> _Place:
        computing = compute_s(start, position)
        loading = load_s(end - position)
        computed = compute_free_s + computing
        loaded = load_free_s + loading if loading or position < end else 0.0
        if position == prompt.stop:  # nothing is loaded, and all of the rest is computed at once
            return _Place(position, compute_free_s + alone, computed, loaded)
        return _Place(position, max(computed, loaded) + behind, computed, loaded)

    if start >= end:
        only = at(end)
        return Meeting(*only, only.seconds, only.seconds)
    # Positions between: multiples of a block. `low` is the first where computing takes longer.
    first, last = start // unit + 1, (end - 1) // unit
    low, high = first, last + 1
    while low < high:
        middle = (low + high) // 2
        found = at(middle * unit)
        if found.compute_s < found.load_s:
            low = middle + 1
        else:
            high = middle
    places = [at(one * unit) for one in (low - 1, low) if first <= one <= last]
    computed, loaded = at(end), at(start)
    best = min(computed, loaded, key=lambda one: one.seconds)
    if places:
        both = min(places, key=lambda one: one.seconds)
        if both.seconds - behind <= (1 - least_gain) * (best.seconds - behind):
            best = both
    return Meeting(*best, computed.seconds, loaded.seconds)


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
