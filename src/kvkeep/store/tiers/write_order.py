"""`WriteOrder`: gives an early block of a prompt room before later ones, with several writers."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvkeep.store.tiers.known import KnownBlocks
    from kvkeep.store.tiers.prompt_holds import PromptHolds

__all__ = ["WriteOrder"]


class WriteOrder:
    """The writes that run in one tier, and the prompts that they belong to.

    Writers work in parallel, so a later block of a prompt may take the room that an earlier one
    needs, and without the earlier one the later is never found. A block without room therefore
    waits for the running writes of later blocks and takes their room (`take_room`). ``timeout``
    returns the tier's timeout in seconds.

    Thread safety: all methods.

    Attributes:
        prompts: prompts of which blocks are being written to the tier, or wait for it.
    """

    def __init__(self, tier: str, known: KnownBlocks, timeout: Callable[[], float]) -> None:
        self._tier = tier
        self._known = known
        self._timeout = timeout
        self.prompts: dict[PromptHolds, None] = {}
        self._changed = threading.Condition()
        self._running: dict[bytes, None] = {}

    @contextmanager
    def writing(self, block: bytes) -> Iterator[bool]:
        """Run the write of ``block`` in the ``with`` block, unless the yielded value is False.

        It is False if an earlier block of its prompt found no room.
        """
        with self._changed:
            allowed = not any(prompt.excludes(self._tier, block) for prompt in list(self.prompts))
            if allowed:
                self._running[block] = None
        try:
            yield allowed
        finally:
            with self._changed:
                self._running.pop(block, None)
                self._changed.notify_all()

    def take_room(self, block: bytes, needed: int) -> list[bytes]:
        """Forget blocks of ``needed`` bytes behind ``block`` in its prompt, and return them.

        The caller deletes them. Waits for running writes of later blocks, for the tier's timeout at
        most. If the later blocks together are smaller, none is forgotten, and those
        not written yet are not written.
        """
        until = time.monotonic() + self._timeout()
        with self._changed:
            prompts = list(self.prompts)
            while any(prompt.precedes_any(block, self._running) for prompt in prompts):
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            for prompt in prompts:
                gone = prompt.give_up(self._tier, self._known, block, needed)
                if gone:
                    return gone
            return []
