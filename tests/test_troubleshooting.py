"""The page on troubleshooting: faults are made, and what comes out is what the page shows.

Numbers, sizes, names of blocks and paths are left out of the comparison.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from faults import FaultyBackend
from kvkeep.cli import main
from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import KVGeometry
from kvkeep.store import BlockStore, KVStore
from kvkeep.store.backends.disk import DiskBackend

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path += [str(Path(__file__).parent / room) for room in ("backends", "cli")]
from seen_server import chat, seen
from servers import needs_server, server

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/how-to/troubleshooting.md").read_text("utf-8")
GEOMETRY = KVGeometry(2, 2, 8)
TOKENS = range(64)


def plain(text: str) -> str:
    """Return ``text`` without what differs between two machines."""
    text = re.sub(r"(file://)?/\S*?/kv\b|file:///var/lib/kvkeep|/var/lib/kvkeep", "PLACE", text)
    text = re.sub(r"\b[0-9a-f]{8,}\b", "#", text)
    text = re.sub(r"\b[\d.,]+ ?([KMGTPE]i)?B\b|\d[\d.,]*\d|\d", "#", text)
    text = re.sub(r"# (min|h|d)\b", "# s", text)
    return " ".join(text.split())


BLOCKS = [plain(block) for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.DOTALL)]


def is_shown(text: str) -> bool:
    return any(plain(text) in block for block in BLOCKS)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[str], str]:
    """Wait for a line of the log with these words; return it as the page shows it."""
    caplog.set_level(logging.INFO, "kvkeep")

    def line(words: str) -> str:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for record in list(caplog.records):
                if words in record.getMessage():
                    return f"{record.levelname} {record.getMessage()}"
            time.sleep(0.01)
        raise AssertionError(f"nothing with {words!r} among {caplog.messages}")

    return line


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What a command prints."""
    assert main(list(words)) == code
    out, err = capsys.readouterr()
    return out + err


def breaker(url: str) -> str:
    """The state of the breaker of the Valkey tier, as the dashboard has it."""
    with urllib.request.urlopen(f"{url}/kv/live") as answer:
        tiers = json.load(answer)["tiers"]
    return next(tier["breaker"] for tier in tiers if tier["name"] == "valkey")


def stored(place: Path, block_tokens: int = 16) -> KVStore:
    tiers = ["memory://1MiB", f"file://{place}?size=8MiB"]
    return KVStore(GEOMETRY, model="m@1", tiers=tiers, block_tokens=block_tokens)


def put(store: KVStore) -> None:
    store.put(TOKENS, torch.zeros(2, 2, 64, 2, 8, dtype=torch.bfloat16), wait=True)


# --- what the page shows comes out ----------------------------------------------------------------


@pytest.mark.model
def test_a_time_at_the_beginning_of_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    with seen() as url:
        for second in range(10, 20):
            chat(url, f"21:58:{second}", "What does textwrap.dedent do?")
        out = said(capsys, "explain", url)
        found = re.search(r"\d+ %[^%]*? differ at token.*?\[[0-9a-f]{8}\]", out, re.DOTALL)
        assert found is not None, out
        assert is_shown(found[0].replace("difference of 1 token)", "difference of 1 tokens)"))


