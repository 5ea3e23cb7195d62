"""``kvkeep store`` on real directories, and on a server that is not there."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

import warm
from kvkeep.cli import main
from kvkeep.cli.store_actions import age
from kvkeep.store.backends import TierURL
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.codecs import codec_name
from kvkeep.store.tiers import open_backend, open_tiers
from kvkeep.store.tiers.record import HEADER_BYTES, seal
from ports import free_port
from warm import KVKEEP

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DAY = 86_400
A, B = b"\xa0" * 16, b"\xa1" + b"\xb0" * 15
PAYLOAD = 70_000
RECORD = PAYLOAD + HEADER_BYTES


def block(space: bytes, number: int) -> bytes:
    return space + number.to_bytes(32, "big")


def record(name: bytes, codec: int = 0) -> memoryview:
    """A record of ``name``, 70,000 bytes of payload that nobody else has."""
    buffer = aligned(RECORD)
    buffer[HEADER_BYTES:] = (name * PAYLOAD)[:PAYLOAD]
    seal(buffer, name, codec, 2 * PAYLOAD)
    return buffer


def path_of(place: Path, name: bytes) -> Path:
    return place / name[:16].hex() / name[16:].hex()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Six records of A, last used 0 … 5 days ago, and two of B, of just now."""
    place = tmp_path / "tier"
    now = time.time()
    with DiskBackend(place) as backend:
        for number in range(6):
            backend.put(block(A, number), record(block(A, number), codec=number % 2))
            used = now - number * DAY - 10
            os.utime(path_of(place, block(A, number)), (used, used))
        for number in range(2):
            backend.put(block(B, number), record(block(B, number)))
    shutil.rmtree(place / "index")  # made anew of the files
    return place


@pytest.fixture
def url(place: Path) -> str:
    return f"file://{place}"


def there(place: Path) -> set[bytes]:
    with DiskBackend(place) as backend:
        return {listed.block for listed in backend.list()}


