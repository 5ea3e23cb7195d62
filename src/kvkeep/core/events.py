"""Events that the cache reports to its hooks: one frozen record each.

A hook is any callable that takes an event; see `kvkeep.core.cache.PagedCache.subscribe`. Page ids
name stored pages: from `Stored` to `Evicted`, an id stands for the same tokens. So a mirror of the
cache needs nothing but these events.

In a cache with groups of layers, rows and checkpoints belong to stored pages (`GroupsStored`), and
go with or before them (`Evicted.groups`). A request resumes at a checkpoint if the model has
states; otherwise wherever the rows are there that its windows reach back to.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvkeep.core.extras import Extras
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.tokens import TokenArray

__all__ = [
    "CacheLock",
    "Cause",
    "Closed",
    "Event",
    "Evicted",
    "GroupsLost",
    "GroupsStored",
    "Hook",
    "Opened",
    "PrefixMiss",
    "ResumePoint",
    "Returned",
    "Stored",
    "frozen",
]


class ResumePoint(NamedTuple):
    """A checkpoint: the end of stored page ``page``, ``tokens`` from the start of the prompt."""

    page: int
    tokens: int


class Returned(NamedTuple):
    """A conversation of ``turns`` requests goes on, ``after_s`` seconds after the end of these."""

    after_s: float
    turns: int


Cause = Literal[
    "last token", "part of a page", "unseen", "differs", "evicted", "computing", "no state",
    "elsewhere",
]  # fmt: skip
"""Why tokens of a prompt are computed; see `PrefixMiss`."""


class PrefixMiss(NamedTuple):
    """Why a prompt is computed from token ``token`` on.

    Attributes:
        cause: one of

            - "last token": all others are cached; this one is always computed, for its logits.
            - "part of a page": the rest is less than a page, where only full pages are reused: in a
              "chain" index, and with groups of layers.
            - "unseen": no prompt is known to have gone on like this. Behind public tokens,
              those that went on in another way are not told of.
            - "differs": the cached prompts go on in another way: ``others`` runs, behind the last
              page that matches.
            - "evicted": the KV was cached, of a page at least. It was removed at ``at``, in seconds
              of the cache's clock, for the reason ``by``: "pressure", "asked", "dropped" or
              "cleared", as in `Evicted`.
            - "computing": the running sequence ``sequence`` has the same next page, and has not
              published it.
            - "no state": the KV up to token ``until`` is cached, but a window or a state is missing
              there, or there was no room beside it. The nearest place to go on is ``token``.
            - "elsewhere": the same tokens are cached in ``namespace``, which shares nothing with
              that of the prompt. Only told where it was asked for.
        token: tokens that need no computing.
    """

    cause: Cause
    token: int
    until: int = 0
    others: int = 0
    at: float | None = None
    by: str = ""
    sequence: int = 0
    namespace: Namespace | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A sequence was opened or forked.

    ``cached_tokens`` need no computing. The KV of ``stored_tokens`` is cached in the layers that
    keep every token: more, if a window or a state was missing there. None: no more. ``returned`` is
    set in a cache whose policy follows conversations, if the prompt continues one. ``miss`` says
    why the rest of the prompt is computed; None for a fork.
    """

    sequence: int
    namespace: Namespace
    prompt_tokens: int
    cached_tokens: int
    forked_from: int | None = None
    stored_tokens: int | None = None
    returned: Returned | None = None
    miss: PrefixMiss | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Full pages of computed tokens became reusable.

    ``parent`` is the page before the first of them, -1 at the start of a prompt. ``tokens`` are the
    ``len(pages) * page_size`` tokens of these pages. ``extras`` are the digests of bytes that
    belong to some of them, at positions that count from the first of ``tokens``; pages with
    different extras differ.
    """

    sequence: int
    namespace: Namespace
    parent: int
    pages: PageArray
    tokens: TokenArray
    extras: Extras = ()


@dataclass(frozen=True, slots=True, eq=False)
class GroupsStored:
    """Rows and checkpoints of stored pages are kept for later requests.

    ``rows`` has, for each window, the pages whose rows became reusable. ``sequence`` is None if a
    pin added the checkpoint.
    """

    sequence: int | None
    checkpoints: tuple[ResumePoint, ...]
    rows: tuple[PageArray, ...]


class GroupsLost(NamedTuple):
    """Checkpoints and, for each window, pages whose rows are no longer kept.

    ``freed`` pool pages became free with them; others are still in use.
    """

    checkpoints: tuple[ResumePoint, ...]
    rows: tuple[PageArray, ...]
    freed: int


@dataclass(frozen=True, slots=True, eq=False)
class Evicted:
    """Pages are no longer reusable. ``reason``: "pressure", "asked", "dropped" or "cleared".

    ``groups`` names the rows and checkpoints that were lost, of ``pages`` and of pages that stay.
    There may be no ``pages``: "replaced" is the reason if a later checkpoint took the place of an
    earlier one, which needs no state.
    """

    pages: PageArray
    reason: str
    groups: GroupsLost | None = None

    @property
    def freed(self) -> int:
        """All pool pages that became free."""
        return len(self.pages) + (0 if self.groups is None else self.groups.freed)


@dataclass(frozen=True, slots=True, eq=False)
class Closed:
    """A sequence was closed. ``stored_pages`` are those of its pages that stay reusable."""

    sequence: int
    tokens: int
    stored_pages: int


def frozen(array: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return a read-only copy, so that no hook can change it under another."""
    array = array.copy()
    array.flags.writeable = False
    return array


