"""The store of a worker, and how a scheduler in the same process finds it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.vllm.kept import OpenStore

if TYPE_CHECKING:
    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.options import ConnectorOptions
    from kvkeep.store import BlockStore
    from kvkeep.store.blocks import ReturnNotes

__all__ = ["SharedStore"]

# By vLLM's engine id. vLLM makes both sides and gives neither a reference to the other, so they
# meet here. Weak: it keeps no store alive.
_ENGINES: WeakValueDictionary[str, SharedStore] = WeakValueDictionary()


class SharedStore(OpenStore):
    """A worker's store, used by both sides. Thread safety: all methods.

    vLLM closes its two sides in any order, so the scheduler may still use a store that the worker
    has closed.

    Attributes:
        sizes: bytes of a record, by group.
        news: set when a load or a lookup has ended.

    Raises:
        InvalidValue: the engine has another open store.
    """

    def __init__(
        self,
        engine: str,
        store: BlockStore,
        groups: Groups,
        sizes: list[int],
        options: ConnectorOptions,
    ) -> None:
        other = _ENGINES.get(engine)
        if other is not None and not other.closed:
            store.close(0)
            raise InvalidValue(
                "there are two KVKeepConnectors in one engine, which would find each other's "
                "blocks; leave one of them, with the tiers of both"
            )
        super().__init__(store, options.flush_timeout)
        self.groups = groups
        self.sizes = sizes
        self.news = threading.Event()
        self._replay = store.replay()
        _ENGINES[engine] = self

    def tell(self, notes: ReturnNotes) -> None:
        """Tell the tiers of conversations that a scheduler in another process follows.

        Calls must be in order, from one thread at a time.
        """
        if not self.closed:
            self._replay.tell(notes)

    @staticmethod
    def find(engine: str) -> SharedStore | None:
        """Return the store of a worker in this process, by vLLM's engine id."""
        return _ENGINES.get(engine)
