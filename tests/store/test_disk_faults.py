"""A directory on bad days: damaged, foreign and missing files, full, read-only, gone, not ours."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import xxhash
from store_kv import counter, disk, get, open_store, put, quiet, records
from writer_process import Processes

from kvkeep.cli import main
from kvkeep.core.errors import InvalidValue
from kvkeep.store.backends.disk import DiskBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvkeep.store import KVStore

HEADER = 128
MEMORY = "memory://4MiB"
root_only = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0, reason="mounts a filesystem"
)


def prompt(number: int, length: int = 4) -> range:
    """Prompts that share nothing; four tokens are one block."""
    return range(number * 1000, number * 1000 + length)


def hasten(store: KVStore) -> None:
    """Let a breaker that opens try again soon."""
    for tier in store._tiered.tiers:
        tier.calls.pause = 0.02


def eventually(good: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not good():
        assert time.monotonic() < end, "it does not recover"
        time.sleep(0.01)


_fresh = itertools.count(5000)


def recovers(store: KVStore) -> None:
    """New prompts reach the disk again, and the breaker is closed."""
    eventually(lambda: _written(store))
    assert store.stats().tiers[1].breaker == "closed"
    quiet(store)
    store.check()


def _written(store: KVStore) -> bool:
    tokens, before = prompt(next(_fresh), store.block_tokens), counter(store, "writes")
    assert put(store, tokens, wait=True).tokens == len(tokens)  # memory takes it, come what may
    assert get(store, tokens) == len(tokens)
    return counter(store, "writes") > before


def stored(path: Path, count: int, length: int = 4) -> list[Path]:
    """Put prompts 0 … ``count``, one block each; the files of each."""
    files: list[Path] = []
    with open_store(disk(path), block_tokens=length) as store:
        for number in range(count):
            before = set(records(path))
            put(store, prompt(number, length), wait=True)
            files += set(records(path)) - before
    assert len(files) == count
    return files


# --- damaged files ---------------------------------------------------------------------------


def test_one_bit_anywhere(tmp_path: Path) -> None:
    """Each byte of the header, and bytes all over the payload: never served, always counted."""
    chance = random.Random(3)
    places = [*range(HEADER), HEADER, HEADER + 511, *chance.sample(range(HEADER, 640), 60)]
    files = stored(tmp_path / "d", len(places) + 1)
    for file, place in zip(files, places, strict=False):
        data = bytearray(file.read_bytes())
        assert len(data) == 640
        data[place] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
    with open_store(MEMORY, disk(tmp_path / "d")) as store:
        for number in range(len(places)):
            assert store.lookup(prompt(number)).tokens == 4  # it cannot know that yet
            assert get(store, prompt(number)) == 0
            assert store.lookup(prompt(number)).tokens == 0
        assert get(store, prompt(len(places))) == 4
        assert counter(store, "damaged") == len(places)
        assert counter(store, "errors") == 0
        for number in range(len(places)):
            assert put(store, prompt(number), wait=True).tokens == 4
        store.check()
    with open_store(MEMORY, disk(tmp_path / "d")) as store:
        assert all(get(store, prompt(number)) == 4 for number in range(len(places)))
        assert counter(store, "damaged") == 0
    assert len(list((tmp_path / "d" / "quarantine").iterdir())) == 16  # the newest, to look at


def cut(length: int) -> Callable[[Path, Path], None]:
    return lambda file, other: os.truncate(file, length)


def grown(file: Path, other: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"x")


def huge(file: Path, other: Path) -> None:
    os.truncate(file, 1 << 40)  # sparse: no disk has to hold it, and no memory may


def torn(file: Path, other: Path) -> None:
    """As power loss leaves it: its length, and zeros where the data did not arrive."""
    data = file.read_bytes()
    file.write_bytes(data[:256] + bytes(len(data) - 256))


def foreign(file: Path, other: Path) -> None:
    file.write_bytes(random.Random(1).randbytes(640))


def swapped(file: Path, other: Path) -> None:
    shutil.copyfile(other, file)


def forged_length(file: Path, other: Path) -> None:
    """A header whose checksum is right, and which promises more than memory could hold."""
    head = bytearray(file.read_bytes()[:HEADER])
    head[72:80] = struct.pack("<Q", 1 << 50)
    head[120:128] = xxhash.xxh3_64_digest(bytes(head[:120]))
    file.write_bytes(bytes(head) + file.read_bytes()[HEADER:])


def test_a_record_that_claims_another_length_is_not_taken(tmp_path: Path) -> None:
    """Its checksums are right: somebody meant to."""
    files = stored(tmp_path / "d", 2)
    head = bytearray(files[0].read_bytes()[:HEADER])
    head[64:72] = struct.pack("<Q", 8)
    head[120:128] = xxhash.xxh3_64_digest(bytes(head[:120]))
    files[0].write_bytes(bytes(head) + files[0].read_bytes()[HEADER:])
    with open_store(MEMORY, disk(tmp_path / "d")) as store:
        assert get(store, prompt(0)) == 0
        assert get(store, prompt(1)) == 4
        assert counter(store, "damaged") + counter(store, "refused") == 1


def missing(file: Path, other: Path) -> None:
    file.unlink()


def directory(file: Path, other: Path) -> None:
    file.unlink()
    file.mkdir()
    (file / "something").write_bytes(b"in it")


def fifo(file: Path, other: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def symlink(file: Path, other: Path) -> None:
    file.unlink()
    file.symlink_to(other)


def dangling(file: Path, other: Path) -> None:
    file.unlink()
    file.symlink_to(file.parent / "nothing")


DAMAGED = {
    "empty": cut(0),
    "one byte": cut(1),
    "half a header": cut(HEADER - 1),
    "a header alone": cut(HEADER),
    "half": cut(320),
    "one byte short": cut(639),
    "one byte more": grown,
    "a terabyte": huge,
    "torn": torn,
    "foreign": foreign,
    "another block's": swapped,
    "a length that cannot be": forged_length,
}
UNLISTED = {("empty", "closed"), ("a terabyte", "closed")}  # by their size
NO_FILES = {
    "missing": missing,
    "a directory": directory,
    "a pipe": fifo,
    "a symlink": symlink,
    "a dangling symlink": dangling,
}


@pytest.mark.parametrize("when", ["closed", "running"])
@pytest.mark.parametrize("kind", [*DAMAGED, *NO_FILES])
def test_a_bad_file_ends_the_prefix_and_nothing_else(kind: str, when: str, tmp_path: Path) -> None:
    """Damaged while no store is open, or behind the back of one that listed it before."""
    path = tmp_path / "d"
    with open_store(disk(path)) as store:
        put(store, range(8), wait=True)
        first = set(records(path))
        put(store, range(12), wait=True)
        (bad,) = set(records(path)) - first
        put(store, range(20), wait=True)
        put(store, prompt(1, 12), wait=True)
    other = min(first)
    damage = (DAMAGED | NO_FILES)[kind]
    if when == "closed":
        damage(bad, other)
    with open_store(MEMORY, disk(path)) as store:
        if when == "running":
            assert store.lookup(range(20)).tokens == 20
            damage(bad, other)
        assert get(store, range(20)) == 8
        assert get(store, prompt(1, 12)) == 12
        quiet(store)
        if kind in DAMAGED and (kind, when) not in UNLISTED:
            outcomes = ("damaged", "refused", "misses")
            assert sum(counter(store, each) for each in outcomes) == 1
        assert counter(store, "errors") == 0
        done = put(store, range(20), wait=True)
        assert done.tokens + done.skipped == 20
        assert get(store, range(20)) == 20
        quiet(store)
        store.check()
    with open_store(MEMORY, disk(path)) as store:
        if kind != "a directory":  # with something in it, that stays where it is
            assert get(store, range(20)) == 20
        else:
            assert get(store, range(20)) == 8
        assert counter(store, "damaged") == 0


def test_files_of_others_beside_the_records(tmp_path: Path) -> None:
    """They are no records, they stay, and they count: the budget is the directory's."""
    path = tmp_path / "d"
    (file,) = stored(path, 1)
    for name in ("notes.txt", "f" * 63, "g" * 64, "F" * 64, ".hidden"):
        (file.parent / name).write_bytes(b"not ours")
    (path / ("0" * 31)).mkdir()
    (path / "lost+found").mkdir()
    (path / "tmp" / "something").write_bytes(b"left by a writer")
    with open_store(MEMORY, disk(path)) as store:
        assert store.stats().tiers[1].blocks == 1
        assert get(store, prompt(0)) == 4
        recovers(store)
    assert (file.parent / "notes.txt").read_bytes() == b"not ours"
    assert (path / "lost+found").is_dir()


