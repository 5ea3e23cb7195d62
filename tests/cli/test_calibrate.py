"""``kvkeep calibrate``: the engine, a server, and servers that are none."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from kvkeep.cli import main
from kvkeep.core.cost import CostModel, PrefillCost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SMALL = ["--lengths", "32,96,256", "--repeats", "1", "--decode", "4"]


@pytest.mark.model
def test_the_engine_is_measured(tmp_path, capsys):
    out = tmp_path / "cost.json"
    assert main(["calibrate", *SMALL, "--memory", "16MiB", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for text in ("kvkeep-tiny on", "each token", "fitted", "Error of the fit", f"Written to {out}"):
        assert text in said
    cost = PrefillCost.read(out)
    assert cost.kv_bytes_per_token == 2048  # docs/tiny-model.md
    assert cost.decode_seconds_per_token > 0
    assert cost.prefill_s(0, 256) > 0
    measured = json.loads(out.read_text())["measured"]
    # Each prompt with nothing of it cached, half of it, and all full pages before its last token.
    assert [(one["start"], one["stop"]) for one in measured] == [
        (0, 32), (16, 32), (0, 96), (48, 96), (80, 96), (0, 256), (128, 256), (240, 256),
    ]  # fmt: skip
    assert all(one["seconds"] > 0 for one in measured)


@pytest.mark.model
def test_tiers_are_measured(tmp_path, capsys):
    out = tmp_path / "cost.json"
    urls = [
        "memory://64MiB",
        f"file://{tmp_path}/one?size=256MiB",
        f"file://{tmp_path}/two?size=256MiB&codec=int8",
    ]
    tiers = [word for url in urls for word in ("--tier", url)]
    words = ["calibrate", "--lengths", "32,64", "--repeats", "1", "--decode", "2", "--memory",
             "16MiB", "--block-tokens", "64"]  # fmt: skip
    assert main([*words, *tiers, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for text in ("memory", "file", "file2", "/s", "tokens/s"):
        assert text in said
    cost = CostModel.read(out)
    assert set(cost.reads()) == {"memory", "file", "file2"}
    for name, read in cost.reads().items():
        assert 0 < read.seconds(1 << 20) < 60, name
    found = json.loads(out.read_text())
    assert found["tiers"]["file2"]["place"].startswith("file://")
    assert found["tiers"]["file"]["write"]["seconds_per_byte"] > 0
    assert " on " in found["model"]
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"cost.json", "FORMAT", "ledger", "budget", "spaces"}, (
        "what was written is deleted"
    )
    for wrong, message in (
        (["--tier", "none://x"], "no tier is called none"),
        (["--tier", "file://"], "file"),
        (["--tier", urls[1], "--url", "http://127.0.0.1:1"], "leave out --url"),
        (["--tier", urls[1], "--block-tokens", "3"], "a multiple of the page size"),
    ):
        assert main(["calibrate", *SMALL, "--memory", "16MiB", *wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.model
def test_a_server_is_measured(capsys):
    from kvkeep.cli.demo import serving
    from kvkeep.core.cache import PagedCache
    from kvkeep.serve.engine import Engine, Runner, Tokenizer
    from kvkeep.serve.models import bundled_model

    runner = Runner.load(bundled_model(), num_pages=192, page_size=16, device="cpu")
    cache = PagedCache(192, 16)
    engine = Engine(runner, cache, Tokenizer.load(bundled_model()))
    with serving(engine, "here") as url:
        for address in (url, f"{url}/v1/"):
            assert main(["calibrate", "--url", address, *SMALL, "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
            assert found["name"] == f"here at {address}"
            assert found["decode_seconds_per_token"] > 0
            assert PrefillCost.of(found).prefill_s(0, 256) > 0
            starts = [one["start"] for one in found["measured"]]
            assert sum(start < 8 for start in starts) >= 3, "beginnings can be alike by chance"
            assert max(starts) > 100, "what the server says was cached"
            for one in found["measured"]:
                assert 0 <= one["start"] < one["stop"] < 400
        assert main(["calibrate", "--url", url, "--name", "nobody", *SMALL]) == 2
        assert "nobody" in capsys.readouterr().err
        # It has 3,072 tokens: what is longer is refused, and what was measured before is used.
        before = cache.stats().opened
        assert main(["calibrate", "--url", url, "--repeats", "1", "--decode", "2"]) == 0
        assert "It refuses prompts of 4,096 tokens" in capsys.readouterr().out
        assert cache.stats().opened > before


# --- servers that say what they should not -------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
MODELS = HEAD + b'{"data": [{"id": "m"}]}'


@contextmanager
def saying(answer: Callable[[bytes], bytes]) -> Iterator[str]:
    """A server that answers each request as ``answer`` makes of its first line; gives its URL."""
    ending = threading.Event()

    def serve() -> None:
        while not ending.is_set():
            connection, _ = listening.accept()
            with connection:
                seen = connection.recv(1 << 20)
                if not seen:
                    continue
                connection.sendall(answer(seen.split(b"\r\n")[0]))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):  # what is not read would reset the connection
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            ending.set()
            socket.create_connection(("127.0.0.1", port)).close()
            thread.join(30)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


TEXT = event(choices=[{"text": "x"}])
USED = {"prompt_tokens": 7, "completion_tokens": 3}


@pytest.mark.parametrize(
    ("models", "answer", "said"),
    [
        (b"", b"", "cannot reach http"),
        (b"nonsense\r\n\r\n", b"", "cannot reach http"),
        (HEAD + b"<html>", b"", "does not speak OpenAI's API"),
        (HEAD + b"[" * 100_000, b"", "does not speak OpenAI's API"),
        (HEAD + b'{"data": []}', b"", "lists no model"),
        (HEAD + b'{"data": 7}', b"", "lists no model"),
        (MODELS, b"HTTP/1.1 401 No\r\n\r\n" + b'{"error": {"message": "a key!"}}', "401: a key!"),
        (MODELS, b"HTTP/1.1 500 No\r\n\r\n" + b"x" * 9999, "500: xxx"),
        (MODELS, HEAD + b"data: 7\n\n", "does not speak"),
        (MODELS, HEAD + TEXT, "without its usage"),
        (MODELS, HEAD + event(choices=[], usage=USED), "without a token"),
        (MODELS, HEAD + TEXT + event(usage={"prompt_tokens": "many"}), "without its usage"),
        (MODELS, HEAD + TEXT + event(usage=[1]), "without its usage"),
        (MODELS, HEAD + TEXT + event(error={"message": "it broke"}), "says: it broke"),
    ],
)
def test_what_a_server_says_wrong_is_one_line(models, answer, said, capsys):
    def answers(request: bytes) -> bytes:
        return models if b"/v1/models" in request else answer

    with saying(answers) as url:
        assert main(["calibrate", "--url", url, *SMALL]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert len(error) < 600


def test_a_server_that_does_not_tell_what_was_cached(capsys):
    whole = HEAD + TEXT + event(choices=[], usage=USED) + b"data: [DONE]\n\n"
    with saying(lambda request: MODELS if b"/v1/models" in request else whole) as url:
        assert main(["calibrate", "--url", url, *SMALL]) == 0
    out = capsys.readouterr().out
    assert "does not report cached tokens" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "ftp://x"], "is no address of a server"),
        (["--url", "http://"], "is no address of a server"),
        (["--url", "http://x:99999999"], "is no address of a server"),
        (["--url", "http://x", "--model", "y"], "one of the two"),
        (["--lengths", "a"], "--lengths is a list"),
        (["--lengths", "64"], "two or more"),
        (["--lengths", "1,64"], "of 2 tokens or more"),
        (["--repeats", "0"], "--repeats"),
        (["--decode", "1"], "--decode"),
        (["--out", "/no/such/folder/cost.json"], "no folder"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(arguments, said, capsys):
    assert main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.model
def test_prompts_longer_than_the_model_takes_are_refused(capsys):
    assert main(["calibrate", "--lengths", "64,100000", "--memory", "4MiB"]) == 2
    assert "shorter --lengths" in capsys.readouterr().err


def test_what_is_quoted_in_an_error_does_nothing_to_a_terminal(tmp_path, capsys):
    trace = tmp_path / "\x1b[2Jtrace.jsonl"
    assert main(["replay", str(trace), "--capacity", "1k"]) == 2
    error = capsys.readouterr().err
    assert "␛[2Jtrace.jsonl" in error
    assert "\x1b" not in error
