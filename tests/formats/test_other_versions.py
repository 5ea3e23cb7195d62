"""Directories and arenas of versions that are not written yet, with unknown parts, or cut short.

Each is refused by name, or is a counted miss, as its reader's contract says; what is read of it is
never something else. Nothing is deleted or replaced that another version may need.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import xxhash
from test_every_format import NEWEST, arena_at, bytes_of, command, expected, plain, private

from kvkeep import InvalidValue
from kvkeep.cli import main
from kvkeep.core.geometry import KVGeometry
from kvkeep.core.keys import SPACE_BYTES, chain_keys
from kvkeep.core.tokens import as_tokens
from kvkeep.store import KVStore
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.backends.shm import ShmBackend

if TYPE_CHECKING:
    from pathlib import Path

WANT = expected(NEWEST, "store.json")
PROMPT = WANT["prompts"][0]


def changed(path: Path, at: int, content: bytes) -> bytes:
    """Write other bytes at an offset of ``path``; return all of them."""
    data = bytearray(path.read_bytes())
    data[at : at + len(content)] = content
    path.write_bytes(data)
    return bytes(data)


def resealed(path: Path, at: int, content: bytes) -> bytes:
    """The same in a record's header, whose checksum is right again."""
    head = bytearray(changed(path, at, content)[:128])
    return changed(path, 120, xxhash.xxh3_64_digest(bytes(head[:120])))


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# --- directories of disk tiers ---------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return private(NEWEST / "store", tmp_path / "store")


def opened(place: Path, options: str = "?size=16MiB") -> KVStore:
    tiers = ["memory://1MiB", f"file://{place}{options}"]
    return KVStore(KVGeometry(**WANT["geometry"]), tiers=tiers, **WANT["options"])


def files_of(place: Path) -> list[Path]:
    """The records of the first prompt's three blocks."""
    with opened(place) as store:
        root = store._names.of(None).root
    keys = chain_keys(root[SPACE_BYTES:], as_tokens(PROMPT["tokens"]).tobytes(), 16)
    files = [place / root[:SPACE_BYTES].hex() / key.hex() for key in keys]
    assert all(file.exists() for file in files)
    return files


