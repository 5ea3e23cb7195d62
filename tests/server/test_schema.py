"""Schemathesis over the published OpenAPI document: examples, edges, random data, sequences.

``KVKEEP_FUZZ=long`` tries twenty times as much random data, other data each time.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvkeep.serve.engine import Limits

pytestmark = pytest.mark.model

# What the document allows is refused where it does not go together (echo and logprobs), or
# where this server's limits or the model's tokens say so: no document can say that.
EXCLUDED = "positive_data_acceptance"
HOW = ("--max-examples", "10", "--generation-deterministic")
HOW_LONG = ("--max-examples", "200")


@pytest.mark.timeout(1800)  # a minute and a half of processor time, on a machine that may be busy
def test_what_the_document_says_is_so(start_server, small_model, tmp_path):
    how = HOW_LONG if os.environ.get("KVKEEP_FUZZ") == "long" else HOW
    limits = Limits(max_running=4, max_waiting=16)
    # No answer is long: the pool has 32 tokens.
    pool = {"num_pages": 8, "page_size": 4, "model": small_model}
    with start_server(**pool, limits=limits, request_timeout_s=10) as server:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
                *("--exclude-checks", EXCLUDED, "--request-timeout", "20", "--no-color", *how),
            ],
            check=False, cwd=tmp_path, capture_output=True, text=True, timeout=1700,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        # All of it was tried, and not only refused.
        paths = server.http.get("/openapi.json").json()["paths"]
        operations = sum(len(path) for path in paths.values())
        assert operations >= 12
        assert f"{operations} selected / {operations} total" in done.stdout
        assert server.engine.stats().finished > 20
        server.assert_idle()
