"""What a hook calls while another thread is inside any method: it never waits for that thread.

A hook runs under the cache's lock. The other thread is stopped wherever it takes that lock or has
just let go of it, whatever other locks it holds there; then a request is served, and its hook
calls the method in question. If that does not return, the two would wait for each other for ever.
"""

from __future__ import annotations

import faulthandler
import inspect
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kvkeep import NotCached, PagedCache, Pin
from kvkeep.core.cache import Sequence, inspector
from kvkeep.core.cache.sessions import Session
from kvkeep.core.events import Closed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGES, SIZE = 150, 1
RUNS = 40
STEP = 16  # runs looked at under the lock at a time: a look takes several steps
TIMEOUT = 20.0
STOPS = 4  # of a call: where it is stopped, from its first use of the lock on

Call = tuple[str, "Callable[[Stage], object]"]


class Stage:
    """What one thread calls methods on: the cache, and objects that nobody else uses."""

    def __init__(self, cache: PagedCache, base: int) -> None:
        self.cache = cache
        self.prompt = [1, 2, base, base + 1]
        self.session = cache.session(f"session {base}")
        self.store()

    def store(self) -> None:
        with self.open() as sequence:
            sequence.publish()

    def open(self) -> Sequence:
        sequence = self.cache.open(self.prompt, session=self.session.id)
        sequence.copies()
        return sequence

    def pin(self) -> Pin:
        return self.cache.pin(self.prompt)

    def on_node(self, do: Callable[[int], object]) -> None:
        """Do it to a small run; what else happens meanwhile may evict that."""
        with suppress(NotCached):
            do(max(one.id for one in self.cache.map().nodes))


def unpin(stage: Stage) -> None:
    stage.cache.unpin(stage.pin())


def on_pin(do: Callable[[Pin], object], stage: Stage) -> None:
    pin = stage.pin()
    do(pin)
    stage.cache.unpin(pin)


def remove(stage: Stage) -> None:
    """Of a prompt that begins as no other does: all that begins alike goes with it."""
    own = [1000 + token for token in stage.prompt[2:]] * 2
    with stage.cache.open(own) as sequence:
        sequence.publish()
    stage.cache.remove(own)


def subscribe(stage: Stage) -> None:
    stage.cache.subscribe(lambda event: None)()


def pin_node(stage: Stage) -> None:
    stage.on_node(lambda node: stage.cache.pin_node(node, ttl=100))
    stage.on_node(stage.cache.unpin_node)


def on_sequence(do: Callable[[Sequence], object], stage: Stage) -> None:
    with stage.open() as sequence:
        do(sequence)


def fork(sequence: Sequence) -> None:
    with sequence.fork() as other:
        other.append([5, 6])
        other.copies()
        other.publish()


ARGUMENTS: dict[str, Callable[[Stage], object]] = {
    "PagedCache.open": lambda stage: stage.open().close(),
    "PagedCache.match": lambda stage: stage.cache.match(stage.prompt),
    "PagedCache.evict": lambda stage: stage.cache.evict(1),
    "PagedCache.clear": lambda stage: stage.cache.clear("nobody's"),
    "PagedCache.remove": remove,
    "PagedCache.bind": lambda stage: stage.cache.bind(stage.cache),
    "PagedCache.pin": unpin,
    "PagedCache.unpin": unpin,
    "PagedCache.pin_node": pin_node,
    "PagedCache.unpin_node": pin_node,
    "PagedCache.evict_below": lambda stage: stage.on_node(stage.cache.evict_below),
    "PagedCache.node": lambda stage: stage.on_node(stage.cache.node),
    "PagedCache.map": lambda stage: stage.cache.map(),
    "PagedCache.session": lambda stage: stage.cache.session("another"),
    "PagedCache.subscribe": subscribe,
    "Sequence.append": partial(on_sequence, lambda sequence: sequence.append([1, 2])),
    "Sequence.truncate": partial(on_sequence, lambda sequence: sequence.truncate(1)),
    "Sequence.fork": partial(on_sequence, fork),
    "Session.suspend": lambda stage: stage.session.suspend(5.0),
}
"""How to call what needs arguments, or something of its own. All else is called without any."""
INTERNAL = {f"Sequence.{name}" for name in ("adopt", "belong", "check", "claims", "hold")}


def public(kind: type) -> Iterator[str]:
    for name, member in inspect.getmembers(kind):
        known = not name.startswith("_") or name == "__repr__"
        if known and (callable(member) or isinstance(member, property)):
            yield name


