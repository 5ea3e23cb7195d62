"""Object stores: local files, memory, a real server that speaks S3, and servers that fail."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from typing import TYPE_CHECKING
from urllib.parse import unquote

import obstore
import pytest
from object_server import ObjectServer
from obstore.store import LocalStore, MemoryStore

from faults import FaultProxy
from kvkeep.core.errors import BackendFailed, InvalidValue, MissingExtra, OutOfRoom
from kvkeep.store.backends import TierURL
from kvkeep.store.backends.objects import ObjectBackend
from kvkeep.testing.backend_hooks import Rooms, block_id, content, get, put, sizes_listed
from kvkeep.testing.backend_suite import BackendTests
from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvkeep.store.backends import Backend

BLOCK = block_id(1, space=2)
NAME = f"{BLOCK[:16].hex()}/{BLOCK[16:].hex()}"


def opened(url: str, timeout: float = 5.0) -> ObjectBackend:
    backend = ObjectBackend.from_url(TierURL(url))
    backend.timeout = timeout
    return backend


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")


@pytest.fixture(scope="module")
def moto() -> Iterator[int]:
    """The port of a server that speaks S3, with a bucket."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        bucket = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
        for attempt in range(300):
            try:
                urllib.request.urlopen(bucket, timeout=30).close()
                break
            except OSError:
                assert server.poll() is None, "moto's server has ended"
                assert attempt < 299, "moto's server does not answer"
                time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        yield server


class TestLocalFiles(BackendTests):
    persistent = True

    def make_backend(self, tmp_path: Path) -> Backend:
        return ObjectBackend(LocalStore(tmp_path / "objects", mkdir=True), prefix="a/b")

    def make_bounded(self, tmp_path: Path, capacity: int) -> Backend | None:
        store = LocalStore(tmp_path / "objects", mkdir=True)
        return ObjectBackend(store, capacity=capacity)


class TestMemory(BackendTests):
    def make_backend(self, tmp_path: Path) -> Backend:
        return ObjectBackend(MemoryStore())

    def make_bounded(self, tmp_path: Path, capacity: int) -> Backend | None:
        return ObjectBackend(MemoryStore(), prefix="bounded", capacity=capacity)


class TestS3(BackendTests):
    persistent = True
    examples = 5
    steps = 25
    secrets = ("the-key", "the-secret")

    @pytest.fixture(autouse=True)
    def endpoint(self, moto: int) -> None:
        self.port = moto

    def make_backend(self, tmp_path: Path, more: str = "") -> Backend:
        place = hashlib.sha256(bytes(tmp_path)).hexdigest()[:12]
        return opened(f"s3://bucket/{place}?endpoint=http://127.0.0.1:{self.port}{more}", 30.0)

    def make_bounded(self, tmp_path: Path, capacity: int) -> Backend | None:
        return self.make_backend(tmp_path, f"&size={capacity}")


# -- URLs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/prefix?endpoint=http://127.0.0.1:1&region=eu-central-1",
        "gs://bucket/prefix?endpoint=http://127.0.0.1:1",
        "az://bucket/prefix?endpoint=http://127.0.0.1:1",
    ],
)
def test_a_url_selects_the_store(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for cloud in ("GOOGLE", "AZURE"):
        monkeypatch.setenv(f"{cloud}_SKIP_SIGNATURE", "true")
    with opened(url + "&size=3MiB") as backend:
        assert backend.scheme == url[:2]
        assert backend.describe() == f"{url[:2]}://bucket/prefix"
        assert backend.capacity == 3 << 20
        assert backend.shared


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3:///prefix", "a bucket is needed"),
        ("s3://host:9000/bucket", "endpoint="),
        ("s3://the-key:the-secret@bucket/prefix", "credentials"),
        ("s3://bucket?endpoint=localhost:9000", "http://host:port"),
        ("s3://bucket?endpoint=http://user:the-secret@host", "http://host:port"),
        ("s3://bucket?secret_access_key=the-secret", "no option secret_access_key"),
        ("s3://bucket?size=much", "much"),
        ("gs://bucket?region=eu", "no option region"),
        ("ftp://bucket", "s3, gs, az"),
    ],
)
def test_a_mistake_in_a_url_is_named(url: str, says: str) -> None:
    with pytest.raises(InvalidValue, match=says) as caught:
        ObjectBackend.from_url(TierURL(url))
    assert "the-secret" not in str(caught.value)


