"""The bounds as they ship hold what a server remembers of requests that have nothing in common.

`test_request_growth` has a real cache and small bounds. Here the observers of a server get the
events of a cache directly, without its work, so that the bounds that ship are reached. What takes
more requests than these is fed directly. With ``KVKEEP_GROWTH=long`` the observers get 200,000.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import tracemalloc
from collections import OrderedDict, deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from kvkeep import Namespace, PagedCache
from kvkeep.core.events import Closed, Evicted, Opened, Stored
from kvkeep.core.keys import BLOCK_ID_BYTES
from kvkeep.core.miss_ratio.prompts import PromptWatch
from kvkeep.core.returns import Ended
from kvkeep.observe.explain import Explainer
from kvkeep.observe.explain.alike import Anchors
from kvkeep.observe.explain.answer import Span
from kvkeep.observe.explain.inbox import Inbox
from kvkeep.observe.explain.nearest import SeenPrompt
from kvkeep.observe.explain.reasons import Reasons
from kvkeep.observe.explain.units import Requester
from kvkeep.observe.telemetry.evictions import PageTimes
from kvkeep.observe.usage import (
    Notifier,
    PromptComputed,
    RequestAdmitted,
    RequestBegun,
    RequestEnded,
    RequestOrigin,
    RequestRecord,
)
from kvkeep.serve.engine.offload.offload import Offload
from kvkeep.serve.engine.offload.writes import Known
from kvkeep.serve.server import ServerSettings
from kvkeep.serve.server.metrics import ServerMetrics
from kvkeep.serve.server.tenant_usage import TenantUsage
from kvkeep.serve.server.watching import Watching
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.kv.removal import Followers
from kvkeep.store.tiers import Chain, Inclusive, MemorySpec, TieredStore
from kvkeep.store.tiers.conversations import BlockWaits, Conversations, SharedReturns

if TYPE_CHECKING:
    from collections.abc import Callable, Sized

LONG = os.environ.get("KVKEEP_GROWTH") == "long"
FILL, ROUND = (0, 100_000) if LONG else (10_000, 5_000)
"""Requests until the bounds are reached, then in each of the two rounds that are compared."""
SERVING = Path(__file__).parents[2] / "docs/serving.md"
PAGE = 16
PAGES = 64
STEP = 5_000
"""Requests between two looks."""
SLACK = ROUND // 5
"""Allocated blocks: a fifth of what one more object a request would take."""


class Observed:
    """All that watches the cache and the requests of one server."""

    def __init__(self) -> None:
        self._cache = PagedCache(PAGES, PAGE)
        engine = SimpleNamespace(cache=self._cache, store=None)
        tenants = TenantUsage(engine, ServerSettings(name="m"), lambda salt: Namespace(tenant=salt))
        self.watching = Watching(self._cache, tenants, explain=True)
        self.metrics = ServerMetrics(self.watching.usage)
        self.metrics.watch(self._cache)
        self._notifier = Notifier(*self.watching.start())
        self.what_if = PromptWatch.of(0.1, PAGE, PAGES)
        self._core = self._cache._core
        self._none = np.empty(0, np.int32)
        self._rng = np.random.default_rng(0)
        self._held: deque[np.ndarray] = deque()
        self._free = list(range(PAGES))
        self._number = 0

    def requests(self, count: int, tokens: int, *, salts: bool) -> None:
        """``count`` requests of so many tokens, each of a new session, maybe with a new salt."""
        for prompt in self._rng.integers(0, 1 << 30, (count, tokens), dtype=np.int32):
            self._request(prompt, salts=salts)
            if self._number % 1000 == 0:
                self._settle()

    def _request(self, prompt: np.ndarray, *, salts: bool) -> None:
        """One request; every 16th leaves its pages in the cache."""
        self._number += 1
        number, name = self._number, f"cmpl-{self._number}"
        space = Namespace(tenant=name if salts else "", model="m")
        request = RequestRecord(RequestOrigin(name, "completions"), prompt, space, name)
        emit = self._notifier.emit
        emit(RequestBegun(request))
        count = 0 if number % 16 else len(prompt) // PAGE
        while len(self._free) < count:
            gone = self._held.popleft()
            self._free += gone.tolist()
            self._tell(Evicted(gone, "pressure"))
        self._tell(Opened(number, space, len(prompt), 0))
        self.what_if.opened(prompt[:-1].tobytes(), self._none, space, 0)
        emit(RequestAdmitted(request, number, 0))
        if count:
            pages = np.array([self._free.pop() for _ in range(count)], np.int32)
            self._held.append(pages)
            self._tell(Stored(number, space, -1, pages, prompt[: count * PAGE]))
        self._tell(Closed(number, len(prompt), count))
        emit(PromptComputed(request, len(prompt), 0.001))
        self.metrics.note_first_token(0.1, prompt_tokens=len(prompt), reused_tokens=0)
        emit(RequestEnded(request, "done", 1, 0.1, 0.2))
        assert not self._notifier.errors

    def _tell(self, event: object) -> None:
        for hook in self._core.hooks:
            hook(event)

    def _settle(self) -> None:
        """Work off what waits, as /metrics and the explainer's thread do."""
        explainer = self.watching.explainer
        assert explainer is not None
        explainer.recent(0)
        assert (explainer.failed, explainer.lost) == (0, 0)
        assert self.metrics._times is not None
        self.metrics._times.snapshot()
        self.what_if.points()

    def sizes(self) -> dict[str, int]:
        """The length of each container that the observers own, by where it is found."""
        found: dict[str, int] = {}
        seen: set[int] = set()
        waiting: list[tuple[str, object]] = [
            ("watching", self.watching), ("metrics", self.metrics), ("what_if", self.what_if),
        ]  # fmt: skip
        while waiting:
            path, one = waiting.pop()
            if id(one) in seen or isinstance(one, (PagedCache, PageTimes)):
                continue
            seen.add(id(one))
            if isinstance(one, (dict, list, set, deque, bytearray)):
                found[path] = len(one)
            elif isinstance(one, np.ndarray):
                found[path] = one.size
            elif type(one).__module__.startswith("kvkeep."):
                waiting += [(f"{path}.{name}", owned) for name, owned in _attributes(one)]
        return found