def test_the_record_of_another_namespace_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "d"
    with open_store(disk(path)) as store:
        for tenant in ("a", "b"):
            put(store, range(4), tenant=tenant, wait=True)
    one, other = records(path)
    shutil.copyfile(one, other)
    with open_store(MEMORY, disk(path)) as store:
        found = [get(store, range(4), tenant=tenant) for tenant in ("a", "b")]
        assert sorted(found) == [0, 4]
        assert counter(store, "damaged") == 1


# --- a disk that does not take it ------------------------------------------------------------


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A filesystem of its own."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def read_only(path: Path) -> None:
    """Let nobody change ``path``, though the index is open, so that no remount is possible."""
    subprocess.run(["mount", "--bind", path, path], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)


def writable(path: Path) -> None:
    subprocess.run(["umount", "-l", path], check=True)


@root_only
@pytest.mark.parametrize(
    "size", ["1GiB", "", None],
    ids=["with a budget above it", "with a budget by default", "without a budget"],
)  # fmt: skip
def test_a_full_filesystem(size: str | None, tmp_path: Path) -> None:
    """With a budget what is older goes; without one nobody may say what: writes are dropped."""
    with small_disk(tmp_path / "small", "2m") as mounted:
        path = mounted / "d"

        def tier() -> str | DiskBackend:
            if size is None:
                return DiskBackend(path, sync="never")
            return disk(path, size=size) if size else f"file://{path}?sync=never"

        with open_store(MEMORY, tier(), block_tokens=128) as store:
            hasten(store)
            for number in range(130):  # of 16 KiB each, and a header's page
                assert put(store, prompt(number, 128), wait=True).tokens == 128
            assert all(get(store, prompt(number, 128)) == 128 for number in range(130))
            assert (counter(store, "evictions") > 0) == (size is not None)
            assert (counter(store, "drops") > 0) == (size is None)
            if size == "":
                disk_free = shutil.disk_usage(path).free
                assert disk_free > 128 * 1024  # a fifth of what was free
        with open_store(MEMORY, tier(), block_tokens=128) as store:
            hasten(store)
            found = [get(store, prompt(number, 128)) == 128 for number in range(130)]
            assert sum(found) > 10
            newest, oldest = (0, 129) if size is None else (129, 0)
            assert found[newest]
            assert not found[oldest]
            assert counter(store, "damaged") == 0
            if size is None:
                for file in records(path)[:3]:
                    file.unlink()
            recovers(store)


