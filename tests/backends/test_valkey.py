"""Valkey and Redis: the contract and this backend's own features, on real servers."""

from __future__ import annotations

import itertools
import mmap
import time
from typing import TYPE_CHECKING, Any

import pytest
from servers import Certificates, Server, make_certificates, needs_server, server

from kvkeep.core.errors import BackendFailed, InvalidValue, OutOfRoom
from kvkeep.store.backends import TierURL
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.backends.valkey import ValkeyBackend, ValkeyOptions
from kvkeep.testing.backend_hooks import Rooms, block_id, content, get, put, sizes_listed
from kvkeep.testing.backend_suite import BackendTests
from kvkeep.testing.backend_threads import together

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = "p/a:s s%w@rd"
A, B, C = (block_id(number) for number in range(3))
numbers = itertools.count()


def open_url(text: str) -> ValkeyBackend:
    return ValkeyBackend.from_url(TierURL(text))


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with server() as one:
        yield one


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secured(certificates: Certificates) -> Iterator[Server]:
    with server(password="sesame", certificates=certificates) as one:
        yield one


@pytest.fixture
def place(plain: Server) -> str:
    """A URL of an empty place, with one option."""
    return f"{plain.url}?prefix=t{next(numbers)}"


@pytest.fixture
def backend(place: str) -> Iterator[ValkeyBackend]:
    with open_url(place) as one:
        yield one


class OnServer(BackendTests):
    """Each place is a prefix of its own on one server."""

    persistent = True
    examples = 25
    url = ""

    def make_backend(self, tmp_path: Path) -> ValkeyBackend:
        self.place = f"{self.url}prefix=s{next(numbers)}"
        return open_url(self.place)

    def reopen(self, tmp_path: Path) -> ValkeyBackend:
        return open_url(self.place)


@needs_server
class TestPlain(OnServer):
    @pytest.fixture(autouse=True)
    def at(self, plain: Server) -> None:
        self.url = f"{plain.url}?"


@needs_server
class TestOneConnection(OnServer):
    """No call needs two connections at once."""

    examples = 5

    @pytest.fixture(autouse=True)
    def at(self, plain: Server) -> None:
        self.url = f"{plain.url}?connections=1&cluster=no&"


@needs_server
class TestPasswordAndTLS(OnServer):
    secrets = ("sesame",)
    examples = 10

    @pytest.fixture(autouse=True)
    def at(self, secured: Server, certificates: Certificates) -> None:
        self.url = f"{secured.url}?ca={certificates.ca}&"


# --- URLs ------------------------------------------------------------------------------------


def test_a_url_sets_all_options(tmp_path: Path, certificates: Certificates) -> None:
    (tmp_path / "file").write_text("secret\n")
    file = tmp_path / "file"
    ca, cert, key = certificates.ca, certificates.cert, certificates.key
    text = (
        f"valkeys://me@[::1]:7000/?ca={ca}&cert={cert}&key={key}&cluster=yes&expire=2h"
        f"&prefix=kv/x&connections=9&password_file={file}"
    )
    with open_url(text) as backend:
        assert backend.options == ValkeyOptions(
            host="::1",
            port=7000,
            username="me",
            password="secret",
            tls=True,
            ca=str(ca),
            cert=str(cert),
            key=str(key),
            cluster="yes",
            connections=9,
            expire=7200.0,
            prefix="kv/x",
        )
        assert backend.describe() == "valkeys://[::1]:7000/0"
        assert "secret" not in repr(backend) + repr(backend.options)