def answered(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    """The answer of one tier, as JSON."""
    assert main(["store", *arguments, "--json"]) == code
    captured = capsys.readouterr()
    (answer,) = json.loads(captured.out)["tiers"]
    return answer


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[str]:
    assert main(["store", *arguments]) == code
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["store", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


# --- ls -------------------------------------------------------------------------------------


def test_ls_has_a_line_a_namespace(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "ls", url)
    assert lines[0] == url
    space, blocks, size, unit, *ages = lines[2].split()
    assert (space, blocks, size, unit) == (B.hex(), "2", "137", "KiB")
    assert re.fullmatch(r"\d+ s \d+ s", " ".join(ages))  # written just now
    space, blocks, size, unit, *ages = lines[3].split()
    assert (space, blocks, size, unit) == (A.hex(), "6", "410.9", "KiB")
    assert re.fullmatch(r"[1-5]\d s 5 d", " ".join(ages))
    assert lines[4].startswith("of 8 records read: ")
    answer = answered(capsys, "ls", url)
    assert answer["url"] == url
    second = answer["spaces"][1]
    assert (second["space"], second["blocks"], second["bytes"]) == (A.hex(), 6, 6 * RECORD)
    assert second["newest"] - second["oldest"] == pytest.approx(5 * DAY, abs=1)
    assert "keys" not in second


def test_ls_lists_blocks(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "ls", url, "--blocks")
    keys = [line.split()[0] for line in lines if len(line.split()[:1] or [""][0]) and "KiB" in line]
    assert [key for key in keys if len(key) == 64][-6:] == [
        block(A, number)[16:].hex() for number in range(6)
    ]
    answer = answered(capsys, "ls", url, "--blocks")
    assert [key["key"] for key in answer["spaces"][1]["keys"]] == keys[-6:]
    assert answer["spaces"][1]["keys"][5]["bytes"] == RECORD


def test_an_empty_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/empty"
    DiskBackend(tmp_path / "empty").close()
    assert said(capsys, "ls", url) == [f"{url} is empty"]
    assert answered(capsys, "ls", url)["blocks"] == 0
    assert answered(capsys, "verify", url)["sound"] == 0
    assert answered(capsys, "gc", url, "--size", "0")["blocks"] == 0
    assert answered(capsys, "rm", url, "--all", "--yes")["blocks"] == 0


def test_ls_has_the_totals(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = answered(capsys, "ls", f"{url}?size=1GiB")
    assert (answer["blocks"], answer["bytes"]) == (8, 8 * RECORD)
    assert (answer["capacity"], answer["quarantined"], answer["odd"]) == (1 << 30, 0, 0)
    assert answer["used"] >= 8 * RECORD
    assert answer["codecs"] == {"raw": 5, "lossless": 3}
    assert answer["last_budget"] is None
    lines = said(capsys, "ls", f"{url}?size=1GiB")
    assert lines[-2:] == ["budget: 1 GiB", "of 8 records read: 5 raw, 3 lossless"]


def test_ls_knows_the_budget_of_the_store(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for tier in (f"{url}?size=1GiB", url):
        memory, (spec,) = open_tiers([tier])
        memory.backend.close()
        spec.backend.close()
        assert answered(capsys, "ls", url)["capacity"] == 1 << 30
        last = answered(capsys, "ls", f"{url}?size=2GiB")["last_budget"]
        assert (last["bytes"], last["given"]) == (1 << 30, True)
        (line,) = [line for line in said(capsys, "ls", url) if "last opened" in line]
        assert "1 GiB (given as size=, " in line


def test_looking_changes_nothing(place: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def used() -> dict[Path, int]:
        files = [path_of(place, block(A, number)) for number in range(6)]
        return {file: file.stat().st_mtime_ns for file in files}

    before = used()
    for arguments in (["ls", "--blocks"], ["verify"], ["gc", "--size", "0", "--dry-run"]):
        said(capsys, *arguments, url)
    assert used() == before


def test_codecs_are_called_as_urls_call_them() -> None:
    from kvkeep.store.codecs import CODECS, BlockShape, codec_of

    shape = BlockShape("bfloat16", "NHD", ((2, 16), (2, 16)))
    for number in range(64):
        name = CODECS[number] if number < len(CODECS) else f"codec {number}"
        assert codec_name(number) == ("transform" if number == 5 else name)
        codec = codec_of(number, shape)
        assert codec is None or codec.name == name
    assert codec_name(65) == "encrypted lossless"


# --- verify ----------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def damage(place: Path) -> dict[bytes, str]:
    """Break all but the last record of A, each in another way; what is to be said of each."""
    paths = [path_of(place, block(A, number)) for number in range(6)]
    flip(paths[0], HEADER_BYTES + 1)
    flip(paths[1], 20)
    os.truncate(paths[2], RECORD - 1)
    shutil.copy(paths[5], paths[3])
    paths[4].write_bytes(b"foreign" * 9999)
    reasons = (
        "payload's checksum",
        "header's checksum",
        "bytes and should",
        "another block",
        "beg",
    )
    return {block(A, number): reason for number, reason in enumerate(reasons)}


def test_verify_finds_nothing(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "verify", url) == [f"{url}: 8 blocks, 547.9 KiB: 8 sound, 0 bad"]


def test_verify_finds_every_damage(
    place: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reasons = damage(place)
    answer = answered(capsys, "verify", url, code=1)
    assert (answer["blocks"], answer["sound"], answer["bad"], answer["gone"]) == (8, 3, 5, 0)
    found = {bytes.fromhex(one["block"]): one for one in answer["found"]}
    assert found.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert reason in found[name]["why"]
        assert not found[name]["quarantined"]
    assert len(there(place)) == 8
    lines = said(capsys, "verify", url, code=1)
    assert "3 sound, 5 bad" in lines[0]
    assert "--repair" in lines[-1]


def test_verify_repairs(place: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    reasons = damage(place)
    lines = said(capsys, "verify", url, "--repair", code=1)
    assert len([line for line in lines if line.endswith("(quarantined)")]) == 5
    assert len(there(place)) == 3
    assert not there(place) & reasons.keys()
    assert answered(capsys, "verify", url)["sound"] == 3
    assert answered(capsys, "ls", url)["quarantined"] == 5


def test_another_format_version_is_not_damaged(
    place: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import xxhash

    path = path_of(place, block(A, 0))
    head = bytearray(path.read_bytes()[:HEADER_BYTES])
    head[8:10] = (9).to_bytes(2, "little")
    head[-8:] = xxhash.xxh3_64_digest(head[:-8])
    with path.open("r+b") as file:
        file.write(head)
    answer = answered(capsys, "verify", url, "--repair")
    assert (answer["sound"], answer["other_version"], answer["bad"]) == (7, 1, 0)
    assert block(A, 0) in there(place)
    assert answered(capsys, "ls", url)["codecs"]["of another format version"] == 1


# --- gc --------------------------------------------------------------------------------------


def test_gc_removes_what_is_old(place: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for last in (False, True):
        dry = [] if last else ["--dry-run"]
        answer = answered(capsys, "gc", url, "--older", "60h", *dry)
        assert (answer["blocks"], answer["bytes"], answer["kept_blocks"]) == (3, 3 * RECORD, 5)
        assert (answer["freed"] > 0) is last
    assert there(place) == {
        *(block(A, number) for number in range(3)),
        *(block(B, number) for number in range(2)),
    }
    assert answered(capsys, "gc", url, "--older", "60h")["blocks"] == 0


def test_gc_removes_what_is_too_much(
    place: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = said(capsys, "gc", url, "--size", str(5 * RECORD - 1))
    assert line == f"{url}: removed 4 blocks, 273.9 KiB; 4 blocks, 273.9 KiB, are kept"
    left = {block(A, 0), block(A, 1), block(B, 0), block(B, 1)}
    assert there(place) == left
    answered(capsys, "gc", f"{url}?size={3 * RECORD}")  # the budget of the tier itself
    assert there(place) == left - {block(A, 1)}


def test_gc_takes_what_killed_writers_left(
    place: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    left = place / "tmp" / "4194304-0123456789abcdef01234567"
    left.write_bytes(bytes(PAYLOAD))
    assert answered(capsys, "gc", url)["kept_blocks"] == 8
    assert not left.exists()


@pytest.mark.parametrize("older", ["7", "7w", "d", "-7d", "0s", "1e3s", ""])
def test_gc_wants_a_time(older: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "12h or 7d" in refused(capsys, "gc", url, f"--older={older}")


# --- rm --------------------------------------------------------------------------------------


def test_rm_takes_a_namespace(place: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = said(capsys, "rm", url, "--space", A.hex()[:5].upper(), "--yes")
    assert line == f"removed {A.hex()} of {url}: 6 blocks, 410.9 KiB"
    assert there(place) == {block(B, 0), block(B, 1)}
    answer = answered(capsys, "rm", url, "--all", "--yes")
    assert (answer["space"], answer["blocks"]) == (None, 2)
    assert there(place) == set()


@pytest.mark.parametrize(
    ("space", "words"),
    [("a0a1", "no namespace"), ("a0", "hexadecimal"), ("tenant", "hexadecimal"), ("", "hexadec")],
)
def test_rm_wants_one_namespace(
    space: str, words: str, place: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, "rm", url, "--space", space, "--yes")
    assert len(there(place)) == 8


def test_rm_does_not_guess_between_two(
    place: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = A[:4] + b"\x01" + bytes(43)
    with DiskBackend(place) as backend:
        backend.put(name, record(name))
    assert "2 namespaces" in refused(capsys, "rm", url, "--space", "a0a0", "--yes")
    assert len(there(place)) == 9


def on_terminal(arguments: list[str], typed: str) -> subprocess.CompletedProcess[str]:
    """The command with a terminal for what is typed and for what is said beside the output."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, typed.encode())
        process = warm.Popen(
            [*KVKEEP, *arguments], stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, text=True
        )
        out, _ = process.communicate(timeout=60)
        os.set_blocking(ours, False)
        shown = os.read(ours, 1 << 20).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    return subprocess.CompletedProcess(arguments, process.returncode, out, shown)


@pytest.mark.parametrize("typed", ["n", "", "yes", "Y"])
def test_rm_asks(typed: str, place: Path, url: str) -> None:
    done = on_terminal(["store", "rm", url, "--all"], f"{typed}\n")
    agreed = typed.lower().startswith("y")
    assert done.returncode == (0 if agreed else 1)
    assert f"Remove everything of {url}: 8 blocks" in done.stderr
    assert len(there(place)) == (0 if agreed else 8)


def test_nobody_to_ask(place: Path, url: str) -> None:
    done = warm.run(
        [*KVKEEP, "store", "rm", url, "--all"],
        input="y\n", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "--yes" in done.stderr
    assert len(there(place)) == 8


# --- everything ------------------------------------------------------------------------------


def test_a_terminal_sees_how_far_it_is(url: str) -> None:
    done = on_terminal(["store", "verify", url], "")
    assert done.stdout == f"{url}: 8 blocks, 547.9 KiB: 8 sound, 0 bad\n"
    assert "verifying" in done.stderr


def test_several_tiers(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DiskBackend(tmp_path / "empty").close()
    assert main(["store", "ls", url, f"file://{tmp_path}/empty", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["tiers"]
    assert (len(first["spaces"]), len(second["spaces"])) == (2, 0)


def test_nothing_is_made_by_looking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere" in refused(capsys, "ls", f"file://{tmp_path}/nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "bare").mkdir(mode=0o755)
    assert "empty directory" in refused(capsys, "ls", f"file://{tmp_path}/bare")
    assert not list((tmp_path / "bare").iterdir())
    assert (tmp_path / "bare").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("memory://1GiB", "process"), ("tier", "no tier's URL"), ("{url}?what=1", "what")],
)
def test_wrong_urls(wrong: str, words: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(capsys, "ls", wrong.format(url=url))


@pytest.mark.parametrize("arguments", [[], ["ls"], ["rm", "file:///x"], ["sing", "file:///x"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvkeep: error: ")


def test_a_dead_server_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    dead = f"valkey://someone:secret@127.0.0.1:{port}"
    assert main(["store", "ls", dead, url]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith(url), "the others are done"
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("kvkeep: error: ")
    assert captured.err.count(str(port)) in {1, 2}
    assert "refused" in captured.err
    assert "secret" not in captured.err
    answer = answered(capsys, "verify", dead, code=1)
    assert set(answer) == {"url", "error"}


@pytest.fixture
def server() -> Iterator[str]:
    """The URL of an empty server of this test's own."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    port = free_port()
    process = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "Ready to accept connections" in line:
                break
        yield f"valkey://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def test_a_server(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "ls", server) == [f"{server} is empty"]
    with open_backend(TierURL(server)) as backend:
        for number in range(5):
            backend.put(block(A, number), record(block(A, number)))
        wrong = record(block(A, 3))
        wrong[-1] ^= 1
        backend.put(block(A, 3), wrong)
    assert said(capsys, "ls", server)[2].split()[:2] == [A.hex(), "5"]
    answer = answered(capsys, "ls", server)
    assert (answer["blocks"], answer["quarantined"], answer["capacity"]) == (5, None, None)
    answer = answered(capsys, "verify", server, "--repair", code=1)
    assert [one["block"] for one in answer["found"]] == [block(A, 3).hex()]
    assert answered(capsys, "verify", server)["sound"] == 4
    assert answered(capsys, "gc", server, "--size", str(2 * RECORD))["blocks"] == 2
    assert answered(capsys, "rm", server, "--space", "a0a0", "--yes")["blocks"] == 2
    assert said(capsys, "ls", server) == [f"{server} is empty"]


def test_ages() -> None:
    seconds = (-5, 0, 59, 60, 3599, 3600, DAY - 1, DAY, 5000 * DAY)
    assert [age(1e9, 1e9 + past) for past in seconds] == [
        "0 s", "0 s", "59 s", "1 min", "59 min", "1 h", "23 h", "1 d", "5,000 d",
    ]  # fmt: skip


def test_the_url_may_be_as_the_store_has_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = "size=1GiB&sync=flush&codec=lossless&policy=lru&ttl=7d&timeout=5s"
    answer = answered(capsys, "verify", f"{url}?{options}&encrypt=/nowhere")
    assert answer["sound"] == 8
    assert answer["url"] == url