@root_only
def test_a_filesystem_that_others_fill(tmp_path: Path) -> None:
    """What is stored is found all the while; when they go, there is room again."""
    with small_disk(tmp_path / "small", "640k") as mounted:
        with open_store(MEMORY, disk(mounted / "d"), block_tokens=128) as store:
            for number in range(6):  # to open the index needs the room of some
                put(store, prompt(number, 128), wait=True)
        filler = mounted / "filler"
        fill(filler)
        with open_store(MEMORY, disk(mounted / "d"), block_tokens=128) as store:
            hasten(store)
            assert get(store, prompt(0, 128)) == 128
            for number in range(10, 19):
                assert put(store, prompt(number, 128), wait=True).tokens == 128
                assert get(store, prompt(number, 128)) == 128
            assert counter(store, "evictions") > 5  # what there is room for is the newest alone
            assert store.clear().bytes > 0
            fill(filler)
            assert put(store, prompt(20, 128), wait=True).tokens == 128
            assert counter(store, "drops") > 0
            filler.unlink()
            recovers(store)


def fill(file: Path) -> None:
    """Let it have all room that there is."""
    with file.open("ab", buffering=0) as opened, contextlib.suppress(OSError):
        while opened.write(bytes(4096)):
            pass


def test_files_that_may_not_be_so_large(tmp_path: Path) -> None:
    """A limit of the process (RLIMIT_FSIZE): large blocks are dropped, small ones are kept.

    The index must be allowed, whose log has a quarter of a MiB.
    """
    with Processes() as processes:
        processes.start("limited", disk(tmp_path / "d"), 0, 0, 400_000)
        said = processes.wait()
    (limited,) = [list(map(int, words[1:])) for what, *words in said if what == "limited"]
    drops, writes, large, small = limited
    assert drops == 2
    assert writes == 1
    assert (large, small) == (0, 8)