@pytest.mark.parametrize("scheme", ["valkey", "redis", "valkeys", "rediss"])
def test_each_scheme_has_its_default(scheme: str) -> None:
    with open_url(f"{scheme}://host/3") as backend:
        assert backend.options == ValkeyOptions(
            host="host", database=3, tls=scheme in {"valkeys", "rediss"}
        )
        assert backend.shared
        assert backend.capacity is None
        assert backend.used() is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("valkey://", "names no host"),
        ("valkey:///0", "names no host"),
        ("valkey://host/one", "a database is a number"),
        ("valkey://host/1/2", "a database is a number"),
        ("valkey://host/3?cluster=yes", "database 0 only"),
        ("valkey://host?size=4GiB", "maxmemory"),
        ("valkey://host?cluster=maybe", "auto, yes, no"),
        ("valkey://host?connections=0", "connections"),
        ("valkey://host?expire=soon", "expire=soon"),
        ("valkey://host?prefix=a*", "letters, digits"),
        ("valkey://host?prefix={a}", "letters, digits"),
        ("valkey://host?prefix=", "letters, digits"),
        ("valkey://host?colour=red", "no option colour"),
        ("valkey://host?ca=/dev/null", "valkeys://"),
        ("valkeys://host?ca=/none", "/none"),
        ("valkeys://host?ca=/dev/null", "certificates and keys"),
        ("valkeys://host?cert=/dev/null", "certificates and keys"),
        ("valkeys://host?key=/dev/null", "without cert="),
        ("valkey://host?password_file=/none", "/none"),
        ("valkey://host?password_file=/dev/null", "is empty"),
        ("valkey://u:hush@host?password_file=/dev/null", "one of them"),
    ],
)
def test_a_wrong_url_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidValue, match=said) as caught:
        open_url(text)
    assert "hush" not in str(caught.value)


def test_a_binary_password_file_is_refused_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_bytes(b"hush\xff\n")
    with pytest.raises(InvalidValue, match="UTF-8") as caught:
        open_url(f"valkey://host?password_file={file}")
    assert caught.value.__cause__ is None


# --- records on the server -------------------------------------------------------------------


def test_keys_are_as_documented(plain: Server, backend: ValkeyBackend) -> None:
    block = bytes(range(48))
    put(backend, block, b"record")
    name = f"{backend.options.prefix}:1:{block[:16].hex()}:{block[16:].hex()}"
    assert plain.ask("GET", name) == b"record"


def test_foreign_keys_are_left_alone(plain: Server, backend: ValkeyBackend, place: str) -> None:
    prefix = backend.options.prefix
    space, key = "00" * 16, "0" * 64
    foreign = [
        f"{prefix}:1:",
        f"{prefix}:1:{space}",
        f"{prefix}:1:{space}:{key}0",
        f"{prefix}:2:{space}:{key}",
        f"{prefix}:1:{space}:{'F' * 64}",
        f"{prefix}x:1:{space}:{key}",
        f"{prefix}:1:{space[:-1]}::{key}",
        f"{prefix}:1:{space}:{key[:-2]}\xff",
    ]
    for name in foreign:
        assert plain.ask("SET", name, "not ours") == b"+OK"
    put(backend, B, b"ours")
    assert sizes_listed(backend) == {B: 4}
    with open_url(f"{place}x") as beside:
        assert sizes_listed(beside) == {A: 8}
    backend.delete([one.block for one in backend.list()])
    assert all(plain.ask("EXISTS", name) == b":1" for name in foreign)


def test_many_records_are_listed_and_measured(backend: ValkeyBackend) -> None:
    """More than fit into one batch."""
    blocks = {block_id(number): number % 7 + 1 for number in range(2500)}
    for block, size in blocks.items():
        backend.put(block, memoryview(bytes(size)))
    assert sizes_listed(backend) == blocks
    assert backend.sizes(list(blocks)) == list(blocks.values())
    assert backend.delete(list(blocks)) == sum(blocks.values())
    assert sizes_listed(backend) == {}


def test_listing_returns_idle_times(plain: Server, backend: ValkeyBackend) -> None:
    put(backend, A, b"x")
    (one,) = backend.list()
    assert abs(one.used - time.time()) < 60
    assert plain.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu") == b"+OK"
    try:  # the server does not say it then
        (one,) = backend.list()
        assert abs(one.used - time.time()) < 60
        assert one.size == 1
    finally:
        assert plain.ask("CONFIG", "SET", "maxmemory-policy", "noeviction") == b"+OK"


