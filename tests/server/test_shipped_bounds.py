"""The bounds as they ship hold what a server's observers remember of 200,000 unique requests.

`test_growth` has a real cache and small bounds. Here the observers of a server get the events of a
cache directly, without its work, so that the bounds that ship are reached.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import OrderedDict, deque
from types import SimpleNamespace

import numpy as np
import pytest

from kvkeep import Namespace, PagedCache
from kvkeep.events import Closed, Evicted, Opened, Stored
from kvkeep.explain.answer import Span
from kvkeep.explain.inbox import Inbox
from kvkeep.explain.reasons import Reasons
from kvkeep.server.metrics import Metrics
from kvkeep.server.watching import Watching
from kvkeep.server.worker import Call
from kvkeep.telemetry.evictions import PageTimes
from kvkeep.whatif.prompts import PromptWatch

pytestmark = pytest.mark.skipif(
    os.environ.get("KVKEEP_GROWTH") != "long", reason="takes a minute of CPU"
)

REQUESTS = 200_000
PAGE = 16
PAGES = 64
STEP = 5_000
"""Requests between two looks."""
SLACK = 20_000
"""Allocated blocks: those of some hundred requests of which everything is remembered."""


class Observed:
    """All that watches the cache and the requests of one server."""

    def __init__(self) -> None:
        self._cache = PagedCache(PAGES, PAGE)
        self.metrics = Metrics()
        self.metrics.watch(self._cache)
        self.watching = Watching(self._cache, explain=True, model="m", watches=[self.metrics.reuse])
        self.watching.start()
        self.what_if = PromptWatch.of(0.1, PAGE, PAGES, 256)
        self._core = self._cache._core
        self._none = np.empty(0, np.int32)
        self._rng = np.random.default_rng(0)
        self._held: deque[np.ndarray] = deque()
        self._free = list(range(PAGES))
        self._number = 0

    def requests(self, count: int) -> None:
        """``count`` requests, each of a new session, every fourth one with a new salt.

        A prompt has four tokens; every 16th has 17 full pages.
        """
        tokens = self._rng.integers(0, 1 << 30, (count, 4), dtype=np.int32)
        long = self._rng.integers(0, 1 << 30, (count // 16 + 1, 17 * PAGE), dtype=np.int32)
        for at in range(count):
            self._request(long[at // 16] if at % 16 == 0 else tokens[at])
            if at % 1000 == 999:
                self._settle()

    def _request(self, prompt: np.ndarray) -> None:
        self._number += 1
        number, name = self._number, f"cmpl-{self._number}"
        space = Namespace(tenant="" if number % 4 else name, model="m")
        request = SimpleNamespace(
            id=number, prompt=prompt, namespace=space, session=name, turn=None, store=True
        )
        self.watching.begin(request, name, Call(name, "completions", {}))
        count = len(prompt) // PAGE
        while len(self._free) < count:
            gone = self._held.popleft()
            self._free += gone.tolist()
            self._tell(Evicted(gone, "pressure"))
        self._tell(Opened(number, space, len(prompt), 0))
        self.what_if.opened(prompt[:-1].tobytes(), self._none, space)
        self.watching.admitted(request, SimpleNamespace(id=number, num_cached=0), 0.0)
        if count:
            pages = np.array([self._free.pop() for _ in range(count)], np.int32)
            self._held.append(pages)
            self._tell(Stored(number, space, -1, pages, prompt[: count * PAGE]))
        self._tell(Closed(number, len(prompt), count))
        self.watching.computed(request, len(prompt), 0.001)
        self.watching.figures.note_first_token(0.1, prompt_tokens=len(prompt), reused_tokens=0)
        choices = [SimpleNamespace(tokens=(1,))]
        done = SimpleNamespace(choices=choices, ttft_s=0.1, seconds=0.2)
        self.watching.came(SimpleNamespace(request=request, tokens=(1,), completion=done))

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
    yield one
    one.watching.close()


def test_200_000_requests_take_no_more_than_100_000(observed):
    halves: list[OrderedDict[str, int]] = []
    blocks: list[int] = []
    for _ in range(2):
        peaks: OrderedDict[str, int] = OrderedDict()
        for _ in range(REQUESTS // 2 // STEP):
            observed.requests(STEP)
            for path, size in observed.sizes().items():
                peaks[path] = max(size, peaks.get(path, 0))
        halves.append(peaks)
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    half, whole = halves
    grown = {path: (half.get(path, 0), size) for path, size in whole.items()
             if size > 1.05 * half.get(path, 0) + 64}  # fmt: skip
    assert not grown, f"entries at {REQUESTS // 2:,} requests, and at {REQUESTS:,}"
    more = blocks[1] - blocks[0]
    assert more < SLACK, f"{more:,} blocks of memory more than at {REQUESTS // 2:,} requests"


def test_times_of_pages_forget_the_oldest_of_200_000_sequences():
    """Each stores one page, in the place of the one before it by `PAGES`."""
    times = PageTimes(PAGES)
    tokens, space = np.zeros(PAGE, np.int32), Namespace()
    pages = [np.array([page], np.int32) for page in range(PAGES)]
    peaks: list[int] = []
    for number in range(REQUESTS):
        page = pages[number % PAGES]
        if number >= PAGES:
            times.see(Evicted(page, "pressure"))
        times.see(Stored(number, space, -1, page, tokens))
        if (number + 1) % (REQUESTS // 2) == 0:
            times.snapshot()
            peaks.append(len(times._own) + len(times._waiting))
    assert peaks[1] <= peaks[0]
