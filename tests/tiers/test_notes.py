"""Notes on namespaces: what a store logs that finds blocks and none of its own."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tier_bench import until

from kvkeep.core.geometry import KVGeometry
from kvkeep.core.keys import Namespace, space_of
from kvkeep.store import BlockStore, KVStore
from kvkeep.store.backends import TierURL
from kvkeep.store.backends.objects import ObjectBackend
from kvkeep.store.tiers import note_of, open_backend
from kvkeep.store.tiers.notes import NOTE_BYTES, difference

sys.path.append(str(Path(__file__).parents[1] / "backends"))
from servers import Server, needs_server, server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvkeep.store.backends import Backend

OURS = Namespace(model="m", revision="1", dtype="bfloat16", tenant="a very private name")
KEYS = [bytes([number]) * 32 for number in range(3)]
FALSE = [
    b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 5000, b'{"format": "kvkeep namespace 1"}',
    b'{"format": "kvkeep namespace 1", "fields": []}',
    b'{"format": "kvkeep namespace 1", "fields": {"model": 5}}',
    b'{"format": "another", "fields": {"model": "x"}}',
    json.dumps({"format": "kvkeep namespace 1", "fields": {"model": "x" * NOTE_BYTES}}).encode(),
]  # fmt: skip


def changed(**fields: str) -> Namespace:
    return Namespace(
        **{name: getattr(OURS, name) for name in ("model", "revision", "dtype", "tenant")} | fields
    )


def test_no_note_writes_a_line_of_its_own_into_the_log() -> None:
    evil = {"format": "kvkeep namespace 1", "fields": {"model": "x\nERROR all is lost\x1b[2J" * 99}}
    found = difference(note_of(OURS), [json.dumps(evil).encode()[:NOTE_BYTES], json.dumps(
        {**evil, "fields": {"model": "x\nERROR\x1b[2J"}}).encode()])  # fmt: skip
    assert found is not None
    assert all(text.isascii() and text.isprintable() for text in found[0])


# --- in places -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with server() as one:
        yield one


@pytest.fixture(
    params=[
        "file",
        "file without size",
        "objects",
        "objects without size",
        pytest.param("valkey", marks=needs_server),
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Backend]:
    if request.param == "valkey":
        url = request.getfixturevalue("running").url
        return lambda: open_backend(TierURL(url))
    if request.param.startswith("objects"):
        from obstore.store import MemoryStore

        store = MemoryStore()
        size = 1 << 20 if request.param == "objects" else None
        return lambda: ObjectBackend(store, prefix="p", capacity=size)
    size = "?size=1MiB" if request.param == "file" else ""
    return lambda: open_backend(TierURL(f"file://{tmp_path}/d{size}"))


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[tuple[int, str]]]]:
    with caplog.at_level(logging.INFO, "kvkeep.tiers"):
        yield lambda: [
            (one.levelno, one.getMessage())
            for one in caplog.records
            if "none of this store" in one.msg
        ]


def test_a_store_of_kv_says_why_as_well(
    tmp_path: Path, told: Callable[[], list[tuple[int, str]]]
) -> None:
    """Its tenants are known only when they come, long after its tiers were opened."""
    geometry = KVGeometry(1, 1, 8)
    kv, tokens = torch.zeros(1, 2, 16, 1, 8, dtype=torch.bfloat16), range(16)

    def opened(revision: str, tenant: str = "") -> KVStore:
        return KVStore(
            geometry, model="m", revision=revision, tenant=tenant, block_tokens=16,
            tiers=["memory://1MiB", f"file://{tmp_path}/d?size=1MiB"],
        )  # fmt: skip

    with opened("1") as store:
        store.put(tokens, kv, wait=True)
        store.put(tokens, kv, tenant="a", wait=True)
    with opened("1") as store:
        assert store.lookup(tokens).tokens == 16
    assert told() == []
    with opened("2") as store:
        assert store.lookup(tokens).tokens == 0
        until(told)
    ((level, text),) = told()
    assert level == logging.WARNING
    assert text.endswith("in the most similar ones, revision is '1' there and '2' here")
    with opened("1", tenant="b") as store:
        assert store.lookup(tokens).tokens == 0
        until(lambda: len(told()) == 2)
    assert told()[1][0] == logging.INFO, "tenants share nothing, by design"
    assert told()[1][1].endswith("tenant is different")


def test_a_store_that_finds_none_of_its_own_says_why_once(
    place: Callable[[], Backend], told: Callable[[], list[tuple[int, str]]]
) -> None:
    with BlockStore(OURS, tiers=["memory://1MiB", place()]) as store:
        store.lookup(KEYS)
        store.put(KEYS, [b"x" * 100] * 3, wait=10.0)
        store.put([bytes(32)], [b"x" * 100], wait=10.0)
    assert told() == [], "an empty place, and then its own"
    with BlockStore(OURS, tiers=["memory://1MiB", place()]) as store:
        assert store.lookup(KEYS) == 3
        store._tiered.tiers[0].reading.wait(10)
    assert told() == []
    with BlockStore(changed(revision="2"), tiers=["memory://1MiB", place()]) as store:
        for _ in range(3):
            assert store.lookup(KEYS) == 0
        until(told)
        store._tiered.tiers[0].reading.wait(10)
    ((level, text),) = told()
    assert level == logging.WARNING
    assert text.endswith("in the most similar ones, revision is '1' there and '2' here")
    assert "private" not in text
    with BlockStore(changed(model="another"), tiers=["memory://1MiB", place()]) as store:
        assert store.lookup(KEYS) == 0
        until(lambda: len(told()) == 2)
    assert told()[1][0] == logging.INFO, "another model may well share the place"
    with place() as backend:
        assert space_of(OURS) in backend.noted_spaces()


def test_a_store_of_kv_notes_its_namespaces_when_they_are_named(
    place: Callable[[], Backend], told: Callable[[], list[tuple[int, str]]]
) -> None:
    kv = torch.zeros(2, 2, 4, 2, 8, dtype=torch.bfloat16)
    geometry = KVGeometry(2, 2, 8, "bfloat16")
    differs = "in the most similar ones, revision is '1' there and '2' here"
    for revision in "12":
        model = f"m@{revision}"
        tiers = ["memory://1MiB", place()]
        with KVStore(geometry, model=model, tiers=tiers, block_tokens=4) as store:
            assert store.lookup([1, 2, 3, 4, 5]).tokens == 0
            if revision == "2":  # the server of other tests may hold their notes, too
                until(lambda: any(said.endswith(differs) for _, said in told()))
            store.put([1, 2, 3, 4], kv, wait=True)
            store.put([1, 2, 3, 4], kv, wait=True, tenant="a very private name")
    with place() as backend:
        noted = backend.noted_spaces()
    assert len(noted) >= 4
    assert not any(b"private" in note for note in noted.values())


@pytest.mark.parametrize("what", ["fifo", "folder", "link", "garbage", "huge"])
def test_what_lies_under_the_former_name_of_the_notes_does_nothing(
    what: str, tmp_path: Path, told: Callable[[], list[tuple[int, str]]]
) -> None:
    """Without an index, the notes are taken from there."""
    url = f"file://{tmp_path}/d?size=1MiB"
    with BlockStore(OURS, tiers=[url]) as store:
        store.put(KEYS, [b"x" * 100] * 3, wait=10.0)
    path = tmp_path / "d" / "spaces"
    shutil.rmtree(tmp_path / "d" / "index")
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "link":
        (tmp_path / "secret").write_text("secret")
        path.symlink_to(tmp_path / "secret")
    else:
        path.write_bytes(b"\n".join(FALSE) if what == "garbage" else b"x" * (8 << 20))
    started = time.monotonic()
    for namespace in (OURS, changed(revision="2")):
        with BlockStore(namespace, tiers=[url]) as store:
            assert store.lookup(KEYS) == (3 if namespace == OURS else 0)
            store.put([bytes(32)], [b"y" * 100], wait=10.0)
            store._tiered.tiers[0].reading.wait(10)
            assert store.stats()[1].breaker == "closed"
    assert time.monotonic() - started < 10
    assert not [text for _, text in told() if "secret" in text]
    if what == "link":
        assert (tmp_path / "secret").read_text() == "secret"


def test_the_notes_of_a_directory_are_bounded(tmp_path: Path) -> None:
    place = open_backend(TierURL(f"file://{tmp_path}/d?size=1MiB"))
    for number in range(2000):
        space = number.to_bytes(16, "big")
        place.note_space(space, note_of(changed(model=f"m{number}")))
    place.note_space(bytes(16), b"another")
    found = place.noted_spaces()
    assert sum(map(len, found.values())) <= 64 << 10
    assert 100 < len(found) < 2000
    assert found[bytes(16)] == note_of(changed(model="m0"))
    place.close()
