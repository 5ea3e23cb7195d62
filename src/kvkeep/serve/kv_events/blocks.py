"""`CacheBlocks`: the blocks of a cache that KV events have announced, and the events to come."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.events import Evicted, GroupsStored, Stored
from kvkeep.core.extras import extras_between
from kvkeep.core.keys import chain_keys, root_key
from kvkeep.core.tokens import TOKEN_BYTES, TOKEN_DTYPE
from kvkeep.serve.kv_events.wire import PUBLIC_SALT, BlockRemoved, BlockStored, salt_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any, Protocol

    import numpy.typing as npt

    from kvkeep.core.events import Event
    from kvkeep.core.extras import Extras
    from kvkeep.core.keys import Namespace
    from kvkeep.serve.kv_events.wire import BlockHash, KVEvent

    class StoredRun(Protocol):
        """A run of a cache's tree: `kvkeep.core.prefix.PrefixRun` is one."""

        @property
        def depth(self) -> int: ...
        @property
        def pages(self) -> npt.NDArray[np.int32]: ...
        @property
        def tokens(self) -> npt.NDArray[np.int32] | None: ...
        @property
        def symbols(self) -> bytes: ...
        @property
        def extras(self) -> Extras: ...
        @property
        def start(self) -> int: ...
        @property
        def points(self) -> Sequence[int]: ...


__all__ = ["CacheBlocks"]

# Limits per event: none may occupy a reader for long or exceed its bounds.
_EVENT_BLOCKS = 4096
_EVENT_TOKENS = 1 << 18
_EVENT_REMOVALS = 1 << 16
_MEDIUM = "GPU"  # the tier in events


class _Page(NamedTuple):
    """A stored page: its block key, the page before it, and for an event to come, its tokens."""

    key: bytes
    parent: int
    namespace: Namespace
    tokens: bytes
    extras: Extras