def test_a_store_with_another_block_size(
    tmp_path: Path, log: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "kv"
    with stored(place) as store:
        put(store)
    with stored(place, 32) as store:
        assert store.lookup(TOKENS).tokens == 0
        assert is_shown(log("holds blocks, but none of this store"))
        put(store)
    assert is_shown(said(capsys, "store", "ls", f"file://{place}"))


def test_speed_and_space_of_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"file://{tmp_path}/kv"
    lines = said(capsys, "doctor", "memory://8MiB", f"{place}?size=8MiB", "--seconds", "0.1")
    (speed,) = [line for line in lines.splitlines() if " speed " in line]
    speed = speed.partition(", longer than load_timeout")[0]  # as on a busy machine
    assert is_shown(speed.replace("warn  ", "ok    "))
    (memory,) = [line for line in lines.splitlines() if "memory://: " in line]
    assert is_shown(memory)
    lines = said(capsys, "doctor", f"{place}?size=9999TiB", "--seconds", "0", code=1)
    (space,) = [line for line in lines.splitlines() if "a budget of" in line]
    assert is_shown(space)


def test_a_full_filesystem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "kv"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small filesystem")
    try:
        with stored(place) as store:
            put(store)
        with (place / "other").open("wb", buffering=0) as other, suppress(OSError):
            while other.write(bytes(1024)):
                pass
        lines = said(capsys, "doctor", f"file://{place}?size=1MiB", "--seconds", "0", code=1)
        assert is_shown(next(line for line in lines.splitlines() if "has no room" in line))
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_more_kv_than_memory_holds(tmp_path: Path, log: Callable[[str], str]) -> None:
    slow = FaultyBackend(DiskBackend(tmp_path / "kv", capacity=1 << 26, sync="never"))
    slow.timeout = 60.0
    slow.hang("put")
    with BlockStore("a", tiers=["memory://16MiB", slow]) as store:
        for number in range(3):
            blocks = [bytes([number, at]) * 16 for at in range(8)]
            store.write(blocks, [4 << 20] * 8, lambda _at, _raw: None)
        slow.heal()
        assert is_shown(log("KV was dropped").replace("faulty", "file"))
        assert sum(tier.counters["drops"] for tier in store.stats()) > 0


@pytest.mark.model
@needs_server
def test_a_server_that_goes_away_and_comes_back(
    log: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    with server() as valkey, seen(tiers=["memory://16MiB", valkey.url]) as url:
        chat(url, "10:00", "What?")
        valkey.stop()
        for number in range(60):
            chat(url, f"{number} o'clock", "What does textwrap.dedent do?")
            if breaker(url) == "open":
                break
        assert is_shown(log("write: circuit breaker open for 1 s"))
        lines = said(capsys, "doctor", valkey.url, code=1)
        assert is_shown(next(line for line in lines.splitlines() if "fail" in line))
        valkey.start()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            chat(url, f"{time.time()}", "What does textwrap.dedent do?")
            if breaker(url) == "closed":
                break
        assert is_shown(log("write: circuit breaker closed"))


def test_a_flipped_bit(
    tmp_path: Path, log: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "kv"
    with stored(place) as store:
        put(store)
    records = [path for path in place.glob("*/*") if len(path.name) == 64]
    for record in records[:2]:
        data = bytearray(record.read_bytes())
        data[-1] ^= 1
        record.write_bytes(data)
    assert "2 bad" in said(capsys, "store", "verify", f"file://{place}", code=1)
    with stored(place) as store:
        store.get(TOKENS)
        assert is_shown(log("is bad"))
        assert store.stats().tiers[1].counters["damaged"] >= 1


def test_a_wrong_option_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"^kvkeep doctor '(.*load_timout.*)'$", PAGE, re.MULTILINE)
    lines = said(capsys, "doctor", command, code=1).splitlines()
    assert is_shown(lines[0])


def test_what_ends_the_start_of_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "kv"
    place.mkdir()
    (place / "notes.txt").write_text("not ours")
    with pytest.raises(InvalidValue) as raised:
        stored(place)
    assert is_shown(f"kvkeep: error: {raised.value}")
    with stored(tmp_path / "2" / "kv"):
        pass
    (tmp_path / "2" / "kv" / "FORMAT").write_text("kvkeep blocks 2\n")
    with pytest.raises(InvalidValue) as raised:
        stored(tmp_path / "2" / "kv")
    assert is_shown(f"kvkeep: error: {raised.value}")
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        assert is_shown(said(capsys, "serve", "--port", port, "--no-store", code=2))
    tier = f"file://{place}?sice=1GiB"
    assert is_shown(said(capsys, "serve", "--port", "0", "--tier", tier, code=2))


@pytest.mark.model
def test_what_commands_say_of_a_server_that_tells_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVKEEP_API_KEY", raising=False)
    with seen(api_key="secret") as url:
        capsys.readouterr()  # the model was loaded
        assert is_shown(said(capsys, "top", "--once", url, code=2))
    assert is_shown(said(capsys, "explain", url, code=2))


# --- what the pages name exists -------------------------------------------------------------------

OPERATORS = [ROOT / "docs/how-to" / name for name in ("troubleshooting.md", "production.md")]


@pytest.mark.parametrize("path", OPERATORS, ids=lambda path: path.name)
def test_metrics_and_alerts_that_the_page_names_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    known = "".join(
        (ROOT / "docs" / name).read_text() for name in ("observability.md", "routing.md")
    )
    figures = (ROOT / "docs/vllm.md").read_text()
    named = re.findall(r"`(?:vllm:)?kvkeep_[a-z_]+", text)
    assert named
    for name in named:
        if name.startswith("`vllm:"):
            short = name.removeprefix("`vllm:kvkeep_").removesuffix("_total")
            assert f"`{short}" in figures or f"`{short}{{" in figures, name
        else:
            assert name in known, name
    rules = (ROOT / "deploy/prometheus/kvkeep-rules.yml").read_text()
    for alert in re.findall(r"`(Kvkeep[A-Z]\w+)`", text):
        assert f"alert: {alert}" in rules, alert


def test_each_alert_leads_to_a_section() -> None:
    rules = (ROOT / "deploy/prometheus/kvkeep-rules.yml").read_text()
    rows = [
        line for line in OPERATORS[1].read_text().splitlines() if "](troubleshooting.md#" in line
    ]
    for alert in re.findall(r"alert: (\w+)", rules):
        assert any(_names(row, alert) for row in rows), alert


def _names(row: str, alert: str) -> bool:
    begins = re.findall(r"`(\w+)…`", row)
    return f"`{alert}`" in row or any(alert.startswith(begin) for begin in begins)


def test_counters_that_the_page_names_exist() -> None:
    known = (ROOT / "docs/store.md").read_text() + (ROOT / "docs/vllm.md").read_text()
    for name in ("drops", "dropped_tokens", "over_budget", "unread_tokens", "damaged", "refused",
                 "late", "failed_tokens", "slower_tokens"):  # fmt: skip
        assert f"`{name}`" in PAGE
        assert f"`{name}`" in known or f"`{name}{{" in known


def test_codes_that_the_page_names_exist() -> None:
    serving = (ROOT / "docs/serving.md").read_text()
    codes: Any = re.findall(r"\b[45]\d\d `(\w+)`", PAGE)
    assert len(codes) > 6
    for code in codes:
        assert f"`{code}`" in serving, code
