"""State machines that do to a `PagedCache` all that engines do, at once and in tiny pools."""

from __future__ import annotations

from paged_memory import Memory
from paged_requests import Requests


class PagedMachine(Requests, Memory):
    """All rules; see `PagedModel` for what must hold after each step."""


class RadixMachine(PagedMachine):
    prefix = "radix"


class ChainMachine(PagedMachine):
    prefix = "chain"
