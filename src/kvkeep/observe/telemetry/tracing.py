"""`Tracing`: OpenTelemetry spans of requests and of their lookup, load, prefill and store."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvkeep.observe.usage import (
    PromptComputed,
    PromptStored,
    RequestAdmitted,
    RequestBegun,
    RequestEnded,
    RequestLoaded,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

    from kvkeep.observe.usage import LoadReport, RequestEvent, RequestRecord

__all__ = ["Tracing"]

# Endpoint → operation, in the semantic conventions of generative AI.
_OPERATIONS: Final = {"chat": "chat", "chat.completions": "chat", "completions": "text_completion"}
_MOST_SOURCES = 32  # events of one load
_NS = 1_000_000_000


@dataclass(slots=True)
class _Part:
    """Work that a request does in several steps: from the first beginning to the last end."""

    begun_ns: int
    ended_ns: int
    times: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def more(self, tokens: int, seconds: float, now_ns: int) -> None:
        self.ended_ns = now_ns
        self.times += 1
        self.tokens += tokens
        self.seconds += seconds


@dataclass(slots=True)
class _Open:
    """A sampled request that has not ended."""

    span: Span
    parts: dict[str, _Part] = field(default_factory=dict)
    reused: int = 0


class Tracing:
    """A `RequestObserver` (`see`) that makes spans; requests that are not sampled make none.

    A request is one span, below the ``traceparent`` of its HTTP headers if they have one. Its
    children are ``kvkeep.match`` (the lookup in the pool), ``kvkeep.load`` (from the tiers),
    ``kvkeep.prefill`` (from the first step that computed tokens of the prompt to the last) and
    ``kvkeep.store`` (handing KV to the store). Attributes are counts, times and names of tiers: no
    text, no token, no salt.

    ``close`` is called once, at the end. ``clock`` gives nanoseconds since 1970. At most ``most``
    requests are followed at once; the span of the oldest is ended for one more.

    Thread safety: all methods. Cost: some tens of microseconds a request, without the export.
    """

    def __init__(
        self,
        tracer: Tracer,
        *,
        close: Callable[[], None] | None = None,
        clock: Callable[[], int] = time.time_ns,
        most: int = 10_000,
    ) -> None:
        self._tracer = tracer
        self._end = close
        self._clock = clock
        self._most = most
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._propagator = TraceContextTextMapPropagator()

    def close(self) -> None:
        """End open spans, and flush the exporter."""
        with self._lock:
            left, self._open = list(self._open.values()), OrderedDict()
        for one in left:
            one.span.end(self._clock())
        if self._end is not None:
            self._end()
            self._end = None

    def see(self, event: RequestEvent) -> None:
        """Follow an event of a request."""
        if isinstance(event, RequestBegun):
            self._begin(event.request)
            return
        if isinstance(event, RequestEnded):
            self._ended(event)
            return
        with self._lock:
            one = self._open.get(event.request.id)
        match event:
            case _ if one is None:
                pass
            case RequestAdmitted():
                self._admitted(one, event)
            case RequestLoaded():
                self._loaded(one, event.report)
            case PromptComputed():
                self._more(one, "prefill", event.tokens, event.seconds)
            case PromptStored():
                self._more(one, "store", event.tokens, event.seconds)

    def _begin(self, request: RequestRecord) -> None:
        origin, model = request.origin, request.namespace.model
        operation = _OPERATIONS.get(origin.endpoint, origin.endpoint)
        span = self._tracer.start_span(
            f"{operation} {model}",
            self._propagator.extract(origin.headers),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "kvkeep",
                "gen_ai.request.model": model,
                "gen_ai.response.id": request.id,
            },
            start_time=self._clock(),
        )
        if not span.is_recording():
            return
        given_up = None
        with self._lock:
            if len(self._open) >= self._most:
                _, given_up = self._open.popitem(last=False)
            self._open[request.id] = _Open(span)
        if given_up is not None:
            given_up.span.end(self._clock())

    def _admitted(self, one: _Open, event: RequestAdmitted) -> None:
        prompt_tokens, cached_tokens = len(event.request.prompt), event.cached_tokens
        one.reused = cached_tokens
        one.span.set_attribute("gen_ai.usage.input_tokens", prompt_tokens)
        one.span.set_attribute("gen_ai.usage.cache_read.input_tokens", cached_tokens)
        now = self._clock()
        tokens = {"kvkeep.prompt_tokens": prompt_tokens, "kvkeep.cached_tokens": cached_tokens}
        self._child(one, "match", now - _ns(event.match_s), now, tokens)

    def _loaded(self, one: _Open, report: LoadReport) -> None:
        sources, tokens = report.sources, report.tokens
        if not sources and not report.seconds:
            return  # no tier was queried
        one.reused += tokens
        one.span.set_attribute("gen_ai.usage.cache_read.input_tokens", one.reused)
        now = self._clock()
        tiers = sorted({tier for _, _, tier in sources})
        span = self._child(
            one,
            "load",
            now - _ns(report.seconds),
            None,
            {"kvkeep.loaded_tokens": tokens, "kvkeep.tiers": tiers, "kvkeep.late": report.late},
        )
        for start, stop, tier in sources[:_MOST_SOURCES]:
            piece: dict[str, AttributeValue] = {
                "kvkeep.tier": tier,
                "kvkeep.start": start,
                "kvkeep.stop": stop,
            }
            span.add_event("kvkeep.loaded", piece, now)
        span.end(now)

    def _ended(self, event: RequestEnded) -> None:
        """End the request's span, and write those of its work in several steps."""
        with self._lock:
            one = self._open.pop(event.request.id, None)
        if one is None:
            return
        for name, part in one.parts.items():
            counts = {
                f"kvkeep.{name}.tokens": part.tokens,
                f"kvkeep.{name}.times": part.times,
                f"kvkeep.{name}.seconds": part.seconds,
            }
            self._child(one, name, part.begun_ns, part.ended_ns, counts)
        span = one.span
        span.set_attribute("gen_ai.usage.output_tokens", event.generated)
        span.set_attribute("kvkeep.outcome", event.outcome)
        if event.ttft_s is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", event.ttft_s)
        if event.outcome == "failed":
            span.set_attribute("error.type", event.outcome)
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._clock())

    def _more(self, one: _Open, name: str, tokens: int, seconds: float) -> None:
        now = self._clock()
        part = one.parts.get(name)
        if part is None:
            part = one.parts[name] = _Part(now - _ns(seconds), now)
        part.more(tokens, seconds, now)

    def _child(
        self,
        one: _Open,
        name: str,
        begun_ns: int,
        ended_ns: int | None,
        attributes: Mapping[str, AttributeValue],
    ) -> Span:
        """Start a child of the request's span; end it if ``ended_ns`` is given."""
        span = self._tracer.start_span(
            f"kvkeep.{name}",
            set_span_in_context(one.span),
            SpanKind.INTERNAL,
            attributes,
            start_time=begun_ns,
        )
        if ended_ns is not None:
            span.end(ended_ns)
        return span


def _ns(seconds: float) -> int:
    return max(0, int(seconds * _NS))
