"""What a server remembers of requests has a bound: many that have nothing in common, then more.

The parts are those of a server, without a model and without HTTP: the cache, its hooks, what-if
curves, everybody who is told of requests. Their bounds are made small, so that they are soon
reached; with ``KVKEEP_GROWTH=long`` they are as they ship, and 200,000 requests come.
"""

from __future__ import annotations

import gc
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kvkeep import Namespace, PagedCache
from kvkeep.serve.server import figures
from kvkeep.serve.server.metrics import ServerMetrics
from kvkeep.serve.server.watching import Watching
from kvkeep.serve.server.worker import Call

LONG = os.environ.get("KVKEEP_GROWTH") == "long"
REQUESTS = 200_000 if LONG else 3_000
# Blocks of memory below 512 bytes: those of twenty requests of which everything is remembered.
SLACK = 20_000 if LONG else 600


@pytest.fixture(autouse=True)
def _small_bounds(monkeypatch):
    if LONG:
        return
    for where, most in (
        ("kvkeep.observe.telemetry.evictions._MOST_OPEN", 100),
        ("kvkeep.observe.explain.explainer._MOST_NAMESPACES", 100),
        ("kvkeep.observe.explain.ledger._SLACK", 100),
        ("kvkeep.core.cache.sessions._MOST_SESSIONS", 100),
    ):
        monkeypatch.setattr(where, most)
    for name in ("_MOST_TENANTS", "_MOST_SESSIONS", "_MOST_TIMES"):
        monkeypatch.setattr(figures, name, 100)


class Served:
    """A cache and all that a server has watch it."""

    def __init__(self) -> None:
        self.cache = PagedCache(64, 16, what_if=0.1)
        self.metrics = ServerMetrics()
        self.metrics.watch(self.cache)
        if not LONG:
            self.metrics.reuse._shares._most = 100
        self.watching = Watching(self.cache, explain=True, model="m", watches=[self.metrics.reuse])
        self.watching.start()
        explainer = self.watching.explainer
        assert explainer is not None
        self.explainer = explainer
        if not LONG:
            explainer._most_requests = 50
            explainer._mirror.ledger.units = 400
            explainer._mirror.prompts.most_tokens = 4_000
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
            request = SimpleNamespace(
                id=self._number, prompt=tokens, namespace=space, session=session, turn=None,
                store=True, prompt_tokens=len(tokens), cached_tokens=0,
            )  # fmt: skip
            self.watching.begin(request, f"cmpl-{own}", Call(f"cmpl-{own}", "completions", {}))
            sequence = self.cache.open(tokens, space, session=session)
            self.watching.admitted(request, sequence, 0.0)
            sequence.copies()
            sequence.publish()
            sequence.close()
            self.watching.computed(request, len(tokens), 0.001)
            self.watching.figures.note_first_token(0.1, prompt_tokens=40, reused_tokens=0)
            done = SimpleNamespace(choices=[SimpleNamespace(tokens=(1,))], ttft_s=0.1, seconds=0.2)
            self.watching.came(SimpleNamespace(request=request, tokens=(1,), completion=done))
            if self._number % 500 == 0:
                self.settle()

    def settle(self) -> int:
        """Work off what waits, as /metrics and the explainer's thread do; blocks in use."""
        self.explainer.recent(0)
        self.cache.stats()
        assert self.metrics._times is not None
        self.metrics._times.snapshot()
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
        assert served.explainer.forgotten > REQUESTS // 4
        assert whole - half < SLACK, f"{whole - half:,} blocks more than at {REQUESTS // 2:,}"
    finally:
        served.watching.close()
