"""``kvkeep serve`` with a collector and logs for machines, as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import httpx
import pytest

import warm
from warm import KVKEEP

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(os.name != "posix", reason="signals"),
]

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAID = "the quick brown fox that nobody may read about"


def test_a_request_is_seen_by_the_collector_and_said_by_nobody(collector, tmp_path):
    pytest.importorskip("opentelemetry.sdk")
    address, got = collector
    environ = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_ENDPOINT": address,
        "OTEL_SERVICE_NAME": "kv",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(tmp_path),
        "KVKEEP_API_KEY": "a-long-secret",
    }
    command = [*KVKEEP, "serve", "--port", "0", "--memory", "64MiB"]
    with warm.Popen(
        [*command, "--log-format", "json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
    ) as process:  # fmt: skip
        try:
            says = process.stdout.readline()
            assert says, process.stderr.read()
            headers = {
                "traceparent": f"00-{TRACE}-{PARENT}-01",
                "authorization": "Bearer a-long-secret",
            }
            asked = {"prompt": SAID, "max_tokens": 3, "temperature": 0, "cache_salt": "salt-x"}
            with httpx.Client(base_url=says.split(" at ")[1].split()[0], timeout=60) as http:
                answer = http.post("/v1/completions", json=asked, headers=headers)
                answer.raise_for_status()
                http.get("/v1/models/%1B[2J%0Anothing%E2%80%AE", headers=headers)
                # Of what is longer than the model's context, its tokenizer warns by itself.
                long = {**asked, "prompt": f"{SAID} " * 1000}
                assert http.post("/v1/completions", json=long, headers=headers).is_client_error
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    lines = [json.loads(line) for line in log.splitlines()]
    assert len(lines) == len(log.splitlines())  # nothing else is written there
    said = [line["message"] for line in lines if line["logger"] == "kvkeep.access"]
    assert len(said) == 3
    assert log.isascii()
    assert "a-long-secret" not in log
    assert SAID not in log
    spans = {
        span.name: span
        for _, _, request in got
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }
    root = spans["text_completion kvkeep-tiny"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    told = {one.key: one.value for one in root.attributes}
    assert told["gen_ai.response.id"].string_value == answer.json()["id"]
    assert told["gen_ai.usage.output_tokens"].int_value == 3
    for name in ("kvkeep.match", "kvkeep.prefill"):
        assert spans[name].parent_span_id == root.span_id
    sent = b"".join(request.SerializeToString() for _, _, request in got)
    for secret in (SAID, "salt-x", "a-long-secret"):
        assert secret.encode() not in sent
