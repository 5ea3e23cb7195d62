"""Addresses, keys, and a client that believes nothing: against servers that say odd things."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
from said_live import live, request, summary
from told_server import failure, told

import warm
from kvkeep.cli import main
from kvkeep.cli.client import (
    Address,
    Client,
    Gone,
    ServerRefusal,
    entries,
    number,
    text,
    tokens_by,
    whole,
)
from kvkeep.cli.top import Watcher
from kvkeep.core.errors import InvalidValue
from warm import KVKEEP

ANSWERS = {"/kv/live": live, "/kv/requests": {"requests": [request()]}, "/kv/summary": summary}


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv("KVKEEP_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("localhost", "http://localhost:8000"),
        ("localhost:9000", "http://localhost:9000"),
        ("http://localhost", "http://localhost"),
        ("http://localhost:8000/", "http://localhost:8000"),
        ("HTTPS://Example.com/below/", "https://example.com/below"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("http://[::1]", "http://[::1]"),
    ],
)
def test_addresses_as_people_write_them(given, meant):
    address = Address.parse(given)
    assert str(address) == meant
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "given",
    [
        "", "http://", "ftp://host", "host:port", "host:99999", "host:0", "http://host?x=1",
        "http://host#x", "http://ho st", "http://höst", "http://host/\x1b[31m", "[::1", "a b:1",
        "http://host/a b", "http://user@host", "user:secret@host", "http://\x1b]52;c;x\x07",
    ],
)  # fmt: skip
def test_what_is_no_address_is_one_harmless_line(given, capsys):
    assert main(["top", "--once", "--", given]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error[:-1].isprintable()
    assert "secret" not in error


def test_one_connection_serves_all_questions():
    with told(ANSWERS) as server, Client(Address.parse(server.url)) as client:
        for _ in range(5):
            assert client.get("/kv/live")["model"] == "kvkeep-tiny"
        assert server.connections == 1


def test_a_connection_that_was_closed_meanwhile_is_made_again():
    with told(ANSWERS) as server, Client(Address.parse(server.url)) as client:
        client.get("/kv/live")
        server.connected[0].shutdown(socket.SHUT_RDWR)
        assert client.get("/kv/live")["model"] == "kvkeep-tiny"
        assert server.connections == 2


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ((404, failure("no request x\x1b[31m")), ServerRefusal, "says: no request x␛"),
        ((401, failure("key")), ServerRefusal, "needs an API key: give it with --api-key-file"),
        ((503, failure("shutting down")), Gone, "says: shutting down"),
        ((502, b"<html>"), Gone, "answers 502 at /kv/live"),
        ((404, b"<html>"), ServerRefusal, "answers 404 at /kv/live: it is no kvkeep server"),
        ((301, b""), ServerRefusal, "answers 301"),
        (b"<html>", ServerRefusal, "it is no kvkeep server"),
        (b"[]", ServerRefusal, "it is no kvkeep server"),
        (b'{"x":' + b"[" * 100_000, ServerRefusal, "it is no kvkeep server"),
        (b"1" * 5000, ServerRefusal, "it is no kvkeep server"),
        (b"\xff\xfe", ServerRefusal, "it is no kvkeep server"),
        ((500, {"error": {"message": 5}}), Gone, "answers 500"),
        ((400, {"error": "words"}), ServerRefusal, "answers 400"),
    ],
    ids=str,
)  # fmt: skip
def test_answers_that_are_none(said, error, words):
    with told({"/kv/live": said}) as server, Client(Address.parse(server.url)) as client:
        for _ in range(2):
            with pytest.raises(error, match=words) as raised:
                client.get("/kv/live")
            assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"", "closed the connection"),
        (b"SSH-2.0-OpenSSH\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 100_000, "does not speak HTTP"),
    ],
)
def test_what_does_not_speak_http(said, words):
    def serve():
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            with suppress(OSError):  # whoever has heard enough hangs up
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        address = Address.parse(f"127.0.0.1:{listening.getsockname()[1]}")
        with Client(address) as client, pytest.raises(Gone, match=words):
            client.get("/kv/live")
        thread.join(30)


def test_a_server_that_hangs_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = Address.parse(f"127.0.0.1:{listening.getsockname()[1]}")
        with (
            Client(address, timeout_s=0.05) as client,
            pytest.raises(Gone, match=r"does not answer within 0\.05 s"),
        ):
            client.get("/kv/live")


def test_an_answer_that_has_no_end_is_not_read(monkeypatch):
    monkeypatch.setattr("kvkeep.cli.client._ANSWER_BYTES", 1000)
    with (
        told({"/kv/live": {"x": "y" * 2000}}) as server,
        Client(Address.parse(server.url)) as client,
        pytest.raises(Gone, match="more than 1,000 bytes"),
    ):
        client.get("/kv/live")


# --- https ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """One for localhost, signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    command = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
        "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", folder / "key.pem",
        "-out", folder / "cert.pem",
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no openssl here to make a certificate with")
    return folder


