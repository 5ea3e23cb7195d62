"""Tiers from URLs: every option, every mistake, the buffer in memory, and schemes of others."""

from __future__ import annotations

import os
import sys
import textwrap
import traceback
from typing import TYPE_CHECKING, Any

import pytest

from faults import CountingBackend
from kvkeep.cli import main
from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.vllm.options import ConnectorOptions
from kvkeep.integrations.vllm.transfer import CONNECTOR, TransferPart, check_part
from kvkeep.store import BlockStore
from kvkeep.store.backends import WriteBudget
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.codecs import generate_key
from kvkeep.store.tiers import TIER_OPTIONS, TieredStore, check_tiers, open_tiers
from kvkeep.store.tiers.front import LEAST_BUFFER
from kvkeep.store.tiers.two_queues import tier_policies

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvkeep.store.tiers import TierSpec


@pytest.fixture
def place(tmp_path: Path) -> str:
    return f"file://{tmp_path}/d?size=1MiB&sync=never"


def one(url: str) -> TierSpec:
    """The tier that is opened below memory."""
    memory, (tier,) = open_tiers(["memory://64KiB", url])
    memory.backend.close()
    tier.backend.close()
    return tier


def test_a_tier_without_options_has_the_documented_ones(place: str) -> None:
    tier = one(place)
    assert (tier.name, tier.codec.name, tier.backend.timeout) == ("file", "raw", 5.0)
    options = tier.options
    assert (options.readers, options.writers, options.ttl, options.queue_bytes) == (
        4,
        2,
        None,
        None,
    )
    assert options.policy is tier_policies()["lru"]
    assert tier.backend.capacity == 1 << 20


OPTIONS: dict[str, tuple[str, Any]] = {
    "codec=lossless": ("codec.name", "lossless"),
    "policy=2q": ("options.policy", tier_policies()["2q"]),
    "ttl=10m": ("options.ttl", 600.0),
    "timeout=250ms": ("backend.timeout", 0.25),
    "writes=2TB/day": ("options.writes", WriteBudget(2 * 10**12)),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_reaches_its_place(option: str, place: str) -> None:
    path, value = OPTIONS[option]
    found: Any = one(f"{place}&{option}")
    for step in path.split("."):
        found = getattr(found, step)
    assert found == value


def test_every_option_is_tested() -> None:
    tested = {option.partition("=")[0] for option in OPTIONS}
    assert tested | {"encrypt", "decrypt"} == {*TIER_OPTIONS}


def test_encrypt_names_a_key_file(place: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("00" * 32)
    key.chmod(0o600)
    assert one(f"{place}&encrypt={key}").codec.number == 128
    assert one(f"{place}&codec=lossless&encrypt={key}").codec.number == 129
    assert one(f"memory://64KiB?encrypt={key}").codec.number == 128


@pytest.mark.parametrize("policy", tier_policies())
def test_every_policy_has_a_name(policy: str, place: str) -> None:
    assert one(f"{place}&policy={policy}").options.policy is tier_policies()[policy]


def test_a_queue_is_as_long_as_memory_allows_and_no_longer(place: str) -> None:
    memory, below = open_tiers(["memory://64KiB", place])
    store = TieredStore(memory, below)
    assert store.tiers[0].writing.limit == 48 << 10
    store.close()


MISTAKES = {
    "codec=zip": ("'zip'", "lossless"),
    "policy=best": ("policy=best", "lru", "2q"),
    "ttl=0": ("ttl=0", "above"),
    "ttl=soon": ("ttl=soon",),
    "timeout=-1s": ("timeout=-1s",),
    "timeout=200000d": ("timeout=200000d", "100 years"),
    "writes=2TB": ("writes", "'2TB'", "2TB/day"),
    "encrypt=/no/such/file": ("/no/such/file",),
    "size=2MiB": ("size twice",),
    "sync=always": ("sync twice",),
    "colour=red": ("no option colour", "codec", "timeout", "sync"),
    "colour=red&weight=2": ("colour, weight",),
}


@pytest.mark.parametrize("option", MISTAKES)
def test_a_wrong_option_is_named_and_nothing_stays_open(
    option: str, place: str, tmp_path: Path
) -> None:
    other = CountingBackend(DiskBackend(tmp_path / "other"))
    with pytest.raises(InvalidValue) as caught:
        open_tiers(["memory://64KiB", other, f"{place}&{option}"])
    assert all(word in str(caught.value) for word in MISTAKES[option]), str(caught.value)
    assert other.calls["close"] == 1
    with pytest.raises(InvalidValue) as checked:
        check_tiers(["memory://64KiB", f"{place}&{option}"])
    assert str(checked.value) == str(caught.value)


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ([], ("a list", "[]")),
        ("memory://1MiB", ("a list", "memory://1MiB")),
        (None, ("a list", "None")),
        ([5], ("URL", "5")),
        (["1GiB"], ("'1GiB'", "memory://4GiB")),
        (["tape://1"], ("tape", "memory", "s3", "valkey")),
        (["memory://1MiB?timeout=5s"], ("no option timeout", "policy", "ttl", "touch")),
        (["memory://1MiB?writes=5MiB/day"], ("no option writes",)),
        (["memory://a lot"], ("a lot",)),
        (["memory://1MiB?ttl=1s&ttl=2s"], ("ttl twice",)),
        (["memory://1MiB#1"], ("#1", "%23")),
        (["file://relative/path"], ("file:///relative/path",)),
        (["file:///kv%00?size=1MiB"], ("%00",)),
        (["file:///kv?encrypt=/key%00"], ("%00",)),
        (["valkey://localhost?ca=%00"], ("%00",)),
        (["file:///kv?size=1MiB", "file:///a/../kv/?size=2MiB"], ("file:///a/../kv/", "twice")),
    ],
)
def test_wrong_tiers_are_named(tiers: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidValue) as caught:
        open_tiers(tiers)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    if tiers and isinstance(tiers, list):
        with pytest.raises(InvalidValue) as checked:
            check_tiers(tiers)
        assert str(checked.value) == str(caught.value)