@root_only
def test_a_directory_that_becomes_read_only(tmp_path: Path) -> None:
    """It is read, new blocks stay in memory and are counted as dropped; later all is well."""
    with small_disk(tmp_path / "small", "16m") as mounted:
        url = disk(mounted / "d")
        with open_store(MEMORY, url) as store:
            hasten(store)
            put(store, prompt(0), wait=True)
            read_only(mounted)
            for number in range(1, 6):
                assert put(store, prompt(number), wait=True).tokens == 4
                assert get(store, prompt(number)) == 4
            assert counter(store, "drops") == 5
            assert counter(store, "errors") >= 3
            assert store.stats().tiers[1].breaker_opened
            with open_store(MEMORY, url) as other:  # opened while it is so
                hasten(other)
                assert get(other, prompt(0)) == 4
                assert get(other, prompt(1)) == 0
                assert put(other, prompt(6), wait=True).tokens == 4
                assert counter(other, "drops") == 1
            writable(mounted)
            recovers(store)
        with open_store(MEMORY, url) as store:
            assert get(store, prompt(0)) == 4


@root_only
def test_a_bad_record_in_a_read_only_directory(tmp_path: Path) -> None:
    """It cannot be moved away: it is a miss all the same, each time."""
    with small_disk(tmp_path / "small", "16m") as mounted:
        files = stored(mounted / "d", 2)
        foreign(files[0], files[1])
        read_only(mounted)
        try:
            with open_store(MEMORY, disk(mounted / "d")) as store:
                for _ in range(3):
                    assert get(store, prompt(0)) == 0
                assert counter(store, "damaged") >= 1
                assert get(store, prompt(1)) == 4
        finally:
            writable(mounted)


# --- a directory that goes -------------------------------------------------------------------


def test_a_directory_that_goes_and_comes_back(tmp_path: Path) -> None:
    """As when a disk is unmounted for a while."""
    path = tmp_path / "d"
    stored(path, 6)
    with open_store(MEMORY, disk(path)) as store:
        hasten(store)
        assert get(store, prompt(0)) == 4
        path.rename(tmp_path / "elsewhere")
        assert get(store, prompt(0)) == 4  # from memory
        for number in (1, 2):
            assert get(store, prompt(number)) == 0
        for number in range(10, 15):
            assert put(store, prompt(number), wait=True).tokens == 4
            assert get(store, prompt(number)) == 4
        assert counter(store, "drops") == 0, "the directory is made anew"
        path.rename(tmp_path / "made anew")
        (tmp_path / "elsewhere").rename(path)
        recovers(store)
        for number in (1, 2, 3):
            eventually(lambda number=number: get(store, prompt(number)) == 4)