def test_https_with_a_certificate_to_trust(certificate, capsys):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    with told(ANSWERS) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = server.url.replace("http://127.0.0.1", "https://localhost")
        assert main(["top", url, "--once", "--ca-file", str(certificate / "cert.pem")]) == 0
        assert "kvkeep-tiny" in capsys.readouterr().out
        assert main(["top", url, "--once"]) == 2
        assert "is not trusted (self-signed certificate); --ca-file" in capsys.readouterr().err
        assert main(["top", url.replace("https", "http"), "--once"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_certificates_that_are_none(tmp_path, capsys):
    wrong = tmp_path / "ca.pem"
    wrong.write_text("no certificate")
    for file in (wrong, tmp_path / "nothing"):
        assert main(["top", "https://localhost", "--once", "--ca-file", str(file)]) == 2
        assert "cannot read certificates from" in capsys.readouterr().err
    assert main(["top", "http://localhost", "--once", "--ca-file", str(wrong)]) == 2
    assert "--ca-file needs an https address" in capsys.readouterr().err


# --- the key --------------------------------------------------------------------------------------


def test_the_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch, capsys):
    file = tmp_path / "key"
    file.write_text("from-the-file\n")
    with told(ANSWERS) as server:
        top = ["top", server.url, "--once", "--json"]
        assert main(top) == 0
        assert "Authorization" not in server.headers[-1]
        monkeypatch.setenv("KVKEEP_API_KEY", "from-the-environment")
        assert main(top) == 0
        assert server.headers[-1]["Authorization"] == "Bearer from-the-environment"
        assert main([*top, "--api-key-file", str(file)]) == 0
        assert server.headers[-1]["Authorization"] == "Bearer from-the-file"
    assert "from-the" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"\n", b"two\nlines", b"\xff", b"x" * 5000, "ä".encode()])
def test_what_is_no_key(content, tmp_path, capsys):
    file = tmp_path / "key"
    file.write_bytes(content)
    assert main(["top", "localhost", "--once", "--api-key-file", str(file)]) == 2
    error = capsys.readouterr().err
    assert "key" in error
    assert error.count("\n") == 1


def test_a_missing_key_file_and_a_wrong_timeout(tmp_path, capsys):
    assert main(["explain", "localhost", "--api-key-file", str(tmp_path / "none")]) == 2
    assert "cannot read an API key" in capsys.readouterr().err
    assert main(["explain", "localhost", "--timeout", "0"]) == 2
    assert "--timeout is 0" in capsys.readouterr().err


# --- reading and polling --------------------------------------------------------------------------


def test_what_a_server_says_is_read_with_care():
    odd = {
        "a": True, "b": "7", "c": -1, "d": float("nan"), "e": 10**4000, "f": 7.5, "g": None,
        "h": [1, {"x": 1}, "y"], "i": {"z\x1b": 3, "y": "4", "x": 7},
    }  # fmt: skip
    assert [number(odd, name) for name in "abcdefgz"] == [None] * 5 + [7.5, None, None]
    assert (whole(odd, "f"), whole(odd, "z"), number([], "a")) == (7, 0, None)
    assert entries(odd, "h") == [{"x": 1}]
    assert entries(odd, "a") == []
    assert tokens_by(odd, "i") == {"x": 7, "z␛": 3, "y": 0}
    assert list(tokens_by(odd, "i")) == ["x", "z␛", "y"]
    assert text({"t": "a\nb"}, "t") == "a␊b"


def test_a_watcher_keeps_its_picture_while_the_server_is_gone():
    with told(ANSWERS) as server:
        port = server.server_address[1]
        client = Client(Address.parse(server.url))
        watcher = Watcher(client)
        first = watcher.poll()
        assert (first.before, first.trouble) == (None, None)
        second = watcher.poll()
        assert second.before == first.live
        assert server.paths().count("/kv/summary") == 1, "not at every poll"
    gone = watcher.poll()
    assert gone.live == second.live
    assert "no server listens" in gone.trouble
    assert set(gone.as_dict()) == {"at", "error"}
    with told({**ANSWERS, "/kv/live": lambda: live(uptime_s=1.0)}, port) as server:
        back = watcher.poll()
        assert (back.trouble, back.before) == (None, None)
        assert server.paths() == ["/kv/live", "/kv/requests?last=50", "/kv/summary"]
    client.close()


def test_a_watcher_without_a_server_or_with_another_key_has_nothing_to_show():
    with (
        told({"/kv/live": (401, failure("no"))}) as server,
        Client(Address.parse(server.url), key="k") as client,
        pytest.raises(ServerRefusal, match="needs another API key"),
    ):
        Watcher(client).poll()
    with Client(Address.parse(server.url)) as client, pytest.raises(Gone):
        Watcher(client).poll()


def test_nothing_heavy_is_imported_to_watch():
    code = (
        "import sys\n"
        "from kvkeep.cli import main\n"
        "assert main(['top', '127.0.0.1:1', '--once']) == 2\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=60, check=False)
    assert done.returncode == 0


def test_a_reader_that_hangs_up_is_no_server_that_is_gone():
    command = [*KVKEEP, "top", "--json", "--interval", "0.1"]
    with told(ANSWERS) as server:
        process = warm.Popen([*command, server.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.stderr.close()
        assert process.wait(30) == 1


def test_what_the_client_refuses_is_a_mistake_of_the_caller():
    assert issubclass(ServerRefusal, InvalidValue)
