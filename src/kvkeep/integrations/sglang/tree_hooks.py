"""`TreeHooks`: kvkeep's own events of a tree inside SGLang."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvkeep.core.events import Closed, Evicted, Opened, Stored, frozen
from kvkeep.integrations.sglang.symbols import reported, row_of
from kvkeep.integrations.sglang.tree_explain import TreeExplainer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from kvkeep.core.events import Event, Hook
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.integrations.sglang.handles import PathHandle
    from kvkeep.observe.explain import Explainer

__all__ = ["TreeHooks"]

_LOG = logging.getLogger("kvkeep.sglang")


class TreeHooks:
    """Reports to hooks what `KVKeepTree` does; costs nothing without one.

    A request is a sequence; its number is new at its first checkpoint, or at the lock before it if
    requests are explained. Token ids are `reported`.

    Thread safety: none.
    """

    def __init__(self) -> None:
        self._hooks: list[Hook] = []
        self._numbers: dict[str, int] = {}
        self._opened = 0
        self._explained: TreeExplainer | None = None
        self.failures = 0
        """Exceptions that hooks raised; each is logged."""

    @property
    def listening(self) -> bool:
        """Whether there is a hook."""
        return bool(self._hooks)

    def subscribe(self, hook: Hook) -> Callable[[], None]:
        """Call ``hook`` with every event from now on; return what ends that."""
        self._hooks.append(hook)

        def end() -> None:
            if hook in self._hooks:
                self._hooks.remove(hook)

        return end

    def explain(self, page_size: int, policy: str) -> Explainer:
        """Explain requests from now on, with pages of so many tokens; once."""
        if self._explained is None:
            self._explained = TreeExplainer(self._number, page_size, policy)
            self.subscribe(self._explained.see)
        return self._explained.explainer

    def locked(self, handle: PathHandle, page_size: int) -> None:
        """Number the request for which a prefix was locked, if requests are explained."""
        if self._explained is not None and handle.locks == 1:
            cached = handle.pages * page_size
            handle.number = self._explained.locked(handle.namespace, len(handle.tokens), cached)

    def unlocked(self, handle: PathHandle) -> None:
        """End the explained request of a prefix that is not locked any more; no other one."""
        if self._explained is not None and not handle.locks:
            self._numbers.pop(self._explained.ended(handle.number), None)

    def reset(self) -> None:
        """End all explained requests."""
        if self._explained is not None:
            self._explained.reset()
            self._numbers.clear()

    def number_of(self, rid: str) -> int:
        """Return the number of a request; 0 if it has none."""
        return self._numbers.get(rid, 0)

    def _number(self) -> int:
        self._opened += 1
        return self._opened

    def opened(
        self,
        rid: str,
        namespace: Namespace,
        tokens: Sequence[int],
        cached: int,
        lock: PathHandle | None,
    ) -> None:
        """Report that the first of a request's tokens are computed; ``lock`` is of its prefix."""
        if self._hooks:
            number = lock.number if lock is not None else 0
            if self._explained is not None:
                number = number or self._explained.locked(namespace, len(tokens), cached)
                row = reported(row_of(tokens))
                self._explained.opened(rid, row, namespace, cached=cached, number=number)
            self._numbers[rid] = number = number or self._number()
            self._emit(Opened(number, namespace, len(tokens), cached))

    def stored(
        self,
        rid: str | None,
        namespace: Namespace,
        parent: int,
        pages: PageArray,
        tokens: npt.NDArray[np.int64],
    ) -> None:
        """Report pages that became reusable, behind page ``parent``."""
        if self._hooks and len(pages):
            number = self._numbers.get(rid, 0) if rid is not None else 0
            self._emit(Stored(number, namespace, parent, frozen(pages), reported(tokens)))

    def evicted(self, pages: PageArray, reason: str) -> None:
        """Report pages that are gone."""
        if self._hooks and len(pages):
            self._emit(Evicted(frozen(pages), reason))

    def closed(self, rid: str, tokens: int, stored_pages: int, generated: int) -> None:
        """Report the end of a request."""
        if self._hooks and (number := self._numbers.pop(rid, None)) is not None:
            self._emit(Closed(number, tokens, stored_pages))
            if self._explained is not None:
                self._explained.ended(number, generated, "done")

    def _emit(self, event: Event) -> None:
        for hook in tuple(self._hooks):
            try:
                hook(event)
            except Exception:  # noqa: BLE001 - a hook must not end SGLang's scheduler
                self.failures += 1
                _LOG.exception("a hook failed and stays subscribed")
