"""What operators watch: times of pages, what reuse saves, spans, and logs for machines.

Nothing here knows a cache, an engine or a server: they tell, in events and in plain values. Nothing
here ever sees text of a prompt. OpenTelemetry comes with the extra ``otel``, and is imported when
`start` finds that it is wanted.
"""

from kvkeep.telemetry.evictions import PageTimes, TimesOfPages
from kvkeep.telemetry.histogram import Buckets, Histogram
from kvkeep.telemetry.labels import label, visible
from kvkeep.telemetry.logs import configure
from kvkeep.telemetry.reuse import RequestWatch, Reuse, Reused
from kvkeep.telemetry.shares import Share, Shares
from kvkeep.telemetry.starting import start, wanted

__all__ = [
    "Buckets",
    "Histogram",
    "PageTimes",
    "RequestWatch",
    "Reuse",
    "Reused",
    "Share",
    "Shares",
    "TimesOfPages",
    "configure",
    "label",
    "start",
    "visible",
    "wanted",
]
