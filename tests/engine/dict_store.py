"""A store that is a dictionary with the interface of `kvkeep.store.KVStore`, and engines over it.

It can be made slow, or to hang, drop and forget.
"""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import NamedTuple

from kvkeep.core.cost import CostModel
from kvkeep.core.keys import Namespace
from kvkeep.serve.engine import Engine, Limits, SamplingParams
from kvkeep.store.identity import is_loaded

PAGE = 4
BLOCK = 8


class Put(NamedTuple):
    tokens: int
    skipped: int
    dropped: int


class Lookup(NamedTuple):
    tokens: int
    tiers: tuple[tuple[str, int], ...]


class Prefetch:
    def __init__(self, store, tokens):
        self._store, self._ready = store, tokens
        self._began = time.monotonic()

    @property
    def done(self):
        store = self._store
        return not store.hung.is_set() and time.monotonic() - self._began >= store.fetch_seconds

    def wait(self, timeout=None):
        return self._ready if self.done else 0

    def cancel(self):
        self._store.cancelled += 1


class DictStore:
    """An exact store in memory, without tiers: (tenant, all tokens up to a block's end) → KV."""

    snapshots = False
    tiers = ("memory", "dict")

    def __init__(self, geometry, *, block_tokens=BLOCK, layout="NHD"):
        self.geometry, self.block_tokens, self.layout = geometry, block_tokens, layout
        self.namespace = Namespace(model="tiny", dtype=geometry.dtype)
        self.blocks = {}
        self.written = 0  # tokens of all puts
        self.fetch_seconds = self.block_seconds = 0.0  # before the first block, and before each
        self.reads = 0  # blocks delivered
        self.holes = set()  # beginnings of blocks that do not come
        self.cost = CostModel()
        self.hung = threading.Event()
        self.lookups_hang = threading.Event()
        self.drops = False
        self.ends = []  # tokens of answers, and how they ended
        self.cancelled = self.touched = self.told_of = 0
        self._at = 1 if geometry.latent_dim is not None else 3 if layout == "HND" else 2

    def bind(self, identity):
        assert is_loaded(identity)

    def _ends(self, tenant, tokens):
        """The ends of consecutive stored blocks from the beginning of ``tokens``."""
        at, size = 0, self.block_tokens
        while (tenant, tokens[: at + size].tobytes()) in self.blocks and at + size <= len(tokens):
            at += size
            yield at
        for end in range(min(at + size - 1, len(tokens)), at, -1):
            if (tenant, tokens[:end].tobytes()) in self.blocks:
                yield end
                return

    def put(self, tokens, kv, start=0, *, wait=False, tail=False, exact=None, tenant=None):
        assert exact is None
        assert isinstance(tenant, str)
        assert start % self.block_tokens == 0
        assert kv.shape[self._at] == len(tokens) - start
        assert tail or (len(tokens) - start) % self.block_tokens == 0
        count = len(tokens) - start
        self.written += count
        if self.drops:
            return Put(0, 0, count)
        for at in range(start, len(tokens), self.block_tokens):
            stop = min(at + self.block_tokens, len(tokens))
            part = kv.narrow(self._at, at - start, stop - at).clone()
            self.blocks.setdefault((tenant, tokens[:stop].tobytes()), part)
        return Put(count, 0, 0)

    def lookup(self, tokens, *, tenant=None):
        while self.lookups_hang.is_set():
            time.sleep(0.001)
        found = max(self._ends(tenant, tokens), default=0)
        return Lookup(found, (("dict", found),) if found else ())

    def touch(self, tokens, *, tenant=None):
        self.touched += 1

    def worth(self, answer, *, ended=None, first=None, tenant=None):
        return answer

    def ended(self, tokens, *, prompt, ended, tenant=None):
        assert 0 < prompt <= len(tokens)
        self.ends.append((len(tokens) - prompt, ended))

    def unkept(self, tokens, start=0, *, tenant=None):
        self.told_of += len(tokens) - start

    def prefetch(self, tokens, start=0, *, tenant=None):
        return Prefetch(self, self.lookup(tokens, tenant=tenant).tokens)

    def get(self, tokens, start=0, *, deadline=None, tenant=None, sink, pays=False):
        until = None if deadline is None else time.monotonic() + deadline
        at = start
        if pays:
            return None, 0
        self._wait(self.fetch_seconds, until)
        for begin, stop in pairwise([0, *self._ends(tenant, tokens)]):
            if stop <= start:
                continue
            self._wait(self.block_seconds, until)
            if (until is not None and time.monotonic() >= until) or begin in self.holes:
                break
            kv = self.blocks[tenant, tokens[:stop].tobytes()]
            first = max(begin, start)
            at, self.reads = stop, self.reads + 1
            if not sink(first, stop, kv.narrow(self._at, first - begin, stop - first), "dict"):
                break
        return None, at - start

    def _wait(self, seconds, until):
        ends = time.monotonic() + seconds
        while time.monotonic() < ends or self.hung.is_set():
            if until is not None and time.monotonic() >= until:
                break
            time.sleep(0.0005)

    def flush(self, timeout=None):
        return True


class Watched:
    """Wraps a runner and counts the tokens it computes."""

    def __init__(self, runner):
        self._runner = runner
        self.computed = 0
        self.steps = 0

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def forward(self, pieces):
        self.computed += sum(len(piece.tokens) for piece in pieces)
        self.steps += 1
        return self._runner.forward(pieces)


class House:
    """A model, a store that stays, and engines with fresh pools that come and go."""

    def __init__(self, bench, *, num_pages=96, **store):
        self.bench, self.num_pages = bench, num_pages
        self.store = DictStore(bench.runner.geometry, **store)

    def engine(self, *, cache=None, load_timeout=5.0, **limits):
        """An engine; pages unknown to its ``cache`` hold values that would change results."""
        if cache is None:
            self.bench.spoil()
        runner = Watched(self.bench.runner)
        cache = cache or runner.cache()
        engine = Engine(
            runner, cache, limits=Limits(**limits), store=self.store, load_timeout=load_timeout
        )
        return engine, runner

    def ask(self, *prompts, params=None, **how):
        """Return what a new engine answers to all prompts at once; checks and closes it."""
        add = {key: how.pop(key) for key in ("namespace", "store") if key in how}
        engine, runner = self.engine(**how)
        requests = [engine.add(prompt, params or few(6), **add) for prompt in prompts]
        done = finish(engine)
        assert engine.close(10)
        engine.cache.check()
        assert engine.cache.stats().sequences == 0
        return [done[request.id] for request in requests], runner, engine.stats()


def few(count, **more):
    return SamplingParams(max_tokens=count, **more)


def finish(engine):
    """Step until no request is left; return the completions by request id."""
    done = {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            if delta.completion is not None:
                done[delta.request.id] = delta.completion
    return done
