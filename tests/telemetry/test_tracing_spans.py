"""Spans of requests, as the SDK's exporter and a real receiver get them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

import pytest

from kvkeep.observe.telemetry import start, wanted

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from kvkeep.observe.telemetry.tracing import Tracing
from request_events import Requests

SECOND = 1_000_000_000
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
SECRET = "the prompt's own words"


class Traced:
    """A `Tracing` into memory, on a clock of ours."""

    def __init__(self, **options) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(**{"shutdown_on_exit": False, **options.pop("provider", {})})
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.now = 100 * SECOND
        self.tracing = Tracing(provider.get_tracer("test"), clock=lambda: self.now, **options)

    def spans(self):
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def request(self, id="chatcmpl-1", headers=SAMPLED, outcome="done"):
        tracing = Requests(self.tracing.see)
        tracing.begun(id, kind="chat", model="tiny", headers=headers)
        self.now += SECOND
        tracing.admitted(id, namespace=SECRET, prompt_tokens=100, cached_tokens=32, match_s=0.25)
        self.now += SECOND
        sources = [(32, 48, "memory"), (48, 64, "file")]
        tracing.loaded(id, sources=sources, seconds=0.5, late=True)
        for _ in range(2):
            self.now += SECOND
            tracing.computed(id, tokens=18, seconds=0.5)
        self.now += SECOND
        tracing.stored(id, tokens=36, seconds=0.125)
        self.now += SECOND
        tracing.ended(id, outcome=outcome, generated=7, ttft_s=4.5)


def test_a_request_is_a_tree_of_spans_below_its_clients():
    traced = Traced()
    traced.request()
    spans = traced.spans()
    assert set(spans) == {
        "chat tiny", "kvkeep.match", "kvkeep.load", "kvkeep.prefill", "kvkeep.store"
    }  # fmt: skip
    root = spans.pop("chat tiny")
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT
    assert root.context.trace_state["vendor"] == "1"
    assert root.kind is SpanKind.SERVER
    assert root.end_time - root.start_time == 6 * SECOND
    assert dict(root.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvkeep",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.response.time_to_first_chunk": 4.5,
        "kvkeep.outcome": "done",
    }
    for child in spans.values():
        assert child.parent.span_id == root.context.span_id
        assert child.context.trace_id == root.context.trace_id
        assert root.start_time <= child.start_time <= child.end_time <= root.end_time


def test_names_of_attributes_are_those_of_the_conventions():
    conventions = pytest.importorskip(
        "opentelemetry.semconv._incubating.attributes.gen_ai_attributes"
    )
    known = {getattr(conventions, name) for name in dir(conventions) if name.startswith("GEN_AI_")}
    traced = Traced()
    traced.request(outcome="failed")
    for span in traced.spans().values():
        for name in span.attributes:
            assert name.startswith("kvkeep.") or name == "error.type" or name in known, name


def test_times_and_counts_of_the_parts():
    traced = Traced()
    traced.request()
    spans = traced.spans()

    def length(name):
        return (spans[name].end_time - spans[name].start_time) / SECOND

    assert length("kvkeep.match") == 0.25
    assert spans["kvkeep.match"].attributes["kvkeep.cached_tokens"] == 32
    load = spans["kvkeep.load"]
    assert length("kvkeep.load") == 0.5
    assert load.attributes["kvkeep.loaded_tokens"] == 32
    assert load.attributes["kvkeep.tiers"] == ("file", "memory")
    assert load.attributes["kvkeep.late"] is True
    assert [event.attributes["kvkeep.tier"] for event in load.events] == ["memory", "file"]
    assert length("kvkeep.prefill") == 1.5  # from the first step's beginning to the last one's end
    prefill = spans["kvkeep.prefill"].attributes
    assert (prefill["kvkeep.prefill.tokens"], prefill["kvkeep.prefill.times"]) == (36, 2)
    assert prefill["kvkeep.prefill.seconds"] == 1.0
    assert spans["kvkeep.store"].attributes["kvkeep.store.tokens"] == 36


def test_nothing_of_what_was_said_and_no_salt_is_in_a_span():
    traced = Traced()
    traced.request(headers={**SAMPLED, "authorization": SECRET})
    assert SECRET not in "".join(span.to_json() for span in traced.spans().values())


@pytest.mark.parametrize(
    "headers",
    [{}, {"traceparent": "nonsense"}, {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"},
     {"traceparent": "\x00" * 500}, {"tracestate": "a=b"}],
)  # fmt: skip
def test_without_a_parent_a_request_begins_its_own_trace(headers):
    traced = Traced()
    traced.request(headers=headers)
    root = traced.spans()["chat tiny"]
    assert root.parent is None
    assert root.context.trace_id


def test_who_was_not_sampled_by_its_client_is_not_traced():
    traced = Traced()
    traced.request(headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert traced.spans() == {}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    Requests(traced.tracing.see).begun("one more", kind="chat", model="m", headers=headers)
    assert not traced.tracing._open  # nothing is kept for it
    off = Traced(provider={"sampler": ALWAYS_OFF})
    off.request(headers={})
    assert off.spans() == {}


def test_a_failed_request_is_an_error_and_an_aborted_one_is_none():
    traced = Traced()
    traced.request(outcome="failed")
    root = traced.spans()["chat tiny"]
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes["error.type"] == "failed"
    traced.exporter.clear()
    traced.request(outcome="aborted")
    assert traced.spans()["chat tiny"].status.status_code is StatusCode.UNSET


def test_strangers_and_what_ended_are_left_out():
    traced = Traced()
    traced.request()
    before = len(traced.exporter.get_finished_spans())
    requests = Requests(traced.tracing.see)
    requests.computed("chatcmpl-1", tokens=1, seconds=1)
    requests.ended("chatcmpl-1", outcome="done", generated=1, ttft_s=None)
    requests.admitted("nobody", namespace="", prompt_tokens=1, cached_tokens=0, match_s=0.0)
    assert len(traced.exporter.get_finished_spans()) == before


def test_requests_that_never_end_are_given_up():
    traced = Traced(most=3)
    for number in range(10):
        Requests(traced.tracing.see).begun(str(number), kind="completions", model="m", headers={})
    assert len(traced.tracing._open) == 3
    traced.tracing.close()
    spans = traced.exporter.get_finished_spans()
    assert sorted(span.attributes["gen_ai.response.id"] for span in spans) == list("0123456789")
    assert {span.name for span in spans} == {"text_completion m"}


def test_many_threads_leave_whole_trees():
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    see = Tracing(provider.get_tracer("test")).see

    def work(name: str) -> None:
        tracing = Requests(see)
        for number in range(50):
            id = f"{name}{number}"
            tracing.begun(id, kind="chat", model="m", headers={})
            tracing.admitted(id, namespace="", prompt_tokens=9, cached_tokens=0, match_s=0.0)
            tracing.computed(id, tokens=9, seconds=0.0)
            tracing.ended(id, outcome="done", generated=1, ttft_s=None)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = exporter.get_finished_spans()
    roots = {span.context.span_id for span in spans if span.parent is None}
    assert len(roots) == 200
    assert sum(span.parent is not None and span.parent.span_id in roots for span in spans) == 400


# --- to a collector --------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("TRACES_", ""):
        for what in ("ENDPOINT", "PROTOCOL"):
            monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}{what}", raising=False)
    for name in ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_spans_reach_a_real_receiver(collector, environment):
    address, got = collector
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    environment.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=ops")
    tracing = start()
    assert tracing is not None
    requests = Requests(tracing.see)
    requests.begun("cmpl-1", kind="completions", model="tiny", headers=SAMPLED)
    requests.admitted("cmpl-1", namespace="", prompt_tokens=9, cached_tokens=4, match_s=0.001)
    requests.ended("cmpl-1", outcome="done", generated=2, ttft_s=0.1)
    tracing.close()
    tracing.close()
    ((path, headers, request),) = got
    assert path == "/v1/traces"
    assert headers["x-tenant"] == "ops"
    (resource,) = request.resource_spans
    named = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert named["service.name"] == "kvkeep"
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert set(spans) == {"text_completion tiny", "kvkeep.match"}
    root = spans["text_completion tiny"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert spans["kvkeep.match"].parent_span_id == root.span_id


def test_a_collector_that_is_away_costs_spans_alone(environment, caplog):
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    environment.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    tracing = start()
    assert tracing is not None
    with caplog.at_level(logging.CRITICAL):
        requests = Requests(tracing.see)
        requests.begun("a", kind="chat", model="m", headers={})
        requests.ended("a", outcome="done", generated=0, ttft_s=None)
        tracing.close()


def test_it_is_off_unless_somebody_wants_it(environment):
    assert start() is None
    environment.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1/v1/traces")
    assert wanted()
    environment.setenv("OTEL_TRACES_EXPORTER", "none")
    assert not wanted()
    assert start() is None
    environment.setenv("OTEL_SDK_DISABLED", "true")
    assert start() is None


def test_the_environment_names_the_service(collector, environment):
    address, got = collector
    environment.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{address}/custom")
    environment.setenv("OTEL_SERVICE_NAME", "mine")
    tracing = start()
    Requests(tracing.see).begun("a", kind="chat", model="m", headers={})
    tracing.close()
    ((path, _, request),) = got
    assert path == "/custom"
    named = {
        one.key: one.value.string_value for one in request.resource_spans[0].resource.attributes
    }
    assert named["service.name"] == "mine"


def test_a_protocol_that_is_not_spoken_is_logged(environment, caplog):
    environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    assert start() is None  # an environment is everybody's: no reason not to serve
    assert "grpc" in caplog.text


@pytest.mark.parametrize("module", ["opentelemetry", "opentelemetry.exporter"])
def test_without_the_extra_the_log_says_which_it_is(module):
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from kvkeep.observe.telemetry import start\n"
        "assert start() is None\n"
    )
    environ = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "kvkeep[otel]" in done.stderr  # the line of the log
