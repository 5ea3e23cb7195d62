"""kvkeep keeps the KV cache of large language models, so that no token is ever prefilled twice.

Importing it needs NumPy and nothing else; what needs PyTorch is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.cache import CachedPrefix, CacheStats, PagedCache, Pin, Sequence
from kvkeep.core.errors import (
    BackendFailed,
    IllegalStep,
    InvalidValue,
    KVKeepError,
    MissingExtra,
    NotCached,
    OutOfPages,
    OutOfRoom,
    OutOfSlots,
    QueueFull,
    UnsupportedModel,
)
from kvkeep.core.keys import Namespace
from kvkeep.core.pages import PageCopy, PageTables, page_tables

if TYPE_CHECKING:
    from kvkeep.core.slots import SlotCache, SlotCopy, SlotLease

__version__ = "0.1.0"

__all__ = [
    "BackendFailed",
    "CacheStats",
    "CachedPrefix",
    "IllegalStep",
    "InvalidValue",
    "KVKeepError",
    "MissingExtra",
    "Namespace",
    "NotCached",
    "OutOfPages",
    "OutOfRoom",
    "OutOfSlots",
    "PageCopy",
    "PageTables",
    "PagedCache",
    "Pin",
    "QueueFull",
    "Sequence",
    "SlotCache",
    "SlotCopy",
    "SlotLease",
    "UnsupportedModel",
    "__version__",
    "page_tables",
]


def __getattr__(name: str) -> object:
    """Caches of slots are imported by those who use them."""
    if name in {"SlotCache", "SlotCopy", "SlotLease"}:
        from kvkeep.core import slots  # noqa: PLC0415

        return getattr(slots, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
