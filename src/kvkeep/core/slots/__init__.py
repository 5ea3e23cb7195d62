"""Slots: prefix reuse where a request's KV is one contiguous tensor."""

from __future__ import annotations

from kvkeep.core.errors import OutOfSlots
from kvkeep.core.slots.cache import SlotCache, SlotStats
from kvkeep.core.slots.lease import SlotLease
from kvkeep.core.slots.table import SlotCopy, SlotPin

__all__ = ["OutOfSlots", "SlotCache", "SlotCopy", "SlotLease", "SlotPin", "SlotStats"]
