"""`start`: exports spans to a collector, if the environment or the command line requests it."""

from __future__ import annotations

import logging
import os
import threading
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, MissingExtra, require

if TYPE_CHECKING:
    from kvkeep.observe.telemetry.tracing import Tracing

__all__ = ["start", "wanted"]

_log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_FLUSH_S = 5.0


def wanted() -> bool:
    """Whether the environment names a collector for spans.

    That is, ``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` is set, and
    ``OTEL_TRACES_EXPORTER`` is unset or "otlp".
    """
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() not in {"", "otlp"}:
        return False
    return any(os.environ.get(name, "").strip() for name in _ENDPOINTS)


def start() -> Tracing | None:
    """Export spans over OTLP/HTTP if `wanted`; return None if not exported.

    The SDK reads the other variables (``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_SERVICE_NAME``,
    ``OTEL_TRACES_SAMPLER``, ``OTEL_RESOURCE_ATTRIBUTES``, …). ``OTEL_SDK_DISABLED=true``
    disables export in any case.
    Call `Tracing.close` at the end: it waits for pending exports, for five seconds at most. If the
    collector is unreachable, the SDK logs that and drops spans; requests are not affected.

    An environment is often shared by many processes: if its setting cannot be met here, that is
    logged, and the process serves without spans.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if not wanted():
        return None
    try:
        return _started()
    except (MissingExtra, InvalidValue) as error:
        _log.warning("no spans, though the environment names a collector: %s", error)
        return None


def _started() -> Tracing:
    protocol = next((value for name in _PROTOCOLS if (value := os.environ.get(name))), "")
    if protocol not in {"", "http/protobuf"}:
        raise InvalidValue(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; spans are sent as http/protobuf: "
            "collectors take that at port 4318"
        )
    require("opentelemetry.sdk.trace", "otel")
    require("opentelemetry.exporter.otlp.proto.http", "otel")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 - an extra
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    from kvkeep.observe.telemetry.tracing import Tracing  # noqa: PLC0415

    ours = _version()
    named = {"service.version": ours}
    if "OTEL_SERVICE_NAME" not in os.environ:
        named["service.name"] = "kvkeep"
    # Not the global provider: that belongs to the embedding program.
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))

    def close() -> None:
        # The SDK's own timeouts do not hold for a collector that hangs.
        ending = threading.Thread(target=provider.shutdown, name="kvkeep spans", daemon=True)
        ending.start()
        ending.join(_FLUSH_S)
        if ending.is_alive():
            _log.warning("the collector did not take all spans in %g s", _FLUSH_S)

    return Tracing(provider.get_tracer("kvkeep", ours), close=close)


def _version() -> str:
    try:
        return version("kvkeep")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
