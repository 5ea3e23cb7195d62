"""kvkeep keeps the KV cache of large language models, so that no token is ever prefilled twice.

Its names are imported when they are used. They need NumPy and nothing else, beside PyTorch where
tensors are given.
"""

from __future__ import annotations

# Not typing's: until a command has taken over Ctrl-C, nothing large is imported.
TYPE_CHECKING = False
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
    "UnsupportedModel",
    "__version__",
    "page_tables",
]


def __getattr__(name: str) -> object:
    """Import what a name stands for at its first use, so that a command begins at once."""
    if name in __all__:
        from kvkeep.core import cache, errors, keys, pages, slots  # noqa: PLC0415

        for room in (cache, errors, keys, pages, slots):
            if name in room.__all__:
                return globals().setdefault(name, getattr(room, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