def test_a_directory_that_is_deleted(tmp_path: Path) -> None:
    """Nothing is found and nothing raises; the next put makes it anew."""
    path = tmp_path / "d"
    stored(path, 6)
    with open_store(MEMORY, disk(path)) as store:
        hasten(store)
        shutil.rmtree(path)
        for number in range(3):
            assert get(store, prompt(number)) == 0
            assert put(store, prompt(number), wait=True).tokens == 4
            assert get(store, prompt(number)) == 4
            assert store.prefetch(prompt(number + 3)).wait(10) == 0
        assert counter(store, "drops") == 0
        with open_store(MEMORY, disk(path)) as other:
            assert all(get(other, prompt(number)) == 4 for number in range(3))
            assert put(other, prompt(7), wait=True).tokens == 4
        recovers(store)
        eventually(lambda: get(store, prompt(7)) == 4)


def test_the_directory_of_the_namespace_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "d"
    (file, *_) = stored(path, 2)
    with open_store(MEMORY, disk(path)) as store:
        shutil.rmtree(file.parent)
        assert get(store, prompt(0)) == 0
        recovers(store)
        file.parent.rename(path / "aside")
        file.parent.write_bytes(b"a file where a directory was")
        assert get(store, prompt(1)) == 0
        assert put(store, prompt(9), wait=True).tokens == 4
        assert counter(store, "errors") > 0
        file.parent.unlink()
        hasten(store)
        recovers(store)


# --- a directory that is not ours ------------------------------------------------------------


def foreign_home(path: Path) -> None:
    (path / "letters").mkdir(parents=True)
    (path / "letters" / "to a friend").write_bytes(b"private")


def other_version(path: Path) -> None:
    stored(path, 1)
    (path / "FORMAT").write_bytes(b"kvkeep blocks 2\n")


def other_program(path: Path) -> None:
    path.mkdir()
    (path / "FORMAT").write_bytes(b"some database, version 7\n")


def a_file(path: Path) -> None:
    path.write_bytes(b"no directory")


NOT_OURS = {
    "foreign": (foreign_home, "not kvkeep's"),
    "another version": (other_version, "kvkeep blocks 2"),
    "another program": (other_program, "not kvkeep's"),
    "a file": (a_file, "cannot hold records|is no directory"),
}


@pytest.mark.parametrize("kind", NOT_OURS)
def test_a_directory_that_is_not_ours_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named in one line, by the library and by the command line; nothing in it is changed."""
    make, says = NOT_OURS[kind]
    path = tmp_path / "theirs"
    make(path)
    before = snapshot(tmp_path)
    with pytest.raises(InvalidValue, match=says):
        open_store(MEMORY, disk(path))
    for action in (["ls"], ["verify"], ["gc"], ["rm", "--all", "--yes"]):
        assert main(["store", action[0], f"file://{path}", *action[1:]]) == 2
        out, error = capsys.readouterr()
        assert out == ""
        assert error.startswith("kvkeep: error: ")
        assert error.count("\n") == 1
        assert re.search(says, error)
    assert snapshot(tmp_path) == before


def snapshot(path: Path) -> dict[Path, bytes | None]:
    return {file: file.read_bytes() if file.is_file() else None for file in path.rglob("*")}


def test_a_record_of_another_version_is_a_miss_and_stays(tmp_path: Path) -> None:
    """A newer kvkeep may have written it here: that one should find it again."""
    files = stored(tmp_path / "d", 2)
    head = bytearray(files[0].read_bytes()[:HEADER])
    head[8:10] = struct.pack("<H", 2)
    head[120:128] = xxhash.xxh3_64_digest(bytes(head[:120]))
    newer = bytes(head) + files[0].read_bytes()[HEADER:]
    files[0].write_bytes(newer)
    with open_store(MEMORY, disk(tmp_path / "d")) as store:
        assert get(store, prompt(0)) == 0
        assert get(store, prompt(1)) == 4
        assert counter(store, "refused") == 1
        assert counter(store, "damaged") == 0
        assert files[0].read_bytes() == newer
