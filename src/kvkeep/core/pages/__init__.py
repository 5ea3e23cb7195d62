"""Pages: the pool of page ids, growing page tables, and (with torch) the tensors."""

from __future__ import annotations

from kvkeep.core.pages.pool import PagePool
from kvkeep.core.pages.tables import GrowingArray, PageCopy, PageTables, page_tables

__all__ = ["GrowingArray", "PageCopy", "PagePool", "PageTables", "page_tables"]
