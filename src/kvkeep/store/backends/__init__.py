"""Backends: places where records lie under block ids.

base.py     the contract
urls.py     the URL of a tier, taken apart
"""

from __future__ import annotations

from kvkeep.store.backends.base import ALIGNMENT, Backend, Listed, Room
from kvkeep.store.backends.urls import TierURL

__all__ = ["ALIGNMENT", "Backend", "Listed", "Room", "TierURL"]
