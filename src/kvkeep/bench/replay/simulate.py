"""`simulate`: a trace through `PagedCache`, with virtual memory and a virtual clock."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.bench.replay.outcome import Outcome, ReplayWatch
from kvkeep.bench.replay.paging import PADDING, PASS_TOKENS, Paging, Passes
from kvkeep.core.cache import PagedCache
from kvkeep.core.errors import InvalidValue, OutOfPages, whole
from kvkeep.core.eviction import LRU, Priority
from kvkeep.core.eviction import policy as named_policy
from kvkeep.core.eviction.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvkeep.bench.replay.workload import Workload
    from kvkeep.core.cache import Sequence
    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.core.groups import GroupLayout

__all__ = ["Stage", "simulate"]


def simulate(
    workload: Workload,
    capacity_tokens: int,
    policy: str | EvictionPolicy = "lru",
    *,
    page_tokens: int | None = None,
    groups: GroupLayout | None = None,
    shares: Mapping[str, float] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay ``workload`` through one pool of ``capacity_tokens``, one request after the other.

    Each request is opened at its time, its prompt (and its answer, if the trace has it) is
    published, and it is closed, as in an engine that serves one request at a time. `Paging`
    explains ``page_tokens``. With ``shares`` tenants have these weights (`Shares`; others have 1),
    and the policy of the outcome is then "lru+shares". ``progress`` is called with the number of
    requests done.

    With ``groups`` the model has windows or states: prompts are computed in passes of at most 2,048
    tokens, which end where the cache plans a checkpoint. Pages are those of the layout. A prompt
    ends with its last whole unit for checkpoints, as the trace does not tell how the last one goes
    on.

    By tokens, the hits are those of the engine, token for token. One exception: if several pages
    begin alike and one of them is copied, ids do not tell which page the engine copied.

    Cost: about 100 µs per request by units; about 200 by tokens for prompts of 12,000 tokens, and
    60 for each page of an answer with another policy than `lru` and `priority`.
    """
    begun = time.perf_counter()
    stage = Stage(
        workload,
        capacity_tokens,
        policy if shares is None else _shared(policy, shares),
        page_tokens=page_tokens,
        groups=groups,
    )
    for number in range(len(workload)):
        stage.watch.now = float(workload.times[number])
        try:
            sequence, _ = stage.open(number)
        except OutOfPages:
            stage.refuse(number)
        else:
            _serve(stage, number, sequence)
        stage.look()
        if progress is not None and number % 100 == 99:
            progress(number + 1)
    outcome = stage.done()
    outcome.seconds = time.perf_counter() - begun
    return outcome


def _serve(stage: Stage, number: int, sequence: Sequence) -> None:
    keep = bool(stage.workload.store[number])
    with suppress(OutOfPages):  # an engine ends an answer that finds no more pages
        stage.compute_prompt(number, sequence, publish=keep)
        if stage.paging.page_tokens is not None:
            _write(stage, number, sequence, keep=keep)
        elif keep and len(stage.workload.answer(number)):
            sequence.publish(stage.append_answer(number, sequence))
    stage.close(number, sequence)


def _write(stage: Stage, number: int, sequence: Sequence, *, keep: bool) -> None:
    """Generate the answer as an engine does: each page is allocated when the one before is stored.

    With most policies the stored pages decide the next victim; with the others the whole answer is
    appended at once.
    """
    if len(stage.workload.answer(number)):
        try:
            at_once = stage.at_once and stage.append_answer(number, sequence)
        except OutOfPages:
            at_once = False
        if not at_once:
            _write_pages(stage, number, sequence, keep=keep)
        elif keep:
            sequence.publish(at_once)
    stage.fill(number, sequence)


def _write_pages(stage: Stage, number: int, sequence: Sequence, *, keep: bool) -> None:
    ids, size = stage.paging.answer(stage.workload.answer(number)), stage.paging.size
    sequence.truncate(stage.paging.whole_units(int(stage.workload.tokens[number])))
    while len(ids):
        count = size - sequence.num_tokens % size
        sequence.append(ids[:count])
        sequence.copies()
        stage.compute(sequence, sequence.num_tokens, publish=keep)
        ids = ids[count:]


def _shared(policy: str | EvictionPolicy, shares: Mapping[str, float]) -> Shares:
    if not isinstance(policy, str):
        raise InvalidValue(f"shares make a policy for each tenant, by name; got {policy!r}")
    return Shares(lambda: named_policy(policy), shares)