def test_a_missing_account_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(InvalidValue, match=r"az://bucket cannot be opened: .*Account"):
        ObjectBackend.from_url(TierURL("az://bucket"))


def test_a_missing_obstore_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtra, match=r"kvkeep\[objects\]"):
        ObjectBackend.from_url(TierURL("s3://bucket"))


# -- stored objects --------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "a", "a/b", "/a/"])
def test_an_object_is_named_by_space_and_key(prefix: str) -> None:
    store = MemoryStore()
    backend = ObjectBackend(store, prefix=prefix)
    put(backend, BLOCK, b"record")
    name = f"{prefix.strip('/')}/{NAME}".removeprefix("/")
    assert [one["path"] for one in obstore.list(store).collect()] == [name]
    assert bytes(obstore.get(store, name).bytes()) == b"record"


def test_foreign_objects_are_left_alone() -> None:
    store = MemoryStore()
    backend = ObjectBackend(store, prefix="ours", capacity=1000)
    others = [
        "ours/readme", f"theirs/{NAME}", f"ours2/{NAME}", f"ours/{NAME}.tmp", f"ours/x/{NAME}",
        f"ours/{NAME.upper().replace('0', 'F')}",
    ]  # fmt: skip
    for name in others:
        obstore.put(store, name, b"x" * 900)
    put(backend, BLOCK, b"record")
    assert sizes_listed(backend) == {BLOCK: 6}
    assert backend.used() == 6
    assert backend.delete([one.block for one in backend.list()]) == 6
    assert {one["path"] for one in obstore.list(store).collect()} == set(others)


