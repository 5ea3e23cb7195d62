"""``kvkeep serve`` as a process: what it prints, what it refuses, how signals end it."""

from __future__ import annotations

import gc
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

import warm
from kvkeep.cli import main, serve
from kvkeep.core.cost import CostModel, PrefillCost
from warm import KVKEEP

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(os.name != "posix", reason="signals"),
]

SMALL = ["--port", "0", "--memory", "64MiB"]
KEY = "a-long-secret"
ENDLESS = {"prompt": "Return a copy", "max_tokens": 8000, "ignore_eos": True, "temperature": 0}


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen, str, str]]:
    """The process, its address, and the curl that it prints."""
    with tempfile.TemporaryDirectory() as cache, warm.Popen(
        [*KVKEEP, "serve", *SMALL, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": cache, **environment},
    ) as process:  # fmt: skip
        try:
            says, curl = process.stdout.readline(), process.stdout.readline()
            assert says, process.stderr.read()
            yield process, says.split(" at ")[1].split()[0], curl.strip()
        finally:
            process.kill()


def ended(process, seconds=30):
    """Exit code and what it logged."""
    _, log = process.communicate(timeout=seconds)
    return process.returncode, log


def test_it_says_where_it_listens_and_what_to_type():
    with serving() as (process, url, curl):
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "kvkeep-tiny"
        command = shlex.split(curl)
        assert command[:2] == ["curl", f"{url}/v1/chat/completions"]
        if shutil.which("curl"):
            done = subprocess.run(
                [*command, "-s"], capture_output=True, text=True, check=True, timeout=60
            )
            assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"
        process.send_signal(signal.SIGTERM)
        code, log = ended(process)
    assert code == 0
    assert "Traceback" not in log
    assert "INFO GET /v1/models 200" in log
    assert "uvicorn" not in log.lower()


def test_a_key_is_asked_for_and_never_written_down():
    with serving("--name", "mine", KVKEEP_API_KEY=KEY) as (process, url, curl):
        assert httpx.get(f"{url}/v1/models").status_code == 401
        headers = {"authorization": f"Bearer {KEY}"}
        assert httpx.get(f"{url}/v1/models", headers=headers).json()["data"][0]["id"] == "mine"
        assert 'Bearer $KVKEEP_API_KEY"' in curl
        process.send_signal(signal.SIGINT)
        code, log = ended(process)
    assert code == 0
    assert KEY not in log + curl


def test_a_file_has_its_options(tmp_path):
    file, key = tmp_path / "kvkeep.toml", tmp_path / "key"
    key.write_text(KEY)
    store = tmp_path / "store"
    file.write_text(
        f"[serve]\nname = 'from the file'\nport = 1\napi-key-file = '{key}'\n"
        f"tier = ['memory://16MiB', 'file://{store}?size=64MiB']\ndrain-timeout = '5s'\n"
    )
    with serving(KVKEEP_CONFIG=str(file)) as (process, url, _):  # --port 0 goes before port = 1
        assert httpx.get(f"{url}/v1/models").status_code == 401
        headers = {"authorization": f"Bearer {KEY}"}
        models = httpx.get(f"{url}/v1/models", headers=headers).json()
        assert models["data"][0]["id"] == "from the file"
        tiers = httpx.get(f"{url}/kv/stats", headers=headers).json()["store"]["tiers"]
        assert [tier["name"] for tier in tiers] == ["memory", "file"]
        process.send_signal(signal.SIGTERM)
        code, log = ended(process)
    assert code == 0
    assert KEY not in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_those_finish_that_run(number):
    with serving() as (process, url, _):
        lines = []

        def ask():
            body = {**ENDLESS, "max_tokens": 300, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
                lines.extend(line for line in answer.iter_lines() if line)

        asking = threading.Thread(target=ask)
        asking.start()
        while not lines:
            time.sleep(0.01)
        process.send_signal(number)
        while httpx.get(f"{url}/health").status_code != 503:
            time.sleep(0.01)
        refused = httpx.post(f"{url}/v1/completions", json=ENDLESS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        asking.join(60)
        code, log = ended(process)
    assert code == 0
    assert "Traceback" not in log
    assert lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in lines[-2]


def test_those_that_take_too_long_are_told(tmp_path):
    with (
        serving("--drain-timeout", "0.3") as (process, url, _),
        httpx.stream(
            "POST", f"{url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=60
        ) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-1]
        assert "shutting_down" in last
        assert ended(process)[0] == 0


def test_a_second_signal_ends_it_at_once():
    with (
        serving() as (process, url, _),
        httpx.stream(
            "POST", f"{url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=60
        ) as answer,
    ):
        lines = answer.iter_lines()  # kept, or the client would hang up
        next(lines)
        process.send_signal(signal.SIGTERM)
        while httpx.get(f"{url}/health").status_code != 503:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        code, log = ended(process)
        assert time.monotonic() - begun < 15  # and not the 30 of a drain
    assert code == 0
    assert "Traceback" not in log


def test_what_stays_is_no_work_for_the_garbage_collector(monkeypatch):
    left = []
    monkeypatch.setattr(serve, "_listen", lambda *_: left.append(len(gc.get_objects())) or 0)
    assert main(["serve", "--no-store", "--port", "0"]) == 0
    assert left[0] < 5000  # of half a million


def test_a_port_that_is_taken_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in line
    assert "--port" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "70000"], "0 … 65535"),
        (["--port", "-1"], "0 … 65535"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--model", "/no/such/model"], "no such directory"),
        (["--memory", "10B"], "holds no page"),
        (["--api-key", "ключ"], "printable ASCII"),
        (["--api-key", ""], "--api-key holds no API key"),
        (["--api-key", " \t"], "--api-key holds no API key"),
        (["--api-key-file", "/no/such/key"], "cannot read an API key"),
        (["--api-key", "a", "--api-key-file", "b"], "leave one out"),
        (["--max-running", "0"], "max_running"),
        (["--max-waiting", "-1"], "max_waiting"),
        (["--request-timeout", "nan"], "request_timeout"),
        (["--drain-timeout", "-1"], "drain_timeout"),
        (["--name", ""], "name"),
    ],
    ids=str,
)
def test_wrong_values_are_one_line(arguments, says, capsys):
    assert main(["serve", *SMALL, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("kvkeep: error: ")
    assert says in line


KEY_PLACES = [
    *(("serve", place) for place in ("variable", "option beside a variable", "file", "key file")),
    *((client, place) for client in ("top", "explain", "tree")
      for place in ("variable", "key file")),
]  # fmt: skip


@pytest.mark.parametrize("blank", ["", " \n"])
@pytest.mark.parametrize("where", KEY_PLACES, ids="-".join)
def test_a_key_that_is_none_is_never_no_key(where, blank, capsys, tmp_path, monkeypatch):
    """A server would be open to all, and a client would send nothing."""
    command, place = where
    words = [command, *SMALL] if command == "serve" else [command, "http://127.0.0.1:1"]
    key, config = tmp_path / "key", tmp_path / "kvkeep.toml"
    key.write_text(blank)
    config.write_text(f"[serve]\napi-key = {json.dumps(blank)}\n")
    config.chmod(0o600)
    monkeypatch.delenv("KVKEEP_API_KEY", raising=False)
    if place == "variable":
        monkeypatch.setenv("KVKEEP_API_KEY", blank)
    elif place == "key file":
        words += ["--api-key-file", str(key)]
    elif place == "file":
        words += ["--config", str(config)]
    else:
        monkeypatch.setenv("KVKEEP_API_KEY", KEY)
        words += ["--api-key", blank]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds no API key" in line


@pytest.mark.parametrize("module", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_missing_package_says_which_extra_brings_it(module):
    program = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from kvkeep.cli import main; sys.exit(main(['serve']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    needed = f"{module} is needed here; install it with: pip install 'kvkeep[server]'"
    assert done.stderr == f"kvkeep: error: {needed}\n"


# --- the store -------------------------------------------------------------------------------

LONG = {"prompt": [7, 8, 9] * 200, "max_tokens": 12, "temperature": 0}


def asked(url):
    """The answer's text, and how many tokens were loaded."""
    answer = httpx.post(f"{url}/v1/completions", json=LONG, timeout=60).raise_for_status().json()
    return answer["choices"][0]["text"], answer["usage"]["kvkeep"]["loaded_tokens"]


def slow_computing(folder):
    """Options of a server that takes computing for slow, until it has computed something."""
    CostModel(PrefillCost(seconds_per_token=1.0)).write(folder / "cost.json")
    return ["--cost", str(folder / "cost.json")]


def test_what_was_computed_outlives_the_process(tmp_path):
    """By default, in the user's cache; a signal is enough for it to be there."""
    told = []
    for _ in range(2):
        with serving(*slow_computing(tmp_path), XDG_CACHE_HOME=str(tmp_path)) as (process, url, _):
            assert str(tmp_path / "kvkeep" / "store") in process.stdout.readline()
            told.append(asked(url))
            process.send_signal(signal.SIGTERM)
            assert ended(process)[0] == 0
    (text, none), (again, loaded) = told
    assert (text, none, loaded) == (again, 0, 599)


def test_named_tiers_and_none(tmp_path):
    with serving("--no-store", XDG_CACHE_HOME=str(tmp_path)) as (_, url, _):
        text, _ = asked(url)
        assert httpx.get(f"{url}/kv/stats").json()["store"] is None
    place = f"file://{tmp_path}/tier?size=64MiB&codec=lossless"
    for loaded in (0, 599):
        arguments = ["--tier", place, "--block-tokens", "64"]
        arguments += slow_computing(tmp_path)
        with serving(*arguments, XDG_CACHE_HOME=str(tmp_path)) as (process, url, _):
            assert asked(url) == (text, loaded)
            (tier,) = httpx.get(f"{url}/kv/stats").json()["store"]["tiers"][1:]
            assert tier["blocks"] >= (10 if loaded else 0)  # nine whole blocks of the prompt
            process.send_signal(signal.SIGTERM)
            assert ended(process)[0] == 0
    assert not (tmp_path / "kvkeep" / "store").exists()


def test_a_server_that_reuses_nothing_says_so(tmp_path):
    with serving("--no-reuse", XDG_CACHE_HOME=str(tmp_path)) as (process, url, _):
        assert "no KV is reused" in process.stdout.readline()
        first = httpx.post(f"{url}/v1/completions", json=LONG, timeout=60).json()
        again = httpx.post(f"{url}/v1/completions", json={**LONG, "n": 3}, timeout=60).json()
        assert {one["text"] for one in again["choices"]} == {first["choices"][0]["text"]}
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        stats = httpx.get(f"{url}/kv/stats").json()
        assert (stats["reuse"], stats["store"]) == (False, None)
        assert stats["cache"]["hit_tokens"] == stats["cache"]["stored_pages"] == 0
        assert stats["cache"]["pages_free"] == stats["cache"]["pages_total"]
        told = httpx.get(f"{url}/kv/explain/{again['id']}").json()
        assert {span["reason"] for span in told["spans"]} == {"not_admitted"}
        assert told["spans"][0]["evidence"]["why"] == "reuse_off"
        assert "the server reuses nothing" in told["sentence"]
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 0
    assert [one.name for one in (tmp_path / "kvkeep").iterdir()] == ["costs"]


def test_a_cache_that_cannot_be_written_is_no_reason_not_to_serve(tmp_path):
    (tmp_path / "kvkeep").write_text("in the way")
    with serving(XDG_CACHE_HOME=str(tmp_path)) as (process, url, _):
        assert process.stdout.readline().strip().endswith("stored in memory://1GiB")
        assert asked(url)[1] == 0
        process.send_signal(signal.SIGTERM)
        code, log = ended(process)
    assert code == 0
    assert "KV is not stored on disk" in log


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tier", "ftp://x"], "no tier is called ftp"),
        (["--tier", "memory://1MiB", "--no-store"], "--no-store"),
        (["--tier", "memory://1MiB", "--no-reuse"], "--no-reuse"),
        (["--block-tokens", "40"], "multiple of the page size"),
        (["--tier", "memory://1MiB?codec=nonsense"], "codec"),
        (["--load-timeout", "-1"], "seconds"),
    ],
)
def test_a_wrong_store_is_one_line(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["serve", *SMALL, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvkeep: error: ")
    assert said in line
