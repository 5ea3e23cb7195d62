"""The demo from end to end: a real model behind the real service, cold against warm."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest

import warm
from kvkeep.cli import demo, main
from kvkeep.cli.demo import print_rows
from warm import KVKEEP

pytestmark = pytest.mark.model

OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def others():
    """Threads that were there before."""
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def assert_nothing_is_left(url):
    """No port, and none of our threads."""
    host, port = url.removeprefix("http://").split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5).close()
    left = {*threading.enumerate()} - OTHERS
    assert not [thread.name for thread in left if "kvkeep" in thread.name]


def url_in(text):
    return re.search(r"http://127\.0\.0\.1:\d+", text)[0]


def test_it_reuses_and_answers_the_same(capsys):
    assert main(["demo", "--json", "--max-tokens", "12"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    shown = json.loads(out)
    rows = {(row["request"], row["about"]): row for row in shown["requests"]}
    assert len(rows) == demo.REQUESTS
    assert shown["same_text"] is True
    for (request, _), row in rows.items():
        assert row["same_text"] is True
        assert row["prompt_tokens"] > 1500
        assert 1 < row["generated_tokens"] <= 12
        assert row["tokens_per_s"] > 0
        assert row["text"].strip()
        if request == "first" or request.startswith("tenant"):
            assert row["reused_tokens"] == 0  # nobody of theirs has asked before
        elif request == "restarted":  # some may be computed while the rest is loaded
            assert row["reused_tokens"] > 0.5 * row["prompt_tokens"]
        else:
            # All but the question itself, of a long document.
            assert row["reused_tokens"] > 0.95 * row["prompt_tokens"]
            assert row["ttft_warm_s"] < row["ttft_cold_s"]  # a hundredth of the work
    # The second turn finds the first one whole, not only the document (but for half a page).
    follow_up = rows["follow-up", demo.FOLLOW_UP]
    assert follow_up["reused_tokens"] > rows["again", demo.ASKED[-1]]["prompt_tokens"] - 16
    assert shown["reused_tokens"] == sum(row["reused_tokens"] for row in rows.values())
    # After the restart it came from disk, not from the pool.
    restarted = rows["restarted", demo.ASKED[0]]
    assert restarted["loaded_tokens"] == restarted["reused_tokens"]
    assert {row["loaded_tokens"] for row in rows.values() if row is not restarted} == {0}
    from_pool = shown["reused_tokens"] - restarted["reused_tokens"]
    assert from_pool == shown["cache"]["hit_tokens"]
    assert shown["cache"]["sequences"] == 0
    assert shown["engine"]["finished"] == 2 * (demo.REQUESTS - 1) + 1  # and what warms up
    assert_nothing_is_left(shown["url"])


@pytest.fixture
def short(monkeypatch):
    """A shorter document, for what does not depend on its length, on a terminal's width."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(demo, "SECTIONS", (*demo.ASKED, demo.FOLLOW_UP))


def test_the_table(short, capsys):
    assert main(["demo", "--max-tokens", "6"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    *lines, curl = out.splitlines()
    assert max(map(len, lines)) <= 80
    starts = [("first", demo.ASKED[0]), *(("again", name) for name in demo.ASKED[1:])]
    starts += [("follow-up", demo.FOLLOW_UP), ("tenant a", demo.ASKED[0])]
    starts += [("tenant b", demo.ASKED[0]), *(("at once", name) for name in demo.CLIENTS)]
    starts += [("restarted", demo.ASKED[0])]
    table = [line for line in lines if line.rstrip().endswith("yes")]
    for (request, about), line in zip(starts, table, strict=True):
        assert re.match(rf" *{request} +{re.escape(about)} +\d", line)
        assert "…" not in line  # it fits
    (totals,) = [line for line in lines if "% reused" in line]
    assert "× sooner (median)" in totals
    assert any("prompt tokens came from disk" in line for line in lines)
    assert lines[-1] == "Next: kvkeep serve (or make serve), and when it listens"
    assert curl.startswith("curl ")
    assert_nothing_is_left(url_in(lines[0]))


def test_a_model_without_a_chat_template(short, tmp_path, capsys):
    from kvkeep.serve.models import bundled_model

    path = tmp_path / "plain"
    shutil.copytree(bundled_model(), path)
    (path / "chat_template.jinja").unlink()
    assert main(["demo", "--json", "--max-tokens", "1", "--model", str(path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"] == "plain"
    assert shown["reused_tokens"] > 0
    assert {row["tokens_per_s"] for row in shown["requests"]} == {None}  # there is no second token


def test_the_last_lines_name_the_model_that_was_asked(capsys):
    row = demo.DemoRow("first", "json.dumps", 9, 8, 8, 2, 0.2, 0.1, 5.0, True, "An answer.")
    print_rows([row], 4, Path("my models/hybrid"))
    *_, serve, curl = capsys.readouterr().out.splitlines()
    assert serve == "Next: kvkeep serve --model 'my models/hybrid', and when it listens"
    body = json.loads(shlex.split(curl)[-1])
    assert body["messages"][0]["role"] == "user"
    assert (body["max_tokens"], body["temperature"]) == (32, 0)


# --- what must not pass ----------------------------------------------------------------------


def test_one_other_word_fails_it(short, monkeypatch, capsys):
    honest = demo.ask
    answers = 0

    def misheard(*request):
        nonlocal answers
        heard = honest(*request)
        answers += 1
        return dataclasses.replace(heard, text=heard.text + ".") if answers == 5 else heard

    monkeypatch.setattr(demo, "ask", misheard)
    assert main(["demo", "--max-tokens", "3"]) == 1
    out, err = capsys.readouterr()
    assert len(re.findall("NO *$", out, re.MULTILINE)) == 1
    assert "differs from its cold one" in err


def test_lost_kv_fails_it(short, monkeypatch, capsys):
    """Not only the comparison: what the model reads from the pages decides."""
    from kvkeep.serve.engine import Runner

    forward = Runner.forward

    def forward_and_forget(runner, *given, **how):
        logits = forward(runner, *given, **how)
        for layer in range(runner.geometry.layers):
            runner.tensors.v(layer).zero_()
        return logits

    monkeypatch.setattr(Runner, "forward", forward_and_forget)
    assert main(["demo", "--max-tokens", "8", "--memory", "32MiB"]) == 1  # zeroed at each step
    assert "NO" in capsys.readouterr().out


def test_tenants_that_are_mixed_up_fail_it_and_nothing_is_left(short, monkeypatch, capsys):
    from kvkeep.serve.server.service import Service

    namespace = Service.namespace
    monkeypatch.setattr(Service, "namespace", lambda service, _: namespace(service, None))
    with pytest.raises(AssertionError, match="the salt is new"):
        main(["demo", "--max-tokens", "3"])
    assert_nothing_is_left(url_in(capsys.readouterr().out))


def test_what_the_service_refuses_is_one_line(short, capsys):
    assert main(["demo", "--max-tokens", "0"]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert re.match(r"kvkeep: error: .*max_tokens", line)
    assert_nothing_is_left(url_in(out))


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_a_signal_ends_it_and_nothing_is_left(sent, code):
    command = [*KVKEEP, "demo", "--max-tokens", "1000"]
    with warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = url_in(process.stdout.readline())  # it serves, and asks
        process.send_signal(sent)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, "")
    assert_nothing_is_left(url)


def test_the_document_is_readable_text():
    document = demo.read_document()
    for name in demo.SECTIONS:
        assert f"# {name}\n\n" in document
    assert 4000 < len(document) < 20000
    assert document.replace("\n", " ").isprintable()
