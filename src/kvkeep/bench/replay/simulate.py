"""`simulate`: a trace through `PagedCache`, with virtual memory and a virtual clock."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.bench.replay.outcome import Outcome
from kvkeep.bench.replay.watching import ReplayWatch
from kvkeep.core.cache import PagedCache
from kvkeep.core.errors import InvalidValue, OutOfPages, whole
from kvkeep.core.eviction import policy as named_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvkeep.bench.replay.workload import Ids, Workload
    from kvkeep.core.cache import Sequence
    from kvkeep.core.eviction import EvictionPolicy

__all__ = ["PADDING", "SESSIONS", "Paging", "Stage", "simulate"]

SESSIONS = "+sessions"
"""Suffix of a policy's name when the cache knows the session of each request."""

PADDING = 2**31 - 1
"""A token that is in no prompt and never stored."""
_UNIT = 2  # tokens of the cache per unit, by units: one page

_TIMES = (0.5, 1.0, 2.0, 4.0)  # factors of the memory, for the curve of each namespace


@dataclass(frozen=True, slots=True)
class Paging:
    """The layout of a workload's tokens in pages.

    By units (``page_tokens`` None): each unit is a page, the last one of a prompt as well, full or
    not. Published hit rates of traces of block ids are counted this way. By tokens: a prompt has
    all its tokens, pages of ``page_tokens`` are stored when they are full, the last token of a
    prompt is always computed, and an answer takes its pages while it is generated, as in an engine.
    """

    unit_tokens: int
    page_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.page_tokens is not None:
            whole("page_tokens", self.page_tokens, 1, 65_536)

    @property
    def size(self) -> int:
        """Tokens of the cache per page."""
        return _UNIT if self.page_tokens is None else self.page_tokens

    @property
    def tokens(self) -> int:
        """Tokens of the trace per page."""
        return self.unit_tokens if self.page_tokens is None else self.page_tokens

    def pages(self, capacity_tokens: int) -> int:
        """Return the pages in a capacity. Raises `InvalidValue` if there is none."""
        whole("capacity", capacity_tokens, 1)
        pages = capacity_tokens // self.tokens
        if not pages:
            raise InvalidValue(
                f"a capacity of {capacity_tokens} tokens is less than a page of {self.tokens}"
            )
        return pages

    def prompt(self, ids: Ids, tokens: int) -> Ids:
        """Return the tokens to give to `PagedCache.open`."""
        if self.page_tokens is None:
            # `open` never returns the last token as cached; this one fills no page, so no policy
            # sees it.
            return np.append(np.repeat(ids, _UNIT), np.int32(PADDING))
        return ids if self.unit_tokens == 1 else np.repeat(ids, self.unit_tokens)[:tokens]

    def whole_units(self, tokens: int) -> int:
        """Return the tokens of the cache in the whole units of a prompt of ``tokens``."""
        units = tokens // self.unit_tokens
        return units * (_UNIT if self.page_tokens is None else self.unit_tokens)

    def answer(self, ids: Ids) -> Ids:
        """Return the tokens to append after the whole units of the prompt."""
        if self.page_tokens is None:
            return np.repeat(ids, _UNIT)
        return ids if self.unit_tokens == 1 else np.repeat(ids, self.unit_tokens)


