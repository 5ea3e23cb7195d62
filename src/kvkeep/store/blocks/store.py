"""BlockStore: opaque bytes under block keys, over the same tiers as `KVStore`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, check_type, listed, told, whole
from kvkeep.core.keys import KEY_BYTES, as_namespace, space_of
from kvkeep.store.blocks.base import Store, closed_is_illegal, runs_of, seconds_of
from kvkeep.store.blocks.returns import BlockReturns
from kvkeep.store.tiers import PROMPT_TOKENS, note_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.cost import CostModel
    from kvkeep.core.keys import NamespaceLike
    from kvkeep.store.backends import Backend
    from kvkeep.store.tiers import Removed, ReturnNotes, TieringPolicy, TierStats

__all__ = ["BlockStore"]


class BlockStore(Store):
    """Opaque bytes under 32-byte keys, for engines that move whole pages of KV.

    A key must stand for the bytes and everything they depend on, as the keys of
    `kvkeep.core.keys.chain_keys` do. The namespace separates what must never be mixed. Only codecs
    that do not interpret the bytes can be used: raw and lossless, encrypted or not.

    A failing tier is a miss, as in `KVStore`. Several methods take a sequence of keys and process
    its leading part: they stop at the first key that is missing, or finds no room, and return the
    number of keys before it.

    Args:
        namespace: what the keys belong to; another namespace never finds these blocks.
        tiers: URLs, fastest first, or backends; see `KVStore`.
        policy: decides which blocks move to which tier; `kvkeep.store.tiers.Inclusive` by default.
        cost: what loading and computing take, as far as it is known; it learns from here on. An
            engine that uses the same object learns it, too. A new one by default.
        token_bytes: bytes of the KV of a token, if known: they size the buffer that is put in front
            of tiers without memory, as in `KVStore`; else it has 256 MiB.

    Raises:
        InvalidValue: an argument is wrong; nothing stays open.

    Notes
    -----
    Thread safety: all methods. After the store is closed, also by another thread during a call,
    all methods raise `IllegalStep`, except `close`, `stats` and `check`.

    Cost: a few µs a block, and one copy each way. With `write` and `read` the caller makes that
    copy, from and to any memory.
    """

    def __init__(
        self,
        namespace: NamespaceLike,
        *,
        tiers: Sequence[str | Backend] = ("memory://1GiB",),
        policy: TieringPolicy | None = None,
        cost: CostModel | None = None,
        token_bytes: int = 0,
    ) -> None:
        self.namespace = as_namespace(namespace)
        self._space = space_of(self.namespace)
        super().__init__(
            tiers, policy, cost, unit="blocks", notes={self._space: note_of(self.namespace)},
            prompt_bytes=PROMPT_TOKENS * whole("token_bytes", token_bytes, 0),
        )  # fmt: skip
        self._tiered.expect(self._space)

    def pin_memory(self) -> None:
        """Page-lock the memory of the first tier until `close`, so that a GPU copies at full speed.

        All of that memory is allocated now. Does nothing without CUDA, or where CUDA refuses.
        """
        self._tiered.check_open()
        self._pin_memory()

    def put(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview | bytes],
        *,
        wait: float | None = None,
    ) -> int:
        """Store each of ``buffers`` under its key; return how many leading blocks are stored now.

        Blocks that are stored already count and are skipped; those that are stored with another
        length are replaced. With ``wait``, return when the slower
        tiers have written the blocks, or after that many seconds.

        Raises:
            InvalidValue: the numbers of keys and buffers differ, a key is not 32 bytes, or a buffer
                is empty.
        """
        views = _views(buffers, _count("keys", keys))

        def fill(at: int, raw: memoryview) -> None:
            raw[:] = views[at]

        return self.write(keys, [len(view) for view in views], fill, wait=wait)

    def write(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        fill: Callable[[int, memoryview], None],
        *,
        wait: float | None = None,
    ) -> int:
        """Store blocks as `put` does; ``fill(i, raw)`` writes the ``sizes[i]`` bytes of block i.

        ``fill`` is called in this thread, before this returns, for blocks that are not stored yet.
        If it raises, the exception is passed on and that block is not stored.
        """
        began = self._begin()
        blocks = self._blocks(keys)
        sizes = _sizes(sizes, len(blocks))
        check_type("fill", fill, Callable, "a function that fills a block")
        if wait is not None:
            wait = seconds_of("wait", wait)
        with closed_is_illegal():
            written = self._tiered.write(blocks, sizes, fill, wait=wait)
        if began:
            kept, size = len(written.kept), sum(sizes[at] for at in written.kept)
            tiers = [(self._tiered.memory.name, kept)] if kept else []
            self._log(began, "put", asked=len(keys), moved=kept, size=size, tiers=tiers)
        return len(written.kept) + len(written.already)

    def get(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], *, deadline: float | None = None
    ) -> int:
        """Copy blocks into ``buffers`` of their lengths; return how many leading ones were read.

        The content of the other buffers is undefined. After ``deadline`` seconds, blocks that have
        not arrived are missing.

        Raises:
            InvalidValue: as `put`; or a buffer is read-only.
        """
        views = _views(buffers, _count("keys", keys))
        if any(view.readonly for view in views):
            raise InvalidValue("a buffer to read into is read-only; a writable one is needed")

        def take(at: int, raw: memoryview) -> None:
            views[at][:] = raw

        return self.read(keys, [len(view) for view in views], take, deadline=deadline)

    def read(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        sink: Callable[[int, memoryview], None],
        *,
        deadline: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> int:
        """Read blocks as `get` does; pass the ``sizes[i]`` bytes of block i to ``sink(i, raw)``.

        ``sink`` is called in order, in this thread; it must copy from ``raw``, which is the store's
        memory, and not write to it. Between two blocks ``cancelled()`` is called; True ends the
        read.
        """
        began = self._begin()
        blocks = self._blocks(keys)
        sizes = _sizes(sizes, len(blocks))
        check_type("sink", sink, Callable, "a function that takes a block")
        check_type("cancelled", cancelled, Callable | None, "a function without arguments")
        if deadline is not None:
            deadline = seconds_of("deadline", deadline)
        names: list[str] | None = [] if began else None
        with closed_is_illegal():
            count = self._tiered.read(
                blocks, sizes, sink, deadline=deadline, cancelled=cancelled, sources=names
            ).blocks
        if began:
            tiers = runs_of((name, 1) for name in names or ())
            size = sum(sizes[:count])
            self._log(began, "get", asked=len(keys), moved=count, size=size, tiers=tiers)
        return count

    def prepare_reads(self, size: int) -> None:
        """Touch the memory that reads of blocks of ``size`` bytes go through.

        With `kvkeep.store.tiers.PassThrough`, the first read then is as fast as later ones. Takes
        64 MiB at most, and as long as it takes to write them.
        """
        with closed_is_illegal():
            self._tiered.prepare_reads(whole("the size of a block", size, 1))

    def lookup(self, keys: Sequence[bytes], *, deadline: float | None = None) -> int:
        """Return how many leading ``keys`` are stored; read no block.

        Shared tiers are queried about unknown keys, for at most their timeout and ``deadline``
        seconds.
        """
        until = None if deadline is None else time.monotonic() + seconds_of("deadline", deadline)
        with closed_is_illegal():
            return len(self._tiered.locate(self._blocks(keys), until))

    def lookup_each(self, keys: Sequence[bytes], *, deadline: float | None = None) -> list[bool]:
        """Return for each of ``keys`` whether it is stored; read no block.

        As `lookup`, but a missing key does not hide those behind it. Cost: a query about all keys
        that are not known.
        """
        until = None if deadline is None else time.monotonic() + seconds_of("deadline", deadline)
        with closed_is_illegal():
            levels = self._tiered.locate_each(self._blocks(keys), until)
        return [level is not None for level in levels]

    def knows(self, keys: Sequence[bytes]) -> int:
        """Return how many leading ``keys`` are known to be stored, without querying shared tiers.

        There may be more where `must_ask`; blocks that another process deleted meanwhile still
        count. Cost: about 0.15 µs a block.
        """
        self._tiered.check_open()
        blocks = self._named(keys)
        # Tiers that hide records, or are not read now, are checked block by block below.
        quick = [tier.catalogue for tier in self._tiered.tiers if tier.serves_all]
        catalogues = [self._tiered.memory.catalogue, *quick]
        count = 0
        while count < len(blocks):
            before = count
            for catalogue in catalogues:
                count += catalogue.leading(blocks[count:] if count else blocks)
                if count == len(blocks):
                    return count
            if count == before:
                if not self._tiered.known(blocks[count : count + 1]):
                    return count
                count += 1
        return count

    def unknown(self, keys: Sequence[bytes]) -> list[int]:
        """Return the positions of ``keys`` not known to be stored: what `write` would store.

        Cost: as `knows`, and up to a microsecond for each key behind the first that is unknown.
        """
        keys = listed("keys", keys, "keys of 32 bytes")
        first = self.knows(keys)
        rest = self._named(keys[first:])
        known = self._tiered.known(rest)
        return [at for at, block in enumerate(rest, first) if block not in known]

    def sources(self, keys: Sequence[bytes]) -> list[tuple[int, str]]:
        """Return the tiers that ``keys`` would be read from, in runs: the end of each, and a name.

        Keys that are not known to be stored count for the last tier. Queries no tier. Cost: about
        0.2 µs a block, and some µs for each block of a tier that is shared.
        """
        self._tiered.check_open()
        blocks = self._named(keys)
        memory, tiers = self._tiered.memory, self._tiered.tiers
        runs: list[tuple[int, str]] = []
        at = 0
        while at < len(blocks):
            name, end = memory.name, at + 1
            if blocks[at] in memory:
                end = at + max(1, memory.catalogue.leading(blocks[at:]))
            elif tiers:
                (held,) = self._tiered.holders(blocks[at : at + 1])
                tier = tiers[min(held[0], len(tiers)) - 1] if held and held[0] else tiers[-1]
                name, there = tier.name, 1
                if held and tier.serves_all:
                    there = tier.catalogue.leading(blocks[at:])
                while end < at + there and blocks[end] not in memory:
                    end += 1
            if runs and runs[-1][1] == name:
                runs.pop()
            runs.append((end, name))
            at = end
        return runs

    def returns(self, block_tokens: int) -> BlockReturns:
        """Return what follows this store's conversations, in blocks of ``block_tokens`` tokens.

        Report prompts and ends of requests to it, and tiers with ``policy=returns`` order by them.

        Raises:
            InvalidValue: ``block_tokens`` is not positive.
        """
        self._tiered.check_open()
        size = whole("block_tokens", block_tokens, 1)
        return BlockReturns(size, self._tiered.conversations, self._space)

    def replay(self, notes: ReturnNotes) -> None:
        """Tell the tiers of conversations that another process follows with a `ReturnRecorder`.

        Calls must be in order, from one thread at a time.
        """
        self._tiered.check_open()
        self._tiered.conversations.replay(notes, self._space)

    @property
    def must_ask(self) -> bool:
        """Whether other processes may have stored blocks that are not known here."""
        self._tiered.check_open()
        return any(tier.queried for tier in self._tiered.tiers)

    def pin(self, keys: Sequence[bytes], seconds: float) -> int:
        """Protect leading blocks from eviction for ``seconds``; return how many are pinned."""
        seconds = seconds_of("seconds", seconds, ends=True)
        return self._tiered.pins.pin(self._blocks(keys), seconds)

    def remove(self, keys: Sequence[bytes]) -> Removed:
        """Delete blocks from every tier; `Removed.failed` names tiers that may still hold some."""
        with closed_is_illegal():
            return self._tiered.remove(self._blocks(keys))

    def clear(self) -> Removed:
        """Delete all blocks of the namespace; see `Removed` for failures."""
        with closed_is_illegal():
            return self._tiered.clear(self._space)

    def stats(self) -> list[TierStats]:
        """Return the state of every tier, fastest first."""
        return self._tiered.stats()

    def own_bytes(self) -> dict[str, int]:
        """Return by tier the bytes of this namespace's records; see `TieredStore.bytes_of`."""
        return self._tiered.bytes_of(self._space)

    def _blocks(self, keys: Sequence[bytes]) -> list[bytes]:
        keys = keys if isinstance(keys, list | tuple) else listed("keys", keys, "block keys")
        for key in keys:
            if type(key) is not bytes or len(key) != KEY_BYTES:
                raise InvalidValue(f"a block key is {KEY_BYTES} bytes, got {told(key)}")
        return [self._space + key for key in keys]

    def _named(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return block ids as `_blocks` does, without looking at the length of each key."""
        space = self._space
        try:
            return [space + key for key in keys]
        except Exception as error:
            raise InvalidValue(f"keys is {told(keys)}; block keys are needed") from error

    def __repr__(self) -> str:
        return f"<BlockStore over {self._places}>"


def _count(name: str, values: Sequence[object]) -> int:
    try:
        return len(values)
    except TypeError as error:
        raise InvalidValue(f"{name} is {told(values)}; a list is needed") from error


def _sizes(sizes: Sequence[int], count: int) -> list[int]:
    if _count("sizes", sizes) != count:
        raise InvalidValue(f"{len(sizes)} sizes are given for {count} keys")
    if set(map(type, sizes)) <= {int} and min(sizes, default=1) > 0:
        return list(sizes)
    return [whole("the size of a block", size, 1) for size in listed("sizes", sizes, "numbers")]


def _views(buffers: Sequence[memoryview | bytes], count: int) -> list[memoryview]:
    if _count("buffers", buffers) != count:
        raise InvalidValue(f"{len(buffers)} buffers are given for {count} keys")
    return [_view(buffer) for buffer in listed("buffers", buffers, "bytes of blocks")]


def _view(buffer: memoryview | bytes) -> memoryview:
    try:
        view = memoryview(buffer)
        if view.nbytes:
            return view.cast("B")
    except (TypeError, BufferError) as error:
        raise InvalidValue(
            f"a buffer is {type(buffer).__name__}; bytes are needed, or an object with one piece "
            f"of memory in C order: {error}"
        ) from error
    raise InvalidValue("a block has at least one byte; an empty buffer is given")