def test_databases_are_apart(plain: Server) -> None:
    with open_url(f"{plain.url}/3") as third, open_url(f"{plain.url}/4") as fourth:
        put(third, A, b"in three")
        assert get(fourth, A) is None
        assert get(third, A) == b"in three"


def test_a_key_of_another_type_is_a_failure_and_can_be_replaced(
    plain: Server, backend: ValkeyBackend
) -> None:
    name = backend._name(A)
    for way in ("delete", "put", "quarantine"):
        assert plain.ask("HSET", name, "field", "value") == b":1"
        for _ in range(2):
            with pytest.raises(BackendFailed, match="WRONGTYPE"):
                get(backend, A)
            with pytest.raises(BackendFailed, match="WRONGTYPE"):
                backend.sizes([B, A])
        assert sizes_listed(backend) == {}
        if way == "put":
            put(backend, A, b"record")
            assert get(backend, A) == b"record"
            backend.delete([A])
        elif way == "delete":
            assert backend.delete([A]) == 0
        else:
            backend.quarantine(A, "it is a hash")
        assert get(backend, A) is None


# --- expiry ----------------------------------------------------------------------------------


def ttl_ms(plain: Server, backend: ValkeyBackend, block: bytes) -> int:
    return int(plain.ask("PTTL", backend._name(block))[1:])


def test_unused_records_expire(plain: Server, place: str) -> None:
    with open_url(f"{place}&expire=2h") as backend:
        put(backend, A, b"x")
        assert 7_100_000 < ttl_ms(plain, backend, A) <= 7_200_000
        plain.ask("PEXPIRE", backend._name(A), "60000")
        assert get(backend, A) == b"x"
        assert ttl_ms(plain, backend, A) <= 60_000
        backend.touch([A, B])
        assert ttl_ms(plain, backend, A) > 7_100_000
    with open_url(f"{place}&expire=20ms") as backend:
        put(backend, C, b"x")
        time.sleep(0.03)
        assert get(backend, C) is None
        assert backend.sizes([C]) == [None]
        assert set(sizes_listed(backend)) == {A}


def test_without_expire_no_record_expires(plain: Server, backend: ValkeyBackend) -> None:
    put(backend, A, b"x")
    backend.touch([A])
    assert ttl_ms(plain, backend, A) == -1


# --- credentials -----------------------------------------------------------------------------


def everything_said(error: BaseException) -> str:
    text = ""
    seen: BaseException | None = error
    while seen is not None:
        text += f"{type(seen)} {seen} {seen.args!r}\n"
        seen = seen.__cause__ or seen.__context__
    return text


@needs_server
def test_a_wrong_password_fails_and_is_not_shown(
    secured: Server, certificates: Certificates
) -> None:
    where = f"127.0.0.1:{secured.port}?ca={certificates.ca}"
    with open_url(f"valkeys://:hushhush@{where}") as backend:
        with pytest.raises(BackendFailed, match="invalid username-password") as caught:
            get(backend, A)
        assert "hushhush" not in everything_said(caught.value) + repr(backend)
    with (
        open_url(f"valkeys://{where}") as backend,
        pytest.raises(BackendFailed, match=r"(?i)auth"),
    ):
        get(backend, A)