def test_the_home_directory_at_all_doors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "my home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    generate_key(home / "kv.key")
    url = "file://~/kv?size=8MiB&encrypt=~/kv.key"
    check_part(TransferPart(CONNECTOR, ConnectorOptions.parse({"tiers": [url]})))
    with BlockStore("m", tiers=["memory://1MiB", url]) as store:
        assert store.put([b"k" * 32], [b"x" * 1000], wait=10) == 1
    assert len(os.listdir(home / "kv")) > 1
    assert main(["store", "ls", url]) == 0
    assert "1.2 KiB" in capsys.readouterr().out
    assert main(["doctor", url, "--seconds", "0"]) == 0
    assert "my%20home/kv" in capsys.readouterr().out
    for wrong in ("file:///~/kv", "file://$HOME/kv"):
        assert main(["store", "ls", wrong]) == 2
        assert "write file://~/kv " in capsys.readouterr().err
        with pytest.raises(InvalidValue, match="write file://~/kv "):
            BlockStore("m", tiers=[wrong])
        with pytest.raises(InvalidValue, match="write file://~/kv "):
            check_part(TransferPart(CONNECTOR, ConnectorOptions.parse({"tiers": [wrong]})))


@pytest.mark.parametrize("option", ["policy=returns", "ttl=1h"])
def test_without_a_budget_of_ours_the_server_decides(option: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"size="):
        open_tiers([f"valkey://127.0.0.1:1/0?{option}"])
    with pytest.raises(InvalidValue, match=r"size="):
        check_tiers([f"valkey://127.0.0.1:1/0?{option}"])
    _, (tier,) = open_tiers([f"file://{tmp_path}/d?{option}"])  # it has a budget without size=
    assert tier.backend.capacity
    tier.backend.close()
    check_tiers([f"file://{tmp_path}/d?{option}"])


