"""For operators: spans, labels, and structured logs.

This room depends on no cache, engine or server, and never gets the text of a prompt. OpenTelemetry
comes with the extra ``otel`` and is imported when `start` exports spans.
"""

from kvkeep.observe.telemetry.labels import label
from kvkeep.observe.telemetry.logs import configure
from kvkeep.observe.telemetry.starting import start, wanted

__all__ = [
    "configure",
    "label",
    "start",
    "wanted",
]
