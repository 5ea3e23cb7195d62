"""KV events over ZeroMQ: publish which blocks a cache holds, and follow such publishers.

The schema is vLLM's, so both sides interoperate with it; see `docs/routing.md`.
"""

from __future__ import annotations

from kvkeep.core.errors import require

require("msgspec", "events")  # first, so that the error names the extra to install
require("zmq", "events")

from kvkeep.serve.kv_events.blocks import CacheBlocks  # noqa: E402 - after require
from kvkeep.serve.kv_events.publisher import EventPublisher, PublisherStats  # noqa: E402
from kvkeep.serve.kv_events.reader import EventReader, Receiver  # noqa: E402
from kvkeep.serve.kv_events.wire import (  # noqa: E402
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    KVEvent,
    ReaderStats,
    Source,
    salt_digest,
)

__all__ = [
    "AllBlocksCleared",
    "Batch",
    "BlockRemoved",
    "BlockStored",
    "CacheBlocks",
    "EventPublisher",
    "EventReader",
    "KVEvent",
    "PublisherStats",
    "ReaderStats",
    "Receiver",
    "Source",
    "salt_digest",
]