def test_users_with_odd_passwords_and_few_rights(plain: Server, tmp_path: Path) -> None:
    rights = "~kv:* -@all +get +set +strlen +unlink +scan +select +auth +ping"
    assert plain.ask("ACL", "SETUSER", "kv", "on", f">{SECRET}", *rights.split()) == b"+OK"
    (tmp_path / "password").write_text(SECRET + "\n")
    file = f"password_file={tmp_path / 'password'}"
    with open_url(f"valkey://kv@127.0.0.1:{plain.port}/0?prefix=kv&{file}") as backend:
        put(backend, A, b"x")
        assert get(backend, A) == b"x"
        assert sizes_listed(backend) == {A: 1}, "it may not ask for idle times"
        with pytest.raises(BackendFailed, match=r"(?i)permission"):
            backend.touch([A])
        assert backend.delete([A]) == 1
    quoted = "p%2Fa%3As%20s%25w%40rd"
    with open_url(f"valkey://kv:{quoted}@127.0.0.1:{plain.port}/0?prefix=kv") as backend:
        assert get(backend, A) is None
        assert SECRET not in repr(backend)


# --- TLS -------------------------------------------------------------------------------------


@needs_server
def test_an_untrusted_server_gets_nothing(
    secured: Server, certificates: Certificates, tmp_path: Path
) -> None:
    other = make_certificates(tmp_path)
    for ca in (f"?ca={other.ca}", ""):  # "": the system's do not know it
        with open_url(secured.url + ca) as backend, pytest.raises(BackendFailed, match=r"(?i)cert"):
            put(backend, A, b"x")
    by_name = secured.url.replace("127.0.0.1", "localhost")
    with open_url(f"{by_name}?ca={certificates.ca}") as backend:
        assert get(backend, A) is None
    with server("--bind", "127.0.0.2", "127.0.0.1", certificates=certificates) as one:
        wrong_name = f"valkeys://127.0.0.2:{one.port}?ca={certificates.ca}"
        with open_url(wrong_name) as backend, pytest.raises(BackendFailed, match=r"127\.0\.0\.2"):
            get(backend, A)


@needs_server
def test_plain_and_tls_do_not_mix(plain: Server, secured: Server) -> None:
    for url in (f"valkeys://127.0.0.1:{plain.port}", f"valkey://127.0.0.1:{secured.port}"):
        with open_url(url) as backend:
            backend.timeout = 0.5
            with pytest.raises(BackendFailed):
                get(backend, A)


@needs_server
def test_the_client_certificate_is_sent(certificates: Certificates) -> None:
    with server(certificates=certificates) as one:
        assert one.ask("CONFIG", "SET", "tls-auth-clients", "yes") == b"+OK"
        ours = f"cert={certificates.cert}&key={certificates.key}"
        with open_url(f"{one.url}?ca={certificates.ca}&{ours}") as backend:
            put(backend, A, b"x")
            assert get(backend, A) == b"x"
        with open_url(f"{one.url}?ca={certificates.ca}") as backend, pytest.raises(BackendFailed):
            get(backend, A)


# --- limits ----------------------------------------------------------------------------------


@needs_server
def test_a_full_server_is_out_of_room() -> None:
    with (
        server("--maxmemory", "12mb", "--maxmemory-policy", "noeviction") as small,
        open_url(small.url) as backend,
    ):
        kept: list[bytes] = []

        def fill() -> None:
            for number in range(100):
                put(backend, block_id(number), content(block_id(number), 0, 1 << 20))
                kept.append(block_id(number))

        with pytest.raises(OutOfRoom, match=f":{small.port}") as caught:
            fill()
        assert caught.value.needed == 1 << 20
        assert 2 <= len(kept) < 12
        for block in kept:
            assert get(backend, block) == content(block, 0, 1 << 20)
        assert sizes_listed(backend) == dict.fromkeys(kept, 1 << 20)
        assert backend.delete(kept[:2]) == 2 << 20
        put(backend, B, b"there is room again")


@needs_server
def test_an_evicting_server_accepts_puts() -> None:
    with (
        server("--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru") as small,
        open_url(small.url) as backend,
    ):
        for number in range(30):
            put(backend, block_id(number), content(block_id(number), 0, 1 << 20))
        assert get(backend, block_id(29)) == content(block_id(29), 0, 1 << 20)
        assert sum(size is not None for size in backend.sizes([*map(block_id, range(30))])) < 12


