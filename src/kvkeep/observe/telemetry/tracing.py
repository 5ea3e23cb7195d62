"""`Tracing`: OpenTelemetry spans of requests: what they matched, loaded, computed and stored."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

__all__ = ["Tracing"]

# What the semantic conventions of generative AI call what an endpoint does.
_OPERATIONS: Final = {"chat": "chat", "chat.completions": "chat", "completions": "text_completion"}
_MOST_SOURCES = 32  # events of one load
_NS = 1_000_000_000


@dataclass(slots=True)
class _Part:
    """Something that a request does now and then: when it began first and ended last."""

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
    """A request that has not ended."""

    span: Span
    parts: dict[str, _Part] = field(default_factory=dict)
    reused: int = 0


class Tracing:
    """A `RequestWatch` that makes spans; one that is not sampled costs nothing more.

    A request is one span, below the ``traceparent`` of its HTTP headers if it has one. Below it are
    ``kvkeep.match`` (looking in the pool), ``kvkeep.load`` (from the tiers), ``kvkeep.prefill``
    (from the first step that computed of its prompt to the last) and ``kvkeep.store`` (handing it
    to the store). Attributes are counts, times and names of tiers: no text, no token, no salt.

    ``close`` is called once, at the end. ``clock`` gives nanoseconds since 1970. At most ``most``
    requests are followed at once; the oldest is given up for one more.

    Thread safety: all methods. Cost: some tens of microseconds a request; spans are exported by
    whoever made the tracer.
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
        """End what is open, and hand what was not exported yet to the exporter."""
        with self._lock:
            left, self._open = list(self._open.values()), OrderedDict()
        for one in left:
            one.span.end(self._clock())
        if self._end is not None:
            self._end()
            self._end = None

    def begun(self, id: str, *, kind: str, model: str, headers: Mapping[str, str]) -> None:
        """Begin its span."""
        operation = _OPERATIONS.get(kind, kind)
        span = self._tracer.start_span(
            f"{operation} {model}",
            self._propagator.extract(headers),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "kvkeep",
                "gen_ai.request.model": model,
                "gen_ai.response.id": id,
            },
            start_time=self._clock(),
        )
        if not span.is_recording():
            return
        given_up = None
        with self._lock:
            if len(self._open) >= self._most:
                _, given_up = self._open.popitem(last=False)
            self._open[id] = _Open(span)
        if given_up is not None:
            given_up.span.end(self._clock())

    def admitted(
        self, id: str, *, namespace: str, prompt_tokens: int, cached_tokens: int, match_s: float
    ) -> None:
        """It was looked up in the pool."""
        one = self._of(id)
        if one is None:
            return
        one.reused = cached_tokens
        one.span.set_attribute("gen_ai.usage.input_tokens", prompt_tokens)
        one.span.set_attribute("gen_ai.usage.cache_read.input_tokens", cached_tokens)
        now = self._clock()
        tokens = {"kvkeep.prompt_tokens": prompt_tokens, "kvkeep.cached_tokens": cached_tokens}
        self._child(one, "match", now - _ns(match_s), now, tokens)

    def loaded(
        self, id: str, *, sources: Sequence[tuple[int, int, str]], seconds: float, late: bool
    ) -> None:
        """The tiers were asked."""
        one = self._of(id)
        if one is None or (not sources and not seconds):
            return  # there was nothing to ask
        tokens = sum(stop - start for start, stop, _ in sources)
        one.reused += tokens
        one.span.set_attribute("gen_ai.usage.cache_read.input_tokens", one.reused)
        now = self._clock()
        tiers = sorted({tier for _, _, tier in sources})
        span = self._child(
            one,
            "load",
            now - _ns(seconds),
            None,
            {"kvkeep.loaded_tokens": tokens, "kvkeep.tiers": tiers, "kvkeep.late": late},
        )
        for start, stop, tier in sources[:_MOST_SOURCES]:
            piece: dict[str, AttributeValue] = {
                "kvkeep.tier": tier,
                "kvkeep.start": start,
                "kvkeep.stop": stop,
            }
            span.add_event("kvkeep.loaded", piece, now)
        span.end(now)

    def computed(self, id: str, *, tokens: int, seconds: float) -> None:
        """A step computed some of its prompt."""
        self._more(id, "prefill", tokens, seconds)

    def stored(self, id: str, *, tokens: int, seconds: float) -> None:
        """Some of it was handed to the store."""
        self._more(id, "store", tokens, seconds)

    def ended(self, id: str, *, outcome: str, generated: int, ttft_s: float | None) -> None:
        """End its span, and write those of what it did now and then."""
        with self._lock:
            one = self._open.pop(id, None)
        if one is None:
            return
        for name, part in one.parts.items():
            told = {
                f"kvkeep.{name}.tokens": part.tokens,
                f"kvkeep.{name}.times": part.times,
                f"kvkeep.{name}.seconds": part.seconds,
            }
            self._child(one, name, part.begun_ns, part.ended_ns, told)
        span = one.span
        span.set_attribute("gen_ai.usage.output_tokens", generated)
        span.set_attribute("kvkeep.outcome", outcome)
        if ttft_s is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", ttft_s)
        if outcome == "failed":
            span.set_attribute("error.type", outcome)
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._clock())

    def _of(self, id: str) -> _Open | None:
        with self._lock:
            return self._open.get(id)

    def _more(self, id: str, name: str, tokens: int, seconds: float) -> None:
        one = self._of(id)
        if one is None:
            return
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
        """A span below the request's; it is left open without ``ended_ns``."""
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
