"""kvkeep keeps the KV cache of large language models, so that no token is ever prefilled twice.

Its names are imported when they are used. They need NumPy and nothing else, beside PyTorch where
tensors are given.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = (
    False  # not typing's: a command that is interrupted before it begins has a traceback
)
if TYPE_CHECKING:
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
        StartRefused,
        UnsupportedModel,
    )
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages import PageCopy, PageTables, page_tables
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
    "StartRefused",
    "UnsupportedModel",
    "__version__",
    "page_tables",
]


_ROOMS = {
    "cache": ("CacheStats", "CachedPrefix", "PagedCache", "Pin", "Sequence"),
    "errors": (
        "BackendFailed",
        "IllegalStep",
        "InvalidValue",
        "KVKeepError",
        "MissingExtra",
        "NotCached",
        "OutOfPages",
        "OutOfRoom",
        "OutOfSlots",
        "QueueFull",
        "StartRefused",
        "UnsupportedModel",
    ),
    "keys": ("Namespace",),
    "pages": ("PageCopy", "PageTables", "page_tables"),
    "slots": ("SlotCache", "SlotCopy", "SlotLease"),
}


def __getattr__(name: str) -> object:
    """Import the room of a name at its first use, so that a command can begin at once."""
    for room, names in _ROOMS.items():
        if name in names:
            return globals().setdefault(name, getattr(import_module(f"kvkeep.core.{room}"), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