def calls() -> Iterator[Call]:
    """Every public method and property of what a cache and its users hold."""
    reach: dict[type, Callable[[Callable[[Any], object], Stage], object]] = {
        PagedCache: lambda do, stage: do(stage.cache),
        Sequence: on_sequence,
        Session: lambda do, stage: do(stage.session),
        Pin: on_pin,
    }
    for kind, on in reach.items():
        for name in public(kind):
            full = f"{kind.__name__}.{name}"
            if full in INTERNAL:
                continue

            def plain(target: Any, name: str = name) -> object:
                member = getattr(target, name)
                return member() if callable(member) else member

            yield full, ARGUMENTS.get(full, partial(on, plain))


CALLS = dict(calls())


class Lock:
    """The cache's lock, which tells of every moment at which its user does not hold it."""

    def __init__(self, free: Callable[[], None]) -> None:
        self._lock = threading.RLock()
        self._free = free
        self._depth = threading.local()

    def acquire(self) -> bool:
        depth = getattr(self._depth, "now", 0)
        if not depth:
            self._free()
        self._depth.now = depth + 1
        return self._lock.acquire()

    def release(self) -> None:
        self._lock.release()
        self._depth.now -= 1
        if not self._depth.now:
            self._free()


class Play:
    """One thread calls ``outer``; each time it is stopped, another's hook calls ``inner``."""

    def __init__(self) -> None:
        self.outer_thread = 0
        self.stops = 0
        self.closing = 0
        self.inner: Callable[[Stage], object] | None = None
        self.called = 0
        self.errors: list[BaseException] = []
        self.cache = PagedCache(PAGES, SIZE, what_if=0.5)
        self.fill()
        self.mine, self.others = Stage(self.cache, 100), Stage(self.cache, 200)
        self.core = self.cache._core
        self.core._lock = Lock(self.stop)  # type: ignore[assignment]
        self.cache.subscribe(self.hook)

    def fill(self) -> None:
        for i in range(RUNS):
            with self.cache.open([1, i + 1000]) as sequence:
                sequence.copies()
                sequence.publish()

    def run(self, outer: Callable[[Stage], object], inner: Callable[[Stage], object]) -> int:
        """How often ``inner`` was called."""
        if self.cache.stats().pages_cached < RUNS:
            self.fill()
        self.mine.store()
        self.others.store()
        self.called, self.stops, self.inner = 0, 0, inner
        self.outer_thread = threading.get_ident()
        try:
            with suppress(NotCached):  # the hook may have evicted it
                outer(self.mine)
        finally:
            self.outer_thread = 0
            self.inner = None
        if self.errors:
            raise self.errors.pop()
        return self.called

    def stop(self) -> None:
        """The thread of ``outer`` does not hold the cache's lock: now the hook has its turn."""
        if threading.get_ident() != self.outer_thread or self.stops >= STOPS:
            return
        self.stops += 1
        thread = threading.Thread(target=self.serve, daemon=True)
        thread.start()
        thread.join(TIMEOUT)
        if thread.is_alive():
            faulthandler.dump_traceback()
            raise AssertionError("a hook waits for a thread that waits for the cache")

    def serve(self) -> None:
        try:
            sequence = self.cache.open([7, 8])
            self.closing = sequence.id
            sequence.close()
        except BaseException as error:  # noqa: BLE001 - the test raises it again
            self.errors.append(error)

    def hook(self, event: object) -> None:
        # Only this one: what `inner` does is told to this hook, too.
        if self.inner is not None and isinstance(event, Closed) and event.sequence == self.closing:
            self.called += 1
            try:
                self.inner(self.others)
            except BaseException as error:  # noqa: BLE001 - the cache would only count it
                self.errors.append(error)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("inner", CALLS)
def test_a_hook_may_call_anything_while_a_thread_is_inside_anything(
    inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspector, "_STEP", STEP)
    play = Play()
    for name, outer in CALLS.items():
        try:
            called = play.run(outer, CALLS[inner])
        except AssertionError as error:
            raise AssertionError(f"{inner} in a hook, {name} in a thread: {error}") from error
        assert called or name in LOCKLESS, f"{name} never let the hook run"
    play.cache.check()


LOCKLESS = {
    "PagedCache.__repr__", "PagedCache.policy", "PagedCache.session",
}  # fmt: skip


def test_every_public_method_is_called() -> None:
    """One that is added is called without arguments, or fails here until it is told how."""
    assert ARGUMENTS.keys() <= CALLS.keys()
    assert {"PagedCache.map", "Sequence.publish", "Session.close", "Pin.num_tokens"} <= CALLS.keys()
    stage = Stage(PagedCache(64, SIZE, what_if=0.5), 100)
    for call in CALLS.values():
        with stage.open() as sequence:
            sequence.publish()
        call(stage)
