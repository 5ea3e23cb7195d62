"""The record and events of each request, and the usage that adds up from them.

An engine emits the events of `records`, each once, through one `Notifier`; explanations, spans,
metrics and the dashboard read these events or the `UsageTable` made from them.
"""

from kvkeep.observe.usage.records import (
    LoadReport,
    Notifier,
    Outcome,
    PromptComputed,
    PromptStored,
    RequestAdmitted,
    RequestBegun,
    RequestEnded,
    RequestEvent,
    RequestLoaded,
    RequestObserver,
    RequestOrigin,
    RequestRecord,
)  # fmt: skip
from kvkeep.observe.usage.table import UsageTable
from kvkeep.observe.usage.tenants import TenantCounts, TenantLedger

__all__ = [
    "LoadReport", "Notifier", "Outcome", "PromptComputed", "PromptStored", "RequestAdmitted",
    "RequestBegun", "RequestEnded", "RequestEvent", "RequestLoaded", "RequestObserver",
    "RequestOrigin", "RequestRecord", "TenantCounts", "TenantLedger", "UsageTable",
]  # fmt: skip
