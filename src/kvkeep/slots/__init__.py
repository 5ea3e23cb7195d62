"""Slots: prefix reuse where a request's KV is one contiguous tensor."""

from __future__ import annotations

from kvkeep.errors import OutOfSlots
from kvkeep.slots.cache import SlotCache, SlotStats
from kvkeep.slots.guards import SlotCopy, SlotPin
from kvkeep.slots.lease import SlotLease

__all__ = ["OutOfSlots", "SlotCache", "SlotCopy", "SlotLease", "SlotPin", "SlotStats"]
