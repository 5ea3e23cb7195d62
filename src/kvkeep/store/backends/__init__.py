"""Backends: places where records lie under block ids.

base.py     the contract
budget.py   how many bytes may be written in a day or an hour
urls.py     the URL of a tier, taken apart
"""

from __future__ import annotations

from kvkeep.store.backends.base import ALIGNMENT, Backend, Listed, Room
from kvkeep.store.backends.budget import WriteBudget
from kvkeep.store.backends.urls import TierURL

__all__ = ["ALIGNMENT", "Backend", "Listed", "Room", "TierURL", "WriteBudget"]
