"""Pages: the pool of page ids, growing page tables, and (with torch) the memory itself."""

from __future__ import annotations

from kvkeep.pages.pool import PagePool
from kvkeep.pages.table import GrowingArray, PageCopy

__all__ = ["GrowingArray", "PageCopy", "PagePool"]
