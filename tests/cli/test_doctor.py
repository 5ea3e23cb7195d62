"""``kvkeep doctor`` on real directories, filesystems and servers, and on those that are wrong."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import warm
from kvkeep.cli import main
from kvkeep.integrations.tested import TESTED
from kvkeep.store import BlockStore
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.backends.shm import ShmBackend
from ports import free_port
from warm import KVKEEP

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECTOR = {"kv_connector": "KVKeepConnector", "kv_role": "kv_both"}


def doctor(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[dict[str, str]]:
    """The results of all checks; no time is spent on speed, and records are small, unless asked."""
    rest = [] if "--seconds" in words else ["--seconds", "0"]
    rest += [] if "--block-tokens" in words else ["--block-tokens", "1"]
    assert main(["doctor", *words, *rest, "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    checks: list[dict[str, str]] = answer["checks"]
    assert answer["failed"] == sum(one["state"] == "fail" for one in checks)
    assert answer["warned"] == sum(one["state"] == "warn" for one in checks)
    for one in checks:
        assert one["found"]
        assert bool(one["todo"]) <= (one["state"] != "ok"), "nothing is to be done about what is ok"
        assert one["todo"] or one["state"] != "warn", "a warning says what to do"
    return checks


def only(checks: list[dict[str, str]], check: str, about: str = "") -> dict[str, str]:
    found = [one for one in checks if one["check"] == check and about in one["about"]]
    assert len(found) == 1, found
    return found[0]


def tree(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


# --- what is given ---------------------------------------------------------------------------


def test_without_anything_the_machine_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    checks = doctor(capsys)
    assert {one["check"] for one in checks} == {"limits", "versions"}
    assert only(checks, "versions", "kvkeep")["state"] == "ok"


def test_lines_and_exit_code(tmp_path: Path) -> None:
    right = warm.run(
        [*KVKEEP, "doctor", f"file://{tmp_path}/kv?size=8MiB", "--seconds", "0.1"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = right.stdout.splitlines()
    assert lines[0].startswith("ok    options   tiers: ")
    speed = f"  speed     file://{tmp_path}/kv: reads "  # a busy machine may be too slow: a warning
    assert any(speed in line for line in lines)
    assert "checks: 0 failed, " in lines[-1]
    wrong = warm.run(
        [*KVKEEP, "doctor", '{"tiers": ["file:///x?sice=1MiB"]}'], capture_output=True, text=True
    )
    assert wrong.returncode == 1
    assert wrong.stdout.startswith("fail  options   the given JSON: file:///x has no option sice;")
    assert tree(tmp_path) == []


@pytest.mark.parametrize("kind", ["transfer", "extra", "file", "multi"])
def test_a_configuration_of_vllm(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {"tiers": ["memory://1MiB", f"file://{tmp_path}/kv?size=1MiB"], "load_timeout": 2}
    given: dict[str, Any] = {**CONNECTOR, "kv_connector_extra_config": extra}
    if kind == "extra":
        given = extra
    if kind == "multi":
        given = {
            "kv_connector": "MultiConnector", "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [given, {"kv_connector": "Another"}]},
        }  # fmt: skip
    text = json.dumps(given)
    if kind == "file":
        (tmp_path / "vllm.json").write_text(text)
        text = str(tmp_path / "vllm.json")
    checks = doctor(capsys, text)
    assert only(checks, "options", "KVKeepConnector")["state"] == "ok"
    assert only(checks, "access", f"file://{tmp_path}/kv")["state"] == "ok"
    assert "1 MiB in all" in only(checks, "space", "memory://")["found"]


def test_a_tier_below_vllms_offloading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier = {"type": "KVKeepTier", "module_path": "kvkeep.integrations.vllm.tier",
            "tiers": [f"file://{tmp_path}/kv?size=1MiB"]}  # fmt: skip
    config = {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVKeepSpec", "cpu_bytes_to_use": 1 << 20, "secondary_tiers": [tier],
        },
    }  # fmt: skip
    blind = only(doctor(capsys, json.dumps(config), code=1), "options")
    assert 'give "kv_connector": "KVKeepOffloadingConnector"' in blind["found"]
    config["kv_connector"] = "KVKeepOffloadingConnector"
    checks = doctor(capsys, json.dumps(config))
    assert only(checks, "options", "KVKeepTier")["state"] == "ok"
    assert only(checks, "limits", "/dev/shm")["state"] == "ok"
    config["kv_connector_extra_config"]["cpu_bytes_to_use"] = 1 << 60  # type: ignore[index]
    full = only(doctor(capsys, json.dumps(config), code=1), "limits", "/dev/shm")
    assert full["state"] == "fail"
    assert "cpu_bytes_to_use is 1 EiB" in full["found"]
    tier["reset"] = False  # type: ignore[assignment]
    wrong = only(doctor(capsys, json.dumps(config), code=1), "options")
    assert "did you mean 'resets'?" in wrong["found"]


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("spec_name", "TieringOffloadingSpec", '"spec_name": "KVKeepSpec"'),
        ("spec_name", None, "spec_name is None"),
        ("spec_name", "KVKepSpec", "did you mean 'KVKeepSpec'?"),
        ("cpu_bytes_to_use", None, "cpu_bytes_to_use is None"),
        ("cpu_bytes_to_use", "8GiB", '"cpu_bytes_to_use": 8589934592'),
        ("type", "KVKeepTeir", 'that in kvkeep.integrations.vllm.tier is "KVKeepTier"'),
    ],
)
def test_what_a_tier_needs_beside_it(
    name: str, value: object, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = {"type": "KVKeepTier", "module_path": "kvkeep.integrations.vllm.tier",
            "tiers": ["file:///var/lib/kvkeep?size=1MiB"]}  # fmt: skip
    extra = {"spec_name": "KVKeepSpec", "cpu_bytes_to_use": 1 << 20, "secondary_tiers": [tier]}
    (tier if name == "type" else extra)[name] = value  # type: ignore[index]
    for config in (
        {"kv_connector": "KVKeepOffloadingConnector", "kv_connector_extra_config": extra},
        extra,
    ):
        wrong = only(doctor(capsys, json.dumps(config), code=1), "options")
        assert found in wrong["found"]


def test_a_configuration_of_sglang(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"backend_name": "kvkeep", "class_name": "KVKeepStorage", "interface_v1": 1,
             "module_path": "kvkeep.integrations.sglang", "tiers": ["memory://1MiB"],
             "load_timeout": 1}  # fmt: skip
    assert only(doctor(capsys, json.dumps(given)), "options")["state"] == "ok"
    wrong = doctor(capsys, json.dumps({**given, "load_timout": 1}), code=1)
    assert "did you mean 'load_timeout'?" in only(wrong, "options")["found"]
    del given["class_name"]
    wrong = doctor(capsys, json.dumps(given), code=1)
    assert "class_name is missing" in only(wrong, "options")["found"]


def test_a_file_of_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kvkeep.toml"
    path.write_text(
        f"[serve]\nport = 8000\ntier = ['memory://1MiB', 'file://{tmp_path}/served?size=1MiB']\n"
    )
    checks = doctor(capsys, str(path))
    assert only(checks, "options", "kvkeep serve")["state"] == "ok"
    assert only(checks, "access", f"{tmp_path}/served")["state"] == "ok"
    path.write_text("[serve]\ntier = 3\n")
    wrong = only(doctor(capsys, str(path), code=1), "options")
    assert f"{path}:2" in wrong["found"]
    path.write_text("[route]\nport = 1\n")
    assert main(["doctor", str(path)]) == 2
    assert "has no tiers in [serve]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"load_timout": 1}, "did you mean 'load_timeout'?"),
        ({"tiers": []}, "tiers are a list of URLs"),
        ({"tiers": ["file:///x?size=10"]}, "a whole number of at least 4096"),
        ({"tiers": ["memory://4K"]}, "no amount of memory"),
        ({"tiers": ["valkey://host?policy=2q"]}, "has no size="),
        ({"tiers": ["nowhere://x"]}, "no tier is called nowhere"),
        ({"tiers": ["file:///x?encrypt=/no/such/key"]}, "/no/such/key"),
        ({"tiers": ["memory://1MiB", "file:///x?codec=int9"]}, "codec is 'int9'"),
        ({"public_prefixes": "/no/such/file"}, "cannot be read: No such file"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_a_failed_check(
    options: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**CONNECTOR, "kv_connector_extra_config": options}
    wrong = only(doctor(capsys, json.dumps(config), code=1), "options")
    assert wrong["state"] == "fail"
    assert said in wrong["found"]


def test_an_outer_connector_that_breaks_a_promise(capsys: pytest.CaptureFixture[str]) -> None:
    inner = {**CONNECTOR, "kv_connector_extra_config": {"tiers": ["memory://1MiB"]}}
    outer: dict[str, Any] = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [inner]},
    }  # fmt: skip
    wrong = only(doctor(capsys, json.dumps(outer), code=1), "options")
    assert 'kv_load_failure_policy is "fail" for MultiConnector' in wrong["found"]
    outer |= {"kv_load_failure_policy": "recompute", "kv_role": "kv_producer"}
    wrong = only(doctor(capsys, json.dumps(outer), code=1), "options")
    assert 'kv_role is "kv_producer" for MultiConnector' in wrong["found"]
    outer["kv_role"] = "kv_both"
    outer["kv_connector_extra_config"] = {"connectors": [inner, inner]}
    wrong = only(doctor(capsys, json.dumps(outer), code=1), "options")
    assert "two KVKeepConnectors in one engine" in wrong["found"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ('{"tiers": ["valkey://:secret@h"', "is not JSON at line 1, column 32"),
        ("/no/such/file", "/no/such/file cannot be read (No such file or directory)"),
        ('{"kv_connector": "NixlConnector", "kv_role": "kv_both"}', "has no part of kvkeep"),
        ('{"kv_connector_extra_config": {"tiers": []}}', 'add "kv_connector"'),
        (
            '{"backend_name": "dynamic", "module_path": "other.module", '
            '"class_name": "OtherStorage", "prefetch_threshold": 64}',
            "no part of kvkeep: class_name is 'OtherStorage' of 'other.module'",
        ),
    ],
)
def test_wrong_usage(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", word]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "secret" not in err


def test_no_password_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    url = f"valkey://me:geheim@127.0.0.1:{port}"
    for words in ([url], [json.dumps({"tiers": [url]})], [json.dumps({"tiers": [url + "?x=1"]})]):
        assert main(["doctor", *words]) == 1
        captured = capsys.readouterr()
        assert "geheim" not in captured.out + captured.err


# --- directories -----------------------------------------------------------------------------


def test_nothing_is_left_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    with DiskBackend(tmp_path / "store") as backend:
        record = aligned(5000)
        backend.put(b"k" * 48, record)
    before = tree(tmp_path)
    modes = [path.stat().st_mode for path in sorted(tmp_path.rglob("*"))]
    places = ["deep/er/kv", "empty", "store"]
    checks = doctor(
        capsys, *(f"file://{tmp_path}/{place}?size=1MiB" for place in places), "--seconds", "0.2"
    )
    for place in places:
        assert only(checks, "access", f"{tmp_path}/{place}")["state"] == "ok"
        speed = only(checks, "speed", f"{tmp_path}/{place}")
        assert "reads 0 B/s" not in speed["found"]
    assert tree(tmp_path) == before
    assert [path.stat().st_mode for path in sorted(tmp_path.rglob("*"))] == modes
    with DiskBackend(tmp_path / "store") as backend:
        assert [one.block for one in backend.list()] == [b"k" * 48]
        assert backend.used() == 8192


def test_a_directory_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    wrong = only(doctor(capsys, f"file://{tmp_path}?size=1MiB", code=1), "access")
    assert wrong["state"] == "fail"
    assert "holds 'letter.txt', which is not kvkeep's" in wrong["found"]
    assert tree(tmp_path) == ["letter.txt"]


def test_a_file_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    for place in ("file", "file/below"):
        wrong = only(doctor(capsys, f"file://{tmp_path}/{place}?size=1MiB", code=1), "access")
        assert wrong["state"] == "fail"
        assert "is no directory" in wrong["found"]


def test_a_budget_larger_than_the_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = shutil.disk_usage(tmp_path).free
    checks = doctor(capsys, f"file://{tmp_path}/kv?size={2 * free}", code=1)
    wrong = next(one for one in checks if one["check"] == "space")
    assert wrong["state"] == "fail"
    assert "give size=" in wrong["todo"]
    # Each would fit, and both together do not.
    half = f"size={free * 6 // 10}"
    checks = doctor(capsys, f"file://{tmp_path}/a?{half}", f"file://{tmp_path}/b?{half}", code=1)
    states = [one["state"] for one in checks if "budget of" in one["found"]]
    assert states[0] == "ok"
    assert "fail" in states


def mount(*arguments: str) -> None:
    if os.geteuid():
        pytest.skip("only root can mount a filesystem")
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no filesystem can be mounted here: {done.stderr.strip()}")


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    mount("-t", "tmpfs", "-o", f"mode=0700,{options}", "kvkeep-test", str(path))
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mounted(tmp_path / "small", "size=1M") as small:
        checks = doctor(capsys, f"file://{small}/kv?size=64KiB", "--block-tokens", "64", code=1)
        wrong = only(checks, "access")
        assert wrong["state"] == "fail"
        assert "no room for" in wrong["found"]
        assert tree(small) == []


def test_a_disk_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mounted(tmp_path / "fixed", "size=8M") as fixed:
        DiskBackend(fixed / "kv").close()
        mount("-o", "remount,ro", str(fixed))
        for place in ("kv", "new"):
            wrong = only(doctor(capsys, f"file://{fixed}/{place}?size=1MiB", code=1), "access")
            assert wrong["state"] == "fail"
            assert "Read-only" in wrong["found"]
            assert wrong["todo"] == "mount it writable"


def test_an_index_that_another_process_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DiskBackend(tmp_path / "kv") as backend:
        backend.used()
    (index,) = (tmp_path / "kv/index").glob("?" * 16)
    with closing(sqlite3.connect(index, isolation_level=None)) as held:
        held.execute("BEGIN IMMEDIATE")
        wrong = only(
            doctor(capsys, f"file://{tmp_path}/kv?size=1MiB&timeout=200ms", code=1), "access"
        )
    assert wrong["state"] == "fail"
    assert "lock" in wrong["found"]
    assert "lslocks" in wrong["todo"]


def test_a_directory_without_a_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warned = only(doctor(capsys, f"file://{tmp_path}/kv"), "space", "file://")
    assert warned["state"] == "warn"
    assert "80% of what is free" in warned["found"]
    assert "give size=" in warned["todo"]
    with BlockStore("tenant", tiers=["memory://64KiB", f"file://{tmp_path}/kv?size=1MiB"]):
        pass
    before = tree(tmp_path)
    checks = doctor(capsys, f"file://{tmp_path}/kv")  # which remembers what it had
    assert any("a budget of 1 MiB" in one["found"] for one in checks)
    assert tree(tmp_path) == before


def test_a_budget_smaller_than_a_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = doctor(
        capsys, "memory://1MiB", f"file://{tmp_path}/kv?size=64MiB", "--block-tokens", "16", code=1
    )
    (wrong,) = [one for one in checks if one["state"] == "fail"]
    assert (wrong["check"], wrong["about"]) == ("space", "memory://1MiB")
    assert wrong["found"] == "a record of 2 MiB, and 1 MiB in all"


# --- memory ----------------------------------------------------------------------------------


def test_more_memory_than_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = only(doctor(capsys, "memory://900TiB", code=1), "space", "memory://")
    assert wrong["state"] == "fail"
    assert "900 TiB in all" in wrong["found"]
    ranks = only(doctor(capsys, "memory://1MiB", "--tp", "4"), "space", "memory://")
    assert "4 MiB in all" in ranks["found"]


def test_shared_memory_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"shm://1MiB?dir={tmp_path}&name=tested"
    assert "is not there yet" in only(doctor(capsys, url), "access")["found"]
    assert tree(tmp_path) == []
    with ShmBackend(1 << 20, name="tested", directory=str(tmp_path)):
        assert "the arena is there" in only(doctor(capsys, url), "access")["found"]
    full = doctor(capsys, f"shm://900TiB?dir={tmp_path}&name=other", code=1)
    assert only(full, "space")["state"] == "fail"


# --- servers ---------------------------------------------------------------------------------


@contextmanager
def valkey(*options: str) -> Iterator[int]:
    """The port of an empty server of this test's own."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    port = free_port()
    process = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", *options],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "Ready to accept connections" in line:
                break
        yield port
    finally:
        process.kill()
        process.communicate()


