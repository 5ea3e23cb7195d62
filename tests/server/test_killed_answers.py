"""kill -9 of a server in the middle of an answer that it holds back."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

import httpx
import numpy as np
import pytest

import warm
from waiting_loads import LOADING
from warm import PYTHON

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(sys.platform == "win32", reason="there are no signals"),
]

BLOCK, ANSWER = 16, 80
SERVE = f"{LOADING}\nfrom kvkeep.cli import main\nsys.exit(main())"


@contextmanager
def serving(folder):
    """``kvkeep serve`` in a process of its own, which is killed at the end, and a client."""
    command = [
        *PYTHON, "-c", SERVE, "serve", "--port", "0",
        "--page-size", "16", "--block-tokens", str(BLOCK), "--memory", "16MiB", "--tier", "memory://64MiB",
        "--tier", f"file://{folder}/tier?size=256MiB&sync=never",
    ]  # fmt: skip
    process = warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().partition(" at ")[2].split()[0]
        with httpx.Client(base_url=address, timeout=60) as client:
            yield process, client
    finally:
        process.kill()
        process.communicate()


def body(tokens, count, **more):
    return {
        "prompt": [int(token) for token in tokens], "max_tokens": count, "ignore_eos": True,
        "temperature": 0, **more,
    }  # fmt: skip


def ask(client, tokens, count):
    return client.post("/v1/completions", json=body(tokens, count)).raise_for_status().json()


def text(count, seed):
    return np.random.default_rng(seed).integers(300, 2000, count)


def figures(client):
    lines = client.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines
            if not line.startswith("#"))}  # fmt: skip


def test_what_was_held_back_is_computed_again(tmp_path):
    prompt = text(40, seed=999)
    with serving(tmp_path) as (process, client):
        for talk in range(10):  # each next prompt lacks the answer
            begun = text(40, seed=2 * talk)
            ask(client, begun, ANSWER)
            ask(client, np.concatenate((begun, text(9, seed=2 * talk + 1))), 1)
        assert figures(client)["kvkeep_store_unread_tokens_total"] > 0
        stream = client.stream("POST", "/v1/completions", json=body(prompt, 400, stream=True))
        with stream as answer:
            events = answer.iter_lines()
            for _ in range(2 * ANSWER):
                next(events)
            process.kill()
            process.wait(30)
    with serving(tmp_path) as (_, client):
        first = ask(client, prompt, ANSWER)
        told = figures(client)
        assert first["usage"]["kvkeep"]["loaded_tokens"] == 40 // BLOCK * BLOCK
        assert told['kvkeep_store_damaged_total{tier="file"}'] == 0
        assert told['kvkeep_store_errors_total{tier="file"}'] == 0
        again = ask(client, prompt, ANSWER)
    with serving(tmp_path / "other") as (_, client):
        alone = ask(client, prompt, ANSWER)
    said = [one["choices"][0]["text"] for one in (first, again, alone)]
    assert said[0] == said[1] == said[2]
