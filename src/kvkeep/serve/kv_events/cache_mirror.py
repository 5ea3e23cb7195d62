"""`CacheMirror`: what a cache holds, kept from its events, and told in the words of the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.events import Evicted, Stored
from kvkeep.core.extras import extras_between
from kvkeep.core.keys import chain_keys, root_key
from kvkeep.core.tokens import TOKEN_BYTES, TOKEN_DTYPE
from kvkeep.serve.kv_events.wire import BlockRemoved, BlockStored, salt_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any, Protocol

    import numpy.typing as npt

    from kvkeep.core.events import Event
    from kvkeep.core.extras import Extras
    from kvkeep.core.keys import Namespace
    from kvkeep.serve.kv_events.wire import BlockHash, KVEvent

    class StoredRun(Protocol):
        """A run of a cache's tree: `kvkeep.core.prefix.base.Run` is one."""

        @property
        def depth(self) -> int: ...
        @property
        def pages(self) -> npt.NDArray[np.int32]: ...
        @property
        def tokens(self) -> npt.NDArray[np.int32] | None: ...
        @property
        def extras(self) -> Extras: ...


__all__ = ["CacheMirror"]

# Of one event at most: no message should keep a reader for long, or be too large for it.
_EVENT_BLOCKS = 4096
_EVENT_TOKENS = 1 << 18
_EVENT_REMOVALS = 1 << 16


@dataclass(slots=True, eq=False)
class _Page:
    """One stored page."""

    key: bytes
    parent: int
    tokens: bytes
    space: Namespace
    extras: Extras


class CacheMirror:
    """A mirror of one cache's stored pages: page id → block key, tokens, parent.

    A page is a block of ``page_size`` tokens; its hash is the low 64 bits of its block key
    (`kvkeep.core.keys`), so equal prefixes have equal hashes on every instance. ``medium`` is the
    tier that is told. Events about pages whose parent is not known are left out and counted
    (``orphans``): less is told than is held, never more.

    Thread safety: none. Memory: about 250 bytes and its tokens for each page.
    """

    def __init__(self, page_size: int, medium: str = "GPU") -> None:
        self.page_size = page_size
        self.medium = medium
        self.orphans = 0
        self._most = max(1, min(_EVENT_BLOCKS, _EVENT_TOKENS // page_size))
        self._pages: dict[int, _Page] = {}

    def __len__(self) -> int:
        """Pages that are held."""
        return len(self._pages)

    def take(self, event: Event) -> list[KVEvent]:
        """What to tell of ``event``. One told twice tells nothing the second time."""
        if isinstance(event, Stored):
            tokens = event.tokens.astype(TOKEN_DTYPE, copy=False).tobytes()
            pages = event.pages.tolist()
            return self._store(event.namespace, event.parent, pages, tokens, event.extras)
        if isinstance(event, Evicted):
            return self._forget(event.pages.tolist())
        return []

    def reconcile(self, spaces: Iterable[tuple[Namespace, Iterable[StoredRun]]]) -> list[KVEvent]:
        """What to tell so that this is known to be all that is held: each namespace with its runs.

        ``runs`` come depth first, as `PagedCache.runs` gives them. For a cache that was there
        before its first event was taken, or events that were missed. Runs without tokens (of the
        chain index) cannot be told of, nor what hangs from them.
        """
        told: list[KVEvent] = []
        seen: set[int] = set()
        for space, runs in spaces:
            last_page: list[int] = []  # of the run above, at each depth
            for run in runs:
                pages = run.pages.tolist()
                del last_page[run.depth :]
                parent = last_page[-1] if last_page else -1
                last_page.append(pages[-1])
                if run.tokens is None:
                    self.orphans += len(pages)
                    continue
                seen.update(pages)
                tokens = run.tokens.astype(TOKEN_DTYPE, copy=False).tobytes()
                told += self._store(space, parent, pages, tokens, run.extras)
        return told + self._forget([page for page in self._pages if page not in seen])

    def snapshot(self) -> Iterator[KVEvent]:
        """All that is held, as events for somebody who knows nothing: parents first."""
        children: dict[int, list[int]] = {}
        for page, held in self._pages.items():
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
        self, space: Namespace, parent: int, pages: Sequence[int], tokens: bytes, extras: Extras
    ) -> list[KVEvent]:
        above = self._pages.get(parent)
        if parent >= 0 and (above is None or above.space != space):
            self.orphans += len(pages)
            return []
        size = self.page_size * TOKEN_BYTES
        told: list[KVEvent] = []
        fresh: list[_Page] = []
        first_parent = parent
        keys = chain_keys(root_key(space) if above is None else above.key, tokens, size, extras)
        for at, (page, key) in enumerate(zip(pages, keys, strict=True)):
            known = self._pages.get(page)
            if known is not None and known.key == key:
                if fresh:  # told before: what is new ends here, and may go on behind it
                    told += self._stored(fresh, first_parent)
                    fresh = []
                first_parent = page
            else:
                if known is not None:
                    told += self._forget([page])
                own = extras_between(extras, at * self.page_size, (at + 1) * self.page_size)
                held = _Page(key, parent, tokens[at * size : (at + 1) * size], space, own)
                self._pages[page] = held
                fresh.append(held)
            parent = page
        if fresh:
            told += self._stored(fresh, first_parent)
        return told

    def _forget(self, pages: Iterable[int]) -> list[KVEvent]:
        gone = [held for page in pages if (held := self._pages.pop(page, None)) is not None]
        if not gone:
            return []
        hashes: list[BlockHash] = [_wire_hash(held.key) for held in gone]
        return [
            BlockRemoved(hashes[at : at + _EVENT_REMOVALS], self.medium)
            for at in range(0, len(hashes), _EVENT_REMOVALS)
        ]

    def _stored(self, held: Sequence[_Page], parent: int) -> Iterator[BlockStored]:
        """These pages in order behind ``parent``, as events that are not too large."""
        above = None if parent < 0 else self._pages[parent]
        for at in range(0, len(held), self._most):
            run = held[at : at + self._most]
            yield self._event(run, above)
            above = run[-1]

    def _event(self, held: Sequence[_Page], above: _Page | None) -> BlockStored:
        space = held[0].space
        # As pairs, so that who takes text for a salt does not take these for one.
        extra: list[list[Any] | None] = [
            [[one.digest.hex(), one.position] for one in page.extras] or None for page in held
        ]
        if above is None and (space.tenant or space.lora):
            first: list[Any] = [space.lora] if space.lora else []
            if space.tenant:
                first.append(salt_digest(space.tenant))
            extra[0] = [*first, *(extra[0] or ())]
        return BlockStored(
            block_hashes=[_wire_hash(one.key) for one in held],
            parent_block_hash=None if above is None else _wire_hash(above.key),
            token_ids=_ids(b"".join(one.tokens for one in held)),
            block_size=self.page_size,
            lora_id=None,
            medium=self.medium,
            lora_name=space.lora or None,
            extra_keys=extra if any(extra) else None,
        )


def _wire_hash(key: bytes) -> int:
    """The low 64 bits, as vLLM does by default."""
    return int.from_bytes(key[-8:], "big")


def _ids(tokens: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(tokens, TOKEN_DTYPE).tolist()
    return ids
