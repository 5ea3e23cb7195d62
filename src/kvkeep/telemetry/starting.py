"""`start`: spans go to a collector, when the environment or the command line says so."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from kvkeep.errors import InvalidValue, require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvkeep.telemetry.tracing import Tracing

__all__ = ["start", "wanted"]

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_FLUSH_MS = 5_000


def wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment (default: the process's) names a collector for spans.

    It does with ``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``, unless
    ``OTEL_TRACES_EXPORTER`` is another than "otlp".
    """
    told = os.environ if environ is None else environ
    if told.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() not in {"", "otlp"}:
        return False
    return any(told.get(name, "").strip() for name in _ENDPOINTS)


def start(*, always: bool = False) -> Tracing | None:
    """Export spans over OTLP/HTTP if `wanted`, or ``always``; None where they are not.

    The SDK reads what else the environment says (``OTEL_EXPORTER_OTLP_HEADERS``,
    ``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER``, ``OTEL_RESOURCE_ATTRIBUTES``, …). Without an
    endpoint spans go to ``http://localhost:4318/v1/traces``. ``OTEL_SDK_DISABLED=true`` is stronger
    than both. Whoever calls this calls `Tracing.close` at the end: it waits for what is not
    exported yet, for some seconds at most. A collector that is away is logged by the SDK and costs
    spans, never requests.

    Raises:
        MissingExtra: OpenTelemetry's SDK or its exporter is not installed (extra ``otel``).
        InvalidValue: the environment asks for another protocol than http/protobuf.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if not always and not wanted():
        return None
    protocol = next((told for name in _PROTOCOLS if (told := os.environ.get(name))), "")
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

    from kvkeep.telemetry.tracing import Tracing  # noqa: PLC0415

    ours = _version()
    named = {"service.version": ours}
    if "OTEL_SERVICE_NAME" not in os.environ:
        named["service.name"] = "kvkeep"
    # A provider of its own: the process's belongs to whoever embeds us.
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))

    def close() -> None:
        provider.force_flush(_FLUSH_MS)
        provider.shutdown()

    return Tracing(provider.get_tracer("kvkeep", ours), close=close)


def _version() -> str:
    try:
        return version("kvkeep")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
