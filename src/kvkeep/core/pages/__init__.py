"""Pages: the pool of page ids, growing page tables, and (with torch) the tensors."""

from __future__ import annotations

from kvkeep.core.pages.pool import GrowingArray, PageCopy, PagePool, PageTables, page_tables

__all__ = ["GrowingArray", "PageCopy", "PagePool", "PageTables", "page_tables"]
