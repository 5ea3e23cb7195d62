"""What a server remembers of requests has a bound: many that have nothing in common, then more.

The parts are those of a server, without a model and without HTTP: the cache, its hooks, what-if
curves, everybody who is told of requests. Their bounds are made small, so that they are soon
reached; with ``KVKEEP_GROWTH=long`` they are as they ship, and 200,000 requests come.
"""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import pytest

from kvkeep import Namespace, PagedCache
from kvkeep.observe.usage import (
    Notifier,
    PromptComputed,
    RequestAdmitted,
    RequestBegun,
    RequestEnded,
    RequestOrigin,
    RequestRecord,
)
from kvkeep.serve.server.metrics import ServerMetrics
from kvkeep.serve.server.service import Watching

LONG = os.environ.get("KVKEEP_GROWTH") == "long"
REQUESTS = 200_000 if LONG else 2_000
# Blocks of memory below 512 bytes: those of twenty requests of which everything is remembered.
SLACK = 20_000 if LONG else 600


@pytest.fixture(autouse=True)
def _small_bounds(monkeypatch):
    if LONG:
        return
    for where, most in (
        ("kvkeep.observe.usage.history._MOST_TIMES", 100),
        ("kvkeep.core.cache.sessions._MOST_SESSIONS", 100),
    ):
        monkeypatch.setattr(where, most)


class Served:
    """A cache and all that a server has watch it."""

    def __init__(self) -> None:
        self.cache = PagedCache(64, 16, what_if=0.1)
        self.watching = Watching(self.cache)
        self.metrics = ServerMetrics(self.watching.usage)
        if not LONG:
            self.watching.usage._most = self.watching.tenants._most = 100
        self.notifier = Notifier(*self.watching.start())
        explainer = self.watching.explainer
        assert explainer is not None
        self.explainer = explainer
        if not LONG:
            explainer.requests, explainer.history.most_tokens = 50, 4_000
        self._rng = np.random.default_rng(0)
        self._number = 0

    def serve(self, count: int, *, salts: bool) -> None:
        """So many requests of 40 tokens, each with a salt and a session of its own, or none."""
        for _ in range(count):
            self._number += 1
            tokens = self._rng.integers(10, 4000, 40).astype(np.int32)
            own = f"{self._number}"
            space = Namespace(tenant=own if salts else "", model="m")
            session = own if salts else None
            origin = RequestOrigin(f"cmpl-{own}", "completions")
            request = RequestRecord(origin, tokens, space, session)
            emit = self.notifier.emit
            emit(RequestBegun(request))
            sequence = self.cache.open(tokens, space, session=session)
            emit(RequestAdmitted(request, sequence.id, sequence.num_cached, miss=sequence.miss))
            sequence.copies()
            sequence.publish()
            sequence.close()
            emit(PromptComputed(request, len(tokens), 0.001))
            self.metrics.note_first_token(0.1, prompt_tokens=40, reused_tokens=0)
            emit(RequestEnded(request, "done", 1, 0.1, 0.2))
            assert not self.notifier.errors
            if self._number % 500 == 0:
                self.settle()

    def settle(self) -> int:
        """Work off what waits, as /metrics and the explainer's thread do; blocks in use."""
        self.explainer.recent(0)
        self.cache.stats()
        gc.collect()
        return sys.getallocatedblocks()


@pytest.mark.parametrize("salts", [False, True])
def test_requests_that_have_nothing_in_common_take_no_more_memory(salts):
    served = Served()
    try:
        served.serve(REQUESTS // 2, salts=salts)
        half = served.settle()
        served.serve(REQUESTS // 2, salts=salts)
        whole = served.settle()
        assert served.explainer.history.tokens <= served.explainer.history.most_tokens
        assert whole - half < SLACK, f"{whole - half:,} blocks more than at {REQUESTS // 2:,}"
    finally:
        served.watching.close()