def _attributes(one: object) -> list[tuple[str, object]]:
    slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
    names = {*getattr(one, "__dict__", ()), *slots}
    return [(name, getattr(one, name)) for name in names if hasattr(one, name)]


def _no_reason(self: Reasons, asked: object) -> list[Span]:
    """One span, at the price of one: `Reasons` remembers nothing, and its work is most of all."""
    return [Span(0, len(asked.prompt.tokens), None, "new")]  # type: ignore[attr-defined]


@pytest.fixture
def observed(monkeypatch):
    # What waits is worked off by the test: a thread beside it would only compete for the lock.
    monkeypatch.setattr(Inbox, "_run", lambda _: None)
    monkeypatch.setattr(Reasons, "spans", _no_reason)
    one = Observed()
    gc.disable()  # or it goes through all that is remembered, again and again
    yield one
    gc.enable()
    one.watching.close()


@pytest.mark.parametrize(
    ("tokens", "salts"),
    [
        (97, True),
        pytest.param(20, False, marks=pytest.mark.skipif(not LONG, reason="a minute of CPU")),
    ],
)
def test_requests_take_no_more_than_those_before_them(observed, tokens, salts):
    ask = partial(observed.requests, tokens=tokens, salts=salts)
    before, _ = _peaks(observed, ask, FILL)
    half, blocks = _peaks(observed, ask, ROUND)
    before = {path: max(size, before.get(path, 0)) for path, size in half.items()}
    whole, more = _peaks(observed, ask, ROUND)
    grown = {path: (before.get(path, 0), size) for path, size in whole.items()
             if size > 1.05 * before.get(path, 0) + 64}  # fmt: skip
    assert not grown, f"entries at {FILL + ROUND:,} requests, and at {FILL + 2 * ROUND:,}"
    assert more - blocks < SLACK, f"{more - blocks:,} blocks of memory for {ROUND:,} requests"


