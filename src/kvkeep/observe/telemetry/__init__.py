"""What operators watch: times of pages, what reuse saves, spans, and logs for machines.

Nothing here knows a cache, an engine or a server: they tell, in events and in plain values. Nothing
here ever sees text of a prompt. OpenTelemetry comes with the extra ``otel``, and is imported when
`start` finds that it is wanted.
"""

from kvkeep.observe.telemetry.evictions import PageTimes, TimesOfPages
from kvkeep.observe.telemetry.histogram import Buckets, Histogram
from kvkeep.observe.telemetry.labels import label, visible
from kvkeep.observe.telemetry.logs import configure
from kvkeep.observe.telemetry.starting import start, wanted

__all__ = [
    "Buckets",
    "Histogram",
    "PageTimes",
    "TimesOfPages",
    "configure",
    "label",
    "start",
    "visible",
    "wanted",
]