class Stage:
    """The cache of one replay, with the clock ``watch.now``, and the watch that counts.

    A request begins with `open`, or is refused (`refuse`), and ends with `close`; only these two
    tell the cache whose request it is. Between them are `compute_prompt`, `append_answer`, and the
    steps of its sequence.
    """

    def __init__(
        self,
        workload: Workload,
        capacity_tokens: int,
        policy: str | EvictionPolicy,
        *,
        page_tokens: int | None,
        groups: GroupLayout | None = None,
    ) -> None:
        self.workload = workload
        self.paging = Paging(workload.unit_tokens, page_tokens, groups)
        page_tokens = self.paging.page_tokens
        pages = self.paging.pages(capacity_tokens)
        # By units a request needs one more page, for the padding token, which is never stored.
        self.pages = pages
        pages = whole("pages", pages + (page_tokens is None), 1, 2**31 - 1)
        named = policy if isinstance(policy, str) else policy.name
        policy = named_policy(policy)
        self.at_once = type(policy) in {LRU, Priority} and groups is None
        outcome = Outcome(
            named, capacity_tokens, self.paging.tokens, workload.name, workload.digest
        )
        self.watch = ReplayWatch(workload, pages, self.paging, outcome)
        self.cache = PagedCache(
            pages,
            self.paging.layout,
            eviction=policy,
            clock=lambda: self.watch.now,
        )
        self.cache.subscribe(self.watch.see)
        self._passes: Passes | None = None
        layout = self.paging.layout
        if groups is not None and not isinstance(layout, int):
            in_pass = max(1, PASS_TOKENS // self.paging.scale)
            self._passes = Passes(self.cache, layout, in_pass)

    def open(self, number: int, reserve: int = 0) -> tuple[Sequence, int]:
        """Open the sequence of a request's prompt; return it and its cached tokens.

        ``reserve`` pages must remain available after that. Raises `OutOfPages`.
        """
        work, paging = self.workload, self.paging
        ids, tokens = work.prompt(number), int(work.tokens[number])
        prompt = paging.prompt(ids, tokens)
        rest = prompt[:0]
        if self._passes is not None:
            # The cache plans a checkpoint at the end of the prompt that it knows, and the next turn
            # has the whole units of this one.
            known = min(len(prompt), paging.whole_units(tokens) + 1)
            more = -(-len(prompt) // paging.size) - -(-known // paging.size)
            prompt, rest = prompt[:known], prompt[known:]
            reserve += self.reserved(number) + more
        sequence = self.cache.open(prompt, self._space(number), reserve=reserve)
        if len(rest):
            sequence.append(rest)
        hit, blocks = paging.found(sequence.num_cached, tokens)
        self.watch.request(number, hit, blocks)
        sequence.copies()
        return sequence, hit

    def close(self, number: int, sequence: Sequence) -> None:
        """End a request: its answer is known, and how it ended."""
        work = self.workload
        sequence.close(keep=bool(work.store[number]), ended=work.ended(number))

    def _space(self, number: int) -> str:
        return self.workload.namespaces[int(self.workload.namespace[number])]

    def length(self, number: int, *, answered: bool = False) -> int:
        """Return the tokens of a prompt, or of prompt and answer without the last token."""
        work, paging = self.workload, self.paging
        tokens = int(work.tokens[number])
        if not answered:
            return paging.length(tokens)
        told = len(work.answer(number)) * paging.unit_size
        longest = paging.length(tokens + max(0, int(work.output_tokens[number]) - 1))
        return max(longest, paging.whole_units(tokens) + told)

    def reserved(self, number: int, *, state: bool = False) -> int:
        """Return the pages of a prompt's rows and, if asked for, of its running state."""
        if self._passes is None:
            return 0
        return self._passes.reserved(-(-self.length(number) // self.paging.size), state=state)

    def refuse(self, number: int) -> None:
        """Record a request for which there is no room."""
        self.watch.outcome.refused += 1
        self.watch.request(number, 0, 0)

    def compute_prompt(self, number: int, sequence: Sequence, *, publish: bool) -> None:
        """Compute the prompt of a request, and publish it if asked to."""
        if self._passes is None:
            if publish:
                sequence.publish(self.length(number))
            return
        self.compute(
            sequence, self.paging.whole_units(int(self.workload.tokens[number])), publish=publish
        )

    def compute_answer(self, sequence: Sequence, *, checkpoints: bool) -> None:
        """Compute to the end of a sequence, without publishing. Raises `OutOfPages`."""
        if self._passes is not None:
            self._passes.run(sequence, sequence.num_tokens, checkpoints=checkpoints, publish=False)

    def compute(self, sequence: Sequence, stop: int, *, publish: bool) -> None:
        """Compute up to token ``stop`` of the cache, and publish if asked to."""
        if self._passes is not None:
            self._passes.run(sequence, stop, checkpoints=publish, publish=publish)
        elif publish:
            sequence.publish(stop)

    def append_answer(self, number: int, sequence: Sequence) -> int:
        """Append the known units of the answer after the whole units of the prompt; all or nothing.

        Returns the length of the sequence, in tokens of the cache. Raises `OutOfPages`.
        """
        sequence.truncate(self.paging.whole_units(int(self.workload.tokens[number])))
        sequence.append(self.paging.answer(self.workload.answer(number)))
        sequence.copies()
        return sequence.num_tokens

    def fill(self, number: int, sequence: Sequence) -> None:
        """Take the pages of the part of an answer that the trace lacks. Raises `OutOfPages`."""
        end = min(self.length(number, answered=True), self.pages * self.paging.size)
        if end > sequence.num_tokens:
            sequence.append(np.full(end - sequence.num_tokens, PADDING, np.int32))
            sequence.copies()
        self.compute_answer(sequence, checkpoints=False)

    def look(self) -> None:
        """Note what rows and states take."""
        if self._passes is not None:
            self._passes.look()

    def done(self) -> Outcome:
        """Return the complete outcome."""
        outcome = self.watch.outcome
        outcome.evicted_pages = self.cache.stats().evicted_pages
        if self._passes is not None:
            outcome.groups = self._passes.figures()
        return self.watch.done()