class CacheBlocks:
    """The announced blocks of one cache: page id → block key.

    A page is a block of ``page_size`` tokens; its hash is the low 64 bits of its block key
    (`kvkeep.core.keys`), so equal prefixes have equal hashes on every instance. Pages whose parent
    is unknown are left out: the events may describe less than the cache holds, never more.

    In a cache with ``groups`` of layers requests resume at checkpoints (without states elsewhere,
    too, while rows are there, which is not published). So a block is published only while there is
    a checkpoint at its end or behind it. Rows and states are no blocks.

    Thread safety: none. Memory: per page about 150 bytes; with ``groups`` also its tokens, since a
    page may be announced long after it was stored.
    """

    def __init__(self, page_size: int, *, groups: bool = False) -> None:
        self.page_size = page_size
        self._most = max(1, min(_EVENT_BLOCKS, _EVENT_TOKENS // page_size))
        self._pages: dict[int, _Page] = {}
        self._grouped = groups
        self._points: set[int] = set()  # pages with a checkpoint at their ends
        # By published page: 1 for its own checkpoint, and 1 for each published page behind it.
        self._reasons: dict[int, int] = {}

    def take(self, event: Event) -> list[KVEvent]:
        """Apply a cache event. Return the KV events to publish: none for one applied before."""
        if isinstance(event, Stored):
            tokens = event.tokens.astype(TOKEN_DTYPE, copy=False).tobytes()
            pages = event.pages.tolist()
            return self._store(event.namespace, event.parent, pages, tokens, event.extras)
        if isinstance(event, GroupsStored):
            return self._resumable(point.page for point in event.checkpoints)
        if isinstance(event, Evicted):
            lost = () if event.groups is None else event.groups.checkpoints
            return self._lost(point.page for point in lost) + self._remove(event.pages.tolist())
        return []

    def reconcile(self, spaces: Iterable[tuple[Namespace, Iterable[StoredRun]]]) -> list[KVEvent]:
        """Announce exactly the given runs of each namespace. Return the events to publish.

        For a cache that existed before, or whose events were missed; of new `CacheBlocks` these
        events are a snapshot. Runs are given depth first, as by `PagedCache.runs`. Runs without
        tokens (of the chain index) cannot be announced here: those announced before stay.
        """
        events: list[KVEvent] = []
        seen: set[int] = set()
        points: list[int] = []
        for namespace, runs in spaces:
            last_page: list[int] = []  # of the runs above, by depth
            for run in runs:
                pages = run.pages.tolist()
                del last_page[run.depth :]
                parent = last_page[-1] if last_page else -1
                last_page.append(pages[-1])
                if run.tokens is None:
                    seen.update(self._still_announced(pages, run.symbols))
                    continue
                seen.update(pages)
                tokens = run.tokens.astype(TOKEN_DTYPE, copy=False).tobytes()
                events += self._store(namespace, parent, pages, tokens, run.extras)
                points += [pages[point - run.start - 1] for point in run.points]
        if self._grouped:
            events += self._resumable(points)
            events += self._lost(self._points.difference(points))
        return events + self._remove([page for page in self._pages if page not in seen])

    def _still_announced(self, pages: Sequence[int], keys: bytes) -> Iterator[int]:
        """Yield those of ``pages`` that were announced under their present ``keys``."""
        size = len(keys) // len(pages)
        for at, page in enumerate(pages):
            announced = self._pages.get(page)
            if announced is not None and announced.key == keys[at * size : (at + 1) * size]:
                yield page

    def _store(
        self, namespace: Namespace, parent: int, pages: Sequence[int], tokens: bytes, extras: Extras
    ) -> list[KVEvent]:
        above = self._pages.get(parent)
        if parent >= 0 and (above is None or _unrelated(above.namespace, namespace)):
            return []
        size = self.page_size * TOKEN_BYTES
        events: list[KVEvent] = []
        fresh: list[_Page] = []
        keys = chain_keys(root_key(namespace) if above is None else above.key, tokens, size, extras)
        for at, (page, key) in enumerate(zip(pages, keys, strict=True)):
            announced = self._pages.get(page)
            if announced is not None and announced.key == key:
                events += self._stored(fresh)  # it ends the run of new ones; more may follow it
                fresh = []
            else:
                if announced is not None:
                    events += self._remove([page])
                own = extras_between(extras, at * self.page_size, (at + 1) * self.page_size)
                new = _Page(key, parent, namespace, tokens[at * size : (at + 1) * size], own)
                self._pages[page] = new if self._grouped else new._replace(tokens=b"", extras=())
                fresh.append(new)
            parent = page
        return events + self._stored(fresh)

    def _remove(self, pages: Iterable[int]) -> list[KVEvent]:
        stored = [page for page in pages if page in self._pages]
        if not self._grouped:
            return self._removed(self._pages.pop(page) for page in stored)
        events = self._lost(page for page in stored if page in self._points)  # no event told of it
        gone = [page for page in stored if page in self._reasons]  # with blocks behind, that stay
        for page in gone:
            del self._reasons[page]
        events += self._removed(self._pages[page] for page in gone)
        for page in stored:
            del self._pages[page]
        return events

    # --- groups of layers --------------------------------------------------------------------

    def _resumable(self, pages: Iterable[int]) -> list[KVEvent]:
        """Note checkpoints at the ends of ``pages``; return the events of blocks up to there."""
        events: list[KVEvent] = []
        for end in pages:
            if end not in self._pages or end in self._points:
                continue
            self._points.add(end)
            path: list[_Page] = []
            page = end
            while page in self._pages:
                self._reasons[page] = self._reasons.get(page, 0) + 1
                if self._reasons[page] > 1:
                    break
                path.append(self._pages[page])
                page = self._pages[page].parent
            events += self._announced(path[::-1])
        return events

    def _lost(self, pages: Iterable[int]) -> list[KVEvent]:
        """Note that checkpoints at the ends of ``pages`` are gone; return events of blocks."""
        gone: list[_Page] = []
        for end in pages:
            if end not in self._points:
                continue
            self._points.remove(end)
            page = end
            while page in self._reasons:
                self._reasons[page] -= 1
                if self._reasons[page]:
                    break
                del self._reasons[page]
                gone.append(self._pages[page])
                page = self._pages[page].parent
        return self._removed(gone)

    # --- events ------------------------------------------------------------------------------

    def _removed(self, pages: Iterable[_Page]) -> list[KVEvent]:
        hashes: list[BlockHash] = [_wire_hash(page.key) for page in pages]
        return [
            BlockRemoved(hashes[at : at + _EVENT_REMOVALS], _MEDIUM)
            for at in range(0, len(hashes), _EVENT_REMOVALS)
        ]

    def _stored(self, pages: Sequence[_Page]) -> list[KVEvent]:
        """Return the events of new pages; none yet with groups, see `_resumable`."""
        return [] if self._grouped else [*self._announced(pages)]

    def _announced(self, pages: Sequence[_Page]) -> Iterator[BlockStored]:
        """Yield pages, each behind the one before, as events of bounded size."""
        above = self._pages.get(pages[0].parent) if pages else None
        for at in range(0, len(pages), self._most):
            run = pages[at : at + self._most]
            yield self._event(run, above)
            above = run[-1]

    def _event(self, pages: Sequence[_Page], above: _Page | None) -> BlockStored:
        namespace = pages[0].namespace
        before = [above, *pages[:-1]]
        extra = [_extras(page, last) for page, last in zip(pages, before, strict=True)]
        if above is None and (namespace.tenant or namespace.lora or namespace.scope):
            first: list[Any] = [namespace.lora] if namespace.lora else []
            if namespace.scope:
                first.append(PUBLIC_SALT)
            elif namespace.tenant:
                first.append(salt_digest(namespace.tenant))
            extra[0] = [*first, *(extra[0] or ())]
        tokens = b"".join(page.tokens for page in pages)
        return BlockStored(
            block_hashes=[_wire_hash(page.key) for page in pages],
            parent_block_hash=None if above is None else _wire_hash(above.key),
            token_ids=np.frombuffer(tokens, TOKEN_DTYPE).tolist(),
            block_size=self.page_size,
            lora_id=None,
            medium=_MEDIUM,
            lora_name=namespace.lora or None,
            extra_keys=extra if any(extra) else None,
        )


def _extras(page: _Page, before: _Page | None) -> list[Any] | None:
    """Return what else a page depends on: its extras, and the salt if it is the first private one.

    Extras are pairs: a reader that takes text for a salt cannot mistake them for one.
    """
    own = list(page.extras)
    salts: list[Any] = []
    if before is not None and before.namespace != page.namespace:  # behind a public prefix
        del own[0]
        salts.append(salt_digest(page.namespace.tenant))
    return salts + [[extra.digest.hex(), extra.position] for extra in own] or None


def _unrelated(above: Namespace, namespace: Namespace) -> bool:
    """Whether no page of ``namespace`` follows one of ``above``; private follow public ones."""
    return above != namespace and not above.scope


def _wire_hash(key: bytes) -> int:
    """The low 64 bits of a block key, as vLLM does by default."""
    return int.from_bytes(key[-8:], "big")