Event = Opened | Stored | GroupsStored | Evicted | Closed
"""Every event of a cache."""
Hook = Callable[[Event], None]
"""Called under the cache's lock when an operation is complete; it must be quick."""

_log = logging.getLogger("kvkeep.cache")


class CacheLock:
    """The one lock of a cache, and its hooks.

    ``with lock:`` begins and ends an operation. When it is done, its events are delivered to the
    hooks, in order, still under the lock, also while a caller holds the lock around it. It is the
    innermost lock: a thread may take it while it holds any other, and waits for no other while it
    holds this one. Hooks, eviction policies and the clock run under it.

    Attributes:
        hooks: what events are delivered to.
        errors: how often a hook has raised.
    """

    __slots__ = ("_events", "_hooking", "_lock", "errors", "hooks")

    def __init__(self) -> None:
        self.hooks: tuple[Hook, ...] = ()
        self.errors = 0
        self._events = deque[Event]()
        self._lock = threading.RLock()
        self._hooking: int | None = None  # the thread that is running hooks

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, _kind: object, _error: object, _trace: object) -> None:
        try:
            if self._events and self._hooking is None:
                self._deliver()
        finally:
            self._lock.release()

    def subscribe(self, hook: Hook) -> Callable[[], None]:
        """Deliver events to ``hook`` until the returned function is called."""
        mine = partial(hook)  # distinguishes it from the same hook subscribed twice
        with self:
            self.hooks = (*self.hooks, mine)

        def end() -> None:
            with self:
                self.hooks = tuple(other for other in self.hooks if other is not mine)

        return end

    def emit(self, event: Event) -> None:
        """Queue ``event`` until this operation ends. Callers check ``hooks`` first."""
        self._events.append(event)

    @property
    def in_hook(self) -> bool:
        """Whether this thread is running a hook, and so holds the lock until the hook returns."""
        return self._hooking == threading.get_ident()

    def _deliver(self) -> None:
        self._hooking = threading.get_ident()
        try:
            # A hook may use the cache: this same loop delivers the events of that, in order.
            # What Ctrl-C raises through it leaves the later events to the next operation.
            while self._events:
                event = self._events.popleft()
                for hook in self.hooks:
                    self._call(hook, event)
        finally:
            self._hooking = None

    def _call(self, hook: Hook, event: Event) -> None:
        try:
            hook(event)
        except Exception:  # noqa: BLE001 - a failing hook must not fail the cache
            self.errors += 1
            _log.exception("a cache hook failed on %s", type(event).__name__)