def simulate(
    workload: Workload,
    capacity_tokens: int,
    policy: str | EvictionPolicy = "lru",
    *,
    page_tokens: int | None = None,
    prefix: str = "radix",
    sessions: bool = False,
    what_if: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay ``workload`` through one pool of ``capacity_tokens``, one request after the other.

    Each request is opened at its time, its prompt (and its answer, if the trace has it) is
    published, and it is closed, as in an engine that serves one request at a time. `Paging`
    explains ``page_tokens``. With ``sessions`` the cache knows the session of each request, if the
    trace does; the policy of the outcome is then "lru+sessions". With ``what_if`` the cache samples
    that share of the blocks, and the outcome has the curve of what LRU would reuse with ⅛ … 8 times
    the memory. ``progress`` is called with the number of requests done.

    By tokens, the hits are those of the engine, token for token. One exception: if several pages
    begin alike and one of them is copied, ids do not tell which page the engine copied.

    Cost: about 100 µs per request by units; about 200 by tokens for prompts of 12,000 tokens, and
    60 for each page of an answer with a policy that is not `by_recency`.
    """
    begun = time.perf_counter()
    stage = Stage(
        workload,
        capacity_tokens,
        policy,
        page_tokens=page_tokens,
        prefix=prefix,
        sessions=sessions,
        what_if=what_if,
    )
    for number in range(len(workload)):
        stage.watch.now = float(workload.times[number])
        try:
            sequence, _ = stage.open(number)
        except OutOfPages:
            stage.refuse(number)
        else:
            _serve(stage, number, sequence)
        if progress is not None and number % 100 == 99:
            progress(number + 1)
    outcome = stage.done()
    outcome.seconds = time.perf_counter() - begun
    return outcome


def _serve(stage: Stage, number: int, sequence: Sequence) -> None:
    keep = bool(stage.workload.store[number])
    if keep:
        stage.publish(number, sequence)
    with suppress(OutOfPages):  # an engine ends an answer that finds no more pages
        if stage.paging.page_tokens is not None:
            _write(stage, number, sequence, keep=keep)
        elif keep and len(stage.workload.answer(number)):
            sequence.publish(stage.append_answer(number, sequence))
    sequence.close(keep=keep)


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
        if keep:
            sequence.publish()
        ids = ids[count:]


class Stage:
    """The cache of one replay, with the clock ``watch.now``, and the watch that counts.

    The steps of a request are `open`, `publish`, `append_answer`, and those of its sequence.
    """

    def __init__(
        self,
        workload: Workload,
        capacity_tokens: int,
        policy: str | EvictionPolicy,
        *,
        page_tokens: int | None,
        prefix: str,
        sessions: bool = False,
        what_if: float | None = None,
    ) -> None:
        self.workload = workload
        self._what_if = what_if
        self.sessions = sessions
        self.paging = Paging(workload.unit_tokens, page_tokens)
        pages = self.paging.pages(capacity_tokens)
        # By units a request needs one more page, for the padding token, which is never stored.
        self.pages = pages
        pages = whole("pages", pages + (page_tokens is None), 1, 2**31 - 1)
        named = policy if isinstance(policy, str) else policy.name
        policy = named_policy(policy)
        self.at_once = policy.by_recency and not sessions
        if sessions:
            named += SESSIONS
        outcome = Outcome(
            named, capacity_tokens, self.paging.tokens, workload.name, workload.digest
        )
        self.watch = ReplayWatch(workload, pages, self.paging.size, outcome)
        self.cache = PagedCache(
            pages,
            self.paging.size,
            prefix=prefix,
            eviction=policy,
            block_pages=None if page_tokens else 1,
            what_if=what_if,
            clock=lambda: self.watch.now,
        )
        self.cache.subscribe(self.watch.see)

    def open(self, number: int, reserve: int = 0) -> tuple[Sequence, int]:
        """Open the sequence of a request's prompt; return it and its cached tokens.

        ``reserve`` pages must remain available after that. Raises `OutOfPages`.
        """
        work, paging = self.workload, self.paging
        ids, tokens = work.prompt(number), int(work.tokens[number])
        session, turn = self._session(number)
        sequence = self.cache.open(
            paging.prompt(ids, tokens),
            self._space(number),
            reserve=reserve,
            session=session,
            turn=turn,
        )
        if paging.page_tokens is None:
            blocks = sequence.num_cached // _UNIT
            hit = min(blocks * paging.unit_tokens, tokens)
        else:
            hit = sequence.num_cached
            blocks = hit // paging.unit_tokens
        self.watch.request(number, hit, blocks)
        sequence.copies()
        return sequence, hit

    def _session(self, number: int) -> tuple[str | None, int | None]:
        session = int(self.workload.session[number])
        if not self.sessions or session < 0:
            return None, None
        turn = int(self.workload.turn[number])
        return str(session), turn or None

    def _space(self, number: int) -> str:
        return self.workload.namespaces[int(self.workload.namespace[number])]

    def length(self, number: int, *, answered: bool = False) -> int:
        """Return the tokens of a prompt, or of prompt and answer without the last token."""
        work, unit = self.workload, self.paging.unit_tokens
        units, tokens = self.paging.page_tokens is None, int(work.tokens[number])
        if not answered:
            return int(work.prompt_units[number]) * _UNIT if units else tokens
        told = len(work.answer(number)) * (_UNIT if units else unit)
        longest = tokens + max(0, int(work.output_tokens[number]) - 1)
        if units:
            longest = -(-longest // unit) * _UNIT
        return max(longest, self.paging.whole_units(tokens) + told)

    def refuse(self, number: int) -> None:
        """Record a request for which there is no room."""
        self.watch.outcome.refused += 1
        self.watch.request(number, 0, 0)

    def publish(self, number: int, sequence: Sequence) -> None:
        """Publish the prompt of a request."""
        sequence.publish(self.length(number))

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

    def done(self) -> Outcome:
        """Return the complete outcome."""
        outcome = self.watch.outcome
        outcome.evicted_pages = self.cache.stats().evicted_pages
        if self._what_if is not None:
            sizes = [max(1, int(self.pages * 2.0 ** (step / 2))) for step in range(-6, 7)]
            outcome.what_if = [
                [size * self.paging.tokens, rate] for size, rate in self._curve(sizes)
            ]
        self.watch.done()
        if self._what_if is not None and len(outcome.namespaces) > 1:
            some = [max(1, int(self.pages * times)) for times in _TIMES]
            outcome.what_if_namespaces = {
                space: [
                    [times, rate]
                    for times, (_, rate) in zip(_TIMES, self._curve(some, space), strict=True)
                ]
                for space in outcome.namespaces
            }
        return outcome

    def _curve(self, sizes: list[int], space: str | None = None) -> Iterator[tuple[int, float]]:
        """Yield pages and hit rates, of prompt tokens only, without padding tokens."""
        work, share = self.workload, 1.0
        if self.paging.page_tokens is None:
            units = work.prompt_units
            if space is not None:
                units = units[work.namespace == work.namespaces.index(space)]
            asked = _UNIT * int(units.sum(dtype=np.int64))
            share = 1 + len(units) / asked if asked else 1.0
        for size, point in zip(sizes, self.cache.what_if(sizes, space), strict=True):
            yield size, min(1.0, share * point.hit_rate)
