"""`take_turns`: what to compute next of several prompts while their stored KV is loaded.

Older prompts come first, in computing and in loading. A prompt waits for its load only where
computing meanwhile would delay it, and no longer than computing instead would take. A load that is
late is expected to take as much longer as it is late already.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.core.cost.meeting import LEAST_GAIN, LoadablePrompt, meet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    ComputeSeconds = Callable[[int, int], float]

__all__ = ["LoadProgress", "PromptTurn", "take_turns"]

_LEAST: Final = 16  # tokens: shorter passes are not worth their fixed costs
_UNKNOWN_S: Final = 0.05  # for which loads are waited for while nothing is known of computing …
_FIRST: Final = 64  # … and the tokens of the pass that finds out
_MOST_ERROR: Final = 0.5


def _nothing(_: int) -> float:
    return 0.0


class LoadProgress(NamedTuple):
    """A prompt that is computed, and its load.

    Attributes:
        prompt: how far both have come. A prompt without a load has all of it ``computed``, or
            ``loaded`` and ``stop`` where ``computed`` is.
        expected_s: the seconds to load so many more tokens, as they are expected; 0 if nothing is
            known. They count from the load's last progress.
        first_s: of these, the seconds until the next progress is expected.
        elapsed_s: seconds since the load's last progress, or since it began; None if it did not
            begin.
        over: whether nothing more will come.
        waited_s: seconds for which nothing was computed of the prompt.
    """

    prompt: LoadablePrompt
    expected_s: Callable[[int], float] = _nothing
    first_s: float = 0.0
    elapsed_s: float | None = None
    over: bool = False
    waited_s: float = 0.0

    @property
    def late_s(self) -> float:
        """The seconds by which the next progress is late."""
        return 0.0 if self.elapsed_s is None else max(0.0, self.elapsed_s - self.first_s)

    def load_s(self, tokens: int) -> float:
        """Return the seconds from now until ``tokens`` more will be there."""
        if tokens <= 0:
            return 0.0
        if self.over:
            return math.inf
        return max(0.0, self.expected_s(tokens) - (self.elapsed_s or 0.0)) + self.late_s


class PromptTurn(NamedTuple):
    """The next pass over a prompt.

    Attributes:
        at: where computing and loading are expected to meet. ``loaded`` of the prompt: nothing
            more is worth loading.
        stop: the tokens before it are to be computed in the next pass, as far as passes are that
            long. ``computed`` of the prompt: none, it waits.
        all_computed_s, all_loaded_s: the seconds until the prompt's last token is computed if
            nothing more is loaded, and if all that is stored is; 0 if nothing is known.
    """

    at: int
    stop: int
    all_computed_s: float = 0.0
    all_loaded_s: float = 0.0


def take_turns(
    loads: Sequence[LoadProgress],
    compute_s: ComputeSeconds | None,
    *,
    error: float = 0.0,
    pass_s: float = 0.0,
    room_s: float = math.inf,
    compute_free_s: float = 0.0,
    least_gain: float = LEAST_GAIN,
) -> list[PromptTurn]:
    """Return the turn of each prompt; they are in order, the oldest first.

    ``compute_s(start, stop)`` are the seconds to compute tokens. None if nothing is known of that:
    then loads are waited for, 50 ms at most, before a short pass finds out. ``error`` is that of
    what is expected: the larger, the shorter the passes before a meeting. ``pass_s`` of the seconds
    are those of a pass, which prompts share. All passes together take no
    longer than ``room_s``, and none that would hold up an older prompt whose load is about to
    arrive. Computing begins after ``compute_free_s``. A prompt is computed and loaded at once where
    that is to save the share ``least_gain``. Cost: O(prompts · log blocks).
    """
    if compute_s is None:
        return [_unknown(one) for one in loads]
    turns: list[PromptTurn] = []
    computing, loading, room, passing = compute_free_s, 0.0, room_s, False
    for one in loads:
        prompt = one.prompt
        met = meet(
            prompt, compute_s, one.load_s, compute_free_s=computing, load_free_s=loading,
            least_gain=least_gain,
        )  # fmt: skip
        wanted = _stop(one, met.at, compute_s, error, pass_s)
        shared = pass_s if passing else 0.0  # an older one pays for the pass
        stop = _within(prompt.computed, wanted, compute_s, room + shared)
        if wanted == prompt.computed < prompt.stop or 0 < met.load_s < math.inf:
            # A pass holds up what arrives meanwhile.
            room = min(room, max(met.load_s, 0.0))
        took = compute_s(prompt.computed, stop)
        passing = passing or stop > prompt.computed
        if stop == prompt.tokens:  # its first token is near: no long passes of others beside it
            room = min(room, 1.25 * took)
        room -= max(0.0, took - shared)
        turns.append(PromptTurn(met.at, stop, met.all_computed_s, met.all_loaded_s))
        computing += compute_s(prompt.computed, met.at) + compute_s(prompt.stop, prompt.tokens)
        if met.at < prompt.loaded:
            loading += one.load_s(prompt.loaded - met.at)
    return turns


def _unknown(one: LoadProgress) -> PromptTurn:
    prompt = one.prompt
    at = stop = prompt.computed
    if at >= prompt.loaded or one.over:
        stop = prompt.loaded if at < prompt.loaded < prompt.stop else prompt.tokens
    elif one.waited_s > _UNKNOWN_S:
        stop = min(at + _FIRST, prompt.loaded)
    return PromptTurn(at, stop)


def _stop(
    one: LoadProgress, at: int, compute_s: ComputeSeconds, error: float, pass_s: float
) -> int:
    """Return up to where the next pass should compute, if there is room for it."""
    prompt = one.prompt
    computed = prompt.computed
    if at >= prompt.loaded:  # nothing more is loaded: up to what is there, or to the end
        return prompt.loaded if computed < prompt.loaded < prompt.stop else prompt.tokens
    if at > computed:
        error = min(error, _MOST_ERROR)
        if at - computed <= 2 * prompt.unit or error * compute_s(computed, at) <= pass_s:
            return at  # one more pass would take longer than what it could save
        sure = computed + int((at - computed) * (1 - error))
        return max(sure // prompt.unit * prompt.unit, computed + prompt.unit)
    # It waits; but not for longer than computing would have taken.
    free = _within(computed, prompt.loaded, compute_s, one.late_s)
    return free if free - computed >= _LEAST else computed


def _within(start: int, stop: int, compute_s: ComputeSeconds, seconds: float) -> int:
    """Return the last token up to which computing from ``start`` takes no longer; ``stop`` at most.

    Cost: O(log tokens).
    """
    if seconds == math.inf or compute_s(start, stop) <= seconds:
        return stop
    low, high = start, stop
    while high - low > 1:
        middle = (low + high) // 2
        if compute_s(start, middle) <= seconds:
            low = middle
        else:
            high = middle
    return low
