"""Which loaded model a store serves."""

from __future__ import annotations

import threading

from kvkeep.core.errors import InvalidValue, told
from kvkeep.store.identity import is_loaded

__all__ = ["ModelBinding"]


class ModelBinding:
    """The identity of the only model whose KV a store accepts, once that is known.

    Thread safety: all methods. Users of a shared store have one binding.
    """

    def __init__(self, name: str, revision: str) -> None:
        self._name = name
        self._identity = revision if is_loaded(revision) else None
        self._lock = threading.Lock()

    def bind(self, identity: str) -> None:
        """See `KVStore.bind`."""
        if not is_loaded(identity):
            raise InvalidValue(
                f"the identity is {told(identity)}; the kvkeep.store.model_identity of a loaded "
                "model is needed"
            )
        with self._lock:
            bound = self._identity = self._identity or identity
        if bound != identity:
            raise InvalidValue(
                f"the store {self._name!r} holds KV of the model {bound}, and this model is "
                f"{identity}: its weights, configuration or adapters differ; open a store for it "
                "with KVStore(geometry, model=…)"
            )
