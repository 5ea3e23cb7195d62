"""`CacheMirror`: a mirror of a cache's stored pages, and the KV events that describe them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        def extras(self) -> Extras: ...
        @property
        def start(self) -> int: ...
        @property
        def points(self) -> Sequence[int]: ...


__all__ = ["CacheMirror"]

# Limits per event: none may occupy a reader for long or exceed its bounds.
_EVENT_BLOCKS = 4096
_EVENT_TOKENS = 1 << 18
_EVENT_REMOVALS = 1 << 16
_MEDIUM = "GPU"  # the tier in events


@dataclass(slots=True, eq=False)
class _Page:
    """A stored page."""

    key: bytes
    parent: int
    tokens: bytes
    namespace: Namespace
    extras: Extras


class CacheMirror:
    """A mirror of one cache's stored pages: page id → block key, tokens, parent.

    A page is a block of ``page_size`` tokens; its hash is the low 64 bits of its block key
    (`kvkeep.core.keys`), so equal prefixes have equal hashes on every instance. Pages whose parent
    is unknown are left out: the events may describe less than the cache holds, never more.

    In a cache with ``groups`` of layers requests resume at checkpoints (without states elsewhere,
    too, while rows are there, which is not published). So a block is published only while there is
    a checkpoint at its end or behind it. Rows and states are no blocks.

    Thread safety: none. Memory: per page about 250 bytes and its tokens.
    """

    def __init__(self, page_size: int, *, groups: bool = False) -> None:
        self.page_size = page_size
        self._most = max(1, min(_EVENT_BLOCKS, _EVENT_TOKENS // page_size))
        self._pages: dict[int, _Page] = {}
        self._grouped = groups
        self._points: set[int] = set()  # pages with a checkpoint at their ends
        # By published page: 1 for its own checkpoint, and 1 for each published page behind it.
        self._reasons: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._pages)

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
        """Make the mirror equal to the given runs of each namespace. Return the events to publish.

        For a cache that existed before the mirror, or whose events were missed. Runs are given
        depth first, as by `PagedCache.runs`. Runs without tokens (of the chain index) and all runs
        below them are left out.
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
                    continue
                seen.update(pages)
                tokens = run.tokens.astype(TOKEN_DTYPE, copy=False).tobytes()
                events += self._store(namespace, parent, pages, tokens, run.extras)
                points += [pages[point - run.start - 1] for point in run.points]
        if self._grouped:
            events += self._resumable(points)
            events += self._lost(self._points.difference(points))
        return events + self._remove([page for page in self._pages if page not in seen])

    def snapshot(self) -> Iterator[KVEvent]:
        """Yield all pages as events for a new reader, parents first."""
        children: dict[int, list[int]] = {}
        for page, held in self._pages.items():
            if not self._grouped or page in self._reasons:
                children.setdefault(held.parent, []).append(page)
        ahead = [[page] for page in children.get(-1, ())]
        while ahead:
            chain = ahead.pop()
            while len(chain) < self._most:
                after = children.get(chain[-1], ())
                if len(after) != 1:
                    break
                chain.append(after[0])
            ahead += [[page] for page in children.get(chain[-1], ())]
            run = [self._pages[page] for page in chain]
            yield from self._stored(run, run[0].parent)

    def _store(
        self, namespace: Namespace, parent: int, pages: Sequence[int], tokens: bytes, extras: Extras
    ) -> list[KVEvent]:
        above = self._pages.get(parent)
        if parent >= 0 and (above is None or _unrelated(above.namespace, namespace)):
            return []
        size = self.page_size * TOKEN_BYTES
        events: list[KVEvent] = []
        fresh: list[_Page] = []
        first_parent = parent
        keys = chain_keys(root_key(namespace) if above is None else above.key, tokens, size, extras)
        for at, (page, key) in enumerate(zip(pages, keys, strict=True)):
            known = self._pages.get(page)
            if known is not None and known.key == key:
                if fresh and not self._grouped:
                    # A known page ends the run of new ones; more may follow it.
                    events += self._stored(fresh, first_parent)
                    fresh = []
                first_parent = page
            else:
                if known is not None:
                    events += self._remove([page])
                own = extras_between(extras, at * self.page_size, (at + 1) * self.page_size)
                held = _Page(key, parent, tokens[at * size : (at + 1) * size], namespace, own)
                self._pages[page] = held
                fresh.append(held)
            parent = page
        if fresh and not self._grouped:
            events += self._stored(fresh, first_parent)
        return events

    def _remove(self, pages: Iterable[int]) -> list[KVEvent]:
        known = [page for page in pages if page in self._pages]
        if not self._grouped:
            return self._removed([self._pages.pop(page) for page in known])
        events = self._lost(page for page in known if page in self._points)  # no event told of it
        gone = [page for page in known if page in self._reasons]  # with blocks behind, that stay
        for page in gone:
            del self._reasons[page]
        events += self._removed([self._pages[page] for page in gone])
        for page in known:
            del self._pages[page]
        return events

    # --- groups of layers --------------------------------------------------------------------

    def _resumable(self, pages: Iterable[int]) -> list[KVEvent]:
        """Note checkpoints at the ends of ``pages``; return the events of blocks up to there."""
        events: list[KVEvent] = []
        for page in pages:
            if page in self._pages and page not in self._points:
                self._points.add(page)
                path = [self._pages[one] for one in self._count_up(page)]
                if path:
                    events += self._stored(path, path[0].parent)
        return events

    def _count_up(self, page: int) -> list[int]:
        """Count one more reason to publish ``page``; return the pages to publish, in order."""
        path: list[int] = []
        while page in self._pages:
            self._reasons[page] = self._reasons.get(page, 0) + 1
            if self._reasons[page] > 1:
                break
            path.append(page)
            page = self._pages[page].parent
        return path[::-1]

    def _lost(self, pages: Iterable[int]) -> list[KVEvent]:
        """Note that checkpoints at the ends of ``pages`` are gone; return events of blocks."""
        gone: list[int] = []
        for page in pages:
            if page in self._points:
                self._points.remove(page)
                gone += self._count_down(page)
        return self._removed([self._pages[page] for page in gone])

    def _count_down(self, page: int) -> list[int]:
        """Count one reason less to publish ``page``; return the pages to remove."""
        gone: list[int] = []
        while page in self._reasons:
            self._reasons[page] -= 1
            if self._reasons[page]:
                break
            del self._reasons[page]
            gone.append(page)
            page = self._pages[page].parent
        return gone

    # --- events ------------------------------------------------------------------------------

    def _removed(self, gone: Sequence[_Page]) -> list[KVEvent]:
        hashes: list[BlockHash] = [_wire_hash(held.key) for held in gone]
        return [
            BlockRemoved(hashes[at : at + _EVENT_REMOVALS], _MEDIUM)
            for at in range(0, len(hashes), _EVENT_REMOVALS)
        ]

    def _stored(self, held: Sequence[_Page], parent: int) -> Iterator[BlockStored]:
        """Yield these pages, in order behind ``parent``, as events of bounded size."""
        above = None if parent < 0 else self._pages[parent]
        for at in range(0, len(held), self._most):
            run = held[at : at + self._most]
            yield self._event(run, above)
            above = run[-1]

    def _event(self, held: Sequence[_Page], above: _Page | None) -> BlockStored:
        namespace = held[0].namespace
        before = [above, *held[:-1]]
        extra = [_extras(page, last) for page, last in zip(held, before, strict=True)]
        if above is None and (namespace.tenant or namespace.lora or namespace.scope):
            first: list[Any] = [namespace.lora] if namespace.lora else []
            if namespace.scope:
                first.append(PUBLIC_SALT)
            elif namespace.tenant:
                first.append(salt_digest(namespace.tenant))
            extra[0] = [*first, *(extra[0] or ())]
        return BlockStored(
            block_hashes=[_wire_hash(one.key) for one in held],
            parent_block_hash=None if above is None else _wire_hash(above.key),
            token_ids=_ids(b"".join(one.tokens for one in held)),
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
    found: list[Any] = []
    if before is not None and before.namespace != page.namespace:  # behind a public prefix
        del own[0]
        found.append(salt_digest(page.namespace.tenant))
    return found + [[one.digest.hex(), one.position] for one in own] or None


def _unrelated(above: Namespace, namespace: Namespace) -> bool:
    """Whether no page of ``namespace`` follows one of ``above``; private follow public ones."""
    return above != namespace and not above.scope


def _wire_hash(key: bytes) -> int:
    """The low 64 bits of a block key, as vLLM does by default."""
    return int.from_bytes(key[-8:], "big")


def _ids(tokens: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(tokens, TOKEN_DTYPE).tolist()
    return ids