def test_the_capacity_counts_existing_objects(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with ObjectBackend(store) as first:
        put(first, block_id(1), bytes(600))
        assert first.used() is None
    with ObjectBackend(store, capacity=1000) as second:
        assert second.used() == 600
        with pytest.raises(OutOfRoom):
            put(second, block_id(2), bytes(500))
        put(second, block_id(1), bytes(900))  # in place of the other
        assert second.used() == 900
        assert second.delete([block_id(1), block_id(2)]) == 900
        put(second, block_id(2), bytes(1000))
        assert second.used() == 1000


def test_a_failed_put_counts_what_it_left() -> None:
    calls: list[str] = []
    store = MemoryStore()

    def open_store(timeout: float) -> MemoryStore:
        calls.append("opened")
        if len(calls) == 2:
            raise ConnectionResetError("a test")
        return store

    backend = ObjectBackend(open_store, capacity=1000)
    assert backend.used() == 0
    backend.timeout = 1.0  # so that the store is opened again, which fails
    with pytest.raises(BackendFailed, match="a test"):
        put(backend, block_id(1), bytes(800))
    obstore.put(store, NAME, bytes(700))  # as if that one had arrived
    with pytest.raises(OutOfRoom):
        put(backend, block_id(3), bytes(400))
    put(backend, block_id(3), bytes(300))
    assert backend.used() == 1000


def test_a_changed_timeout_reopens_the_store() -> None:
    asked: list[float] = []
    store = MemoryStore()

    def open_store(timeout: float) -> MemoryStore:
        asked.append(timeout)
        return store

    backend = ObjectBackend(open_store)
    assert asked == []
    for timeout in (5.0, 5.0, 0.5, 0.5):
        backend.timeout = timeout
        assert get(backend, BLOCK) is None
    assert asked == [5.0, 0.5]


def test_nothing_works_after_closing() -> None:
    backend = ObjectBackend(MemoryStore())
    backend.close()
    for call in calls_of(backend):
        with pytest.raises(BackendFailed, match="is closed"):
            call()


# -- servers that fail -----------------------------------------------------------------------------


def calls_of(backend: ObjectBackend) -> list[Callable[[], object]]:
    """All calls that send requests."""
    many = [block_id(number) for number in range(60)]
    return [
        lambda: put(backend, BLOCK, b"record"),
        lambda: backend.get(BLOCK, Rooms()),
        lambda: backend.sizes(many),
        lambda: backend.delete(many),
        lambda: list(backend.list()),
    ]


def all_fail(backend: ObjectBackend) -> None:
    """Each call says `BackendFailed`, in the order of the time-out: a retry may have been due."""
    for call in calls_of(backend):
        begin = time.monotonic()
        with pytest.raises(BackendFailed) as caught:
            call()
        assert caught.value.__cause__ is not None
        assert backend.describe() in str(caught.value)
        assert "the-secret" not in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
        assert time.monotonic() - begin < 3 * backend.timeout + 2, "60 blocks cost one time-out"


def test_a_dead_endpoint_costs_a_timeout_at_most() -> None:
    port = free_port()
    with opened(f"s3://bucket?endpoint=http://127.0.0.1:{port}", 0.5) as backend:
        all_fail(backend)


def test_a_hanging_endpoint_costs_a_timeout_and_works_later(moto: int) -> None:
    with FaultProxy(("127.0.0.1", moto)) as proxy:
        backend = opened(f"s3://bucket/hang?endpoint=http://{proxy.address}", 30.0)
        put(backend, BLOCK, b"before")
        backend.timeout = 0.5
        proxy.hang()
        all_fail(backend)
        proxy.heal()
        backend.timeout = 30.0
        assert get(backend, BLOCK) in {b"before", b"record"}
        # Another block, because the put that hung may still arrive.
        put(backend, block_id(2), b"after")
        assert get(backend, block_id(2)) == b"after"
        backend.close()


def test_resets_and_garbage_are_failures(moto: int) -> None:
    with FaultProxy(("127.0.0.1", moto)) as proxy:
        backend = opened(f"s3://bucket/nonsense?endpoint=http://{proxy.address}", 30.0)
        put(backend, BLOCK, b"before")
        backend.timeout = 0.5
        for fault in (lambda: proxy.replace(b"+OK\r\n"), lambda: proxy.cut(5)):
            fault()
            all_fail(backend)
        proxy.heal()
        backend.timeout = 30.0
        assert get(backend, BLOCK) in {b"before", b"record"}
        backend.close()


@pytest.mark.parametrize("status", [500, 503, 403, 401, 400, 418])
def test_an_error_status_is_a_failure(server: ObjectServer, status: int) -> None:
    with opened(f"s3://bucket?endpoint={server.url}", 30.0) as backend:
        put(backend, BLOCK, b"record")
        backend.timeout = 0.5
        server.fault = status
        all_fail(backend)
        server.fault = None
        backend.timeout = 30.0
        assert get(backend, BLOCK) == b"record"


def test_a_truncated_answer_is_a_failure(server: ObjectServer) -> None:
    with opened(f"s3://bucket?endpoint={server.url}", 30.0) as backend:
        put(backend, BLOCK, content(BLOCK, 1, 3_000_000))
        backend.timeout = 1.0
        for fault in ("truncate", "stall"):
            server.fault = fault
            begin = time.monotonic()
            with pytest.raises(BackendFailed):
                get(backend, BLOCK)
            assert time.monotonic() - begin < 3 * backend.timeout + 2
        server.fault = None
        backend.timeout = 30.0
        assert get(backend, BLOCK) == content(BLOCK, 1, 3_000_000)


def test_a_failing_server_is_retried_within_the_timeout(server: ObjectServer) -> None:
    with opened(f"s3://bucket?endpoint={server.url}", 5.0) as backend:
        server.fault = 503
        server.requests.clear()
        with pytest.raises(BackendFailed):
            backend.sizes([BLOCK])
        assert 2 <= len(server.requests) <= 3
        assert set(server.requests) == {("HEAD", f"/bucket/{NAME}")}


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_gs_and_az_work_with_an_endpoint(
    scheme: str, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As with emulators of Google's service: a dummy key, and no token is requested.
    key = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
    url = f"{scheme}://bucket/prefix?endpoint={server.url}"
    with opened(url) as backend:
        record = content(BLOCK, 1, 3_000_000)
        assert get(backend, BLOCK) is None
        put(backend, BLOCK, record)
        [(path, stored)] = server.objects.items()
        assert unquote(path) == f"/bucket/prefix/{NAME}"
        assert stored == record
        assert get(backend, BLOCK) == record
        assert backend.sizes([BLOCK, block_id(9)]) == [3_000_000, None]


def test_closing_ends_running_lookups(server: ObjectServer) -> None:
    backend = opened(f"s3://bucket?endpoint={server.url}", 1.0)
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            while True:
                backend.sizes([block_id(number) for number in range(40)])
        except BackendFailed as error:
            raised.append(error)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(server.requests) < 50:
        time.sleep(0.01)
    backend.close()
    for thread in threads:
        thread.join(60)
    assert len(raised) == 3