@pytest.mark.parametrize(
    "url",
    [
        "tape://me:secret@host/1",
        "valkey://me:secret@host:1/0?colour=red",
        "valkey:/me:secret@host",
        "valkey://:secret/1@host",
        "valkey://:secret#1@host",
        "valkey://:1#secret@host",
        "valkey://me:secret℀@host",
        "valkey://me:secret@host:port",
    ],
)
def test_a_password_is_not_shown(url: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        open_tiers([url])
    assert "secret" not in "".join(traceback.format_exception(caught.value, limit=0))


def test_a_buffer_is_put_in_front_of_what_is_no_memory(place: str) -> None:
    for first in (place, "memory://1MiB?codec=lossless"):
        memory, (tier,) = open_tiers([first])
        assert (memory.name, memory.backend.arena.size) == ("buffer", LEAST_BUFFER)
        assert tier.backend.capacity == 1 << 20
        memory.backend.close()
        tier.backend.close()


def test_memory_in_front_takes_its_options() -> None:
    memory, below = open_tiers(["memory://64KiB?policy=returns&ttl=2h&touch=yes"])
    assert (memory.name, memory.backend.arena.size, below) == ("memory", 64 << 10, [])
    assert (memory.ttl, memory.policy) == (7200, tier_policies()["returns"])
    memory.backend.close()


def test_tiers_of_one_scheme_are_told_apart(tmp_path: Path) -> None:
    urls = [f"file://{tmp_path}/{at}?size=1MiB" for at in "abc"]
    memory = ["memory://64KiB", "memory://128KiB", "memory://256KiB"]
    memory, below = open_tiers([*memory, *urls])
    names = [memory.name, *(tier.name for tier in below)]
    assert names == ["memory", "memory2", "memory3", "file", "file2", "file3"]
    TieredStore(memory, below).close()


def test_backends_of_the_callers_own_are_taken_beside_urls(place: str, tmp_path: Path) -> None:
    mine = MemoryBackend(64 << 10)
    other = DiskBackend(tmp_path / "other", 1 << 20)
    memory, below = open_tiers([mine, other, place])
    assert memory.backend is mine
    assert [tier.name for tier in below] == ["file", "file2"]
    assert below[0].backend is other
    assert below[0].codec.name == "raw"
    TieredStore(memory, below).close()


RIGHT = [
    ["memory://64KiB?policy=returns", "file:///no/place?size=1MiB&sync=always"],
    ["memory://64KiB", "memory://1MiB?codec=lossless&timeout=1s"],
    ["shm://1MiB?dir=/no/place&name=a", "file:///no/place?size=1GiB&policy=2q&ttl=1h"],
    ["valkey://nowhere:1?expire=7d", "s3://bucket/x?size=1GiB&policy=returns&region=here"],
]


@pytest.mark.parametrize("tiers", RIGHT, ids=str)
def test_what_is_right_is_checked_and_not_opened(tiers: list[str]) -> None:
    check_tiers(tiers)
    assert not os.path.exists("/no/place")


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        (["shm://10"], ("10 bytes", "4096 or more")),
        (["shm://1MiB?name=a/b"], ("'a/b'",)),
        (["shm://1MiB?policy=2q"], ("policy=2q", "leave policy= out")),
        (["memory://1MiB", "valkey://host?policy=2q"], ("has no size=",)),
        (["s3://bucket?colour=red"], ("no option colour",)),
        (["valkeys://host?ca=/no/such/file"], ("/no/such/file",)),
    ],
)
def test_what_is_wrong_is_the_same_whether_checked_or_opened(
    tiers: list[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidValue) as checked:
        check_tiers(tiers)
    assert all(word in str(checked.value) for word in words), str(checked.value)
    with pytest.raises(InvalidValue) as opened:
        open_tiers(tiers)
    assert str(opened.value) == str(checked.value)


def test_memory_is_in_front_of_others_or_is_not() -> None:
    check_tiers(["memory://64KiB?policy=returns"])
    check_tiers(["memory://64KiB?policy=returns&writes=1GiB/day"], in_front=False)
    with pytest.raises(InvalidValue, match="no option writes"):
        check_tiers(["memory://64KiB?policy=returns&writes=1GiB/day"])


# --- schemes of other packages ---------------------------------------------------------------


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that is installed and names a backend; its module's name."""
    module = "kvkeep_tape_for_a_test"
    site = tmp_path / "site"
    info = site / "kvkeep_tape-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvkeep-tape\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        f"[kvkeep.backends]\ntape = {module}:Tape\nbroken = {module}:Broken\n"
    )
    (site / f"{module}.py").write_text(
        textwrap.dedent("""
        from kvkeep.store.backends.memory import MemoryBackend

        class Tape(MemoryBackend):
            scheme = "tape"

            @classmethod
            def from_url(cls, url):
                reels = url.number("reels", 1, 1, 9)
                assert url.host == "library"
                return cls(reels << 20)

        class Broken:
            @classmethod
            def from_url(cls, url):
                return 5
        """)
    )
    monkeypatch.syspath_prepend(site)
    yield module
    sys.modules.pop(module, None)


def test_another_package_gives_a_scheme(plugin: str, place: str) -> None:
    memory, (tape, file) = open_tiers(["tape://library/1?reels=3&codec=lossless", place])
    assert memory.name == "buffer"
    assert type(tape.backend).__module__ == plugin
    assert (tape.name, tape.codec.name, tape.backend.capacity) == ("tape", "lossless", 3 << 20)
    assert file.name == "file"
    TieredStore(memory, [tape, file]).close()
    check_tiers(["tape://library/1?reels=3&codec=lossless"])
    with pytest.raises(InvalidValue, match="codec is 'zip'"):
        check_tiers(["tape://library/1?reels=3&codec=zip"])


@pytest.mark.usefixtures("plugin")
def test_its_options_are_its_own() -> None:
    with pytest.raises(InvalidValue, match=r"reels in tape://library.*1 … 9"):
        open_tiers(["tape://library?reels=12"])
    with pytest.raises(InvalidValue, match=r"no option sync; the options are: .*reels"):
        open_tiers(["tape://library?sync=never"])
    with pytest.raises(InvalidValue, match=r"disc; there are .*memory.*tape"):
        open_tiers(["disc://library"])


@pytest.mark.usefixtures("plugin")
def test_what_is_no_backend_is_said_to_be_none(place: str) -> None:
    with pytest.raises(InvalidValue, match=r"broken.*opens 5.*Backend"):
        open_tiers([place, "broken://x"])


def test_files_are_closed_after_an_error(place: str) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("no /proc to count open files in")
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(InvalidValue):
            open_tiers([place, f"{place}&colour=red"])
    assert len(os.listdir("/proc/self/fd")) == len(before)