def got(store: KVStore) -> int:
    """The tokens that the store has of the first prompt, each as it was put."""
    kv, count = store.get(PROMPT["tokens"])
    if count:
        whole = plain(PROMPT["kv"])
        shape = (4, len(PROMPT["tokens"]), -1)  # layers, K and V; tokens
        rows = [whole[at : at + len(whole) // 4] for at in range(0, len(whole), len(whole) // 4)]
        size = len(rows[0]) // shape[1] * count
        assert bytes_of(kv) == b"".join(row[:size] for row in rows)
    return count


@pytest.mark.parametrize(
    ("at", "content"),
    [(8, b"\x02\0"), (10, b"\x27\0"), (12, b"\x02\0\0\0")],
    ids=["version 2", "codec 39", "unknown flags"],
)
def test_a_record_of_another_version_is_a_counted_miss_and_stays(
    place: Path, at: int, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    file = files_of(place)[1]
    newer = resealed(file, at, content)
    with opened(place) as store:
        assert got(store) == 4
        counters = store.stats().tiers[1].counters
        assert (counters["refused"], counters["damaged"]) == (1, 0)
        store.check()
    (tier,) = command(capsys, "store", "verify", f"file://{place}", "--repair")["tiers"]
    assert tier["bad"] == 0
    assert tier["other_version"] == (at != 10)  # of an unknown codec, the record itself is sound
    (tier,) = command(capsys, "store", "ls", f"file://{place}")["tiers"]
    assert tier["codecs"].get("codec 39") == (1 if at == 10 else None)
    assert file.read_bytes() == newer


def test_storing_the_same_block_replaces_a_record_of_another_version(place: Path) -> None:
    """One name has one record; a newer version reads those of this one."""
    file = files_of(place)[0]
    before = file.read_bytes()
    resealed(file, 8, b"\x02\0")
    kv = plain(PROMPT["kv"])
    with opened(place) as store:
        assert got(store) == 0
        import torch

        tensor = torch.frombuffer(bytearray(kv), dtype=torch.bfloat16).view(2, 2, 12, 2, 8)
        store.put(PROMPT["tokens"], tensor, wait=True)
        store.flush()
    assert file.read_bytes() == before
    with opened(place) as store:
        assert got(store) == 12


@pytest.mark.parametrize("ours_first", [True, False])
def test_records_of_another_version_are_evicted_by_their_age_as_all_are(
    place: Path, ours_first: bool
) -> None:
    """They take room, so they count within the budget; the latest used stay, whoever wrote them."""
    theirs = files_of(place)
    for file in theirs:
        resealed(file, 8, b"\x02\0")
    everything = sorted(place.glob("?" * 32 + "/*"))
    ours = [file for file in everything if file not in theirs]
    for age, file in enumerate([*ours, *theirs] if ours_first else [*theirs, *ours]):
        os.utime(file, (age, 1_700_000_000 + age))
    shutil.rmtree(place / "index")  # made anew of the files
    taken = sum(-file.stat().st_size // 4096 * -4096 for file in everything)
    with opened(place, f"?size={taken - 1}") as store:  # a byte more is there
        store._tiered.tiers[0].reading.wait(20)
        assert store.flush()
        store.check()
    gone = [file for file in everything if not file.exists()]
    assert gone == [ours[0] if ours_first else theirs[0]]


def test_a_directory_of_another_version_is_refused_and_not_changed(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "FORMAT").write_bytes(b"kvkeep blocks 2\n")
    before = contents(place)
    with pytest.raises(InvalidValue, match="'kvkeep blocks 2' and this kvkeep writes 'kvkeep blo"):
        opened(place)
    for action in (["verify", "--repair"], ["gc", "--size", "0"], ["rm", "--all"]):
        assert main(["store", action[0], f"file://{place}", *action[1:]]) == 2
        assert "kvkeep blocks 2" in capsys.readouterr().err
    assert contents(place) == before


@pytest.mark.parametrize("size", range(0, 16, 3))
def test_a_format_file_cut_short_is_refused(place: Path, size: int) -> None:
    os.truncate(place / "FORMAT", size)
    if not size:  # a directory whose maker was killed
        with opened(place) as store:
            assert got(store) == 12
        assert (place / "FORMAT").read_bytes() == b"kvkeep blocks 1\n"
        return
    with pytest.raises(InvalidValue, match=f"FORMAT is cut short: it has {size} of the 16 bytes"):
        opened(place)
    assert (place / "FORMAT").stat().st_size == size


@pytest.mark.parametrize(
    "content", [b"", b"kvkeep budg", b"kvkeep budget 8192 given 1 more\n", b"kvkeep budget2 8192"]
)
def test_a_budget_that_is_not_understood_is_none_and_evicts_nothing(
    place: Path, content: bytes
) -> None:
    (place / "budget").write_bytes(content)
    with DiskBackend(place) as backend:
        assert backend.last_budget() is None
    with opened(place, "") as store:
        assert got(store) == 12
    assert len(list(place.glob("?" * 32 + "/*"))) == len(WANT["blocks"])


def test_notes_of_another_version_are_skipped_and_stay(place: Path) -> None:
    space, note = bytes(range(16)), b'{"format": "kvkeep namespace 2", "names": 5}'
    lines = b"%s %s\nno note at all\n" % (space.hex().encode(), note)
    before = (place / "spaces").read_bytes()
    (place / "spaces").write_bytes(lines + before)
    with opened(place) as store:
        assert got(store) == 12
        store.put([9, 9, 9, 9], _zeros(), tenant="new", wait=True)
    with DiskBackend(place) as backend:
        notes = backend.noted_spaces()
    assert notes[space] == note
    assert len(notes) == 1 + before.count(b"\n") + 1


def _zeros() -> Any:
    import torch

    return torch.zeros(2, 2, 4, 2, 8, dtype=torch.bfloat16)


def test_a_record_cut_short_is_quarantined(place: Path) -> None:
    file = files_of(place)[0]
    whole = file.read_bytes()
    for size in (1, 64, 127, 128, 300, len(whole) - 1):
        file.write_bytes(whole[:size])
        with opened(place) as store:
            assert got(store) == 0
            assert store.stats().tiers[1].counters["damaged"] == 1
        assert not file.exists()


# --- memory of a node ------------------------------------------------------------------------


def test_an_arena_of_another_version_or_cut_short_is_refused_and_stays(tmp_path: Path) -> None:
    import zlib

    path = arena_at(NEWEST, tmp_path)
    whole = path.read_bytes()
    head = whole[:8] + b"\x03" + whole[9:48]
    newer = head + zlib.crc32(head).to_bytes(4, "little") + whole[52:]
    cut = [whole[:size] for size in (10, 100, 5000, len(whole) - 1)]
    cases = [(newer, "version 3; this kvkeep reads 2")]
    cases += [(one, r"no shared arena|truncated") for one in cut]
    for content, said in cases:
        path.write_bytes(content)
        with pytest.raises(InvalidValue, match=said):
            ShmBackend(None, directory=str(tmp_path))
        with pytest.raises(InvalidValue, match=said):
            ShmBackend(64 << 10, directory=str(tmp_path))
        assert path.read_bytes() == content