def keys_of(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as wire:
        wire.sendall(b"DBSIZE\r\n")
        return wire.recv(100)


def test_a_server_that_evicts(capsys: pytest.CaptureFixture[str]) -> None:
    with valkey("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as port:
        checks = doctor(capsys, f"valkey://127.0.0.1:{port}", "--seconds", "0.2")
        assert only(checks, "access", "valkey")["state"] == "ok"
        space = only(checks, "space", "valkey")
        assert space["state"] == "ok"
        assert "64 MiB maxmemory" in space["found"]
        assert "reads 0 B/s" not in only(checks, "speed", "valkey")["found"]
        assert keys_of(port) == b":0\r\n"


@pytest.mark.parametrize(
    ("options", "query", "said"),
    [
        ((), "", "no maxmemory"),
        (("--maxmemory", "64mb", "--maxmemory-policy", "noeviction"), "", "noeviction"),
        (("--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru"), "", "volatile-lru"),
        (("--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru"), "?expire=1h", ""),
    ],
)
def test_what_a_full_server_does(
    options: tuple[str, ...], query: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with valkey(*options) as port:
        space = only(doctor(capsys, f"valkey://127.0.0.1:{port}{query}"), "space", "valkey")
    assert space["state"] == ("warn" if said else "ok")
    assert said in space["found"]
    assert ("maxmemory" in space["todo"]) == bool(said)


def test_a_server_with_a_password(capsys: pytest.CaptureFixture[str]) -> None:
    with valkey("--requirepass", "geheim", "--maxmemory", "64mb",
                "--maxmemory-policy", "allkeys-lru") as port:  # fmt: skip
        for who, said in (("", "NOAUTH"), (":wrong@", "WRONGPASS")):
            wrong = only(doctor(capsys, f"valkey://{who}127.0.0.1:{port}", code=1), "access")
            assert wrong["state"] == "fail"
            assert said in wrong["found"]
            assert wrong["todo"]
        assert doctor(capsys, f"valkey://:geheim@127.0.0.1:{port}")


def test_a_full_server(capsys: pytest.CaptureFixture[str]) -> None:
    with valkey("--maxmemory", "1mb", "--maxmemory-policy", "noeviction") as port:
        wrong = only(doctor(capsys, f"valkey://127.0.0.1:{port}", code=1), "access")
    assert "no room" in wrong["found"]


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    wrong = only(doctor(capsys, f"valkey://127.0.0.1:{port}", code=1), "access")
    assert "refused" in wrong["found"]
    assert "start the server" in wrong["todo"]


def test_a_server_that_hangs(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        wrong = only(doctor(capsys, f"valkey://127.0.0.1:{port}?timeout=200ms", code=1), "access")
    assert wrong["state"] == "fail"
    assert "did not answer" in wrong["found"]


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")


@pytest.mark.usefixtures("cloud")
@pytest.mark.parametrize(
    ("status", "code", "todo"),
    [(403, "AccessDenied", "allow this identity"), (404, "NoSuchBucket", "create the bucket")],
)
def test_a_bucket_that_refuses(
    status: int, code: str, todo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"s3://bucket?endpoint=http://127.0.0.1:{server.server_port}&region=x"
        wrong = only(doctor(capsys, url, code=1), "access")
        server.shutdown()
    assert wrong["state"] == "fail"
    assert todo in wrong["todo"]


@pytest.mark.usefixtures("cloud")
def test_a_bucket(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        bucket = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
        until = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(bucket, timeout=30).close()
                break
            except OSError:
                assert time.monotonic() < until, "moto's server does not answer"
                time.sleep(0.1)
        url = f"s3://bucket/kv?endpoint=http://127.0.0.1:{port}&region=us-east-1"
        checks = doctor(capsys, url, "--seconds", "0.5")
        assert only(checks, "access", "s3://")["state"] == "ok"
        assert only(checks, "space", "s3://")["state"] == "warn"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/bucket", timeout=30) as listed:
            assert b"<Key>" not in listed.read()
    finally:
        server.terminate()
        server.wait(30)


# --- speed and versions ----------------------------------------------------------------------


def test_what_a_prompt_takes_from_a_slow_tier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"tiers": [f"file://{tmp_path}/kv?size=64MiB"], "load_timeout": 0}
    slow = only(doctor(capsys, json.dumps(given), "--seconds", "0.2"), "speed")
    assert slow["state"] == "warn"
    assert "a prompt of 8,192 tokens of Llama 3.1 8B is 1 GiB" in slow["found"]
    assert "longer than load_timeout (0 s)" in slow["found"]


def test_the_versions_that_are_tested_are_those_of_the_makefile() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert f"VLLM_VERSIONS := {' '.join(TESTED['vllm'])}\n" in makefile
    for found in TESTED["sglang"]:
        assert f"sglang=={found}" in makefile


def test_an_engine_that_is_not_here_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    given = json.dumps({**CONNECTOR, "kv_connector_extra_config": {"tiers": ["memory://1MiB"]}})
    told = only(doctor(capsys, given), "versions", "vllm")
    assert told["state"] == "warn"
    assert "run the doctor with the Python of the engine" in told["todo"]
    assert all(one["about"] != "vllm" for one in doctor(capsys))


def test_no_options_are_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert "memory://1GiB" in only(doctor(capsys, "{}"), "options")["found"]
