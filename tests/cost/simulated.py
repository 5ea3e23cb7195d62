"""An engine and a store on a simulated clock: passes and reads take what a formula says.

The decisions are those of `kvkeep.core.cost`; what they know of the times may be wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvkeep.core.cost import (
    LoadablePrompt,
    LoadProgress,
    Overlap,
    PrefillCost,
    PromptTurn,
    take_turns,
)

TICK = 0.002  # of an engine that waits


@dataclass
class Link:
    """A tier whose reads come one after another; ``stalls`` are times in which none comes."""

    token_s: float
    latency_s: float = 0.0
    stalls: list[tuple[float, float]] = field(default_factory=list)
    window: int = 4
    free: float = 0.0

    def arrival(self, now: float, tokens: int) -> float:
        """When a read that is asked for now arrives."""
        at = max(self.free, now)
        left = self.token_s * tokens
        for begin, end in self.stalls:
            if end <= at:
                continue
            if begin >= at + left:
                break
            left -= max(0.0, begin - at)
            at = end
        self.free = at + left
        return self.free + self.latency_s


class Prompt:
    """A prompt of ``tokens`` tokens, of which ``stored`` are stored, in blocks of ``unit``."""

    def __init__(self, tokens: int, stored: int, unit: int) -> None:
        self.tokens, self.stored = tokens, min(stored, tokens - 1)
        self.overlap = Overlap(0, tokens, unit)
        self.overlap.found(self.stored)
        self.blocks = [
            (start, min(start + unit, self.stored)) for start in range(0, self.stored, unit)
        ]
        self.coming: list[tuple[float, int, int]] = []  # arrival, start, stop
        self.reading = False
        self.first_token: float | None = None
        self.loaded = 0
        self.through = not self.stored


class World:
    """Runs prompts that come at once; `run` returns the times of their first tokens."""

    def __init__(
        self,
        prompts: list[tuple[int, int]],
        compute: PrefillCost,
        link: Link,
        *,
        unit: int = 64,
        step_tokens: int = 512,
        policy=take_turns,
        believed_compute: float = 1.0,
        believed_load: float = 1.0,
        error: float = 0.0,
    ) -> None:
        self.prompts = [Prompt(tokens, stored, unit) for tokens, stored in prompts]
        self.compute, self.link, self.policy = compute, link, policy
        self.unit = unit
        self.step_tokens, self.error = step_tokens, error
        self.believed_compute, self.believed_load = believed_compute, believed_load
        self.now = 0.0

    def compute_s(self, start: int, stop: int) -> float:
        more = max(0, math.ceil((stop - start) / self.step_tokens) - 1)
        took = self.compute.prefill_s(start, stop) + more * self.compute.seconds_fixed
        return took * self.believed_compute

    def read_s(self, start: int, stop: int) -> float:
        if not self.believed_load:
            return 0.0
        block = self.link.token_s * self.unit
        each = max(block, (block + self.link.latency_s) / self.link.window) / self.unit
        return (each * (stop - start) + self.link.latency_s) * self.believed_load

    def run(self) -> list[float]:
        while left := [one for one in self.prompts if one.first_token is None]:
            assert self.now < 1e6, "no end"
            self.receive(left)
            pieces, progress = [], [self.progress(one) for one in left]
            turns = self.policy(
                progress, self.compute_s, error=self.error, pass_s=self.compute.seconds_fixed
            )
            assert len(turns) == len(left)
            budget = self.step_tokens
            for one, state, turn in zip(left, progress, turns, strict=True):
                self.begin(one, state, turn)
                limit = one.tokens if one.through else one.overlap.limit()
                stop = min(turn.stop, limit, one.overlap.computed + budget)
                if stop > one.overlap.computed:
                    pieces.append((one, one.overlap.computed, stop))
                    budget -= stop - one.overlap.computed
            self.step(pieces)
        return [one.first_token for one in self.prompts]

    def progress(self, one: Prompt) -> LoadProgress:
        if one.through:
            at = one.overlap.computed
            return LoadProgress(LoadablePrompt(at, at, at, one.tokens, 1))
        return one.overlap.progress(self.now, self.read_s)

    def begin(self, one: Prompt, state: LoadProgress, turn: PromptTurn) -> None:
        if one.through or one.reading or turn.at >= state.prompt.loaded:
            return
        if any(other.reading and not other.through and other.blocks for other in self.prompts):
            return  # an older one is read
        one.reading = True
        one.overlap.begin(self.now)
        self.ask(one, self.now)

    def ask(self, one: Prompt, now: float) -> None:
        """Ask for the next blocks, from the end."""
        while one.blocks and len(one.coming) < self.link.window:
            start, stop = one.blocks[-1]
            if stop <= one.overlap.computing:
                one.blocks.clear()
                break
            one.blocks.pop()
            one.coming.append((self.link.arrival(now, stop - start), start, stop))

    def arrive(self, until: float) -> None:
        """Let blocks arrive, and ask for further ones, up to a time."""
        while True:
            due = [
                (at, start, stop, one)
                for one in self.prompts
                for at, start, stop in one.coming
                if at <= until
            ]
            if not due:
                return
            at, start, stop, one = min(due, key=lambda each: each[0])
            one.coming.remove((at, start, stop))
            if not one.through and stop > one.overlap.computing:
                one.overlap.came(start, stop, at)
                one.overlap.put(start, stop)
            if not one.through:
                self.ask(one, at)

    def receive(self, left: list[Prompt]) -> None:
        for one in left:
            one.overlap.take()
            self.advance(one, one.overlap.computed)

    def advance(self, one: Prompt, computed: int) -> None:
        one.loaded += sum(stop - start for start, stop in one.overlap.advance(computed))
        if one.overlap.met:
            one.through = True
            one.blocks.clear()

    def step(self, pieces: list[tuple[Prompt, int, int]]) -> None:
        if not pieces:
            arrivals = [at for one in self.prompts for at, _, _ in one.coming if at > self.now]
            self.now = min([self.now + TICK, *arrivals])
            self.arrive(self.now)
            return
        took = self.compute.seconds_fixed
        for one, start, stop in pieces:
            took += self.compute.prefill_s(start, stop) - self.compute.seconds_fixed
            one.overlap.compute(stop)
        self.now += took
        self.arrive(self.now)
        for one, _, stop in pieces:
            self.advance(one, stop)
            if stop == one.tokens:
                one.first_token = self.now


def compute_only(loads, compute_s, **_how):
    """As `take_turns`, with nothing loaded."""
    return [PromptTurn(one.prompt.loaded, one.prompt.tokens) for one in loads]