def test_values_larger_than_the_protocol_allows(backend: ValkeyBackend) -> None:
    with mmap.mmap(-1, (512 << 20) + 1) as pages, memoryview(pages) as large:
        with pytest.raises(OutOfRoom, match="512 MiB at most"):
            backend.put(A, large)
        assert get(backend, A) is None


@needs_server
def test_values_larger_than_the_server_allows() -> None:
    with server() as one, open_url(one.url) as backend:
        assert one.ask("CONFIG", "SET", "proto-max-bulk-len", str(1 << 20)) == b"+OK"
        put(backend, A, b"before")
        for _ in range(5):
            with pytest.raises(BackendFailed, match=r"invalid bulk length|hung up|reset|pipe"):
                put(backend, B, bytes(32 << 20))
            assert get(backend, A) == b"before"


# --- threads and buffers ---------------------------------------------------------------------


def test_connections_are_limited(plain: Server, place: str) -> None:
    def clients() -> int:
        return plain.ask("CLIENT", "LIST").count(b"id=")

    before = clients()
    most: list[int] = []
    with open_url(f"{place}&connections=3") as backend:
        put(backend, A, content(A, 0, 1 << 20))

        def work(who: int) -> None:
            for _ in range(10):
                assert get(backend, A) == content(A, 0, 1 << 20)
                most.append(clients())

        together(*[lambda who=who: work(who) for who in range(8)])
        assert clients() - before in {1, 2, 3}
    assert clients() == before


def test_a_record_need_not_be_aligned_or_writable(backend: ValkeyBackend) -> None:
    backend.put(A, memoryview(b"__read only__")[2:-2])
    assert get(backend, A) == b"read only"
    backend.put(B, memoryview(bytearray(b"padded" + bytes(4090)))[:6])
    assert get(backend, B) == b"padded"


def test_a_bad_room_does_not_harm_other_calls(backend: ValkeyBackend) -> None:
    put(backend, A, content(A, 0, 100_000))
    put(backend, B, b"other")

    def room(size: int) -> Any:
        del size
        return memoryview(b"nobody can write here")

    with pytest.raises(TypeError):
        backend.get(A, room)
    assert get(backend, B) == b"other"
    assert get(backend, A) == content(A, 0, 100_000)


def test_a_closed_backend_raises(place: str) -> None:
    backend = open_url(place)
    put(backend, A, b"x")
    backend.close()
    for call in (
        lambda: get(backend, A),
        lambda: backend.sizes([A]),
        lambda: list(backend.list()),
        lambda: backend.put(A, aligned(3)),
    ):
        with pytest.raises(BackendFailed, match="closed"):
            call()


def test_the_room_is_called_with_the_size_of_the_value(backend: ValkeyBackend) -> None:
    put(backend, A, b"")  # no record of ours is empty, and none is found
    rooms = Rooms()
    assert backend.sizes([A]) == [None]
    assert backend.get(A, rooms) == b""
    assert rooms.asked == [0]


def test_notes_on_namespaces_are_bounded_and_may_be_anything(plain: Server) -> None:
    prefix = f"notes{next(numbers)}"
    with open_url(f"{plain.url}?prefix={prefix}") as backend:
        assert backend.noted_spaces() == {}
        for number in range(300):
            backend.note_space(number.to_bytes(16, "big"), b"%d" % number)
        backend.note_space(bytes(16), b"another")
        notes = backend.noted_spaces()
        assert len(notes) == 256
        assert notes[bytes(16)] == b"0"
        assert list(backend.list()) == [], "they are no records"
        plain.ask("DEL", f"{prefix}:1:spaces")
        plain.ask("HSET", f"{prefix}:1:spaces", "no hex", "x", "00", "\xff")
        assert set(backend.noted_spaces()) == {b"\0"}
        plain.ask("DEL", f"{prefix}:1:spaces")
        plain.ask("SET", f"{prefix}:1:spaces", "a text")
        with pytest.raises(BackendFailed):
            backend.noted_spaces()
