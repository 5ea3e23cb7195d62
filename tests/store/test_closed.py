"""A closed store says so, whatever it is asked; and so does one that is closed meanwhile."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from snapshot_kv import open_snapshots, same, snapshot
from store_kv import GQA, disk, given, numbers, open_store, put

from kvkeep.core.errors import IllegalStep
from kvkeep.core.keys import Namespace, space_of
from kvkeep.store import BlockStore, KVStore, Prefetch
from kvkeep.store.tiers import BlockPrefetch, TieredStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOKENS = list(range(16))
KEYS = [bytes([number]) * 32 for number in range(4)]
BLOCKS = [bytes([number]) * 100 for number in range(4)]
SPACE = space_of(Namespace())
IDS = [SPACE + key for key in KEYS]


def kv() -> Any:
    return given(GQA, numbers(GQA, TOKENS))


def fill(at: int, raw: memoryview) -> None:
    raw[:] = BLOCKS[at]


# What each public method is called with. One that is not here fails the test below: whoever adds a
# method says what it does when the store is closed.
CALLS: dict[type, dict[str, Callable[[Any], object]]] = {
    KVStore: {
        "bind": lambda s: s.bind("loaded-" + "0" * 40),
        "put": lambda s: s.put(TOKENS, kv()),
        "get": lambda s: s.get(TOKENS),
        "worth_loading": lambda s: s.worth_loading(TOKENS),
        "lookup": lambda s: s.lookup(TOKENS),
        "why": lambda s: s.why(TOKENS),
        "keep_until": lambda s: s.keep_until(TOKENS, 3),
        "unkept": lambda s: s.unkept(TOKENS),
        "ended": lambda s: s.ended(TOKENS, prompt=3),
        "worth": lambda s: s.worth(3),
        "touch": lambda s: s.touch(TOKENS),
        "prefetch": lambda s: s.prefetch(TOKENS),
        "pin": lambda s: s.pin(TOKENS, 1.0),
        "unpin": lambda s: s.unpin(TOKENS),
        "remove": lambda s: s.remove(TOKENS),
        "clear": lambda s: s.clear(),
        "flush": lambda s: s.flush(1.0),
        "__enter__": lambda s: s.__enter__(),
    },
    BlockStore: {
        "put": lambda s: s.put(KEYS, BLOCKS),
        "write": lambda s: s.write(KEYS, [100] * 4, fill),
        "get": lambda s: s.get(KEYS, [memoryview(bytearray(100)) for _ in KEYS]),
        "read": lambda s: s.read(KEYS, [100] * 4, lambda at, raw: None),
        "prepare_reads": lambda s: s.prepare_reads(100),
        "lookup": lambda s: s.lookup(KEYS),
        "lookup_each": lambda s: s.lookup_each(KEYS),
        "knows": lambda s: s.knows(KEYS),
        "unknown": lambda s: s.unknown(KEYS),
        "sources": lambda s: s.sources(KEYS),
        "own_bytes": lambda s: s.own_bytes(),
        "must_ask": lambda s: s.must_ask,
        "pin": lambda s: s.pin(KEYS, 1.0),
        "pin_memory": lambda s: s.pin_memory(),
        "returns": lambda s: s.returns(16),
        "replay": lambda s: s.replay([]),
        "remove": lambda s: s.remove(KEYS),
        "clear": lambda s: s.clear(),
        "flush": lambda s: s.flush(1.0),
        "__enter__": lambda s: s.__enter__(),
    },
    TieredStore: {
        "locate": lambda s: s.locate(IDS),
        "locate_each": lambda s: s.locate_each(IDS),
        "known": lambda s: s.known(IDS),
        "holders": lambda s: s.holders(IDS),
        "losses_of": lambda s: s.losses_of(IDS),
        "bytes_of": lambda s: s.bytes_of(space_of(Namespace())),
        "read": lambda s: s.read(IDS, [100] * 4, lambda at, raw: None),
        "relearn": lambda s: s.relearn(IDS, [100] * 4, 1),
        "prepare_reads": lambda s: s.prepare_reads(100),
        "write": lambda s: s.write(IDS, [100] * 4, fill),
        "prefetch": lambda s: s.prefetch(lambda: (IDS, [100] * 4)),
        "used": lambda s: s.used(IDS),
        "pins": lambda s: s.pins,
        "remove": lambda s: s.remove(IDS),
        "supersede": lambda s: s.supersede(IDS),
        "clear": lambda s: s.clear(SPACE),
        "set_quota": lambda s: s.set_quota(SPACE, 1 << 20),
        "announce": lambda s: s.announce(SPACE, "a"),
        "expect": lambda s: s.expect(SPACE),
        "flush": lambda s: s.flush(1.0),
        "check_open": lambda s: s.check_open(),
    },
    Prefetch: {
        "tokens": lambda h: h.tokens,
        "sources": lambda h: h.sources,
        "wait": lambda h: h.wait(5.0),
    },
    BlockPrefetch: {
        "ready": lambda h: h.ready,
        "sources": lambda h: h.sources,
        "wait": lambda h: h.wait(5.0),
    },
}
# What a closed store still tells, or does: nothing of it finds, moves or deletes a block.
ANSWERS: dict[type, set[str]] = {
    KVStore: {"close", "stats", "check", "tiers", "snapshots"},
    BlockStore: {"close", "stats", "check"},
    TieredStore: {"close", "stats", "check", "inherited"},
    Prefetch: {"done", "cancel", "start"},
    BlockPrefetch: {"done", "cancel"},
}


# What needs a store of snapshots, which has a test of its own.
SNAPSHOTS: dict[type, set[str]] = {KVStore: {"put_snapshot", "get_snapshot", "window_start"}}


def opened(kind: type, path: Path) -> tuple[Any, Callable[[], object]]:
    """An object of that kind over a store with blocks, and what closes the store."""
    tiers = ["memory://1MiB", disk(path / "d")]
    if kind in (KVStore, Prefetch):
        store = open_store(*tiers)
        put(store, TOKENS, wait=True)
        return (store.prefetch(TOKENS) if kind is Prefetch else store), store.close
    blocks = BlockStore(Namespace(), tiers=tiers)
    blocks.put(KEYS, BLOCKS, wait=10.0)
    if kind is BlockStore:
        return blocks, blocks.close
    if kind is TieredStore:
        return blocks._tiered, blocks.close
    return blocks._tiered.prefetch(lambda: (blocks._named(KEYS), [100] * 4)), blocks.close


@pytest.mark.parametrize("kind", CALLS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_every_method_of_a_closed_store_says_so(kind: type, tmp_path: Path) -> None:
    public = {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}
    public |= {"__enter__"} if hasattr(kind, "__enter__") else set()
    public -= SNAPSHOTS.get(kind, set())
    assert public == {*CALLS[kind], *ANSWERS[kind]}, "say what a new method does once it is closed"
    one, close = opened(kind, tmp_path)
    for name, call in CALLS[kind].items():
        if name not in ("remove", "clear", "supersede"):  # the others need something to find
            call(one)
    close()
    close()
    for name, call in CALLS[kind].items():
        with pytest.raises(IllegalStep, match="closed"):
            pytest.fail(f"{name} answers {call(one)!r}")
    for name in ANSWERS[kind]:
        value = getattr(one, name)
        if callable(value):
            value()
    with BlockStore(Namespace(), tiers=[disk(tmp_path / "d")]) as again:
        assert kind in (KVStore, Prefetch) or again.knows(KEYS) == 4, "nothing was deleted"


@pytest.mark.parametrize("kind", [KVStore, BlockStore, TieredStore], ids=lambda k: k.__name__)
def test_every_method_is_right_or_says_so_while_another_thread_closes(
    kind: type, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """No answer is a miss only because the store was closed meanwhile."""
    finds: dict[str, Callable[[Any], object]] = {
        "get": lambda n: n[1] if isinstance(n, tuple) else n,
        "lookup": lambda n: n if isinstance(n, int) else n.tokens,
        "read": lambda n: n if isinstance(n, int) else n.blocks, "knows": int, "known": len,
        "locate": len,
    }  # fmt: skip
    names = [name for name in CALLS[kind] if name not in ("remove", "clear", "supersede")]
    wrong: list[str] = []
    interval = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    sys.setswitchinterval(1e-4)  # threads change places within a method
    for number, name in enumerate(names):
        one, close = opened(kind, tmp_path / str(number))
        want = finds[name](CALLS[kind][name](one)) if name in finds else None
        going = threading.Event()

        def ask(one: Any = one, name: str = name, want: object = want, go: Any = going) -> None:
            for _ in range(100_000):
                try:
                    answer = CALLS[kind][name](one)
                except IllegalStep:
                    return
                except BaseException as error:  # noqa: BLE001 - it is told below
                    wrong.append(f"{name}: {error!r}")
                    return
                if name in finds and finds[name](answer) != want:
                    wrong.append(f"{name}: {answer!r:.80} instead of {want}")
                    return
                go.set()
            wrong.append(f"{name} does not say that the store is closed")

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        going.wait(10)
        time.sleep(0.005)
        close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), name
    assert not wrong, wrong


def test_a_store_of_snapshots_is_right_or_says_that_it_is_closed(tmp_path: Path) -> None:
    store = open_snapshots("all", "memory://1MiB", disk(tmp_path / "d"))
    given = snapshot(store, TOKENS)
    store.put_snapshot(TOKENS, given, wait=True)
    going, wrong = threading.Event(), []

    def ask() -> None:
        try:
            while (found := store.get_snapshot(TOKENS)) is not None and same(found, given):
                assert store.lookup(TOKENS).tokens == 16
                going.set()
            wrong.append(found)
        except IllegalStep:
            return

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert going.wait(10)
    store.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not wrong
    for call in (lambda: store.put_snapshot(TOKENS, given), lambda: store.get_snapshot(TOKENS),
                 lambda: store.pin(TOKENS, 1.0), lambda: store.remove(TOKENS),
                 lambda: store.touch(TOKENS), lambda: store.why(TOKENS)):  # fmt: skip
        with pytest.raises(IllegalStep, match="closed"):
            call()
    assert store.window_start(0, 16) == 0


def test_who_waits_for_a_prefetch_hears_that_the_store_is_closed(tmp_path: Path) -> None:
    store = open_store("memory://1MiB", disk(tmp_path / "d"))
    put(store, TOKENS, wait=True)
    handle = store.prefetch(TOKENS)
    assert handle.wait(5) == 16
    store.close()
    assert handle.done
    with pytest.raises(IllegalStep, match="closed"):
        handle.wait(1)


@pytest.mark.parametrize("kind", [KVStore, BlockStore, TieredStore], ids=lambda k: k.__name__)
def test_a_forked_process_is_told_to_open_a_store_of_its_own(kind: type, tmp_path: Path) -> None:
    """It has no thread that would write or read; sockets and queues are its parent's."""
    one, close = opened(kind, tmp_path)
    shared: dict[str, Any] = {"tiers": ["memory://1MiB", disk(tmp_path / "d")]}

    def ask() -> None:
        for name, call in CALLS[kind].items():
            with pytest.raises(IllegalStep, match="forked"):
                pytest.fail(f"{name} answers {call(one)!r}")
        assert one.close()
        assert one.stats()
        with KVStore(GQA, model="a@1", **shared) as mine:
            put(mine, range(256))
            assert mine.flush(20.0)

    assert forked(ask) == ""
    assert close()
    with KVStore(GQA, model="a@1", **shared) as again:
        assert again.lookup(range(256)).tokens == 256


def forked(ask: Callable[[], None]) -> str:
    """What went wrong when a forked process called ``ask``."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads: the subject
        process = os.fork()
    if not process:
        said = ""
        try:
            ask()
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            said = f"{error!r}" or "an error"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    os.waitpid(process, 0)
    return said
