"""KV events on the wire: who holds which blocks, published and read over ZeroMQ.

The schema is vLLM's, so each side works with theirs on the other; `docs/routing.md` has it.
"""

from __future__ import annotations

from kvkeep.core.errors import require

require("msgspec", "events")  # all of this room needs them: say which extra brings them
require("zmq", "events")

from kvkeep.serve.kv_events.cache_mirror import CacheMirror  # noqa: E402 - what is missing was named first
from kvkeep.serve.kv_events.publisher import EventPublisher, PublisherStats  # noqa: E402
from kvkeep.serve.kv_events.reader import EventReader, Receiver  # noqa: E402
from kvkeep.serve.kv_events.source import ReaderStats, Source  # noqa: E402
from kvkeep.serve.kv_events.wire import (  # noqa: E402
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    KVEvent,
    salt_digest,
)

__all__ = [
    "AllBlocksCleared",
    "Batch",
    "BlockRemoved",
    "BlockStored",
    "CacheMirror",
    "EventPublisher",
    "EventReader",
    "KVEvent",
    "PublisherStats",
    "ReaderStats",
    "Receiver",
    "Source",
    "salt_digest",
]