def _peaks(
    observed: Observed, ask: Callable[[int], object], requests: int
) -> tuple[dict[str, int], int]:
    """The largest size of each container during so many requests, and allocated blocks then."""
    peaks: dict[str, int] = {}
    for _ in range(requests // STEP):
        ask(STEP)
        for path, size in observed.sizes().items():
            peaks[path] = max(size, peaks.get(path, 0))
    gc.collect()
    return peaks, sys.getallocatedblocks()


def test_what_takes_many_short_prompts_or_few_long_ones():
    """The three bounds of the prompts that an explainer remembers, each reached by itself."""
    prompts = Explainer(PAGE)._mirror.prompts
    requester, tokens = Requester("", store=True, reuse=True), np.zeros(40_000, np.int32)

    def most(length: int, anchors: int) -> int:
        """How many prompts are remembered of such."""
        for number in range(prompts.most_tokens // max(64, length, 16 * anchors) + 10):
            found = Anchors(np.arange(anchors, dtype=np.uint64) + number * anchors, tokens[:0])
            shown = tokens[:length]
            prompts.add(SeenPrompt(requester, Namespace(), shown, [], None, found, shown), 0)
        assert len(prompts._by_anchor) == anchors * len(prompts)
        return len(prompts)

    assert most(40_000, 0) == 100  # 4,000,000 tokens
    assert most(500, 2_500) == 100  # 250,000 anchors
    assert most(4, 0) == 62_500


def test_requests_that_nobody_ends():
    explainer = Explainer(PAGE)
    tokens = np.zeros(4, np.int32)
    for number in range(10_100):
        explainer.see(Opened(number, Namespace(), 4, 0))
        explainer.opened(f"{number}", tokens, Namespace(), cached=0, sequence=number)
        explainer.see(Opened(-number, Namespace(), 4, 0))  # and such that nobody tells of
    explainer.recent(0)
    mirror = explainer._mirror
    assert [len(explainer._running), len(mirror._open), len(mirror._opened)] == [10_000] * 3
    assert (explainer.failed, explainer.lost) == (0, 0)
    explainer.close()


def test_times_of_pages_forget_the_oldest_of_200_000_sequences():
    """Each stores one page, in the place of the one before it by `PAGES`."""
    times = PageTimes(PAGES)
    tokens, space = np.zeros(PAGE, np.int32), Namespace()
    everything = np.arange(PAGES, dtype=np.int32)
    for number in range(200_000):
        page = number % PAGES
        if not page:
            times.see(Evicted(everything, "pressure"))
        times.see(Stored(number, space, -1, everything[page : page + 1], tokens))
    times.snapshot()
    assert (len(times._own), len(times._waiting)) == (65_536, 0)


class Remembers(NamedTuple):
    """What is fed with numbers, the container that it keeps them in, and its bounds."""

    feed: Callable[[int], object]
    kept: Sized
    most: int
    megabytes: int


def _keys() -> Remembers:
    known = Known()

    def arrive(number: int) -> None:
        known.offered(key := _bytes(number, 32))
        known.arrived(key, stored=True)

    return Remembers(arrive, known._keys, 65_536, 16)


def _salts() -> Remembers:
    offload = SimpleNamespace(_tenants=OrderedDict(), tenant_of=lambda space: space.tenant)
    return Remembers(
        lambda number: Offload._tenant(offload, Namespace(tenant=f"{number:032}")),
        offload._tenants, 65_536, 20,
    )  # fmt: skip


def _sessions() -> Remembers:
    board = PagedCache(PAGES, PAGE)._core.sessions
    return Remembers(
        lambda number: board._begin((Namespace(tenant=f"{number:032}"), f"{number:032}")),
        board.states, 65_536, 44,
    )  # fmt: skip


def _losses() -> Remembers:
    losses = _tiered().losses
    note = partial(losses.note, tier="memory", what="evicted", detail="lru")
    return Remembers(lambda number: note([_bytes(number)]), losses._last, 100_000, 36)


def _touches() -> Remembers:
    touches = _tiered()._levels.planner._touches
    return Remembers(lambda number: touches.touch(_bytes(number)), touches._counts, 131_072, 30)


def _links() -> Remembers:
    followers = Followers()
    return Remembers(
        lambda number: followers.note([_bytes(2 * number), _bytes(2 * number + 1)]),
        followers._next, 32_768, 17,
    )  # fmt: skip


def _conversations() -> Remembers:
    talks = Conversations(SharedReturns(), lambda: 0.0)

    def end(number: int) -> None:
        row = np.array([number, *range(100)], np.int32)
        talks.ended(Chain(bytes(48), [], 256, len(row), row), 90, Ended(), "")

    return Remembers(end, talks._known, 32_768, 60)


def _waits() -> Remembers:
    waits = BlockWaits(SharedReturns(), lambda: 0.0)
    return Remembers(lambda number: waits.used([_bytes(number)]), waits._at, 131_072, 58)


def _tiered() -> TieredStore:
    return TieredStore(MemorySpec(MemoryBackend(1 << 20)), [], Inclusive())


def _bytes(number: int, size: int = BLOCK_ID_BYTES) -> bytes:
    return number.to_bytes(size, "little")


@pytest.mark.parametrize(
    "of", [_keys, _salts, _sessions, _losses, _touches, _links, _conversations, _waits]
)
def test_what_serving_md_says_of_the_cache_and_the_store(of):
    """How many of each are remembered, and the memory of so many: a quarter takes a quarter."""
    one = of()
    part = one.most // 4
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(part):
            one.feed(number)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for number in range(part, one.most + 1_000):
        one.feed(number)
    assert len(one.kept) == one.most
    assert 0.7 * one.megabytes < 4 * size / 1e6 < one.megabytes
    said = " ".join(SERVING.read_text().split())
    assert re.search(rf"{one.most:,} [a-z ]+\({one.megabytes} MB\)", said)
