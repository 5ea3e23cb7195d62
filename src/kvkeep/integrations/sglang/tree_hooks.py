"""`TreeHooks`: kvkeep's own events of a tree inside SGLang."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvkeep.core.events import Closed, Evicted, Opened, Stored, frozen
from kvkeep.core.tokens import TOKEN_DTYPE

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from kvkeep.core.events import Event, Hook
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.table import PageArray

__all__ = ["TreeHooks"]

_LOG = logging.getLogger("kvkeep.sglang")
_IDS = 2**31 - 1


class TreeHooks:
    """Reports to hooks what `KVKeepTree` does; costs nothing without one.

    A request is a sequence, numbered in the order of first checkpoints. Token ids of images, which
    may exceed 31 bits, are reported modulo 2³¹.

    Thread safety: none.
    """

    def __init__(self) -> None:
        self._hooks: list[Hook] = []
        self._numbers: dict[str, int] = {}
        self._opened = 0
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

    def opened(self, rid: str, namespace: Namespace, tokens: int, cached: int) -> None:
        """Report that the first tokens of a request are computed."""
        if self._hooks:
            self._opened += 1
            self._numbers[rid] = self._opened
            self._emit(Opened(self._opened, namespace, tokens, cached))

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
            row = (tokens & _IDS).astype(TOKEN_DTYPE)
            self._emit(Stored(number, namespace, parent, frozen(pages), row))

    def evicted(self, pages: PageArray, reason: str) -> None:
        """Report pages that are gone."""
        if self._hooks and len(pages):
            self._emit(Evicted(frozen(pages), reason))

    def closed(self, rid: str, tokens: int, stored_pages: int) -> None:
        """Report the end of a request."""
        if self._hooks and (number := self._numbers.pop(rid, None)) is not None:
            self._emit(Closed(number, tokens, stored_pages))

    def _emit(self, event: Event) -> None:
        for hook in tuple(self._hooks):
            try:
                hook(event)
            except Exception:  # noqa: BLE001 - a hook must not end SGLang's scheduler
                self.failures += 1
                _LOG.exception("a hook failed and stays subscribed")
